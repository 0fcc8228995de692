"""Runs one program as several ranks on this machine, and says which rank failed first.

Owns       the processes it starts, their logs, and the port they meet at.
Promises   a rank that raises while another hangs is reported by its number; every process is gone at the end.
Never      pickles: a function is found again by its file and name, in a fresh interpreter.
"""

from __future__ import annotations

import inspect
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot_harness.errors import ConfigError, SurefootError
from surefoot_harness.system.process import Child
from surefoot_harness.system.signals import Deadline

Target = Callable[[], object] | Path | str | Sequence[str]
_TAIL = 30
_CALL_IN_MODULE = "import importlib, sys; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])()"
_CALL_IN_FILE = (
    "import importlib.util, sys; "
    "spec = importlib.util.spec_from_file_location('ranked_module', sys.argv[1]); "
    "module = importlib.util.module_from_spec(spec); sys.modules['ranked_module'] = module; "
    "spec.loader.exec_module(module); getattr(module, sys.argv[2])()"
)


class RankFailedError(SurefootError):
    """A rank failed, or did not end in time."""

    exit_code = 1


class DevicesMissingError(SurefootError):
    """The machine has fewer GPUs than the test needs."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class Ranks:
    """What a run in which every rank ended well left behind."""

    logs: tuple[Path, ...]
    """One per rank: standard output and error together."""
    port: int

    def output(self, rank: int) -> str:
        """What one rank wrote."""
        return self.logs[rank].read_text(encoding="utf-8", errors="backslashreplace")


class DistributedRunner:
    """Starts ranks and ends them; the `distributed_runner` fixture is one of these.

    Example:
        `runner(work, world_size=2)` calls the module-level function `work` in two fresh processes, with `RANK`,
        `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` set.
    """

    def __init__(self, folder: Path, on_missing_devices: Callable[[str], object] | None = None) -> None:
        self._folder, self._runs, self._on_missing_devices = folder, 0, on_missing_devices
        self._alive: list[Child] = []

    def __call__(
        self, target: Target, *, world_size: int, timeout: float = 120.0, env: Mapping[str, str] | None = None,
        devices: int = 0,
    ) -> Ranks:  # fmt: skip
        """Run `target` as `world_size` ranks and wait for all of them.

        Args:
            target: a module-level function, `"module:function"`, a script's path, or a whole command as a list.
            timeout: seconds for the whole run; when they are over, the ranks still running are named.
            devices: GPUs that this machine must have.

        Raises:
            RankFailedError: the first rank that failed, with the end of its log.
        """
        if world_size < 1:
            raise ConfigError(f"world_size = {world_size}", "a run needs a rank", "ask for 1 or more")
        self._check_devices(devices)
        command, port = _command(target), free_port()
        self._runs += 1
        logs = tuple(self._folder / f"run{self._runs}-rank{rank}.log" for rank in range(world_size))
        try:
            ranks = [self._start(command, rank, world_size, port, log, env or {}) for rank, log in enumerate(logs)]
            self._wait(ranks, logs, timeout)
        finally:
            self.close()
        return Ranks(logs, port)

    def close(self) -> None:
        """Kill whatever still runs, with everything it started."""
        for process in self._alive:
            process.kill()
        for process in self._alive:
            process.end()
        self._alive.clear()

    def _check_devices(self, wanted: int) -> None:
        there = visible_gpus() if wanted > 0 else 0
        if there < wanted:
            what = f"needs {wanted} GPUs, {there} are visible"
            if self._on_missing_devices is not None:
                self._on_missing_devices(what)  # in a test: skip, with this reason
            raise DevicesMissingError(what, "each rank needs its own", "run it on a machine with more")

    def _start(
        self, command: Sequence[str], rank: int, world_size: int, port: int, log: Path, extra: Mapping[str, str]
    ) -> Child:
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1",
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **extra,
        }  # fmt: skip
        with log.open("wb") as file:
            process = Child.start(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        self._alive.append(process)
        return process

    def _wait(self, ranks: Sequence[Child], logs: Sequence[Path], timeout: float) -> None:
        """The first rank that ends badly ends the run: the others may be waiting for it for ever."""
        ended: queue.Queue[tuple[int, int]] = queue.Queue()
        for rank, process in enumerate(ranks):
            threading.Thread(target=lambda r=rank, p=process: ended.put((r, p.wait())), daemon=True).start()
        running, deadline = set(range(len(ranks))), Deadline(timeout)
        while running:
            try:
                rank, code = ended.get(timeout=deadline.left)
            except queue.Empty:
                raise _too_late(sorted(running), logs, timeout) from None
            running.discard(rank)
            if code:
                raise _rank_failed(rank, code, sorted(running), logs[rank])


def free_port() -> int:
    """A port that was free a moment ago, found by binding it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _command(target: Target) -> list[str]:
    if isinstance(target, Path):
        return [sys.executable, os.fspath(target)]
    if isinstance(target, str):
        module, mark, function = target.partition(":")
        if not (module and mark and function):
            raise ConfigError(f"{target!r} is no target", "a text target is module:function", "write it so")
        return [sys.executable, "-c", _CALL_IN_MODULE, module, function]
    if callable(target):
        name = getattr(target, "__qualname__", "")
        if not name.isidentifier():
            raise ConfigError(
                f"{name or target!r} cannot be found again by name",
                "each rank loads the file and looks the function up",
                "define it at the top level of a file, or pass a script",
            )
        return [sys.executable, "-c", _CALL_IN_FILE, inspect.getfile(target), name]
    return list(target)


def visible_gpus() -> int:
    """How many GPUs this machine has and CUDA_VISIBLE_DEVICES lets through."""
    from surefoot_harness.tracker.memory import gpu_names

    there, visible = len(gpu_names()), os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else min(there, len([word for word in visible.split(",") if word.strip()]))


def _rank_failed(rank: int, code: int, others: list[int], log: Path) -> RankFailedError:
    how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
    rest = f"; ranks {', '.join(map(str, others))} were still running and were ended" if others else ""
    return RankFailedError(f"rank {rank} {how}{rest}\n{_tail(log)}", "it failed first", f"the whole log: {log}")


def _too_late(running: list[int], logs: Sequence[Path], timeout: float) -> RankFailedError:
    names = ", ".join(map(str, running))
    said = "\n".join(f"rank {rank} said:\n{_tail(logs[rank])}" for rank in running[:4])
    return RankFailedError(
        f"ranks {names} were still running after {timeout:g} s\n{said}",
        "a rank that waits for another one waits for ever",
        f"raise timeout, or read the logs in {logs[0].parent}",
    )


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="backslashreplace").splitlines()[-_TAIL:]
    return "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
