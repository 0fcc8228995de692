"""Whether a server's program is there at all: looked up, not started.

Promises   what is refused here would certainly not start; what passes may still fail, and is said to be looked up only.

Read next: `mcp_start.py`, the first connection.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from surefoot.envs.servers.mcp_servers import Server
from surefoot.errors import ToolError


def refuse_missing_program(server: Server) -> None:
    """A `ToolError` when the command, the script or the module that a server names does not exist."""
    if not server.command:
        return
    program, *words = server.command
    path = server.environment("").get("PATH", os.defpath)
    if shutil.which(program if "/" not in program else str(_from(server, program)), path=path) is None:
        raise _missing(server, f"there is no program {program!r}", _nearest(program, path))
    if not _is_python(program) or not words:
        return
    if words[0] == "-m" and len(words) > 1 and "PYTHONPATH" not in server.env and not _has_module(words[1]):
        raise _missing(server, f"Python has no module {words[1]!r}", f"pip install {words[1].replace('_', '-')}")
    if not words[0].startswith("-") and not _from(server, words[0]).exists():
        where = "" if Path(words[0]).is_absolute() else ": it starts in a private folder, so write {here}/FILE"
        raise _missing(server, f"there is no file {words[0]!r}", f"correct the path{where}")


def _from(server: Server, word: str) -> Path:
    """A file as the server's process finds it; nothing lies in a private folder."""
    return (server.cwd or Path("/nonexistent")) / word


def _is_python(program: str) -> bool:
    return Path(program) == Path(sys.executable)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except ValueError:
        return True  # something is there; whether it works, its start tells


def _nearest(program: str, path: str) -> str:
    """A way on: the same program beside our own Python, or the nearest name."""
    beside = Path(sys.executable).parent
    if (beside / program).is_file():
        return f"it lies beside the Python that runs surefoot, which is not on PATH: write {beside / program}"
    names: set[str] = set()
    for folder in (*path.split(os.pathsep), str(beside)):
        try:
            names.update(os.listdir(folder or "."))
        except OSError:
            continue
    near = difflib.get_close_matches(program, sorted(names), n=1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else "install it, or give its full path"


def _missing(server: Server, what: str, fix: str) -> ToolError:
    return ToolError(f"tool server {server.name} cannot start: {what}", "nobody would answer its calls", fix)
