"""A file that is begun in place, read at random and salvaged: what a crash leaves of the first write is known again."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from forgetful_disk import ForgetfulFile

from surefoot.errors import StateError, StorageError
from surefoot.system import journal as frames
from surefoot.system.journal import FramedJournal, SystemFile, first_record, salvage

FIRST: dict[str, Any] = {"kind": "notes", "format": 2}
RECORDS: list[dict[str, Any]] = [{"i": i, "pad": "p" * 20 * i} for i in range(4)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "notes"
    with FramedJournal.begin(SystemFile(path, create=True), FIRST, str(path)) as journal:
        journal.append_all(RECORDS)
    return path


def in_memory(data: bytes = b"") -> ForgetfulFile:
    return ForgetfulFile(random.Random(0), data)


def test_it_begins_with_its_first_record_and_belongs_to_its_owner(path: Path) -> None:
    with FramedJournal.open(path, readonly=True) as journal:
        assert [entry.record for entry in journal.records()] == [FIRST, *RECORDS]
    assert path.stat().st_mode & 0o777 == 0o600
    assert first_record(SystemFile(path, readonly=True), "x") == FIRST


def test_every_torn_beginning_is_known_again_and_replaced() -> None:
    file = in_memory()
    FramedJournal.begin(file, FIRST, "x")
    whole = bytes(file.visible)
    for length in range(len(whole)):
        torn = in_memory(whole[:length])
        assert first_record(torn, "x") is None, length
        assert bytes(torn.visible) == whole[:length], "looking changes nothing"
        FramedJournal.begin(torn, FIRST, "x")
        assert first_record(torn, "x") == FIRST
    assert first_record(in_memory(whole), "x") == FIRST


def test_a_changed_beginning_is_refused_and_never_taken_for_a_torn_one() -> None:
    """Teeth: a foreign header makes every frame unreadable; only its place tells that from a file without a record."""
    file, other = in_memory(), in_memory()
    FramedJournal.begin(file, FIRST, "x").close()
    FramedJournal.begin(other, FIRST, "x").close()
    whole, foreign = bytes(file.visible), bytes(other.visible)
    swapped = foreign[: frames.HEADER_BYTES] + whole[frames.HEADER_BYTES :]
    assert list(FramedJournal(in_memory(swapped), readonly=True).records()) == [], "all of it reads as a torn tail"
    flips = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole) - frames.HEAD_BYTES)]
    for changed in (swapped, *flips, b"my diary", b"{}\n" * 40, bytes(200)):
        with pytest.raises(StateError):
            first_record(in_memory(changed), "x")


def test_a_full_disk_at_the_beginning_is_typed_and_leaves_what_the_next_writer_replaces() -> None:
    full = ForgetfulFile(random.Random(3), b"", lambda call: "full" if call == "write" else None)
    with pytest.raises(StorageError, match="notes could not be written"):
        FramedJournal.begin(full, FIRST, "notes")
    assert first_record(full.after_kill(), "notes") is None


def test_a_record_is_found_again_by_its_place_and_checked_once_more(path: Path) -> None:
    with FramedJournal.open(path, readonly=True) as journal:
        places = {entry.number: entry.offset for entry in journal.records()}
        assert [journal.record_at(offset, number) for number, offset in places.items()] == [FIRST, *RECORDS]
        with pytest.raises(StateError, match="frame 3 should be here"):
            journal.record_at(places[2], 3)
        data = bytearray(path.read_bytes())
        data[places[4] + frames.HEAD_BYTES + 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(StateError, match="was whole when"):
            journal.record_at(places[4], 4)


def test_one_process_holds_a_file_until_it_closes_it(path: Path) -> None:
    first, second = SystemFile(path), SystemFile(path)
    first.hold()
    with pytest.raises(BlockingIOError):
        second.hold()
    first.close()
    second.hold()
    second.close()


# -- salvage ----------------------------------------------------------------------


def test_what_is_whole_is_salvaged_in_order_and_a_whole_file_has_no_problem(path: Path) -> None:
    found = salvage(path)
    assert ([entry.record for entry in found.records], found.problems) == ([FIRST, *RECORDS], [])


@pytest.mark.parametrize("lost", range(1, 5))
def test_a_damaged_record_loses_itself_only_and_is_named(path: Path, lost: int) -> None:
    data, entries = bytearray(path.read_bytes()), salvage(path).records
    data[entries[lost].offset + frames.HEAD_BYTES + 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match="damaged"):
        FramedJournal.open(path, readonly=True)
    found = salvage(path)
    assert [entry.record for entry in found.records] == [entry.record for entry in entries if entry != entries[lost]]
    (problem,) = found.problems
    assert f"from byte {entries[lost].offset} on" in problem


def test_a_file_cut_or_filled_with_anything_gives_its_whole_records_and_says_what_it_lacks(path: Path) -> None:
    whole, entries = path.read_bytes(), salvage(path).records
    rng = random.Random(4)
    for _ in range(300):
        at = rng.randrange(frames.HEADER_BYTES, len(whole))
        path.write_bytes(whole[:at] + rng.randbytes(rng.randrange(40)) + whole[at + rng.randrange(60) :])
        found = salvage(path)
        told = [entry.record for entry in found.records]
        assert [record for record in [FIRST, *RECORDS] if record in told] == told, "nothing that was not written"
        assert len(told) == len(entries) or found.problems


def test_a_record_that_is_no_object_is_named_and_the_rest_is_kept(path: Path) -> None:
    seed = frames.Header.unpack(path.read_bytes(), "x").seed
    with path.open("ab") as file:
        file.write(frames.pack_frame(b"[1]", number=7, synced=0, seed=seed))
    found = salvage(path)
    assert len(found.records) == 5
    assert found.problems == ["record 7 is not a JSON object"]


def test_a_file_without_a_header_gives_nothing_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x89SFJ")
    with pytest.raises(StateError, match="not a journal"):
        salvage(tmp_path / "x")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StateError, match="plain file"):
        salvage(tmp_path / "pipe")
