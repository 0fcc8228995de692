"""A stand-in for W&B that records what it is given and misbehaves on request, and helpers to look for its process.

The mode is in the variable WANDB_STAND_IN; calls are appended to DIR/wandb/calls.jsonl, where DIR is what `init` was given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STAND_IN = """
import ctypes, json, os, signal, socket, sys, threading

MODE = os.environ.get("WANDB_STAND_IN", "")
place = None


def note(kind, value):
    with open(os.path.join(place, "wandb", "calls.jsonl"), "a") as file:
        file.write(json.dumps([kind, value]) + "\\n")


def misbehave(mode):
    if mode == "raise":
        raise RuntimeError("500 from the server\\x1b[31m, sent with " + os.environ.get("WANDB_SOME_TOKEN", "nothing"))
    if mode == "refuse":
        socket.create_connection(("127.0.0.1", 1)).close()
    if mode == "stall":
        threading.Event().wait()
    if mode == "hold the interpreter":
        ctypes.PyDLL(None).pause()
    if mode == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "sys.exit":
        sys.exit(0)
    if mode == "os._exit":
        os._exit(7)
    if mode == "crash":
        ctypes.string_at(0)
    if mode == "print":
        print("environment:", dict(os.environ))
        print("x" * 3_000_000, file=sys.stderr)


def init(**given):
    global place
    place = given["dir"]
    os.makedirs(os.path.join(place, "wandb"), exist_ok=True)
    note("init", given)
    note("environment", {name: os.environ.get(name) for name in ("WANDB_MODE", "WANDB_CONSOLE")})
    note("pid", os.getpid())
    misbehave(MODE.removesuffix(" at init") if MODE.endswith(" at init") else "")


def log(metrics, step):
    misbehave(MODE)
    if MODE == "raise once" and step == 1:
        misbehave("raise")
    note("log", [step, metrics])


def finish():
    misbehave(MODE.removesuffix(" at finish") if MODE.endswith(" at finish") else "")
    note("finish", None)
"""


def put_stand_in(folder: Path) -> Path:
    """Write the stand-in as a module `wandb`; the folder to put on the import path."""
    place = folder / "stand in"
    place.mkdir()
    (place / "wandb.py").write_text(STAND_IN)
    return place


def calls(run: Path) -> dict[str, list[Any]]:
    """What the stand-in was asked to do, by kind."""
    found: dict[str, list[Any]] = {}
    for line in (run / "wandb" / "calls.jsonl").read_text().splitlines():
        kind, value = json.loads(line)
        found.setdefault(kind, []).append(value)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def balance(facts: Mapping[str, Any]) -> bool:
    """Every row has exactly one fate."""
    return bool(facts["logged"] == facts["written"] + facts["dropped"] + facts["errors"])


def with_path(*folders: Path) -> dict[str, str]:
    """Variables for a command that is to find modules in `folders`."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])}
