"""The journals of a run: the framed file of `system/journal.py`, made whole in one step, with the store's failpoints.

Read next: `system/journal.py` for the bytes and what damage means, `ledger.py` for what is told.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from surefoot.errors import StateError
from surefoot.storage.failpoints import failpoint
from surefoot.storage.files import atomic_write
from surefoot.system.journal import ID_BYTES, FramedJournal, Header


class Journal(FramedJournal):
    """A journal of a run folder; nobody else writes to it (`lock.py` sees to that).

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.journal"
        >>> with Journal.create(path) as journal:
        ...     journal.append({"event": "hello"})
        1
        >>> [entry.record for entry in Journal.open(path, readonly=True).records()]
        [{'event': 'hello'}]
    """

    @classmethod
    def create(cls, path: Path) -> Self:
        """A new journal, on the disk before this returns. A path that exists is a `StateError`."""
        if path.exists() or path.is_symlink():
            raise StateError(f"{path} exists already", "a journal is never begun anew", "open it, or use another run")
        atomic_write(path, Header(os.urandom(ID_BYTES)).pack())
        failpoint("journal.created")
        return cls.open(path)

    failpoint = staticmethod(failpoint)
