"""One SHA-256 for text, bytes, pieces and files, and the forms that lie in run folders already."""

from __future__ import annotations

import hashlib
import io

import pytest

from surefoot.system import files
from surefoot.system.files import sha256_bytes, sha256_number, sha256_of, sha256_of_file, sha256_of_sized

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""Of "abc", as the standard prints it."""


def test_text_bytes_pieces_and_files_of_the_same_bytes_are_the_same() -> None:
    assert sha256_of("abc") == sha256_of(b"abc") == sha256_of([b"a", b"", b"bc"]) == ABC
    assert sha256_of_file(io.BytesIO(b"abc")) == sha256_of_file(io.BytesIO(b"abcdef"), 3) == ABC
    assert sha256_bytes("abc").hex() == ABC
    assert sha256_number("abc") == int(ABC[:16], 16)
    assert sha256_number("abc", size=4) == int(ABC[:8], 16)


def test_a_file_is_read_in_blocks_to_its_end_or_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK", 7)
    data = bytes(range(100))
    assert sha256_of_file(io.BytesIO(data)) == hashlib.sha256(data).hexdigest()
    for most in (0, 6, 7, 8, 99, 100, 101):
        assert sha256_of_file(io.BytesIO(data), most) == hashlib.sha256(data[:most]).hexdigest()


def test_sized_pieces_know_where_they_end() -> None:
    """The form of `weights_sha256` and the others that a resume compares: it may not change."""
    assert sha256_of_sized([b"ab", b"c"]) != sha256_of_sized([b"a", b"bc"])
    digest = hashlib.sha256(b"\1" + bytes(7) + b"a" + b"\2" + bytes(7) + b"bc" + bytes(8)).hexdigest()
    assert sha256_of_sized([b"a", b"bc", b""]) == digest


def test_planted_pieces_without_their_lengths_are_taken_for_each_other() -> None:
    """Teeth: this is what the lengths are for."""
    assert sha256_of([b"ab", b"c"]) == sha256_of([b"a", b"bc"])


def test_text_that_is_not_unicode_is_refused_unless_the_caller_says_how() -> None:
    with pytest.raises(UnicodeEncodeError):
        sha256_of("\ud800")
    assert sha256_of("\ud800", errors="surrogatepass") == sha256_of(b"\xed\xa0\x80")
    assert sha256_of("\udcff", errors="surrogateescape") == sha256_of(b"\xff")
    assert sha256_bytes("\udcff", errors="surrogateescape").hex() == sha256_of(b"\xff")
