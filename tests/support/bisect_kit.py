"""Scripted git histories, the same ids every time, and the real command in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "src" / "surefoot", ROOT / "harness" / "src" / "surefoot_harness")
SOURCE = os.pathsep.join(str(package.parent) for package in PACKAGES)
FIXED = {
    "GIT_AUTHOR_NAME": "Ann", "GIT_AUTHOR_EMAIL": "ann@example.org", "GIT_COMMITTER_NAME": "Ann",
    "GIT_COMMITTER_EMAIL": "ann@example.org", "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "protocol.file.allow", "GIT_CONFIG_VALUE_0": "always",
}  # fmt: skip
OURS = (
    "GOOD BAD BISECT_REPLAY_LOG BISECT_NO_RESET BISECT_SAVE_DIR SKIP_GOOD_CHECK SED_CLAUSES EXTRA_SCRIPT_ARGS".split()
)


def environment(**more: str) -> dict[str, str]:
    base = {key: value for key, value in os.environ.items() if key not in OURS}
    return {**base, **FIXED, "PYTHONPATH": SOURCE, "NO_COLOR": "1", **more}


def copied(folder: Path) -> Path:
    """Both packages, side by side in a folder, as an installation has them."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "assets")
        shutil.copytree(package, folder / package.name, ignore=ignored)
    return folder


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"git {words}: {done.stderr}"
    return done.stdout.strip()


@dataclass
class History:
    """A repository and its commits, oldest first; `c(1)` is the first."""

    root: Path
    commits: list[str]

    def c(self, number: int) -> str:
        return self.commits[number - 1]

    def commit(self, files: dict[str, str | None], message: str = "") -> str:
        for name, text in files.items():
            path = self.root / name
            if text is None:
                path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if name.endswith(".sh") else 0o644)
        git(self.root, "add", "--all")
        git(self.root, "commit", "--quiet", "--allow-empty", "-m", message or f"c{len(self.commits) + 1}")
        self.commits.append(git(self.root, "rev-parse", "HEAD"))
        return self.commits[-1]

    def state(self) -> tuple[str, str, str, bool]:
        """Branch, commit, changes and whether a bisect is open: all that has to be as before."""
        head = git(self.root, "rev-parse", "--abbrev-ref", "HEAD")
        status = git(self.root, "status", "--porcelain", "--untracked-files=no")
        return head, git(self.root, "rev-parse", "HEAD"), status, (self.root / ".git/BISECT_LOG").exists()

    def verdicts(self) -> dict[str, dict[str, Any]]:
        """Commit -> its verdict.json, of the newest bisect."""
        runs = sorted(path for path in (self.root / "bisect-logs").iterdir() if path.is_dir())
        return {p.parent.name: json.loads(p.read_text()) for p in runs[-1].glob("*/verdict.json")}

    def logs(self) -> list[Path]:
        return sorted((self.root / "bisect-logs").glob("*.log"))


def history(folder: Path) -> History:
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    return History(folder, [])


def numbered(folder: Path, count: int, script: str = "", since: int = 1) -> History:
    """Commit i holds `n` = i; `t.sh` is there from commit `since` on."""
    made = history(folder)
    stream = []
    for number in range(1, count + 1):
        stream.append(
            f"commit refs/heads/main\ncommitter Ann <ann@example.org> {1767225600 + number} +0000\n{_data(f'c{number}')}"
        )
        stream.append(f"M 100644 inline n\n{_data(f'{number}' + chr(10))}")
        if script and number == since:
            stream.append(f"M 100755 inline t.sh\n{_data(script)}")
    words = ["git", "fast-import", "--quiet"]  # one process for the whole history
    subprocess.run(words, cwd=folder, env=environment(), input="".join(stream).encode(), check=True)
    git(folder, "reset", "--hard", "--quiet")
    made.commits = git(folder, "rev-list", "--reverse", "HEAD").split()
    return made


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}\n"


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def both(self) -> str:
        return self.out + self.err


def bisect(cwd: Path, *words: str, source: Path | None = None, **env: str) -> Ran:
    """`surefoot bisect WORDS...` in `cwd`."""
    variables = environment(**env) | ({"PYTHONPATH": str(source)} if source else {})
    argv = [sys.executable, "-m", "surefoot", "bisect", *words]
    done = subprocess.run(argv, cwd=cwd, env=variables, capture_output=True, text=True, timeout=120, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


def shell(cwd: Path, line: str) -> Ran:
    done = subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    return Ran(done.returncode, done.stdout, done.stderr)
