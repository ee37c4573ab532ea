"""The chat format: the Jinja template that ships with the tokenizer, and the same in Python for building the corpus.

Owns  the special tokens and the text around messages and tools.
Reads data/chat_template.jinja.
Never differs between its two forms: tests/unit/test_train_chat.py renders the same dialogues both ways.

The form is Qwen's (ChatML, <tool_call> with JSON inside) with a shorter tool preamble.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Message = dict[str, Any]  # OpenAI's chat form: role, content, tool_calls

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [
    END_OF_TEXT, TURN_START, TURN_END,
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
]  # fmt: skip

TOOLS_HEAD = "You can call these functions. Each line describes one as JSON:\n<tools>"
TOOLS_TAIL = '</tools>\nTo call one, answer only with\n<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'


def template() -> str:
    """Return the Jinja template that ships with the tokenizer."""
    return (Path(__file__).parent / "data" / "chat_template.jinja").read_text(encoding="utf-8")


def turn(role: str, content: str) -> str:
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def prompt(user: str) -> str:
    """Return the text of one user turn with the assistant's turn begun."""
    return turn("user", user) + f"{TURN_START}assistant\n"


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _system(messages: list[Message], tools: list[Any]) -> str:
    system: str | None = messages[0]["content"] if messages[0]["role"] == "system" else None
    if not tools:
        return "" if system is None else turn("system", system)
    lines = "".join("\n" + _dumps(tool) for tool in tools)
    return turn("system", ("" if system is None else system + "\n\n") + TOOLS_HEAD + lines + "\n" + TOOLS_TAIL)


def _assistant(message: Message) -> str:
    text: str = message.get("content") or ""
    for call in message.get("tool_calls") or []:
        name, arguments = _dumps(call["function"]["name"]), _dumps(call["function"]["arguments"])
        text += ("\n" if text else "") + f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    return turn("assistant", text)


def render(messages: list[Message], tools: list[Any] | None = None) -> str:
    """Return the text of a whole dialogue, as the template renders it."""
    text = _system(messages, tools or [])
    roles = [message["role"] for message in messages]
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            text += _assistant(message)
        elif message["role"] == "tool":  # neighbouring tool results share one user turn
            text += f"{TURN_START}user" if i == 0 or roles[i - 1] != "tool" else ""
            text += f"\n<tool_response>\n{message['content']}\n</tool_response>"
            text += f"{TURN_END}\n" if i + 1 == len(roles) or roles[i + 1] != "tool" else ""
        elif i > 0 or message["role"] != "system":
            text += turn(message["role"], message["content"])
    return text
