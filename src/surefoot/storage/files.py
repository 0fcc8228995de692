"""Durable writes: a file, folder or journal is there whole, or not at all; and the places where a test breaks them.

Promises   temporary name in the same folder -> write -> fsync -> rename -> fsync of the folder; files 0600,
           folders 0700; a refusal of the disk is a `StorageError` and leaves no temporary file behind.
Never      overwrites a folder, follows a link at the final name, or retries a failed fsync.

Read next: `system/files.py` and `system/journal.py` for the bytes, `ledger.py` for what is told.
"""

from __future__ import annotations

import builtins
import difflib
import errno
import itertools
import json
import math
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self

from surefoot.errors import ConfigError, InvariantError, StateError, SurefootError
from surefoot.system import files as system_files
from surefoot.system.files import (
    descriptor_to_replace,
    open_plain,
    sha256_of,
    sha256_of_file,
    storage_error,
    sync_folder,
)
from surefoot.system.journal import ID_BYTES, FramedJournal, Header
from surefoot.system.json import parse

# -- Failpoints: named places where a test may stop, break or slow down the real code --------------
# Owns       the list of names below; a call with any other name is refused, switched on or not.
# Promises   switched off it costs one dictionary look-up; it is switched on by one environment variable and nothing
#            else, read when this module is imported; a word it does not understand is refused, never ignored.
# Never      does anything in a run whose environment does not ask for it.
#
#     SUREFOOT_FAILPOINTS="journal.after_write=kill"              kill -9 of this process
#     SUREFOOT_FAILPOINTS="journal.after_write=kill@3"            ... at the third time it comes here
#     SUREFOOT_FAILPOINTS="durable.after_write=errno:ENOSPC"      what a full disk says
#     SUREFOOT_FAILPOINTS="lock.acquired=raise:KeyboardInterrupt,journal.after_sync=sleep:2"


VARIABLE = "SUREFOOT_FAILPOINTS"

NAMES: Mapping[str, str] = {
    "batches.before_append": "graded groups are about to be journaled",
    "batches.after_append": "graded groups are on the disk, nobody knows it yet",
    "batches.before_compose": "all groups of a batch are on the disk, its composition is not",
    "batches.after_compose": "the composition of a batch is on the disk, nobody knows it yet",
    "books.on_disk": "graded groups are on the disk, the ledger does not know it yet",
    "books.delivered": "graded groups are on the disk and delivered, the rest of their batch is still played",
    "batches.after_roll": "a new file for batches exists, the old one is still open",
    "batches.before_forget": "a file of batches that nobody needs any more is about to go",
    "checkpoint.before_files": "a checkpoint's temporary folder exists, empty",
    "checkpoint.after_weights": "its weights and optimiser state are written, not its record",
    "checkpoint.before_commit": "all its files are written, not yet listed",
    "retention.verified": "two good checkpoints are known, an older one is about to go",
    "retention.after_rename": "a checkpoint has lost its name, not its files",
    "loop.before_collect": "a batch is leased, not played",
    "loop.after_collect": "a batch is played and scored, its groups are on the disk, its composition is not",
    "loop.before_learn": "a batch is on the disk, no pass over it has begun",
    "loop.after_learn": "the weights have changed, nothing says so yet",
    "loop.before_publish": "the engine serves older weights than the learner has",
    "loop.after_publish": "the engine has the learner's weights",
    "loop.before_log": "the numbers of a step are about to be written",
    "loop.before_evaluate": "an evaluation is about to begin",
    "loop.after_evaluate": "an evaluation is written and folded",
    "session.folder_made": "the run folder exists and is locked, its config is not written",
    "session.config_written": "the run folder holds its config and nothing else",
    "session.before_build": "the journal exists, torch is not loaded",
    "session.before_save": "a checkpoint is about to be written",
    "session.after_save": "a checkpoint is complete, older ones are not pruned yet",
    "session.before_verdict": "the run is over, its verdict is not written",
    "session.after_verdict": "the verdict is written, the lock still held",
    "resume.found": "a resume knows its checkpoint, nothing is changed",
    "extend.journaled": "a new length of the run is in the journal, config.toml holds the old one",
    "extend.written": "config.toml holds the new length, the run has not gone on yet",
    "resume.rewound": "later numbers are cut from the metrics and the ledger is rewound",
    "durable.before_write": "a file is about to be written beside its final name",
    "durable.after_write": "its bytes are written, not yet on the disk",
    "durable.after_sync": "its bytes are on the disk, under the temporary name",
    "durable.after_rename": "it has its final name, which may not be on the disk",
    "durable.done": "bytes and name are on the disk",
    "folder.before_seal": "a finished folder is about to be listed",
    "folder.after_seal": "one more of its files is synced and hashed",
    "folder.before_manifest": "every file is synced, the manifest is not written",
    "folder.after_manifest": "the manifest is there, under the temporary folder name",
    "folder.after_rename": "the folder has its final name, which may not be on the disk",
    "folder.done": "the folder is on the disk",
    "memory.before_learn": "a measurement of memory has sampled and is about to learn",
    "journal.created": "a journal without a record exists",
    "journal.before_write": "a record is about to be appended",
    "journal.between_pieces": "a part of a large record is written",
    "journal.after_write": "the record is written, not yet on the disk",
    "journal.after_sync": "the record is on the disk, its writer does not know it yet",
    "journal.before_cut": "a torn tail was found",
    "journal.after_cut": "the torn tail is cut off",
    "journal.before_seal": "a journal is about to be closed",
    "learner.before_forward": "a microbatch is about to be scored",
    "learner.after_backward": "one more microbatch has added its gradient",
    "learner.before_step": "the gradient is whole and finite, the weights are untouched",
    "learner.after_step": "the weights are stepped, the version does not say so yet",
    "ledger.before_event": "an event is allowed, not yet in the journal",
    "ledger.after_event": "the event is in the journal, not yet in memory",
    "ledger.opened": "a new driver has taken over the ledger",
    "lock.opened": "the lock file exists, nobody holds it",
    "lock.acquired": "the lock is held, its owner has not signed",
    "lock.signed": "the lock is held and signed",
    "lock.before_release": "the lock file is about to go",
}
"""Every failpoint of the package: where it is, in words. A new one starts here."""


@dataclass(frozen=True, slots=True)
class Armed:
    """What happens at one failpoint, and at which of its hits (None: at each)."""

    name: str
    text: str
    act: Callable[[], None]
    at: int | None = None
    hits: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def hit(self) -> None:
        """Count this hit; act if it is the one."""
        if next(self.hits) == self.at or self.at is None:
            self.act()


_POINTS: dict[str, Armed | None] = dict.fromkeys(NAMES)


def failpoint(name: str) -> None:
    """A place that a test can name. Nothing happens here unless the environment says so."""
    try:
        armed = _POINTS[name]
    except KeyError:
        raise _unknown(name, InvariantError) from None
    if armed is not None:
        armed.hit()


def read_environment() -> dict[str, str]:
    """Switch on what the environment variable names and everything else off; returns what is on.

    Done once, at import. A child that was forked from a warm parent may do it again.
    """
    wanted = {armed.name: armed for armed in _parse(os.environ.get(VARIABLE, ""))}
    _POINTS.update({name: wanted.get(name) for name in NAMES})
    return switched_on()


def switched_on() -> dict[str, str]:
    """The failpoints that are on, with what they do; empty in every real run."""
    return {name: armed.text for name, armed in _POINTS.items() if armed is not None}


def _parse(text: str) -> list[Armed]:
    parts = [part.strip() for part in re.split("[,;]", text) if part.strip()]
    found = [_parse_one(part) for part in parts]
    names = [armed.name for armed in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _refused(f"names {', '.join(twice)} twice")
    return found


def _parse_one(part: str) -> Armed:
    match = re.fullmatch(r"(?P<name>[^=]+)=(?P<action>[^@]+)(?:@(?P<at>[0-9]{1,9}))?", part)
    if match is None or match["at"] == "0":
        raise _refused(f"holds {part!r}, which is not name=action or name=action@hit, hits counted from 1")
    name, action = match["name"].strip(), match["action"].strip()
    if name not in NAMES:
        raise _unknown(name, ConfigError)
    return Armed(name, part.partition("=")[2], _action(name, action), int(match["at"]) if match["at"] else None)


def _action(name: str, text: str) -> Callable[[], None]:
    word, _, argument = text.partition(":")
    if text == "kill":
        return _kill
    if word == "sleep" and (seconds := _seconds(argument)) is not None:
        return lambda: time.sleep(seconds)
    if word == "errno" and isinstance(code := getattr(errno, argument, None), int):
        return lambda: _raise_errno(name, code)
    if word == "raise" and re.fullmatch(r"[\w.]+", argument) and ("." in argument or _kind(argument) is not None):
        return lambda: _raise(name, argument)
    raise _refused(f"asks {name} for {text!r}; there are kill, sleep:SECONDS, errno:NAME and raise:EXCEPTION")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and 0 <= seconds <= 1e6 else None


def _raise_errno(name: str, code: int) -> None:
    raise OSError(code, f"{os.strerror(code)} (failpoint {name})")


def _raise(name: str, kind: str) -> None:
    found = _kind(kind)
    if found is None:
        raise _refused(f"asks {name} for {kind}, and no loaded module has an exception of that name")
    if issubclass(found, SurefootError):
        raise found(f"failpoint {name}", f"{VARIABLE} asked for it", "unset the variable")
    raise found(f"failpoint {name}")


def _kind(name: str) -> type[BaseException] | None:
    """An exception by name: a builtin one, one of ours, or `module.Name` of a module that is loaded already."""
    module, _, word = name.rpartition(".")
    homes = [sys.modules.get(module)] if module else [builtins, sys.modules["surefoot.errors"]]
    found = next((getattr(home, word) for home in homes if hasattr(home, word)), None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _unknown(name: str, kind: type[SurefootError]) -> SurefootError:
    near = " or ".join(difflib.get_close_matches(name[:100], NAMES, n=3))
    guess = f"did you mean {near}? " if near else ""
    return kind(
        f"there is no failpoint {name[:100]!r}",
        "a crash test that hits nothing would pass without having tested anything",
        f"{guess}they are all declared in surefoot/storage/files.py",
    )


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"{VARIABLE} {what}", "a crash test that hits nothing would pass without having tested anything",
        "write for example journal.after_write=kill@2, several with commas; unset it for a real run",
    )  # fmt: skip


read_environment()


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


# -- The journals of a run: the framed file of `system/journal.py`, made whole in one step ---------


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
