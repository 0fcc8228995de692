"""What a tool said is cut visibly, and nothing in it is invisible."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.tools.text import cut, readable, refusal, shown


def test_a_cut_names_what_is_shown_and_what_there_was() -> None:
    text = readable("z" * 50_000, 4000)
    assert len(text) <= 4000
    kept = text.index("\n[cut")
    assert text.endswith(f"[cut: the first {kept} of 50000 characters are shown]")
    assert "about 52 bytes" in readable("z" * 50, 4000, size="about 52 bytes")


def test_a_short_text_stays_as_it_is() -> None:
    assert readable("a\n\tb ü 漢", 4000) == "a\n\tb ü 漢"


@pytest.mark.parametrize(
    "hidden", ["\x1b[2J", "\u202e", "\u200b", "\U000e0041", "\x00", "\r", "\ud800", "\u2066", "\u2028", "\u2029"]
)
def test_invisible_and_moving_characters_are_spelled_out(hidden: str) -> None:
    assert shown(f"a{hidden}b") != f"a{hidden}b"
    assert hidden[0] not in shown(f"a{hidden}b")


@given(st.text(max_size=300), st.integers(80, 200))
def test_the_limit_holds_for_any_text(text: str, limit: int) -> None:
    assert len(readable(text, limit)) <= limit
    assert len(cut(text, limit)) <= limit


def test_a_refusal_is_json() -> None:
    assert json.loads(refusal("unknown_tool", name="é", known=[])) == {
        "error": "unknown_tool",
        "name": "é",
        "known": [],
    }
