"""One folder per run: where everything lies, made once, never shared by two runs.

Owns       the layout below, who may create it, and what `environment.json` says of versions, device and settings.
Promises   a folder that holds anything is refused; folders 0700, files 0600; a start that was refused
           leaves nothing behind.
Never      overwrites a run, or leaves the folder it was given.

    RUN/config.toml  environment.json  metrics.jsonl  verdict.json  report.html
        rollouts/step_N.jsonl  rollouts/eval_N.jsonl  checkpoints/step_N/  logs/  journal/  lock
        start_model/  where the model was given as an object

Of checkpoints there are: every save_steps, the best by held-out metric (named in verdict.json) if it was better than
the model that the run began with, and the newest two.

Read next: `files.py`, how files get there.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import BaseModel

from surefoot import __version__
from surefoot.config import Config
from surefoot.config.keys import dump_toml
from surefoot.config.load import RUN_NAME
from surefoot.errors import ConfigError, SecurityError, StateError
from surefoot.records import Verdict
from surefoot.storage.files import atomic_write, write_json
from surefoot.system.environment import inherited
from surefoot.system.files import linked, read_plain, storage_error, sync_folder
from surefoot.system.git import GitError, OwnPrograms, git_call, own_programs
from surefoot.system.text import is_secret_name, printable, redact_values

FILES = (
    "config.toml",
    "environment.json",
    "metrics.jsonl",
    "verdict.json",
    "report.html",
    "status.json",
    "timeline.jsonl",
    "lock",
)
TEMPORARY = re.compile(r"\.[a-z_.]+(\.[0-9a-f]{8})?\.[0-9]+\.tmp")
"""Left by an atomic write that was killed; the first edition wrote no middle part."""
CONFIG_BYTES = 1_000_000
RECORD_BYTES = 16_000_000
"""Longest config.toml, and longest verdict.json or environment.json, that is read."""
START_MODEL = "start_model"
FOLDERS = ("logs", "rollouts", "checkpoints", "journal", "tensorboard", "wandb", START_MODEL, f".{START_MODEL}.tmp")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's place on disk.

    Example:
        >>> RunFolder(Path("runs/1")).rollouts(7).as_posix()
        'runs/1/rollouts/step_7.jsonl'
    """

    root: Path
    made: tuple[Path, ...] = ()
    """Folders that this run created, outermost first; `discard` takes away no other."""

    @classmethod
    def create(
        cls, output_dir: Path | None, name: str, cwd: Path, *, now: datetime.datetime | None = None
    ) -> RunFolder:
        """Make the folder of a new run.

        Args:
            output_dir: where it goes (relative to `cwd`); None makes `runs/<UTC time>-<name>`.
            name: a slug; only used for the default place.
        """
        root = cls.planned(output_dir, name, cwd, now=now)
        try:
            if output_dir is None:
                root = _free_name(root)
            made = _make_folders(root)
            if root not in made:
                _narrow(root)
            (root / "logs").mkdir(mode=0o700)  # the claim: of two runs that start at once, one fails here
            for folder in ("rollouts", "checkpoints", "journal"):
                (root / folder).mkdir(mode=0o700)
            for folder_made in made:  # the run folder itself has to be there after a power cut
                sync_folder(folder_made.parent)
        except FileExistsError:
            raise _already_used(root) from None
        except OSError as error:
            raise storage_error(root, error) from error
        return cls(root, made)

    @classmethod
    def planned(cls, output_dir: Path | None, name: str, cwd: Path, *, now: datetime.datetime | None = None) -> Path:
        """Where `create` would put the run; refuses what `create` would refuse, and writes nothing."""
        _check_slug(name)
        if output_dir is None:
            moment = now or datetime.datetime.now(datetime.UTC)
            return cwd / "runs" / f"{moment:%Y%m%d-%H%M%S}-{name}"
        root = Path(os.path.abspath(cwd / output_dir))
        if "\0" in str(root):
            raise ConfigError("output_dir holds a NUL character", "no folder can be called that", "choose another")
        try:
            if root.exists() and (not root.is_dir() or any(root.iterdir())):
                raise _already_used(root)
            if root.exists():
                _refuse_shared(root)
        except OSError as error:
            raise storage_error(root, error) from error
        return root

    @classmethod
    def open(cls, root: Path) -> RunFolder:
        """An existing run; anything else is a `StateError`, and so is one whose own folders are links."""
        if not (root / "config.toml").is_file():
            raise StateError(
                f"{root} is not a run folder",
                "it has no config.toml" if root.is_dir() else "it is a file" if root.exists() else "it does not exist",
                "give the folder that `surefoot train` named at its end",
            )
        if link := linked(root, *FOLDERS):
            raise StateError(
                f"{root / link} is a link",
                "it leads out of the run folder, and what lies there is not of this run",
                f"put the folder itself in its place; {root} as a whole may be a link",
            )
        return cls(root)

    @property
    def config(self) -> Path:
        """The resolved config, every key."""
        return self.root / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object per logged step."""
        return self.root / "metrics.jsonl"

    @property
    def environment(self) -> Path:
        """Versions, device, git."""
        return self.root / "environment.json"

    @property
    def verdict(self) -> Path:
        """How the run ended."""
        return self.root / "verdict.json"

    @property
    def journal(self) -> Path:
        """The ledger's journal, and the batches that can be repeated."""
        return self.root / "journal"

    @property
    def logs(self) -> Path:
        """What workers printed."""
        return self.root / "logs"

    def rollouts(self, step: int) -> Path:
        """Every rollout of one step."""
        return self.root / "rollouts" / f"step_{step}.jsonl"

    def answers(self, step: int) -> Path:
        """Every answer of one evaluation."""
        return self.root / "rollouts" / f"eval_{step:06d}.jsonl"

    @property
    def baseline(self) -> Path:
        """Every rollout of an agent's preflight that refused the run."""
        return self.root / "rollouts" / "preflight.jsonl"

    def checkpoint(self, step: int) -> Path:
        """The weights after one step."""
        return self.root / "checkpoints" / f"step_{step}"

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return checkpoints_of(self.root)

    def best_checkpoint(self) -> Path:
        """The weights that verdict.json calls the best; a run that names none, or lost them, is a `StateError`."""
        try:
            found = self.read_verdict()["best"]
            step, best = found.get("step"), found["checkpoint"]
        except (KeyError, TypeError, AttributeError):
            step, best = None, None
        path = self.root / str(best)
        there = ", ".join(p.name for p in self.checkpoints()) or "none"
        if step == 0:
            raise StateError(
                f"no step of {self.root} was better than the model it began with",
                "the best evaluation was the one before training, and it has no checkpoint",
                f"use the model it began with (model in its config.toml), or name a checkpoint; there are: {there}",
            )
        if path not in self.checkpoints():
            raise StateError(
                f"{self.root} names no best checkpoint that is there",
                "verdict.json says which one is best, once the run has ended; save_best keeps it",
                f"there are: {there}",
            )
        return path

    def read_verdict(self) -> dict[str, Any]:
        """verdict.json; empty when there is none that can be read."""
        return _read_object(self.verdict)

    def read_environment(self) -> dict[str, Any]:
        """environment.json; empty when there is none that can be read."""
        return _read_object(self.environment)

    def read_config(self) -> bytes:
        """config.toml as it is on the disk; a link, a pipe or a book in its place is a `StateError`."""
        try:
            return read_plain(self.config, CONFIG_BYTES)
        except OSError as error:
            raise StateError(
                f"{self.config} cannot be read: {error.strerror}", "a run is what its config says",
                "bring it back from a copy",
            ) from error  # fmt: skip

    def sweep(self) -> list[str]:
        """Take away what an interrupted atomic write left beside its final name; returns the names."""
        swept = []
        try:
            for path in sorted(self.root.glob(".*.tmp")):
                if TEMPORARY.fullmatch(path.name) and not path.is_dir():
                    path.unlink()
                    swept.append(path.name)
        except OSError as error:
            raise storage_error(self.root, error) from error
        return swept

    def remove_verdict(self) -> None:
        """Take away the verdict from before the resume: the run is not over."""
        try:
            self.verdict.unlink(missing_ok=True)
            sync_folder(self.root)
        except OSError as error:
            raise storage_error(self.verdict, error) from error

    def write_config(self, config: Config) -> None:
        """Keep the config as TOML with every key; hand in `LoadedConfig.resolved`, so that paths hold anywhere."""
        atomic_write(self.config, config_text(config))

    def write_environment(self, record: Mapping[str, Any]) -> None:
        """Keep the machine's description."""
        write_json(self.environment, redact_values(record))

    def write_verdict(self, status: Verdict, reasons: Sequence[str], facts: Mapping[str, Any] | None = None) -> None:
        """Keep the verdict: status and reasons first, then whatever numbers it rests on."""
        said = [printable(reason) for reason in reasons]
        write_json(self.verdict, {"status": str(status), "reasons": said, **redact_values(facts or {})})

    def discard(self) -> None:
        """Take back a start that was refused: our own files, and the folders this run made if they are empty."""
        for name in FILES:
            (self.root / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(self.root / name, ignore_errors=True)
        for folder in reversed(self.made):
            if any(folder.iterdir()):
                return
            folder.rmdir()


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_plain(path, RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def checkpoints_of(root: Path) -> list[Path]:
    """Complete `checkpoints/step_N` folders of a run, by step."""
    found = [path for path in (root / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def _check_slug(name: str) -> None:
    if not RUN_NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"run name {name!r} is not a slug",
            "it becomes part of a folder's name and must not lead elsewhere",
            "use letters, digits, dot, dash and underscore, at most 64, beginning with a letter or digit",
        )


def _make_folders(root: Path) -> tuple[Path, ...]:
    """Create `root` and its missing parents; returns what was made, outermost first."""
    missing = [folder for folder in [root, *root.parents] if not folder.exists()][::-1]
    for folder in missing:
        folder.mkdir(mode=0o700)
    return tuple(missing)


def _refuse_shared(root: Path) -> None:
    """An existing folder has to be ours alone: whoever may write there could put other files in our files' place."""
    found = root.stat()
    if found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH:
        return
    whose = "belongs to another user" if found.st_uid != os.geteuid() else "may be written to by everybody"
    raise SecurityError(
        f"{root} {whose} (mode {stat.S_IMODE(found.st_mode):o})",
        "others could replace the run's files, and a resume would believe them",
        f"choose another output_dir, or make it yours alone: chmod 700 {root}",
    )


def _narrow(root: Path) -> None:
    """0700, like a folder that we made; what somebody put there until now is seen after that."""
    _refuse_shared(root)
    root.chmod(0o700)
    if any(root.iterdir()):
        raise _already_used(root)


def _free_name(root: Path) -> Path:
    """Two runs within one second get different folders."""
    number, path = 2, root
    while path.exists():
        path = root.with_name(f"{root.name}-{number}")
        number += 1
    return path


def _already_used(root: Path) -> StateError:
    if not root.is_dir():
        what = "exists and is a file"
    elif any((root / name).exists() for name in (*FILES, *FOLDERS)):
        what = "already holds a run"
    else:
        what = "exists and is not empty"
    return StateError(
        f"{root} {what}",
        "two runs in one folder make both unreadable",
        "choose another output_dir, or leave it out for a fresh folder under runs/",
    )


# -- What is in `config.toml` and `environment.json`: settings, versions, device, memory, git ------
# What a later reader needs to repeat a run. No names, no secrets.


PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "pydantic",
    "numpy",
    "reasoning-gym",
    "peft",
    "bitsandbytes",
)
_HIDDEN_NOTE = "# credentials are hidden in: "


def environment_record(*, torch: bool = False, cwd: Path | None = None) -> dict[str, Any]:
    """A JSON-able description of this machine and checkout.

    Args:
        torch: ask torch for devices even if that means importing it. Otherwise it is asked only when it
            is loaded already, and what nobody asked is null, not false.
    """
    started = time.perf_counter()
    total, available = _memory_gb()
    record: dict[str, Any] = {
        "test": "environment",
        "success": True,
        "timestamp": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "memory_total_gb": total,
        "memory_available_gb": available,
        "versions": {"surefoot": __version__} | {name: _version(name) for name in PACKAGES},
        **_torch_facts(torch or "torch" in sys.modules),
        "git": _git(cwd or Path.cwd()),
    }
    record["duration_s"] = time.perf_counter() - started
    return {name: redact_values(value) for name, value in record.items()}


def config_text(config: Config) -> str:
    """The config as a run folder keeps it: every key as TOML, credentials hidden, and a first line that says so."""
    shown, hidden = _without_credentials(config)
    note = f"{_HIDDEN_NOTE}{', '.join(hidden)}\n" if hidden else ""
    return note + dump_toml(shown)


def refuse_hidden(text: str) -> None:
    """Refuse a kept config of which a part was hidden: what is left is not the run that was asked for."""
    first = text.partition("\n")[0]
    if first.startswith(_HIDDEN_NOTE):
        raise StateError(
            f"config.toml holds no credentials, and {first.removeprefix(_HIDDEN_NOTE)} had some",
            "with a part of a setting hidden, another run would come of it",
            "take the credentials out of the config (a variable can hold them) and start a new run",
        )


Model = TypeVar("Model", bound=BaseModel)


def _without_credentials(table: Model, prefix: str = "") -> tuple[Model, list[str]]:
    """What may be kept of a config or of one table in it, and the dotted keys whose text held a credential."""
    changed: dict[str, Any] = {}
    hidden: list[str] = []
    for name, value in table:
        changed[name], found = _kept(value, prefix + name)
        hidden += found
    return (table.model_copy(update=changed), hidden) if hidden else (table, [])


def _kept(value: Any, key: str) -> tuple[Any, list[str]]:
    if isinstance(value, BaseModel):
        return _without_credentials(value, f"{key}.")
    if isinstance(value, Mapping) and any(isinstance(each, BaseModel) for each in value.values()):
        parts = {name: _kept(each, f"{key}.{name}") for name, each in value.items()}
        return {name: kept for name, (kept, _) in parts.items()}, [
            each for _, found in parts.values() for each in found
        ]
    shown = redact_values(value)
    return shown, [key] if shown != value else []


def _torch_facts(ask: bool) -> dict[str, Any]:
    if not ask:
        return {"torch": _version("torch"), "cuda_available": None, "mps_available": None, "threads": None}
    import torch

    cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cuda_available": cuda,
        "mps_available": torch.backends.mps.is_available(),
        "device_name": torch.cuda.get_device_name(0) if cuda else None,
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory_gb() -> tuple[float | None, float | None]:
    """Total and available memory; None where the system does not say."""
    try:
        memory = psutil.virtual_memory()
    except (OSError, psutil.Error):
        return None, None
    return memory.total / 1e9, memory.available / 1e9


def _git(cwd: Path) -> dict[str, Any]:
    """Commit and whether files differ from it; null outside a checkout, without git, and where git cannot tell."""
    commit = _git_says(cwd, None, "rev-parse", "HEAD")
    return {"commit": commit, "dirty": _is_dirty(cwd) if commit else None}


def _is_dirty(cwd: Path) -> bool | None:
    try:
        own = own_programs(cwd)
    except GitError:
        return None
    status = _git_says(cwd, own, "status", "--porcelain", "--untracked-files=no")
    if status is None or (status and own.filters):
        return None  # a file that goes through a filter, which we do not run, looks changed when it is not
    return bool(status)


def _git_says(cwd: Path, own: OwnPrograms | None, *words: str) -> str | None:
    try:
        command, env = git_call(cwd, *words, own=own)
        done = subprocess.run(
            command, env=_for_git(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired, GitError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _for_git(environ: Mapping[str, str]) -> dict[str, str]:
    """Git reads its own settings; should something be started all the same, it is not to find our secrets."""
    return inherited((name for name in environ if name.startswith("GIT_") and not is_secret_name(name)), environ)
