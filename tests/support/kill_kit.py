"""A warm process that forks one child per run of the real command: start, kill and resume in a fraction of a second.

    python tests/support/kill_kit.py serve        reads one JSON request per line, answers with one JSON line

The server has imported everything that a run needs and has started no thread, so that a fork of it is safe. Each child
gets a session, an environment, a folder and files for its output of its own, and calls `surefoot.cli.main`. What a
killed driver leaves behind becomes a child of the server, which is how it can say whether anything is left.

Read next: `kill_runs.py`, which starts runs and holds them against each other.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PEBBLE = ROOT / "src" / "surefoot" / "assets" / "pebble"
MODEL = "mini"
PATIENCE_S = 120.0
"""Longer than any tiny run; a run that takes more is stuck."""
ODD = 99
"""Exit code of a child whose entry point ended in no way that it may."""

# -- the server -----------------------------------------------------------------------------------


def warm_up() -> None:
    """Import what a run imports, make and load a model once; the process must still be single-threaded."""
    import torch

    torch.set_num_threads(1)
    for name in (
        "surefoot.cli", "surefoot.run.session", "surefoot.run.build", "surefoot.loop_state",
        "surefoot.loop", "surefoot.runtime.task_queue", "surefoot.learner.checkpoint",
        "surefoot.learner.checkpoint", "surefoot.report.view", "kill_plants",
    ):  # fmt: skip
        importlib.import_module(name)
    make_model(MODEL, seed=0)
    from surefoot.learner.model import load_policy

    load_policy(MODEL, base=Path.cwd(), device="cpu", dtype="float32")
    gc.collect()
    gc.freeze()  # a fork that does not touch the old objects does not copy them
    deadline = time.monotonic() + PATIENCE_S
    while (
        len(os.listdir("/proc/self/task")) > 1
    ):  # the loader's helpers have been told to end; a busy machine takes a while
        assert time.monotonic() < deadline, f"a fork would not be safe: {threading.enumerate()}"
        time.sleep(0.01)


def make_model(name: str, seed: int, **otherwise: int) -> None:
    """A folder with the smallest model that is one, and the built-in model's tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=8)
    shape = sizes | dict(num_key_value_heads=1, vocab_size=103, max_position_embeddings=64) | otherwise
    torch.manual_seed(seed)
    config = LlamaConfig(**shape, eos_token_id=2, pad_token_id=0, bos_token_id=None, tie_word_embeddings=True)
    shutil.copytree(PEBBLE, name, ignore=shutil.ignore_patterns("*.py", "*.safetensors", "manifest.json"))
    config.save_pretrained(name)
    weights = {key: value for key, value in LlamaForCausalLM(config).state_dict().items() if key != "lm_head.weight"}
    save_file(weights, Path(name) / "model.safetensors", metadata={"format": "pt"})


def serve() -> None:
    """Answer until standard input closes."""
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come to us
    warm_up()
    server = Server()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(server, f"do_{request.pop('do')}")(**request)
        print(json.dumps(answer), flush=True)


class Server:
    """Forks drivers, and waits for them; every method that starts with `do_` is a request."""

    def __init__(self) -> None:
        self.drivers: dict[int, int] = {}

    def do_start(self, argv: list[str], cwd: str, env: dict[str, str], out: str, before: list[Any]) -> dict[str, int]:
        """Fork a driver; `before` lists functions of `kill_plants` with their arguments, called first."""
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            _be_driver(argv, cwd, env, out, before, tell)
        os.close(tell)
        os.read(ready, 1)  # until the child is a session of its own, with its own output
        os.close(ready)
        self.drivers[pid] = os.pidfd_open(pid)
        return {"pid": pid}

    def do_wait(self, pid: int, timeout_s: float) -> dict[str, int | None]:
        """The exit code (minus the signal's number where one ended it); None while it still runs."""
        if not ends_within(self.drivers[pid], timeout_s):
            return {"code": None}
        os.close(self.drivers.pop(pid))
        return {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}

    def do_orphans(self, patience_s: float) -> dict[str, list[str]]:
        """What dead drivers left alive, after some patience, in words; ends it, so that the next test is alone."""
        deadline = time.monotonic() + patience_s
        while (left := self._adopted()) and time.monotonic() < deadline:
            time.sleep(0.005)
        words = [_command_of(pid) for pid in left]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return {"left": words}

    def do_model(self, name: str, seed: int, otherwise: dict[str, int]) -> dict[str, str]:
        """One more model, in the server's folder."""
        make_model(name, seed, **otherwise)
        return {"name": name}

    def _adopted(self) -> list[int]:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        alive = []
        for pid in map(int, children):
            if pid not in self.drivers and os.waitpid(pid, os.WNOHANG)[0] == 0:
                alive.append(pid)
        return alive


def _be_driver(argv: list[str], cwd: str, env: dict[str, str], out: str, before: list[Any], tell: int) -> None:
    """In the child: become a process that a shell could have started, then be the command. Does not return."""

    def prepare() -> None:
        os.chdir(cwd)
        nothing = os.open(os.devnull, os.O_RDONLY)
        said = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor, number in ((nothing, 0), (said, 1), (said, 2)):
            os.dup2(descriptor, number)
        for descriptor in (nothing, said, tell):
            os.close(descriptor)  # the last one tells the server that we are ready
        os.environ.clear()
        os.environ.update(env)
        from surefoot.storage import files

        files.read_environment()
        for name, *arguments in before:
            getattr(importlib.import_module("kill_plants"), name)(*arguments)

    be_command(argv, prepare)


def be_command(argv: list[str], prepare: Callable[[], None]) -> None:
    """In a fork: a session of its own, then what `prepare` does, then `surefoot ARGV`. Does not return."""
    code = ODD
    try:
        os.setsid()
        prepare()
        from surefoot.cli import main

        sys.argv = ["surefoot", *argv]
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ends_within(watch: int, timeout_s: float) -> bool:
    """Whether the process behind a pidfd ends in this time."""
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _command_of(pid: int) -> str:
    try:
        return f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return f"{pid}: gone by now"


# -- the client -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How one run of the command ended."""

    code: int
    said: str
    """Both streams, in order."""
    seconds: float


@dataclass
class Driver:
    """A run under way."""

    warm: Warm
    pid: int
    out: Path
    began: float = field(default_factory=time.monotonic)

    def wait(self, timeout_s: float = PATIENCE_S) -> Ended | None:
        """Its end, or None when it still runs after so many seconds."""
        code = self.warm.ask(do="wait", pid=self.pid, timeout_s=timeout_s)["code"]
        if code is None:
            return None
        return Ended(code, self.out.read_text(errors="replace"), time.monotonic() - self.began)

    def end(self) -> Ended:
        """Its end, which has to come."""
        ended = self.wait()
        if ended is None:
            os.kill(self.pid, signal.SIGABRT)
            raise AssertionError(f"a run is stuck; it said:\n{self.out.read_text(errors='replace')}")
        return ended

    def kill(self) -> Ended:
        """kill -9, now."""
        os.kill(self.pid, signal.SIGKILL)
        return self.end()


class Warm:
    """The client's end: one server process, many runs."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.count = scratch, 0
        path = os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        self.env = {
            "PATH": os.environ["PATH"], "HOME": str(scratch), "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "200",
            "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(scratch),
        }  # fmt: skip
        self.server = subprocess.Popen(
            [sys.executable, __file__, "serve"],
            cwd=scratch, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._read()

    def start(
        self,
        *argv: str,
        cwd: Path,
        failpoints: str = "",
        before: Sequence[Sequence[Any]] = (),
        env: Mapping[str, str] = {},
    ) -> Driver:
        """`surefoot ARGV...` in `cwd`; `before` are calls of functions in `kill_plants`, as (name, arguments ...)."""
        self.count += 1
        out = self.scratch / f"said_{self.count}"
        environment = self.env | {"SUREFOOT_FAILPOINTS": failpoints} | dict(env)
        answer = self.ask(
            do="start",
            argv=[*argv],
            cwd=str(cwd),
            env=environment,
            out=str(out),
            before=[[str(word) for word in call] for call in before],
        )
        return Driver(self, answer["pid"], out)

    def run(self, *argv: str, cwd: Path, **more: Any) -> Ended:
        """The same, to its end."""
        return self.start(*argv, cwd=cwd, **more).end()

    def orphans(self, patience_s: float = 5.0) -> list[str]:
        """Processes that dead drivers left behind."""
        return list(self.ask(do="orphans", patience_s=patience_s)["left"])

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, one answer."""
        assert self.server.stdin is not None, "it was started with a pipe"
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the server; it ends by itself when its input closes."""
        assert self.server.stdin is not None, "it was started with a pipe"
        assert self.server.stdout is not None, "and with another"
        self.server.stdin.close()
        self.server.wait(PATIENCE_S)
        self.server.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self.server.stdout is not None, "it was started with a pipe"
        line = self.server.stdout.readline()
        assert line, f"the fork server ended with {self.server.wait(PATIENCE_S)}"
        return dict(json.loads(line))


if __name__ == "__main__":
    serve()
