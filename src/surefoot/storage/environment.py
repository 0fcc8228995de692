"""What a later reader needs to repeat a run: versions, device, memory, git, settings. No names, no secrets."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import BaseModel

from surefoot import __version__
from surefoot.config import Config
from surefoot.config.keys import dump_toml
from surefoot.errors import StateError
from surefoot.system.environment import inherited
from surefoot.system.git import GitError, OwnPrograms, git_call, own_programs
from surefoot.system.text import is_secret_name, redact_values

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
