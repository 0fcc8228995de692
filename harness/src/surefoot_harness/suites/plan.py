"""What a suite will do: trials (one recipe, one seed), their commands and folders, and what they cost.

Owns       placeholders in commands: `{python} {config} {run} {seed} {max_steps} {steps} {resume} {snapshot} {commit}`.
Promises   each trial is built from its own recipe only, so nothing leaks into the next; planning writes nothing.

Read next: `run.py`, which carries a plan out.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot_harness.errors import StateError
from surefoot_harness.files import read_json, write_atomic, write_json
from surefoot_harness.suites.manifest import DEFAULT_COMMAND, Recipe, Suite
from surefoot_harness.system import git
from surefoot_harness.system.files import atomic_folder, sha256_of

# -- A copy of the code that runs: named by commit and dirty hash, whole or not there, never other code than it says
# Owns       FOLDER/COMMIT[-DIRTY]/ and the record beside it, FOLDER/COMMIT[-DIRTY].json.
# Promises   tracked files as they stand, new files that git does not ignore, and submodules are in it; it appears by
# one
# rename; it is used again only when every file in it and in the tree still has the recorded content.


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
    return Code(commit, None if clean else sha256_of("\n".join(parts), errors="surrogateescape")[:12])


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
    with atomic_folder(target) as half:
        for name, path in files.items():
            copy = half / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy, follow_symlinks=False)


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
    return sha256_of(piece for name, path in sorted(files.items()) for piece in _pieces(name, path))


def _pieces(name: str, path: Path) -> tuple[bytes, bytes]:
    mode = path.lstat().st_mode
    kind = "link" if stat.S_ISLNK(mode) else "run" if mode & 0o100 else "file"
    content = os.fsencode(os.readlink(path)) if kind == "link" else path.read_bytes()
    return f"{kind} {len(content)} {name}\0".encode(errors="surrogateescape"), content


# -- What a suite will do: trials (one recipe, one seed), their commands and folders, and what they cost


NAMES = ("python", "config", "run", "seed", "max_steps", "steps", "resume", "snapshot", "commit")
_PLACEHOLDER = re.compile(r"\{(" + "|".join(NAMES) + r")\}")


@dataclass(frozen=True, slots=True)
class Trial:
    """One recipe with one seed, in its own folder.

    FOLDER/provenance.json   what code and settings are about to run
           run.log           what the trainer said
           run/              the trainer's own folder: `{run}`
           metrics.json      its numbers, metric -> step -> value
           verdict.json      the verdict
    """

    suite: str
    recipe: Recipe
    seed: int | None
    root: Path
    """The top of the repository that the suite belongs to."""
    folder: Path
    extra_args: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    """What the caller changed for this call only, as typed."""

    @property
    def label(self) -> str:
        """Recipe and seed, for people and for part names."""
        return self.recipe.name if self.seed is None else f"{self.recipe.name}/seed_{self.seed}"

    @property
    def run(self) -> Path:
        """The trainer's own folder."""
        return self.folder / "run"

    @property
    def log(self) -> Path:
        """What the trainer said, both streams in order."""
        return self.folder / "run.log"

    @property
    def verdict(self) -> Path:
        """How it ended."""
        return self.folder / "verdict.json"

    def exit_file(self, number: int) -> Path:
        """The trainer's exit status of one run, counted from 1."""
        return self.folder / f"exit_{number}"


def trials_of(
    suite: Suite, recipes: Iterable[Recipe], out: Path, extra_args: Sequence[str] = (), overrides: Sequence[str] = ()
) -> list[Trial]:
    """Every recipe with every seed, in the order of the manifest."""
    found = []
    for recipe in recipes:
        for seed in recipe.trials:
            folder = out / suite.name / recipe.name
            folder = folder if seed is None else folder / f"seed_{seed}"
            found.append(Trial(suite.name, recipe, seed, suite.root, folder, tuple(extra_args), tuple(overrides)))
    return found


def gpu_hours(recipe: Recipe) -> float:
    """GPUs times the longest time that all runs of all seeds may take.

    Example: 2 runs of 30 minutes on 4 nodes of 8 GPUs, one seed: 32 GPU-hours.
    """
    return recipe.nodes * recipe.gpus_per_node * recipe.minutes / 60 * recipe.num_runs * len(recipe.trials)


def command_of(trial: Trial, number: int, code: Code, snapshot: Path, python: str) -> tuple[str, ...]:
    """The words of run `number` (from 1): placeholders filled in, words with `{resume}` left out of the first run."""
    words = [word for word in _with_defaults(trial.recipe) if number > 1 or "{resume}" not in word]
    values = _values(trial, number, code, snapshot, python)
    return (*(_fill(word, values) for word in words), *trial.extra_args)


def env_of(trial: Trial, number: int, code: Code, snapshot: Path, python: str) -> dict[str, str]:
    """The recipe's own variables, placeholders filled in."""
    values = _values(trial, number, code, snapshot, python)
    return {name: _fill(text, values) for name, text in trial.recipe.env.items()}


def steps_until(recipe: Recipe, number: int) -> int:
    """The step that run `number` (from 1) should reach."""
    return min(number * recipe.steps_per_run, recipe.max_steps)


def config_hash(trial: Trial) -> str:
    """16 hex digits of everything that shapes the training beside the code: settings, config file, extra words."""
    recipe = trial.recipe
    facts: dict[str, Any] = {
        name: getattr(recipe, name)
        for name in ("name", "command", "nodes", "gpus_per_node", "max_steps", "steps_per_run", "container", "metrics",
                     "progress", "first_step", "auto_resume", "release")
    }  # fmt: skip
    facts |= {"env": dict(recipe.env), "seed": trial.seed, "extra_args": trial.extra_args}
    if recipe.config is not None:
        facts["config"] = sha256_of(_read(trial.root / recipe.config))
    return sha256_of(json.dumps(facts, sort_keys=True))[:16]


def _with_defaults(recipe: Recipe) -> tuple[str, ...]:
    """Our own trainer gets its usual words; any other command is taken as written."""
    release = recipe.release_args if recipe.release else ()
    if recipe.command != DEFAULT_COMMAND:
        return (*recipe.command, *release)
    config = ("{config}",) if recipe.config is not None else ()
    seed = ("seed={seed}",) if recipe.seeds else ()
    return (*recipe.command, *config, "output_dir={run}", "max_steps={max_steps}", *seed, *release)


def _values(trial: Trial, number: int, code: Code, snapshot: Path, python: str) -> dict[str, str]:
    recipe = trial.recipe
    return {
        "python": python,
        "config": "" if recipe.config is None else str(snapshot / recipe.config),
        "run": str(trial.run),
        "seed": "" if trial.seed is None else str(trial.seed),
        "max_steps": str(recipe.max_steps),
        "steps": str(steps_until(recipe, number)),
        "resume": str(trial.run),
        "snapshot": str(snapshot),
        "commit": code.commit,
    }


def _fill(word: str, values: Mapping[str, str]) -> str:
    """Known placeholders only, in one pass: braces of JSON arguments and of filled-in values stay as they are."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], word)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StateError(
            f"{path} cannot be read: {error.strerror}",
            "the recipe trains by this config",
            "correct config in the manifest",
        ) from error


# -- A trial's folder: recreated for every run, the former one kept beside it; what ran is written down before it runs


PROVENANCE = "provenance.json"


def now() -> str:
    """The present moment in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def prepare_out(out: Path) -> None:
    """Make the output folder; git is told to ignore it, or its own results would make the tree dirty."""
    ignore(out)


def recreate(trial: Trial) -> None:
    """A fresh folder for a trial; the former one becomes NAME.previous. A folder that is not ours is refused."""
    folder = trial.folder
    if folder.exists():
        if not (folder / PROVENANCE).is_file() and any(folder.iterdir()):
            raise StateError(
                f"{folder} holds something else",
                f"it has no {PROVENANCE}, so it is not ours to replace",
                "choose another --out",
            )
        previous = folder.with_name(folder.name + ".previous")
        if previous.exists():
            shutil.rmtree(previous)
        folder.rename(previous)
    folder.mkdir(parents=True)
    trial.run.mkdir()


def write_provenance(trial: Trial, facts: Mapping[str, Any]) -> None:
    """Write down what is about to run."""
    write_json(trial.folder / PROVENANCE, dict(facts))


def read_provenance(trial: Trial) -> dict[str, Any] | None:
    """What ran in the folder; None when nobody wrote it down."""
    path = trial.folder / PROVENANCE
    if not path.is_file():
        return None
    record = read_json(path)
    return record if isinstance(record, dict) else None


def same_training(trial: Trial, code: Code, record: Mapping[str, Any] | None) -> bool:
    """Whether a record (provenance or verdict) is about this very code and these very settings."""
    if record is None:
        return False
    facts = (record.get("commit"), record.get("dirty"), record.get("config_hash"))
    return facts == (code.commit, code.dirty, config_hash(trial))


def recorded_exit(trial: Trial) -> int | None:
    """The latest run's exit status as its executor wrote it down; None when it did not."""
    for number in range(trial.recipe.num_runs, 0, -1):
        path = trial.exit_file(number)
        if path.is_file():
            text = path.read_text(encoding="ascii", errors="replace").strip()
            if not re.fullmatch(r"-?[0-9]{1,3}", text):
                raise StateError(
                    f"{path} holds {text[:40]!r}", "it should hold an exit status", "run again with --fresh"
                )
            return int(text)
    return None


@contextlib.contextmanager
def only_one(out: Path, suite: str) -> Iterator[None]:
    """One process at a time per suite and output folder; the next one is refused, not kept waiting."""
    path = out / suite / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateError(
                f"suite {suite} is running in {out}",
                "two of them would write into the same folders",
                "wait, or use --out",
            ) from error
        yield
