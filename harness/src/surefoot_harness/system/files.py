"""Files and folders: opened only where they are plain, written whole or not at all, and known by their SHA-256.

Promises   a link is not followed, a pipe or device is not waited for, and nothing is read past a limit; what is written
           appears under its name in one step, and a write that fails leaves the old file and no temporary one; a hash
           is the same on every platform and in every process.
Never      says what is wrong with the folder: each caller has its own words, and its own error. For a disk that refuses
           to write, `storage_error` has them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, BinaryIO, Literal

from surefoot_harness.errors import StorageError

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


# -- Atomic writes: one temporary name in the same folder, one rename ------------------------------

Written = Literal["written", "synced", "renamed"]
"""How far an atomic write has come: bytes handed to the system, bytes on the disk, final name in the folder."""


def atomic_write(
    path: Path, data: bytes | str, *, durable: bool = True, passed: Callable[[Written], None] | None = None
) -> None:
    """Replace `path` by `data` (text as UTF-8) in one step; the arguments are those of `atomic_file`."""
    with atomic_file(path, durable=durable, passed=passed) as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)


@contextlib.contextmanager
def atomic_file(
    path: Path,
    *,
    durable: bool = True,
    mode: int = 0o600,
    overwrite: bool = True,
    passed: Callable[[Written], None] | None = None,
) -> Iterator[BinaryIO]:
    """A new file to write to, which is at `path` when the block has ended well; else nothing is left of it.

    Readers see the old file or the new one. A link at `path` is replaced, not followed. What the system refuses is
    an OSError.

    Args:
        durable: on return, bytes and name survive a power cut. False: the last second may be lost, never half of it.
        mode: rights of the file, before the umask.
        overwrite: False refuses a file that is there, or appears meanwhile, with a FileExistsError.
        passed: called at each stage; crash tests stop here.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> with atomic_file(folder / "a.txt") as file:
        ...     _ = file.write(b"whole")
        >>> [(path.name, path.read_text()) for path in folder.iterdir()]
        [('a.txt', 'whole')]
    """
    tell = passed or (lambda stage: None)
    # Random, for machines that share the folder; the process's number, for whoever sweeps up after a kill.
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.{os.getpid()}.tmp")
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # `pread` may look back at what is flushed
        with os.fdopen(os.open(temporary, flags, mode), "wb", 1 << 16) as file:
            yield file
            file.flush()
            tell("written")
            if durable:
                os.fsync(file.fileno())
        tell("synced")
        if overwrite:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
            temporary.unlink()
        tell("renamed")
        if durable:
            sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # it has its name already, or the folder is closed to us: the error says so
            temporary.unlink()
        raise


@contextlib.contextmanager
def atomic_folder(final: Path, *, prefix: str | None = None) -> Iterator[Path]:
    """A new folder, 0700, beside `final`; it gets that name when the block has ended well, else it goes.

    Not synced. A folder with something in it is never replaced: that is an OSError.

    Args:
        prefix: how its temporary name begins, for whoever sweeps up after a kill.
    """
    made = Path(tempfile.mkdtemp(dir=final.parent, prefix=prefix or f".{final.name}."))
    try:
        yield made
        os.rename(made, final)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make names in `folder` durable; of a file, its bytes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(path: Path, error: OSError) -> StorageError:
    """The disk's own words, with the path."""
    return StorageError(
        f"{path} could not be written: {error.strerror or error}",
        "what is not on disk cannot be judged or resumed",
        "free some space or check the rights of the folder, then start again",
    )


# -- SHA-256 of text, bytes, pieces and files: how they become digits ------------------------------
# What goes into a hash, and in which form, is the caller's: digests lie in run folders, so a form that changes is
# another format.


BLOCK = 1 << 20


def sha256_of(data: str | bytes | Iterable[bytes], *, errors: str = "strict") -> str:
    """64 hexadecimal digits: of text as UTF-8, of bytes, or of pieces one after the other with nothing between them.

    Args:
        errors: how text is encoded that is not Unicode; "strict" refuses it.

    Example:
        >>> sha256_of("ab") == sha256_of([b"a", b"b"])
        True
    """
    if isinstance(data, str | bytes):
        return hashlib.sha256(_bytes(data, errors)).hexdigest()
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def sha256_of_sized(pieces: Iterable[bytes]) -> str:
    """Of pieces, each after its length in 8 bytes: `ab, c` and `a, bc` differ."""
    return sha256_of(part for piece in pieces for part in (len(piece).to_bytes(8, "little"), piece))


def sha256_of_file(file: BinaryIO, most: int | None = None) -> str:
    """Of what is left of an open file, or of its next `most` bytes."""
    return sha256_of(iter(lambda: file.read(BLOCK), b"") if most is None else _blocks(file, most))


def sha256_bytes(data: str | bytes, *, errors: str = "strict") -> bytes:
    """The 32 bytes themselves: an order that depends on nothing but the text."""
    return hashlib.sha256(_bytes(data, errors)).digest()


def sha256_number(data: str | bytes, *, size: int = 8, errors: str = "strict") -> int:
    """The first `size` bytes as a whole number, the highest first.

    Example:
        >>> sha256_number("a", size=1) == int(sha256_of("a")[:2], 16)
        True
    """
    return int.from_bytes(sha256_bytes(data, errors=errors)[:size], "big")


def _bytes(data: str | bytes, errors: str) -> bytes:
    return data.encode("utf-8", errors) if isinstance(data, str) else data


def _blocks(file: BinaryIO, left: int) -> Iterator[bytes]:
    while left and (block := file.read(min(BLOCK, left))):
        yield block
        left -= len(block)
