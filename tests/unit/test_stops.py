"""Stop strings: found across pieces, never let out, and nothing held that could not be one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkled.front.stops import StopStrings

pytestmark = pytest.mark.unit


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """What should come out of the whole text: the stop string that is complete first ends it."""
    for end in range(1, len(text) + 1):
        if hits := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, hits))], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    automaton = StopStrings(stops)
    out = "".join(automaton.feed(piece) for piece in pieces)
    return out + automaton.flush(), automaton.is_hit


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "is_hit"),
    [
        (["The br", "own", " fo", "x jumps"], ["own fox"], "The br", True),
        (["The br", "own", " fo", "g"], ["own fox"], "The brown fog", False),
        (["a", "a", "a", "b"], ["aab"], "a", True),  # a restart inside a partial match
        (["ababab", "ac"], ["ababac"], "ab", True),
        (["x", "EN", "D"], ["END", "N"], "xE", True),  # "N" is complete first
        (["xyz"], ["yz", "xyz"], "", True),  # complete at once: the longer
        (["xyz"], ["xyz", "yz"], "", True),
        (["ende", " 東", "京!"], ["東京"], "ende ", True),
        (["tail <", "/s"], ["</s>"], "tail </s", False),
        (["stop"], ["stop"], "", True),
        (["stop", "more"], ["stop"], "", True),
        (["", "a", ""], ["b"], "a", False),
        (["anything"], [], "anything", False),
        (["one\n", "\ntwo"], ["\n\n"], "one", True),
    ],
)
def test_examples(pieces: list[str], stops: list[str], text: str, is_hit: bool) -> None:
    assert run(pieces, stops) == (text, is_hit)


SMALL = st.text(alphabet="ab😀", max_size=12)
STOPS = st.lists(st.text(alphabet="ab😀", min_size=1, max_size=5), max_size=4)


@given(pieces=st.lists(SMALL, max_size=8), stops=STOPS)
def test_the_result_does_not_depend_on_how_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == cut("".join(pieces), stops)


@given(pieces=st.lists(SMALL, max_size=8), stops=STOPS)
def test_only_a_possible_beginning_is_held(pieces: list[str], stops: list[str]) -> None:
    automaton = StopStrings(stops)
    seen = sent = ""
    for piece in pieces:
        seen += piece
        sent += automaton.feed(piece)
        if automaton.is_hit:
            break
        held = seen.removeprefix(sent)
        assert sent + held == seen
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_long_stop_string_costs_linear_time() -> None:
    automaton = StopStrings(["a" * 999 + "b"] * 16)
    assert automaton.feed("a" * 20_000) == "a" * (20_000 - 999)
