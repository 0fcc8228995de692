"""Release packaging: every event file of a folder, without host names, in one tarball named by the commit.

Promises   host names are gone from file names, folder names and contents; the same input gives the same bytes (no
           times, users or machines in the archive); an existing tarball is never touched.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import socket
import struct
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot_harness.errors import ConfigError, StateError
from surefoot_harness.files import read_json
from surefoot_harness.system import git
from surefoot_harness.system.files import atomic_file

# -- TensorBoard event files as bytes: read record by record, replace text of equal length, keep the checksums right
# record = length (8 bytes) | masked CRC of length (4) | data | masked CRC of data (4)
#
# Promises   only records whose data changes get a new checksum, and only after their old one was right; a torn last
# record is left out and counted.


_POLYNOMIAL = 0x82F63B78


def _table() -> tuple[int, ...]:
    rows = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        rows.append(value)
    return tuple(rows)


_TABLE = _table()


def masked_crc(data: bytes) -> int:
    """CRC-32C of `data`, turned and shifted the way event files store it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Redacted:
    """An event file without the given words."""

    data: bytes
    replaced: int
    """How many occurrences were replaced."""
    torn: int
    """Bytes of an unfinished last record that were left out."""


def redact(data: bytes, words: Sequence[bytes], source: str) -> Redacted:
    """Replace every occurrence of `words`, in any case, by filler of equal length."""
    pattern = re.compile(b"|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)), re.IGNORECASE)
    kept: list[bytes] = []
    position = replaced = 0
    while position < len(data):
        if len(data) - position < 12:
            break
        length = _length(data, position, source)
        end = position + 12 + length + 4
        if end > len(data):
            break
        record = data[position:end]
        if words and pattern.search(record[12:-4]):
            record, number = _rewritten(record, pattern, f"{source} at byte {position}")
            replaced += number
        kept.append(record)
        position = end
    return Redacted(b"".join(kept), replaced, len(data) - position)


def filler(word: bytes) -> bytes:
    """As long as the word, and never the word itself."""
    return (b"y" if set(word.lower()) == {ord("x")} else b"x") * len(word)


def _length(data: bytes, position: int, source: str) -> int:
    header = data[position : position + 8]
    (length,) = struct.unpack("<Q", header)
    if masked_crc(header) != struct.unpack("<I", data[position + 8 : position + 12])[0]:
        raise StateError(
            f"{source} is not an event file: wrong checksum at byte {position}",
            "it cannot be redacted safely",
            "leave it out",
        )
    return int(length)


def _rewritten(record: bytes, pattern: re.Pattern[bytes], where: str) -> tuple[bytes, int]:
    body = record[12:-4]
    if masked_crc(body) != struct.unpack("<I", record[-4:])[0]:
        raise StateError(
            f"{where}: wrong checksum", "a damaged record would look whole afterwards", "leave the file out"
        )
    body, number = pattern.subn(lambda match: filler(match[0]), body)
    return record[:12] + body + struct.pack("<I", masked_crc(body)), number


# -- Release packaging: every event file of a folder, without host names, in one tarball named by the commit


_EVENTS = re.compile(r"events\.out\.tfevents\.[0-9]+\.(?P<host>.+?)(?:\.[0-9]+\.[0-9]+(?:\.[A-Za-z]\w*)?)?")
_COMMIT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*")
_SHORTEST = 4
"""A shorter host name occurs by chance in names and numbers; replacing it would damage them."""


@dataclass(frozen=True, slots=True)
class Package:
    """What was packed."""

    path: Path
    files: int
    replaced: int
    torn: int


def package(runs: Path, folder: Path, *, hosts: Sequence[str] = (), commit: str | None = None) -> Package:
    """Pack the event files under `runs` into `folder`/COMMIT.tar.gz."""
    if commit is not None and not _COMMIT.fullmatch(commit):
        raise ConfigError(
            f"--commit {commit!r} is not a commit", "the tarball is named by it", "use letters and digits"
        )
    events = event_files(runs)
    if not events:
        raise StateError(
            f"{runs} holds no event files", "there is nothing to release", "give a folder with tfevents files"
        )
    target = folder / f"{commit or _commit_of(runs)}.tar.gz"
    if target.exists():
        raise StateError(f"{target} exists", "a release is made once", "move it away, or use another -o")
    words = _host_words(events, runs, hosts)
    members, replaced, torn = {}, 0, 0
    for path in events:
        result = redact(path.read_bytes(), [word.encode() for word in words], str(path))
        name = _redacted_name(path.relative_to(runs).as_posix(), words)
        if name in members:
            raise StateError(f"two files would both be {name}", "one would replace the other", "pack them apart")
        members[name] = result.data
        replaced, torn = replaced + result.replaced, torn + result.torn
    _verify(members, words)
    _write(target, members)
    return Package(target, len(members), replaced, torn)


def event_files(runs: Path) -> list[Path]:
    """Event files under a folder, links not followed, in order of name."""
    if not runs.is_dir():
        raise StateError(f"{runs} is not a folder", "event files are looked for in it", "give the folder of the runs")
    found = [path for path in runs.rglob("*tfevents*") if path.is_file() and not path.is_symlink()]
    return sorted(found, key=lambda path: path.relative_to(runs).as_posix())


def _host_words(events: Iterable[Path], runs: Path, given: Sequence[str]) -> list[str]:
    """Host names to take out: those in file names, this machine's, and the given ones; short and full forms."""
    named = {match["host"] for path in events if (match := _EVENTS.fullmatch(path.name))} | set(given)
    here = {socket.gethostname(), os.uname().nodename}
    words = named | {host.split(".")[0] for host in named if not re.fullmatch(r"[0-9.]+", host)}
    words |= {form for host in here for form in (host, host.split(".")[0]) if len(form) >= _SHORTEST}
    short = sorted(word for word in words if len(word) < _SHORTEST)
    if short:
        raise ConfigError(
            f"host name {', '.join(map(repr, short))} is too short to be taken out safely",
            "its letters occur in metric names and numbers as well",
            "rename the event files first, so that their names hold a longer one",
        )
    return sorted(words, key=lambda word: (-len(word), word))


def _redacted_name(name: str, words: Sequence[str]) -> str:
    """Each host becomes host1, host2, ...: files of two machines stay apart."""
    if not words:
        return name
    numbers = {word.lower(): f"host{i}" for i, word in enumerate(sorted(words), 1)}
    pattern = re.compile("|".join(re.escape(word) for word in words), re.IGNORECASE)
    return pattern.sub(lambda match: numbers[match[0].lower()], name)


def _verify(members: dict[str, bytes], words: Sequence[str]) -> None:
    """Look once more, at names and contents, before anything is written."""
    for name, data in members.items():
        left = [word for word in words if word.lower() in name.lower() or word.lower().encode() in data.lower()]
        if left:
            raise StateError(f"{name} still holds a host name", "it must not be released", "leave the file out")


def _commit_of(runs: Path) -> str:
    """The commit that the runs themselves record; without any, the one that is checked out."""
    records = [*runs.rglob("verdict.json"), *runs.rglob("provenance.json")]
    found = {commit for path in sorted(records) if (commit := _recorded(path)) is not None}
    if len(found) > 1:
        shown = ", ".join(sorted(commit[:12] for commit in found))
        raise ConfigError(f"the runs are of {len(found)} commits: {shown}", "one tarball is one commit", "use --commit")
    if found:
        return found.pop()[:12]
    commit = git.head(runs) or git.head(Path.cwd())
    if commit is None:
        raise StateError(f"no commit is known for {runs}", "the tarball is named by it", "use --commit")
    return commit[:12]


def _recorded(path: Path) -> str | None:
    """The commit in a run's own record: a word that can be part of a file's name, and of nothing else."""
    record = read_json(path)
    commit = record.get("commit") if isinstance(record, dict) else None
    if not commit:
        return None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise StateError(
            f"{path} names {str(commit)[:80]!r} as its commit", "the tarball is named by it", "use --commit"
        )
    return commit


def _write(target: Path, members: dict[str, bytes]) -> None:
    """The archive, complete or not there; a tarball that appears meanwhile is not replaced."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_file(target, overwrite=False) as file:
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
                    for member, data in sorted(members.items()):
                        entry = tarfile.TarInfo(member)  # owner, group and time are 0 and nobody's
                        entry.size, entry.mode = len(data), 0o644
                        archive.addfile(entry, io.BytesIO(data))
            os.fchmod(file.fileno(), 0o644)  # a release is for everybody, whatever the umask says
    except FileExistsError as error:
        raise StateError(f"{target} exists", "a release is made once", "move it away, or use another -o") from error
