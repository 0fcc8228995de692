"""What a later reader needs to repeat a run: versions, device, memory, git. No names, no variables."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from surefoot import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pydantic", "numpy", "reasoning-gym")


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
    return record


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
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
        return kilobytes["MemTotal"] / 1e6, kilobytes["MemAvailable"] / 1e6
    except (OSError, KeyError):
        return _memory_by_pages()


def _memory_by_pages() -> tuple[float | None, float | None]:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page / 1e9
    except (ValueError, OSError):
        return None, None
    return total, None


def _git(cwd: Path) -> dict[str, Any]:
    """Commit and whether files differ from it; null outside a checkout or without git."""
    commit = _git_says(cwd, "rev-parse", "HEAD")
    status = _git_says(cwd, "status", "--porcelain", "--untracked-files=no") if commit else None
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _git_says(cwd: Path, *words: str) -> str | None:
    command = ["git", "-C", str(cwd), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
