"""What was appended is there, as it was; what is damaged is refused with its place; a torn tail is cut and counted."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
from forgetful_disk import ForgetfulFile
from journal_mutants import mutations

from surefoot.errors import StateError, StorageError
from surefoot.storage.files import Journal
from surefoot.system import journal as frames

RECORDS: list[dict[str, Any]] = [
    {"event": "a", "n": 1, "x": 0.1},
    {"text": "ü \ud800 \x00 \u202e", "deep": [[{}], None, True, -0.0, 2**70]},
    {},
    {"long": "y" * 500},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed journal with RECORDS, each appended durably."""
    with Journal.create(tmp_path / "a b.journal") as journal:
        for record in RECORDS:
            journal.append(record)
    return tmp_path / "a b.journal"


def told(path: Path, **words: bool) -> list[dict[str, Any]]:
    with Journal.open(path, **words) as journal:
        return [entry.record for entry in journal.records()]


def offsets(path: Path) -> list[int]:
    with Journal.open(path, readonly=True) as journal:
        return [entry.offset for entry in journal.records()]


def in_memory(data: bytes) -> ForgetfulFile:
    return ForgetfulFile(random.Random(0), data)


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


# -- what was written is read -----------------------------------------------------


def test_records_come_back_as_they_were_in_order(path: Path) -> None:
    assert told(path) == RECORDS
    assert str(told(path)[1]["deep"][3]) == "-0.0"


def test_numbers_begin_at_one_and_go_on_after_opening(path: Path) -> None:
    with Journal.open(path) as journal:
        before = journal.last_number
        assert journal.append({"more": 1}) == before + 1
        assert [entry.record for entry in journal.records(after=before)] == [{"more": 1}]


def test_a_batch_is_its_records_in_order(path: Path) -> None:
    with Journal.open(path) as journal:
        numbers = journal.append_all([{"i": i} for i in range(3)])
        assert numbers == list(range(numbers[0], numbers[0] + 3))
        assert journal.append_all([]) == []
    assert told(path)[-3:] == [{"i": 0}, {"i": 1}, {"i": 2}]


def test_a_journal_is_private_and_has_a_name_of_its_own(tmp_path: Path) -> None:
    journals = [Journal.create(tmp_path / name) for name in ("a", "b")]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert journals[0].id != journals[1].id
    for journal in journals:
        journal.close()


def test_a_durable_append_syncs_and_the_other_does_not(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal.open(path) as journal:
        calls: list[int] = []
        fsync = os.fsync
        monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append(descriptor), fsync(descriptor))[1])
        journal.append({"a": 1}, durable=False)
        assert calls == []
        journal.append_all([{"a": 2}, {"a": 3}])
        assert len(calls) == 1


# -- what is not a journal --------------------------------------------------------


def test_a_missing_journal_is_never_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="missing"):
        Journal.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("content", [b"", b"\x89SFJ", b"{}\n" * 40, bytes(200)])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(StateError, match="not a journal"):
        Journal.open(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == content


def test_an_existing_journal_is_never_begun_anew(path: Path) -> None:
    with pytest.raises(StateError, match="exists"):
        Journal.create(path)
    assert told(path) == RECORDS


def test_a_newer_format_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "VERSION", 2)
    with pytest.raises(StateError) as caught:
        Journal.open(path)
    assert "format 1" in caught.value.why
    assert "reads format 2" in caught.value.why


def test_links_pipes_and_folders_are_refused_without_waiting(tmp_path: Path, path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder"):
        with pytest.raises(StateError):
            Journal.open(tmp_path / name)


# -- torn tails -------------------------------------------------------------------


def test_a_file_cut_anywhere_gives_the_whole_records_before_the_cut(path: Path) -> None:
    data, starts = path.read_bytes(), offsets(path)
    ends = [*starts[1:], len(data) - frames.HEAD_BYTES]
    for length in range(frames.HEADER_BYTES, len(data)):
        file = in_memory(data[:length])
        with Journal(file) as journal:
            whole = sum(end <= length for end in ends)
            assert [entry.record for entry in journal.records()] == RECORDS[:whole]
            at_a_border = length in (*starts, ends[-1])
            assert (journal.torn_bytes == 0) == at_a_border
            journal.append({"next": length})
        assert [e.record for e in Journal(file).records()] == [*RECORDS[:whole], {"next": length}]


def test_reading_only_does_not_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])
    size = path.stat().st_size
    with Journal.open(path, readonly=True) as journal:
        assert journal.torn_bytes > 0
        assert len(list(journal.records())) == len(RECORDS) - 1
        with pytest.raises(StateError, match="reading"):
            journal.append({})
    assert path.stat().st_size == size


def test_lost_sectors_inside_the_last_unsynced_batch_are_a_torn_tail_not_damage(path: Path) -> None:
    """Power loss keeps later blocks and loses earlier ones; nobody was promised these records."""
    with Journal.open(path) as journal:
        start = journal.end
        journal.append_all([{"i": i, "pad": "z" * 50} for i in range(5)], durable=False)
        written = path.read_bytes()
    path.write_bytes(written[: start + 90] + bytes(20) + written[start + 110 :])
    with Journal.open(path) as journal:
        assert [entry.record for entry in journal.records()][: len(RECORDS)] == RECORDS
        assert journal.torn_bytes > 0


# -- damage -----------------------------------------------------------------------


def test_one_flipped_bit_anywhere_is_refused_with_its_offset_or_is_harmless(path: Path) -> None:
    """Every byte of a closed journal. The seal at its end carries no record; damage to it alone is a torn tail."""
    clean, starts = path.read_bytes(), offsets(path)
    seal = len(clean) - frames.HEAD_BYTES
    for at in range(len(clean)):
        flipped = clean[:at] + bytes([clean[at] ^ 1 << at % 8]) + clean[at + 1 :]
        if at >= seal:
            assert [entry.record for entry in Journal(in_memory(flipped)).records()] == RECORDS
            continue
        with pytest.raises(StateError) as caught:
            Journal(in_memory(flipped))
        if at >= starts[0]:
            frame = max(start for start in starts if start <= at)
            assert f"damaged at byte {frame}" in caught.value.what


def test_a_removed_repeated_or_swapped_record_is_refused(path: Path) -> None:
    data, (a, b, c, d) = path.read_bytes(), offsets(path)
    seal = len(data) - frames.HEAD_BYTES
    first, second, third, last = data[a:b], data[b:c], data[c:d], data[d:seal]
    for order in ([first, third, last], [first, second, second, third], [second, first], [last]):
        path.write_bytes(data[:a] + b"".join(order))
        with pytest.raises(StateError, match="damaged at byte"):
            Journal.open(path)


def test_a_frame_of_another_journal_does_not_pass(path: Path, tmp_path: Path) -> None:
    with Journal.create(tmp_path / "other") as other:
        other.append({"event": "foreign"})
        foreign = (tmp_path / "other").read_bytes()[frames.HEADER_BYTES :]
    mine = path.read_bytes()[: frames.HEADER_BYTES]
    path.write_bytes(mine + foreign)
    assert told(path) == []


@pytest.mark.parametrize(("length", "synced"), [(frames.MAX_PAYLOAD + 1, 0), (2**32 - 1, 0), (2, 10**15)])
def test_an_impossible_head_is_refused_and_nothing_is_allocated(path: Path, length: int, synced: int) -> None:
    data = path.read_bytes()
    header = frames.Header.unpack(data, "x")
    body = frames._HEAD_BODY.pack(frames.FRAME_MAGIC, length, 6, synced, 0)
    crc = frames.zlib.crc32(body, header.seed)
    path.write_bytes(data + body + crc.to_bytes(4, "little"))
    with pytest.raises(StateError, match="impossible"):
        Journal.open(path)


@pytest.mark.parametrize(
    "payload", [b"[1]", b"{", b"NaN", b'{"a":NaN}', b"\xff\xfe", b"[" * 100_000, b'"' + b"9" * 6000 + b'"']
)
def test_a_framed_payload_that_is_no_record_is_a_typed_refusal(path: Path, payload: bytes) -> None:
    data = path.read_bytes()
    header = frames.Header.unpack(data, "x")
    path.write_bytes(data + frames.pack_frame(payload, number=6, synced=0, seed=header.seed))
    with Journal.open(path, readonly=True) as journal, pytest.raises(StateError, match="record 6"):
        list(journal.records())


def test_damage_after_opening_is_refused_when_read(path: Path) -> None:
    with Journal.open(path, readonly=True) as journal:
        flip(path, offsets(path)[1] + frames.HEAD_BYTES + 3)
        with pytest.raises(StateError, match="was whole when"):
            list(journal.records())


# -- mutations --------------------------------------------------------------------


MUTATED = 3000


def test_a_mutated_journal_is_refused_or_gives_a_beginning_of_what_was_written() -> None:
    refused = 0
    for number, (written, got) in enumerate(mutations(seed=5, count=MUTATED)):
        assert got is None or got == written[: len(got)], f"mutation {number} of seed 5 was believed"
        refused += got is None
    assert refused > MUTATED // 4, "the mutations are too tame"


def test_planted_reader_without_checksums_believes_mutations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "payload_fits", lambda payload, head, seed: len(payload) == head.length)
    assert any(got is not None and got != written[: len(got)] for written, got in mutations(seed=5, count=500))


# -- the disk says no -------------------------------------------------------------


class Stubborn(frames.SystemFile):
    """A disk with room for `room` more bytes, or one whose fsync fails, or that takes nothing back."""

    room, broken_sync, broken_cut = 10**9, False, False

    def write(self, offset: int, data: bytes) -> None:
        super().write(offset, data[: self.room])
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")

    def sync(self) -> None:
        if self.broken_sync:
            raise OSError(errno.EIO, "Input/output error")
        super().sync()

    def truncate(self, size: int) -> None:
        if self.broken_cut:
            raise OSError(errno.EIO, "Input/output error")
        super().truncate(size)


@pytest.fixture
def disk(path: Path) -> Stubborn:
    return Stubborn(path)


@pytest.mark.parametrize("room", [0, 1, 31, 40])
def test_a_full_disk_leaves_the_file_as_it_was_and_the_journal_usable(path: Path, disk: Stubborn, room: int) -> None:
    before = path.read_bytes()
    with Journal(disk, str(path)) as journal:
        disk.room = room
        with pytest.raises(StorageError, match="No space"):
            journal.append_all([{"a": 1}, {"b": "x" * 100}])
        assert path.read_bytes() == before
        disk.room = 10**9
        journal.append({"after": 1})
    assert told(path) == [*RECORDS, {"after": 1}]


def test_an_interrupt_in_the_middle_of_a_write_leaves_the_file_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        if name == "journal.after_write":
            raise KeyboardInterrupt

    before = path.read_bytes()
    with Journal.open(path) as journal:
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "failpoint", staticmethod(interrupted))
            with pytest.raises(KeyboardInterrupt):
                journal.append({"a": 1})
        assert path.read_bytes() == before
        journal.append({"b": 2})
    assert told(path) == [*RECORDS, {"b": 2}]


def test_a_failed_fsync_ends_the_journal_and_is_not_tried_again(path: Path, disk: Stubborn) -> None:
    journal = Journal(disk, str(path))
    journal.append({"kept": 1})
    disk.broken_sync = True
    with pytest.raises(StorageError, match="Input/output"):
        journal.append({"lost": 1})
    disk.broken_sync = False
    with pytest.raises(StorageError, match="fsync failed"):
        journal.append({"lost": 2})
    journal.close()
    assert told(path) == [*RECORDS, {"kept": 1}]


def test_a_write_that_cannot_be_taken_back_ends_the_journal(path: Path, disk: Stubborn) -> None:
    journal = Journal(disk, str(path))
    disk.room, disk.broken_cut = 20, True
    with pytest.raises(StorageError, match="No space"):
        journal.append({"a": 1})
    disk.room = 10**9
    with pytest.raises(StorageError, match="taken back"):
        journal.append({"a": 2})
    journal.close()
    assert told(path) == RECORDS


def test_a_second_writer_is_noticed(path: Path) -> None:
    with Journal.open(path) as first, Journal.open(path) as second:
        first.append({"who": "first"})
        with pytest.raises(StorageError, match="somebody else"):
            second.append({"who": "second"})
    assert told(path) == [*RECORDS, {"who": "first"}]


def test_a_system_that_takes_only_some_bytes_at_a_time_loses_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    with Journal.open(path) as journal:
        journal.append({"slow": "s" * 100})
    assert told(path)[-1] == {"slow": "s" * 100}


@pytest.mark.parametrize(
    "record",
    [{"x": float("nan")}, {"x": float("inf")}, {"x": object()}, {"x": b"bytes"}, {"x": 10**5000}, {1: 1, "1": 2}],
)
def test_what_json_has_no_word_for_is_refused_and_nothing_is_written(path: Path, record: Any) -> None:
    before = path.read_bytes()
    with Journal.open(path) as journal:
        with pytest.raises(StateError, match="record"):
            journal.append_all([{"fine": 1}, record])
    assert path.read_bytes() == before


def test_too_large_and_too_deep_records_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_PAYLOAD", 100)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with Journal.create(path.with_name("c")) as journal:
        for record in ({"x": "y" * 100}, {"x": deep}):
            with pytest.raises(StateError):
                journal.append(record)


def test_a_closed_journal_takes_no_more_and_closing_twice_is_nothing(path: Path) -> None:
    journal = Journal.open(path)
    journal.close()
    journal.close()
    with pytest.raises(StorageError, match="closed"):
        journal.append({})


def test_planted_append_without_fsync_is_caught() -> None:
    """Teeth: the test disk forgets what was not synced, so a journal that skips the fsync loses a promised record."""

    def survivors() -> int:
        rng = random.Random(1)
        file = ForgetfulFile(rng, frames.Header(bytes(16)).pack())
        Journal(file).append({"promised": "p" * 100})
        return len(list(Journal(file.after_power_loss()).records()))

    assert survivors() == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "sync", lambda self: None)
        assert survivors() == 0


def test_a_folder_that_cannot_be_synced_is_a_typed_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(frames, "sync_folder", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        Journal.open(path)
