"""How a command ends: one place turns every outcome into a message and an exit code.

returned            the command's own code (0, or the verdict's)
SurefootError       what, why, fix on stderr; the error's code
KeyboardInterrupt   75
closed pipe         quiet, 0: the reader had enough
disk trouble        74, and so are rights that forbid something
anything else       70: a bug of ours; the traceback goes to a file whose name is printed

Whatever the outcome, secrets are hidden in what is said and in what is kept.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable

from surefoot_harness.errors import SurefootError

BUG, IO, STOPPED = 70, 74, 75
_DISK = {errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS}


def guarded(action: Callable[[], int]) -> int:
    """Run one command; the exit code. Nothing but SystemExit gets past here."""
    try:
        code = action()
        if sys.stdout is not None:  # started with it closed
            sys.stdout.flush()
        return code
    except SurefootError as error:
        _say(f"{type(error).__name__}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("stopped on request")
        return STOPPED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at its end
        return 0
    except OSError as error:
        if error.errno in _DISK:
            _say(f"StorageError: {error}\n  why: the disk refused a write\n  fix: free some space, then start again")
            return IO
        if isinstance(error, PermissionError):
            _say(f"StorageError: {error}\n  why: the rights of a file or folder forbid it\n  fix: look at its mode")
            return IO
        return _bug(error)
    except Exception as error:  # noqa: BLE001 - converted with its reason, nothing is swallowed
        return _bug(error)


def _bug(error: Exception) -> int:
    from surefoot_harness.system.text import printable

    text = printable("".join(traceback.format_exception(error)))
    try:
        descriptor, name = tempfile.mkstemp(prefix="surefoot-crash-", suffix=".txt")  # 0600
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        where = f"the traceback is in {name}"
    except OSError:
        where = f"the traceback could not be saved, so here it is:\n{text}"
    summary = printable(traceback.format_exception_only(error)[-1]).strip()[:500]  # cut after: half a secret is one too
    _say(f"this is a bug in surefoot: {summary}\n  {where}\n  fix: please report it with that file")
    return BUG


def _say(text: str) -> None:
    from surefoot_harness.system.text import printable

    try:
        print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        return  # no one is listening; the exit code still speaks
