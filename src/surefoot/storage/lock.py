"""One driver per run folder: the second is turned away by name.

Owns       the file `lock` in the folder, from the moment a driver begins until it lets go.
Promises   of two drivers one is refused, and told who holds the folder and since when; the lock of a process that died
           is taken over with a note; a forked child does not hold it; a folder that was copied, or moved to another
           machine, is free.
Never      waits, guesses from a process number alone, or removes a file that somebody else holds.

The kernel keeps the lock (`flock`), so it ends with the process, however that ends. The record inside the file says who
held it: it is for people, and for telling a dead owner from none.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from surefoot.errors import StateError
from surefoot.storage.files import failpoint
from surefoot.system.files import storage_error
from surefoot.system.process import boot_id, start_ticks

LOCK = "lock"
MAX_RECORD = 4096
TRIES = 100
"""How often the file may vanish under us (its owner just let go) before something else must be wrong."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock: a process, known by more than its number, which the system uses again."""

    pid: int
    started: int | None
    """Clock ticks between the machine's start and the process's; None where the system does not say."""
    host: str
    boot: str | None
    since: str
    """UTC, in seconds."""
    inode: int
    """Of the lock file: a copy of the file has another one."""

    @classmethod
    def me(cls, inode: int) -> Owner:
        """This process."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(os.getpid(), start_ticks(os.getpid()), os.uname().nodename, boot_id(), now, inode)

    @classmethod
    def read(cls, text: bytes) -> Owner | None:
        """From the lock file; None for anything that is not a whole record."""
        try:
            owner = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        types: dict[str, Any] = {"pid": int, "started": int | None, "host": str, "boot": str | None, "since": str}
        return owner if all(isinstance(getattr(owner, name), kind) for name, kind in types.items()) else None

    def gone(self, inode: int) -> str | None:
        """Why this owner cannot hold the lock any more; None if it is alive."""
        if self.host != os.uname().nodename:
            return f"it was on another machine, {self.host[:100]!r}"
        if self.boot != boot_id():
            return "the machine has been started again since"
        if not self._runs():
            return "that process has ended"
        return None if self.inode == inode else "the folder is a copy of the one that it holds"

    def _runs(self) -> bool:
        if self.started is not None:
            return start_ticks(self.pid) == self.started
        try:  # a system that does not tell when a process began: its number has to do
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host[:100]!r} since {self.since[:40]}"


class RunLock:
    """Holds a run folder from construction until `close`.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with RunLock(folder) as lock:
        ...     (folder / "lock").exists(), lock.note
        (True, None)
        >>> (folder / "lock").exists()
        False
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock, or raise a `StateError` that names its holder."""
        self.path = folder / LOCK
        self.note: str | None = None
        """What to tell the user when the lock of a dead owner was taken over."""
        self._descriptor: int | None = self._take()
        _HELD.add(self)

    @property
    def held(self) -> bool:
        """Whether this object holds the lock in this process."""
        return self._descriptor is not None

    def close(self) -> None:
        """Let go: the file goes first, while it is still ours."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        _HELD.discard(self)
        try:
            failpoint("lock.before_release")
            if _is_file(self.path, descriptor):
                with suppress(OSError):  # a folder that was made read-only or removed keeps the file; the lock ends
                    self.path.unlink()
        finally:
            os.close(descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def forget(self) -> None:
        """In a forked child: close the descriptor. The lock itself belongs to the parent and stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self) -> int:
        """Open, lock and sign the file that has the name now; again if its last owner has just removed it."""
        for _ in range(TRIES):
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise storage_error(self.path, error) from error
            try:
                if self._lock(descriptor):
                    self._sign(descriptor)
                    return descriptor
            except OSError as error:
                os.close(descriptor)
                raise storage_error(self.path, error) from error
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        raise storage_error(self.path, OSError(errno.EAGAIN, "the file vanishes again and again"))

    def _lock(self, descriptor: int) -> bool:
        """Whether we hold the file that has the name; held by somebody else is a `StateError`."""
        failpoint("lock.opened")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use(os.pread(descriptor, MAX_RECORD, 0), os.fstat(descriptor).st_ino) from None
        return _is_file(self.path, descriptor)

    def _sign(self, descriptor: int) -> None:
        """Look at what the last owner left, then write who we are."""
        failpoint("lock.acquired")
        inode, left = os.fstat(descriptor).st_ino, os.pread(descriptor, MAX_RECORD, 0)
        if left:
            former = Owner.read(left)
            gone = former.gone(inode) if former else "its record cannot be read"
            if gone is None:
                raise StateError(
                    f"{self.path.parent} is in use by {former}, and the file system let us lock it all the same",
                    "without working locks two drivers would overwrite each other's work",
                    "wait until it has ended, or put the run on a file system with flock",
                )
            self.note = f"took over the lock of {former or 'an unknown owner'}: {gone}"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(Owner.me(inode))).encode(), 0)
        failpoint("lock.signed")

    def _in_use(self, record: bytes, inode: int) -> StateError:
        owner = Owner.read(record)
        who = str(owner) if owner else "a process that has not signed yet"
        gone = owner.gone(inode) if owner else None
        still = f"; {gone}, but a process that it started still holds the lock" if gone else ""
        return StateError(
            f"{self.path.parent} is in use by {who}{still}",
            "two drivers in one run folder would overwrite each other's work",
            "wait until it has ended, or stop it; a lock never has to be removed by hand",
        )


_HELD: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_HELD):
        lock.forget()
    _HELD.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _is_file(path: Path, descriptor: int) -> bool:
    """Whether the name still belongs to the file that we have open."""
    try:
        named = path.lstat()
    except OSError:
        return False
    ours = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)
