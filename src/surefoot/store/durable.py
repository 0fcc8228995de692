"""Durable writes: a file or folder is there whole, or not at all.

Promises   temporary name in the same folder -> write -> fsync -> rename -> fsync of the folder; files 0600,
           folders 0700; a refusal of the disk is a `StorageError` and leaves no temporary file behind.
Never      overwrites a folder, follows a link at the final name, or retries a failed fsync.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from surefoot.errors import StateError, StorageError
from surefoot.plain_file import descriptor_to_replace
from surefoot.store.failpoints import failpoint
from surefoot.store.manifest import MANIFEST, Entry, manifest_text


def atomic_write(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data` in one step, durably."""
    payload = data.encode("utf-8") if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        failpoint("durable.before_write")
        _write_new(temporary, payload)
        os.replace(temporary, path)
        failpoint("durable.after_rename")
        sync_folder(path.parent)
        failpoint("durable.done")
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(path, error) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """`atomic_write` of JSON; a number that is not finite is refused, since no reader could trust it."""
    try:
        text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    except ValueError as error:
        raise StateError(
            f"{path.name} would hold a number that is not finite", "JSON has no word for it", "leave the key out"
        ) from error
    atomic_write(path, text + "\n")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """A new file of text lines, 0600. Not synced: for what may be lost with the last second of a crash."""
    try:
        with os.fdopen(descriptor_to_replace(path), "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
    except OSError as error:
        raise storage_error(path, error) from error


def commit_folder(
    temporary: Path, final: Path, facts: Mapping[str, Any], *, known: Mapping[str, Entry] | None = None
) -> Path:
    """Make a finished temporary folder visible under its final name.

    Every file is synced and listed in `manifest.json` with size and SHA-256 (plus `facts`); the manifest is
    written last, then the folder is renamed. A final name that exists already is a `StateError`.

    Args:
        known: files that were hashed from memory while they were written; those are not read again.
    """
    if final.exists() or final.is_symlink():
        raise StateError(
            f"{final} exists already", "a saved state is never overwritten", "remove it, or use another run"
        )
    try:
        failpoint("folder.before_seal")
        files = {}
        for path in sorted(temporary.rglob("*")):
            if path.is_dir():
                path.chmod(0o700)
                sync_folder(path)
            else:
                name = path.relative_to(temporary).as_posix()
                files[name] = _seal(path, (known or {}).get(name))
        failpoint("folder.before_manifest")
        atomic_write(temporary / MANIFEST, manifest_text(facts, files))
        failpoint("folder.after_manifest")
        os.rename(temporary, final)
        failpoint("folder.after_rename")
        sync_folder(final.parent)
        failpoint("folder.done")
    except OSError as error:
        raise storage_error(final, error) from error
    return final


def sync_folder(folder: Path) -> None:
    """Make names in `folder` durable."""
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


def _write_new(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        failpoint("durable.after_write")
        os.fsync(file.fileno())
    failpoint("durable.after_sync")


def _seal(path: Path, known: Entry | None = None) -> dict[str, Any]:
    """Size and SHA-256 of one file, after its bytes are on the disk and its rights are narrow."""
    path.chmod(0o600)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        found = Entry(os.fstat(file.fileno()).st_size, known.sha256 if known else _sha256(file))
        if known is not None and known != found:
            raise OSError(f"{path.name} has {found.size} bytes, {known.size} were written")
        failpoint("folder.after_seal")
        return asdict(found)


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
