"""Files in memory that belong to one process and are found again when it dies.

Owns       how such a file is named, made, opened, locked and removed.
Promises   names are random, files are new, 0600 and ours; memory is there before it is promised; a file is swept only
           when its maker is dead and nobody holds a lock on it.

The maker holds a shared lock as long as it lives; so does every reader. Locks belong to open files: the kernel lets go
of them when a process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108 - names are random, files are created exclusively and 0600
_NAME = re.compile(r"surefoot-weights-(\d+)-(\d+)-[0-9a-f]{16}-[01]")


def new_names() -> list[str]:
    """Names for two segments of this process."""
    token = secrets.token_hex(8)
    return [f"surefoot-weights-{os.getpid()}-{_born(os.getpid())}-{token}-{number}" for number in (0, 1)]


def is_name(name: str) -> bool:
    """Whether a segment of ours could be called so."""
    return _NAME.fullmatch(name) is not None


def make(path: Path, size: int) -> tuple[int, mmap.mmap]:
    """A new segment with a shared lock on it: descriptor and memory. OSError when there is no room."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.posix_fallocate(descriptor, 0, size)  # now, as an error: a page missing later would kill the process
        return descriptor, mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise


def open_shared(path: Path, size: int) -> tuple[int, mmap.mmap]:
    """An existing segment with a shared lock on it; its memory is private: what is written there, nobody else sees.

    Raises:
        BlockingIOError: its maker is writing.
        OSError: it is gone, too short, or not ours.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_size < size:
            raise OSError(0, f"it has {facts.st_size} bytes of {size} and belongs to user {facts.st_uid}")
        return descriptor, mmap.mmap(descriptor, facts.st_size, access=mmap.ACCESS_COPY)
    except BaseException:
        os.close(descriptor)
        raise


def remove(paths: list[Path], maker: int) -> None:
    """Remove these names, if this is the process that made them: a forked child inherits the clean-up."""
    if os.getpid() == maker:
        for path in paths:
            path.unlink(missing_ok=True)


def sweep(folder: Path = FOLDER) -> list[str]:
    """Remove segments of this user whose maker is dead and that nobody reads; their names."""
    swept = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is None or _born(int(match[1])) == int(match[2]):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # somebody else's, or just gone
        # A maker in another process namespace has no number here, or another one's; its lock says that it lives.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            swept.append(path.name)
        os.close(descriptor)
    return swept


def readers(descriptor: int) -> list[int]:
    """Processes that hold a lock on this segment beside us, as far as the kernel tells."""
    inode = os.fstat(descriptor).st_ino
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    held = [line.split() for line in lines if "FLOCK" in line]
    return sorted({int(words[4]) for words in held if words[5].endswith(f":{inode}")} - {os.getpid(), -1})


def _born(pid: int) -> int:
    """When a process began, in the kernel's ticks: with its number it names one process for ever. 0: there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text[text.rindex(")") + 2 :].split()[19])
