"""What a results file says about its session besides the metrics: commit, host, packages, GPUs, coverage."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from surefoot.harness.git import GitError, git, head, root_of
from surefoot.harness.tracker.memory import gpu_names
from surefoot.harness.tracker.results import HISTORY, JOURNALS, LATEST, NOT_SET, Session

FORMAT = 1


def header(session: Session) -> dict[str, Any]:
    """The fields known at the start; a session that dies keeps these."""
    started = datetime.fromisoformat(session.started)
    return {
        "format": FORMAT,
        "exit_status": NOT_SET,
        **commit_of(session.root, session.folder),
        "start_time": f"{started:%Y-%m-%d %H:%M:%S}",
        "metrics": {},
        "gpu_types": [],
        "coverage": None,
        "coverage_reason": "the session did not end",
        "session": session.id,
        "started_at": session.started,
        "host": platform.node(),
        "python": platform.python_version(),
        "packages": packages(),
        "pytest_args": list(session.args),
    }


def commit_of(root: Path, results: Path) -> dict[str, Any]:
    """`git_commit` and `dirty`; null for both, and why, where git has no answer."""
    try:
        top = root_of(root)
        if top is None:
            return {"git_commit": None, "dirty": None, "git_reason": "not a git repository"}
        # Our own files are no edit of the code: a project that does not ignore them would be dirty for ever.
        inside = results.resolve().is_relative_to(top.resolve())
        ours = [f":(exclude,literal){name}" for name in (LATEST, HISTORY, JOURNALS)] if inside else []
        words = ("status", "--porcelain", "--untracked-files=normal", "--", ":/", *ours)
        changes = git(results if inside else root, *words)
        return {"git_commit": head(root), "dirty": bool(changes), "git_reason": None}
    except GitError as error:
        return {"git_commit": None, "dirty": None, "git_reason": error.what}


def packages() -> dict[str, str]:
    """Every installed distribution and its version, by the names of their folders: reading each file takes long."""
    found: dict[str, str] = {}
    for place in sys.path:
        with contextlib.suppress(OSError):  # an entry that is no folder has no packages
            for entry in os.scandir(place or "."):
                name, _, version = entry.name.removesuffix(".dist-info").rpartition("-")
                if entry.name.endswith(".dist-info") and name:
                    found.setdefault(name, version)  # the first on the path is the one that is imported
    return dict(sorted(found.items(), key=lambda pair: pair[0].lower()))


def gpu_types() -> list[str]:
    """Each kind of GPU once."""
    return sorted(set(gpu_names()))


def coverage_of(plugin: Any) -> tuple[float | None, str | None]:
    """Total coverage in percent by pytest-cov's plugin object, or None and why not."""
    if plugin is None:
        return None, "coverage was not asked for (pytest --cov)"
    total = getattr(plugin, "cov_total", None)
    if not isinstance(total, int | float) or total != total:
        return None, "pytest-cov gave no total"
    return float(total), None
