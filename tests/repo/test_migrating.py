"""The page for whoever comes from another trainer is made from the table that answers them."""

from __future__ import annotations

from foreign_names import DOCUMENT, MARKS, rewritten

from surefoot.config import foreign


def test_the_page_is_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert rewritten(text) == text, "run: python scripts/foreign_names.py"


def test_every_trainer_has_its_table_and_every_name_stands_in_it() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    parts = {match[2]: match[0] for match in MARKS.finditer(text)}
    assert parts.keys() == {*foreign.TRAINERS, "defaults"}
    for trainer in foreign.TRAINERS:
        assert [name for name in foreign.names_of(trainer) if f"`{name}`" not in parts[trainer]] == []


def test_planted_row_that_was_edited_by_hand_is_seen() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    planted = text.replace("not supported: weights are float32 or bfloat16", "soon", 1)
    assert planted != text
    assert rewritten(planted) == text
