"""What foreign code prints arrives in pieces; a secret that is cut in two is still a secret."""

from __future__ import annotations

import pytest

from surefoot.tracking import process_logs
from surefoot.tracking.process_logs import PrintedLines, safe_bytes, safe_tail

CANARY = "canary-of-the-worker"


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER_TOKEN", CANARY)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 19, 1000])
def test_a_secret_in_pieces_of_any_size_is_hidden(size: int) -> None:
    data = f"first\nkey {CANARY} end\n{CANARY}\nlast {CANARY}".encode()
    lines = PrintedLines()
    out = b"".join(lines.feed(data[at : at + size]) for at in range(0, len(data), size)) + lines.rest()
    assert out == b"first\nkey *** end\n***\nlast ***"


def test_planted_redaction_of_raw_pieces_is_caught() -> None:
    """Teeth: without waiting for the end of a line, the two halves pass."""
    data = CANARY.encode()
    assert safe_bytes(data[:9]) + safe_bytes(data[9:]) == data


def test_a_line_without_end_is_let_through_between_two_words() -> None:
    lines = PrintedLines()
    out, longest = b"", 0
    for _ in range(40):
        out += lines.feed(b"word " * 1000 + CANARY.encode()[:7])
        out += lines.feed(CANARY.encode()[7:] + b" ")
        longest = max(longest, len(lines._waiting))
    out += lines.rest()
    assert CANARY.encode() not in out
    assert out.count(b"***") == 40
    assert longest <= process_logs._LONGEST + 6000


def test_a_line_without_end_and_without_words_takes_bounded_memory() -> None:
    lines = PrintedLines()
    out = 0
    for _ in range(100):
        out += len(lines.feed(b"x" * 10_000))
        assert len(lines._waiting) <= process_logs._LONGEST + 10_000
    assert out + len(lines.rest()) == 1_000_000


def test_control_characters_and_bytes_that_are_no_text_are_spelled_out() -> None:
    assert safe_bytes(b"\x1b[2Jgone\r\n\xff\tok \xe2\x80\xae") == b"\\x1b[2Jgone\\r\n\\xff\tok \\u202e"


def test_a_tail_does_not_begin_inside_a_secret() -> None:
    data = f"{CANARY}\nnext {CANARY}\nend".encode()
    assert safe_tail(data, len(data)) == "***\nnext ***\nend"
    assert safe_tail(data, len(data) - 5) == "next ***\nend"
    assert safe_tail(CANARY.encode(), 10) == ""
