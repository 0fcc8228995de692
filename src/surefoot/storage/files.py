"""Durable writes: a file or folder is there whole, or not at all.

Promises   temporary name in the same folder -> write -> fsync -> rename -> fsync of the folder; files 0600,
           folders 0700; a refusal of the disk is a `StorageError` and leaves no temporary file behind.
Never      overwrites a folder, follows a link at the final name, or retries a failed fsync.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from surefoot.errors import StateError
from surefoot.storage.failpoints import failpoint
from surefoot.system import files as system_files
from surefoot.system.files import (
    descriptor_to_replace,
    open_plain,
    sha256_of,
    sha256_of_file,
    storage_error,
    sync_folder,
)
from surefoot.system.json import parse

# -- The list of a saved folder's files: written last, checked before anything else is read -------
# Owns       the form of `manifest.json`: facts, files with size and SHA-256, and a digest of the list itself.
# Promises   a folder is accepted only if names, count, sizes and SHA-256 are those of the list, and the list is byte
# for
# byte the one that was written; the cheap questions come first, and nothing is read past its stated size.
# Never      follows a link, looks outside the folder, repairs, or allocates what a number in the file asks for.


MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 16 << 20
MAX_FILES = 100_000
BLOCK = 1 << 20
OURS = ("format", "files", "digest")


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """What the manifest says about one file: its size in bytes, and the SHA-256 of them."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checked list.

    Example:
        >>> one = Manifest(Path("step_3"), {"step": 3}, {"model.safetensors": Entry(5, "0" * 64)})
        >>> one.facts["step"], one.path("model.safetensors").as_posix()
        (3, 'step_3/model.safetensors')
    """

    folder: Path
    facts: Mapping[str, Any]
    """What the writer said about the whole: step, version ..."""
    files: Mapping[str, ManifestEntry]
    """By name relative to the folder, with "/" between the parts."""

    def path(self, name: str) -> Path:
        """A listed file; a name that is not in the list is refused."""
        if name not in self.files:
            _refuse(self.folder, f"has no {name}", f"listed are: {_few(self.files)}")
        return self.folder / name


def manifest_text(facts: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> str:
    """The one way a manifest is written; `facts` may not use the manifest's own keys."""
    if taken := sorted(set(facts) & set(OURS)):
        raise StateError(
            f"a manifest cannot hold the fact(s) {', '.join(taken)}", "the manifest uses these names itself",
            "call them something else",
        )  # fmt: skip
    try:
        body = json.loads(json.dumps({"format": FORMAT, **facts, "files": dict(files)}, allow_nan=False))
        return _text({**body, "digest": _digest(body)})
    except (ValueError, TypeError) as error:
        raise StateError(
            f"{MANIFEST} would hold something that JSON has no word for: {error}",
            "what cannot be read back is no record", "leave it out, or write it as text",
        ) from error  # fmt: skip


def read_manifest(folder: Path) -> Manifest:
    """The list alone, checked against itself; the files are not looked at."""
    raw = _read(folder)
    body = parse_json(folder / MANIFEST, raw)
    if not isinstance(body.get("format"), int):
        _refuse(folder, f"has a {MANIFEST} without a format")
    if body["format"] != FORMAT:
        _refuse(folder, f"has {MANIFEST} format {body['format']}, and this version reads format {FORMAT}")
    digest = body.pop("digest", None)
    if digest != _digest(body) or raw != _text({**body, "digest": digest}).encode():
        _refuse(folder, f"has a {MANIFEST} that was changed after it was written")
    files = _files(folder, body.pop("files", None))
    del body["format"]
    return Manifest(folder, body, files)


def verify_folder(folder: Path, *, unread: str = "") -> Manifest:
    """Check a saved folder whole: the list, the names, the sizes, then every byte. Refuses with a `StateError`.

    Args:
        unread: how names of files begin that nobody is going to read: their sizes have to do.
    """
    manifest = read_manifest(folder)
    if folder.is_symlink():
        _refuse(folder, "is a link", "what it leads to is not of this run")
    found = _found(folder)
    missing, extra = manifest.files.keys() - found.keys(), found.keys() - manifest.files.keys()
    if missing or extra:
        _refuse(
            folder, f"does not hold the files of its {MANIFEST}",
            f"missing: {_few(missing)}; not listed: {_few(extra)}; listed {len(manifest.files)}, found {len(found)}",
        )  # fmt: skip
    for name, facts in manifest.files.items():
        if found[name] != facts.size:
            _refuse(folder, f"has {name} with {found[name]} bytes, and its {MANIFEST} says {facts.size}")
    for name, facts in manifest.files.items():
        if not (unread and name.startswith(unread)) and _sha256_of_file(folder, name, facts.size) != facts.sha256:
            _refuse(folder, f"has {name} with other bytes than those that were saved (SHA-256 differs)")
    return manifest


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    """One JSON object as we write it: no key twice, no NaN, no depth that breaks the reader. Else a `StateError`."""
    try:
        value = parse(data)
    except ValueError as error:
        raise refusal(path, f"it is not JSON as we write it ({str(error)[:200]})") from error
    if not isinstance(value, dict):
        raise refusal(path, "it does not hold a JSON object")
    return value


def refusal(path: Path, reason: str) -> StateError:
    """The error for a saved file or folder that cannot be trusted."""
    shown = str(path).encode("utf-8", "backslashreplace").decode()  # a hostile name must not break the message
    return StateError(
        f"{shown} is refused: {reason}", "a saved state is trusted whole or not at all",
        "use another checkpoint, or bring this one back from a copy",
    )  # fmt: skip


def _files(folder: Path, listed: object) -> dict[str, ManifestEntry]:
    if not isinstance(listed, dict) or len(listed) > MAX_FILES:
        _refuse(folder, f"has a {MANIFEST} with no list of files, or one of more than {MAX_FILES}")
    files = {}
    for name, facts in listed.items():
        if not _name_is_safe(name):
            _refuse(folder, f"has a {MANIFEST} with the name {name!r}", "a name has to stay inside the folder")
        size, sha = (facts.get("size"), facts.get("sha256")) if isinstance(facts, dict) else (None, None)
        if type(size) is not int or size < 0 or not isinstance(sha, str) or len(sha) != 64:
            _refuse(folder, f"has a {MANIFEST} without size and SHA-256 of {name!r}")
        files[name] = ManifestEntry(size, sha)
    return files


def _name_is_safe(name: str) -> bool:
    parts = name.split("/")
    return name != MANIFEST and "\0" not in name and not {"", ".", ".."} & set(parts) and len(name) <= 1024


def _found(folder: Path) -> dict[str, int]:
    """Name and size of every regular file below the folder, the manifest left out; anything else is refused."""
    found: dict[str, int] = {}
    for path, status in _walk(folder):
        name = path.relative_to(folder).as_posix()
        if not stat.S_ISREG(status.st_mode):
            _refuse(folder, f"holds {name}, which is not a plain file", "links and devices lead elsewhere")
        if name != MANIFEST:
            found[name] = status.st_size
        if len(found) > MAX_FILES:
            _refuse(folder, f"holds more than {MAX_FILES} files")
    return found


def _walk(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything below `root` that is not a folder; no link is entered, and however deep it goes."""
    folders = [root]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                some = itertools.islice(entries, MAX_FILES + 2)
                found = [(Path(entry.path), entry.stat(follow_symlinks=False)) for entry in some]
        except OSError as error:
            _refuse(root, f"could not be looked through: {error.strerror or error}")
        if len(found) > MAX_FILES + 1:
            _refuse(root, f"holds more than {MAX_FILES} files or folders in one folder")
        folders += [path for path, status in found if stat.S_ISDIR(status.st_mode)]
        yield from ((path, status) for path, status in found if not stat.S_ISDIR(status.st_mode))


def _read(folder: Path) -> bytes:
    try:
        with open_plain(folder / MANIFEST) as file:
            if os.fstat(file.fileno()).st_size > MAX_MANIFEST_BYTES:
                _refuse(folder, f"has a {MANIFEST} of more than {MAX_MANIFEST_BYTES} bytes")
            return file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        why = "it was never finished, or it is not one of ours" if folder.is_dir() else "there is no such folder"
        _refuse(folder, f"has no {MANIFEST} that can be read: {error.strerror or error}", why)


def _sha256_of_file(folder: Path, name: str, size: int) -> str:
    """Of the first `size` bytes and one more: a file that grew in the meantime has another hash."""
    try:
        with open_plain(folder / name) as file:
            return sha256_of_file(file, size + 1)
    except OSError as error:
        _refuse(folder, f"has {name}, which cannot be read: {error.strerror or error}")


def _digest(body: Mapping[str, Any]) -> str:
    return sha256_of(json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False))


def _text(body: Mapping[str, Any]) -> str:
    return json.dumps(body, indent=2, allow_nan=False) + "\n"


def _few(names: object) -> str:
    ordered = sorted(names) if isinstance(names, set | dict) else []
    shown = ", ".join(ordered[:5])
    return f"{shown} and {len(ordered) - 5} more" if len(ordered) > 5 else shown or "none"


def _refuse(folder: Path, what: str, why: str = "a saved state is trusted whole or not at all") -> NoReturn:
    raise StateError(f"{folder} {what}", why, "use another checkpoint, or bring this one back from a copy")


# -- Durable writes: a file or folder is there whole, or not at all -------------------------------


def atomic_write(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data` in one step, durably."""
    try:
        failpoint("durable.before_write")
        system_files.atomic_write(path, data, passed=_durable_failpoint)
        failpoint("durable.done")
    except OSError as error:
        raise storage_error(path, error) from error


def _durable_failpoint(stage: system_files.Written) -> None:
    if stage == "written":
        failpoint("durable.after_write")
    elif stage == "synced":
        failpoint("durable.after_sync")
    else:
        failpoint("durable.after_rename")


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
    temporary: Path, final: Path, facts: Mapping[str, Any], *, known: Mapping[str, ManifestEntry] | None = None
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


def _seal(path: Path, known: ManifestEntry | None = None) -> dict[str, Any]:
    """Size and SHA-256 of one file, after its bytes are on the disk and its rights are narrow."""
    path.chmod(0o600)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        found = ManifestEntry(os.fstat(file.fileno()).st_size, known.sha256 if known else sha256_of_file(file))
        if known is not None and known != found:
            raise OSError(f"{path.name} has {found.size} bytes, {known.size} were written")
        failpoint("folder.after_seal")
        return asdict(found)
