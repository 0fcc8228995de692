"""What reaches a terminal cannot move its cursor, and numbers are short."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from surefoot.system.text import duration, number, printable, size


@given(st.text())
def test_nothing_printable_steers_a_terminal(text: str) -> None:
    shown = printable(text)
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown)
    assert not any(c in shown for c in "\x7f\x1b\x9b\u202e\u2066")
    shown.encode("utf-8")


def test_ordinary_text_stays_as_it_is() -> None:
    assert printable("größer ≥ 3, 東京\tok\n") == "größer ≥ 3, 東京\tok\n"
    assert printable("\x1b[2Jgone\r") == "\\x1b[2Jgone\\r"


def test_numbers_and_times_are_short() -> None:
    assert [number(x) for x in (0, 0.85, 0.123456, 1e-6, 123.456)] == ["0", "0.85", "0.1235", "1.0e-06", "123.5"]
    assert [duration(x) for x in (0.4, 59, 61, 3600 * 2 + 600)] == ["0s", "59s", "1m 01s", "2h 10m"]
    assert [size(x) for x in (12, 1500, 4.4e6, 2.5e9, 3e13)] == ["12 B", "1.5 kB", "4.4 MB", "2.5 GB", "30.0 TB"]
