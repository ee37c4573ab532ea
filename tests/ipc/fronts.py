"""What tests of the front daemon say and expect: chats of clients, and a compute daemon's answers, step by step."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from sparkle.messages import Accepted, Chat, ChatDone, Error, Generate, Text, Tokens, Usage
from tests.daemons import Peer
from tests.fakes import FakeCompute

SHIPPED_MODEL = Path(__file__).resolve().parents[2] / "models" / "sparkle-46m"
HI = [{"role": "user", "content": "Hi!"}]
USAGE = Usage(prompt_tokens=9, output_tokens=5, cached_tokens=2, ttft_ms=12.5, decode_tps=40.0)
SEED = 77
EPOCHS = itertools.count(1)
IDS = itertools.count(1)


def chat(**fields: Any) -> Chat:
    return Chat(**{"request_id": f"r{next(IDS)}", "messages": HI, **fields})


def begin(client: Peer, compute: FakeCompute, message: Chat) -> Generate:
    """Send a Chat, accept it, and return what compute was asked."""
    n_before = len([m for m in compute.received if isinstance(m, Generate)])
    client.send(message)
    generate = compute.wait_for(Generate, n_before + 1)
    compute.tell(Accepted(generate.request_id, SEED, 0))
    assert client.wait_for(Accepted) == Accepted(message.request_id, SEED, 0)
    return generate


def tokens(generate: Generate, ids: list[int], start: int = 0) -> list[Tokens]:
    """Return `ids` as one message per token."""
    return [Tokens(generate.request_id, start + i, [token_id]) for i, token_id in enumerate(ids)]


def end(client: Peer, request_id: str) -> tuple[str, ChatDone | Error]:
    """Receive until the end of the request; return its text so far, checked for holes, and the end."""
    while not isinstance(message := client.receive(), ChatDone | Error):
        pass
    assert message.request_id == request_id
    return text_of(client, request_id), message


def text_of(client: Peer, request_id: str) -> str:
    text = ""
    for message in client.received:
        if isinstance(message, Text) and message.request_id == request_id:
            assert message.index == len(text)
            assert message.delta
            text += message.delta
    return text


def wait_for_text(client: Peer, request_id: str, text: str) -> None:
    while text_of(client, request_id) != text:
        client.receive()
