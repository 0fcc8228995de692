"""A copy of the code that runs: named by commit and dirty hash, whole or not there, never other code than it says.

Owns       FOLDER/COMMIT[-DIRTY]/ and the record beside it, FOLDER/COMMIT[-DIRTY].json.
Promises   tracked files as they stand, new files that git does not ignore, and submodules are in it; it appears by one
           rename; it is used again only when every file in it and in the tree still has the recorded content.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import StateError
from surefoot.harness import git
from surefoot.harness.files import read_json, write_atomic, write_json

FOLDER_VARIABLE = "CODE_SNAPSHOT_DIRNAME"
_MADE_BY_RUNNING = ("__pycache__", ".pytest_cache", ".git")


@dataclass(frozen=True, slots=True)
class Code:
    """Which code: the commit, and a hash of what differs from it (None for a clean tree)."""

    commit: str
    dirty: str | None

    @property
    def name(self) -> str:
        """Folder name of its snapshot."""
        return self.commit[:12] if self.dirty is None else f"{self.commit[:12]}-{self.dirty}"


def identify(root: Path) -> Code:
    """The code of a work tree, submodules included."""
    top = git.root_of(root)
    commit = git.head(root) if top else None
    if top is None or commit is None:
        raise StateError(
            f"{root} is not a git work tree with a commit",
            "a result that cannot be tied to its code proves nothing",
            "git init, add the files and commit them",
        )
    parts = [git.dirty_hash(top) or ""]
    for name in _submodules(top):  # git's own diff tells that a submodule has edits, not which
        parts.append(f"{name} {git.head(top / name)} {git.dirty_hash(top / name)}")
    clean = parts[0] == "" and all(part.endswith(" None") for part in parts[1:])
    return Code(
        commit, None if clean else hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:12]
    )


def take_snapshot(root: Path, code: Code, folder: Path) -> Path:
    """The snapshot of `root` under `folder`; an existing one is used again only after a comparison of contents."""
    ignore(folder)
    top = Path(git.git(root, "rev-parse", "--show-toplevel"))
    inside = folder.resolve()
    files = {name: path for name, path in _files(top).items() if not path.absolute().is_relative_to(inside)}
    digest = _digest(files)
    number, target = 1, folder / code.name
    while target.exists():
        if _is_intact(target, digest):
            return target
        number += 1  # damaged, or other code under the same name: leave it to whoever uses it
        target = folder / f"{code.name}.{number}"
    # The record comes first: a record without its folder is harmless, a folder without its record is not used again.
    write_json(_record(target), {"commit": code.commit, "dirty": code.dirty, "files": len(files), "digest": digest})
    _copy(files, target)
    if not _is_intact(target, digest) or identify(root) != code:
        raise StateError(
            f"{target} is not what was copied",
            "a file changed while it was copied",
            "let the tree rest, then start again",
        )
    return target


def ignore(folder: Path) -> None:
    """Make a folder that git does not look into."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / ".gitignore").exists():
        write_atomic(folder / ".gitignore", "*\n")


def snapshot_folder(out: Path) -> Path:
    """Where snapshots go: the variable CODE_SNAPSHOT_DIRNAME (relative to `out`), or `code_snapshots`."""
    return out / (os.environ.get(FOLDER_VARIABLE) or "code_snapshots")


def _record(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def _is_intact(target: Path, digest: str) -> bool:
    """Whether a snapshot is complete and holds exactly the code that the tree holds now."""
    if not _record(target).is_file():
        return False  # not complete, or not ours
    record: Any = read_json(_record(target))
    return isinstance(record, dict) and record.get("digest") == digest == _digest(_present(target))


def _copy(files: dict[str, Path], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    half = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        for name, path in files.items():
            copy = half / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy, follow_symlinks=False)
        os.replace(half, target)
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise


def _files(top: Path) -> dict[str, Path]:
    """Relative name -> path of everything that belongs to the code, submodules included."""
    listed = git.git(top, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    found = {name: top / name for name in listed if name and _is_file(top / name)}
    for name in _submodules(top):
        found |= {f"{name}/{inner}": path for inner, path in _files(top / name).items()}
    return dict(sorted(found.items()))


def _submodules(top: Path) -> list[str]:
    """Paths of the checked-out submodules of one level."""
    stages = [line for line in git.git(top, "ls-files", "-z", "--stage").split("\0") if line.startswith("160000 ")]
    names = [line.split("\t", 1)[1] for line in stages]
    missing = [name for name in names if not (top / name / ".git").exists()]
    if missing:
        raise StateError(
            f"submodule {', '.join(missing)} is not checked out", "the snapshot would lack its code",
            "git submodule update --init --recursive",
        )  # fmt: skip
    return sorted(names)


def _is_file(path: Path) -> bool:
    """Files and links; deleted ones and folders (submodules, nested repositories) are not."""
    return path.is_symlink() or path.is_file()


def _present(target: Path) -> dict[str, Path]:
    """What lies in a snapshot, without what Python leaves behind when it runs there."""
    found = {}
    for folder, folders, names in os.walk(target):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        folders[:] = [name for name in folders if name not in _MADE_BY_RUNNING and name not in links]
        for name in (*names, *links):
            path = Path(folder) / name
            found[path.relative_to(target).as_posix()] = path
    return found


def _digest(files: dict[str, Path]) -> str:
    """Names, kinds and contents of files as one hash."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        mode = path.lstat().st_mode
        kind = "link" if stat.S_ISLNK(mode) else "run" if mode & 0o100 else "file"
        content = os.fsencode(os.readlink(path)) if kind == "link" else path.read_bytes()
        digest.update(f"{kind} {len(content)} {name}\0".encode(errors="surrogateescape"))
        digest.update(content)
    return digest.hexdigest()
