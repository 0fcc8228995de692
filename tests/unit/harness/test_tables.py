"""Tables line up, and lose no word."""

from __future__ import annotations

import pytest

from surefoot.harness.tables import table, terminal_width

LONG = "word " * 60 + "end"


def test_columns_line_up_and_no_line_ends_in_blanks() -> None:
    text = table("T", ["A", "Long name"], [["1", "x"], ["22222", "y"]])
    assert text.splitlines() == ["T", "A      Long name", "-----  ---------", "1      x", "22222  y"]


def test_without_a_width_nothing_is_cut_or_wrapped() -> None:
    text = table("T", ["A", "B"], [["1", LONG]])
    assert len(text.splitlines()) == 4
    assert LONG in text


@pytest.mark.parametrize("width", [1, 10, 40, 80])
def test_a_width_wraps_the_last_column_and_keeps_every_word(width: int) -> None:
    lines = table("T", ["Name", "B"], [["n", LONG], ["m", "short"]], width=width).splitlines()
    assert " ".join(" ".join(lines[3:]).split()) == f"n {LONG} m short"
    assert max(map(len, lines)) <= max(width, len("Name") + 2 + 20)


def test_line_breaks_and_tabs_in_a_cell_cannot_fake_a_row() -> None:
    text = table("T", ["Status", "Check"], [["FAIL", "x\nPASS  everything\r\n\tis fine"]])
    assert text.splitlines()[3:] == ["FAIL    x PASS everything is fine"]


def test_no_rows_and_empty_cells_are_fine() -> None:
    assert table("T", ["A", "B"], []).splitlines() == ["T", "A  B", "-  -"]
    assert table("T", ["A", "B"], [["", ""]], width=40).endswith("-\n"), "an empty row is a row"


def test_a_row_of_the_wrong_size_is_refused() -> None:
    with pytest.raises((ValueError, IndexError)):
        table("T", ["A", "B"], [["only one"]])


def test_a_pipe_has_no_width(capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal_width() is None
