"""The tool leaves the tree before it moves the tree.

A checkout may change or delete the very files that are running: an editable install, or surefoot bisecting itself. So
the package is copied to a temporary folder and started again from there, with a launcher that puts the copy first.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from surefoot_harness.own_command import COMMANDS

_COPY, _AS = "SUREFOOT_BISECT_COPY", "SUREFOOT_BISECT_AS"
OURS = (_COPY, _AS)
"""Variables that speak to the copy only; the tested command does not see them."""
_LAUNCHER = '''"""Starts the copy that lies beside this file."""
import sys
sys.path.insert(0, {folder!r})
from surefoot_harness.cli import main
main()
'''


def leave_the_tree(words: Sequence[str]) -> None:
    """Copy the package outside of the tree and start it again from there; returns only inside the copy."""
    if os.environ.get(_COPY) == str(_package().parent):
        return
    folder = Path(tempfile.mkdtemp(prefix="surefoot-bisect-")).resolve()
    try:
        shutil.copytree(_package(), folder / "surefoot_harness", ignore=shutil.ignore_patterns("__pycache__"))
        launcher = folder / "launch.py"
        launcher.write_text(_LAUNCHER.format(folder=str(folder)), encoding="utf-8")
        environ = {**os.environ, _COPY: str(folder), _AS: json.dumps(_called_as())}
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, str(launcher), *words], environ)  # noqa: S606
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def clean_up() -> None:
    """Remove the copy that is running. Nothing can be imported from it afterwards."""
    folder = os.environ.get(_COPY)
    if folder == str(_package().parent):
        shutil.rmtree(folder, ignore_errors=True)


def called_as() -> list[str]:
    """How the user called surefoot, for a line that can be pasted."""
    told = os.environ.get(_AS)
    return [str(word) for word in json.loads(told)] if told else _called_as()


def _called_as() -> list[str]:
    name = sys.argv[0]
    command = os.path.basename(name)
    if command not in COMMANDS:
        return [sys.executable, "-m", _package().name if Path(name).resolve().parent == _package() else "surefoot"]
    found = shutil.which(command)
    return [command] if found and os.path.samefile(found, name) else [os.path.abspath(name)]


def _package() -> Path:
    return Path(__file__).resolve().parents[1]
