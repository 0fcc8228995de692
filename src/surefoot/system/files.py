"""Opening a file of a folder that somebody else may have made: a plain file, or an OSError at once.

Promises   a link is not followed, a pipe or device is not waited for, and nothing is read past a limit.
Never      says what is wrong with the folder: each caller has its own words, and its own error.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
REPLACE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Without O_TRUNC: what is cut has to be known to be a plain file first; see `descriptor_to_replace`."""


class TooLongError(OSError):
    """More bytes than a file or line of its kind has."""


def open_plain(path: Path) -> BinaryIO:
    """The file, for reading; an OSError where it is a link, a pipe, a device or a folder."""
    return os.fdopen(plain_descriptor(path, READ), "rb")


def plain_descriptor(path: Path, flags: int) -> int:
    """A descriptor of a plain file, made 0600 where `flags` create it."""
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link") from None
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is not a plain file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file")
    os.set_blocking(descriptor, True)
    return descriptor


def descriptor_to_replace(path: Path) -> int:
    """A descriptor of an empty plain file: a new one, or the old one cut."""
    descriptor = plain_descriptor(path, REPLACE)
    os.ftruncate(descriptor, 0)
    return descriptor


def read_plain(path: Path, limit: int) -> bytes:
    """The bytes of a plain file; one that is longer than `limit` is a `TooLongError`."""
    with open_plain(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise TooLongError(errno.EFBIG, f"it has more than {limit} bytes")
    return data


def bounded_lines(file: IO[bytes], limit: int) -> Iterator[bytes]:
    """Line by line, each with its newline; one of more than `limit` bytes is a `TooLongError`."""
    while line := file.readline(limit + 1):
        if len(line) > limit:
            raise TooLongError(errno.EFBIG, f"a line has more than {limit} bytes")
        yield line


def linked(root: Path, *names: str) -> str | None:
    """The first of these entries of a folder that is a link; a link leads out of it."""
    return next((name for name in names if (root / name).is_symlink()), None)
