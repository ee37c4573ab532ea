"""What unit tests share: the tokenizer that ships with the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkled.front.tokenizer import Tokenizer

SHIPPED_MODEL = Path(__file__).resolve().parents[2] / "models" / "sparkle-46m"


@pytest.fixture(scope="session")
def shipped_tokenizer() -> Tokenizer:
    """The shipped model's tokenizer, as the front daemon loads it."""
    return Tokenizer.load(SHIPPED_MODEL)


@pytest.fixture(scope="session")
def reference_tokenizer() -> Any:
    """The same as transformers loads it, for what prompts and texts should be."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SHIPPED_MODEL, local_files_only=True)
