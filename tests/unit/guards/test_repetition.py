"""Loops are caught, lists are not: measured on a corpus, and on texts that are larger or stranger than it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.guards import repetition
from surefoot.guards.repetition import looping

CORPUS = Path(__file__).parents[2] / "fixtures/repetition"


def corpus(name: str) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in (CORPUS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(row["kind"], row["text"]) for row in rows]


def false_alarms() -> list[str]:
    return [kind for kind, text in corpus("normal") if looping(text) is not None]


def misses() -> list[str]:
    return [kind for kind, text in corpus("looping") if looping(text) is None]


def test_the_corpus_holds_at_least_fifty_different_texts_of_each_sort() -> None:
    for name in ("normal", "looping"):
        assert len({text for _, text in corpus(name)}) == len(corpus(name)) >= 50


def test_no_normal_text_of_the_corpus_is_called_a_loop() -> None:
    assert false_alarms() == []


def test_one_looping_text_of_the_corpus_is_missed() -> None:
    """Eight rounds of sums with few words between them: taken for a table. Named, so that a second miss is seen."""
    assert misses() == ["fresh: sums between words"]


@pytest.mark.parametrize("check", ["_in_a_row", "_sentences"])
def test_without_either_way_of_looking_loops_are_missed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, check, lambda _: None)
    assert len(misses()) > 1


def test_if_data_were_judged_like_prose_tables_would_be_called_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "_too_often", lambda run: run.repeats >= 6)
    assert len(false_alarms()) > 5


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_loop_is_found_first_middle_or_last(place: int) -> None:
    parts = ["The ferry left at six, and nobody waved.", "Fog came down over the water before noon."]
    parts.insert(place, "Let me check that again. " * 10)
    reason = looping(" ".join(parts))
    assert reason is not None
    assert "10 times" in reason


def test_the_border_between_a_refrain_and_a_loop_is_six_times() -> None:
    line = "And the river runs on to the sea.\n"
    assert looping(line * 5) is None
    assert looping(line * 6) is not None


@pytest.mark.parametrize("text", ["", " ", "\x00", "a", "\ud800" * 300, "\n" * 10_000, "🙂 " * 5])
def test_empty_and_odd_texts_are_no_trouble(text: str) -> None:
    assert looping(text) is None or len(text) > 250


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300))
def test_any_text_is_answered_the_same_twice(text: str) -> None:
    assert looping(text) == looping(text)


@pytest.mark.parametrize(
    "unit", ["The answer is 42. ", "a", "ab ", "([", "word{} ", "Line {} of many other lines here.\n"], ids=repr
)
def test_work_grows_in_step_with_the_text(unit: str) -> None:
    """Counted, not timed: calls of Python functions while looking, per character, in a text eight times as long."""
    small, large = (_calls("".join(unit.format(i) for i in range(size // len(unit)))) for size in (10_000, 80_000))
    assert large <= 9 * small + 1000


def test_a_megabyte_is_answered() -> None:
    assert looping(" ".join(f"{i:x}" for i in range(150_000))) is None


def _calls(text: str) -> int:
    count = 0

    def tick(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(tick)
    try:
        looping(text)
    finally:
        sys.setprofile(before)
    return count
