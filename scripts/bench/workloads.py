"""Prompts for measurements, by kind: what people do with a chat model. Half of each kind is held out.

Policies and profiles learn from `SEEN` and are judged on `HELD_OUT`: a figure on prompts that were learned from says
nothing. `MIXED` changes the topic with every prompt.
"""

from __future__ import annotations

_PROMPTS = {
    "chat": [
        "Hello! How are you today?",
        "What is the capital of France?",
        "Can you explain why the sky is blue?",
        "What should I eat for breakfast?",
        "I am sad today. Can you cheer me up?",
        "Give me three tips for better sleep.",
        "What is the difference between a lake and a sea?",
        "Who are you and what can you do?",
    ],
    "code": [
        "Write a Python function that adds two numbers.",
        "Write a Python function that checks whether a number is prime.",
        "Write a Python function that reverses a string.",
        "Write a Python function that finds the largest number in a list.",
        "Write a Python function that counts the vowels in a string.",
        "Write a Python function that returns the factorial of n.",
        "Write a Python function that removes duplicates from a list.",
        "Write a Python function that checks whether a word is a palindrome.",
    ],
    "story": [
        "Tell me a story about a cat.",
        "Write a story about a lonely lighthouse.",
        "Tell me a story about a brave knight.",
        "Write a short story about a lost key.",
        "Tell me a story about two friends in the forest.",
        "Write a story about a girl who found a map.",
        "Tell me a story about an old clock.",
        "Write a short story about the sea.",
    ],
    "arithmetic": [
        "What is 17 + 25?",
        "What is 9 times 8?",
        "What is 64 - 19?",
        "What is 12 times 11?",
        "What is 33 + 48?",
        "What is 90 - 37?",
        "What is 7 times 6?",
        "What is 58 + 14?",
    ],
    "french": [
        "Bonjour, comment ça va ?",
        "Translate 'house' into French.",
        "Translate 'water' into French.",
        "Parlez-vous français ?",
        "Translate 'dog' into French.",
        "Translate 'book' into French.",
        "Comment dit-on 'bread' en français ?",
        "Translate 'night' into French.",
    ],
}
KINDS = tuple(_PROMPTS)
SEEN = {kind: prompts[::2] for kind, prompts in _PROMPTS.items()}
HELD_OUT = {kind: prompts[1::2] for kind, prompts in _PROMPTS.items()}


def mixed(of: dict[str, list[str]]) -> list[str]:
    """One prompt of each kind after the other: a change of topic every time."""
    return [prompt for row in zip(*of.values(), strict=True) for prompt in row]
