"""One save, broken at every place where it touches the disk.

    python tests/support/checkpoint_breaker.py inject FOLDER [--kinds kill,ENOSPC,EIO] [--every 1]
    python tests/support/checkpoint_breaker.py full-disk FOLDER        (inside a user and mount namespace)

`inject` forks a warm child for each fault, lets strace hold it, and has the kernel's answer to the n-th write, fsync,
rename, mkdir or creation replaced: a kill, "no space left", "input/output error". Then somebody looks at the folder:
the newest good checkpoint is whole and bit-equal to one that was saved, and the next save works. `full-disk` does the
same with a real file system that is a few pages too small.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from checkpoint_kit import Session, fingerprint, make_learner

from surefoot.errors import StorageError
from surefoot.learner.checkpoint import capture
from surefoot.storage.checkpoints import newest_good, sweep

CALLS = (
    "write",
    "pwrite64",
    "writev",
    "fsync",
    "fdatasync",
    "rename",
    "renameat",
    "renameat2",
    "mkdir",
    "mkdirat",
    "openat",
)
PATIENCE_S = 60.0
SAVED, REFUSED, ODD = 0, 74, 99


class Place:
    """A run with one good checkpoint, and a session that is about to save its second."""

    def __init__(self, root: Path) -> None:
        self.root, self.learner = root, make_learner(seed=77)
        (root / "checkpoints").mkdir(parents=True)
        self.session = Session(make_learner()).train(1)
        self.session.save(self.folder(1))
        self.states = {1: fingerprint(capture(self.session.learner))}
        self.session.train(1)
        self.states[2] = fingerprint(capture(self.session.learner))

    def folder(self, step: int) -> Path:
        return self.root / "checkpoints" / f"step_{step}"

    def save(self) -> int:
        """Exit status of a save of step 2."""
        try:
            self.session.save(self.folder(2))
        except StorageError:
            return REFUSED
        return SAVED

    def look(self) -> tuple[int, list[str]]:
        """The step that a resume would go on from, after it was loaded and compared; and what else is lying about."""
        found = newest_good(self.root)
        assert found.path is not None, "no checkpoint is left"
        step = Session.load(found.path, self.learner).step
        assert fingerprint(capture(self.learner)) == self.states[step], f"step {step} came back with other bits"
        names = sorted(p.name for p in (self.root / "checkpoints").iterdir() if p.name not in ("step_1", "step_2"))
        return step, names

    def clear(self) -> None:
        """Back to one checkpoint, by the means that a real run has."""
        sweep(self.root)
        if self.folder(2).exists():
            subprocess.run(["rm", "-rf", str(self.folder(2))], check=True)


# -- strace -------------------------------------------------------------------------------------


def held_child(place: Place, options: list[str], log: Path) -> int:
    """Fork, let strace take hold of the child, then let the child save; returns its wait status."""
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = ODD
        try:
            os.close(go)
            os.read(ready, 1)
            code = place.save()
        finally:
            os._exit(code)
    os.close(ready)
    tracer = subprocess.Popen(
        ["strace", "-f", "-q", "-o", str(log), "-e", "trace=" + ",".join(CALLS), *options, "-p", str(pid)],
        stderr=subprocess.DEVNULL,
    )
    _wait_for_tracer(pid, tracer)
    os.write(go, b"!")
    os.close(go)
    _, status = os.waitpid(pid, 0)
    tracer.wait(PATIENCE_S)
    return status


def _wait_for_tracer(pid: int, tracer: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
        if tracer.poll() is not None or time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise SystemExit("strace cannot take hold of a child here")
        time.sleep(0.001)


def places_to_break(place: Place, log: Path) -> list[tuple[str, int, str]]:
    """Every call of one whole save that changes the disk: its name, its number among those of that name, its words."""
    assert held_child(place, [], log) == SAVED, "a save that nobody disturbs has to work"
    place.clear()
    counts: Counter[str] = Counter()
    found = []
    lines = [line for line in log.read_text(errors="replace").splitlines() if re.match(r"\d+ +\w+\(", line)]
    main = lines[0].split()[0]
    for line in lines:
        thread, rest = line.split(maxsplit=1)
        name = rest.partition("(")[0]
        if thread != main or name not in CALLS:
            assert name not in ("write", "fsync", "rename"), f"another thread touches the disk: {line}"
            continue
        counts[name] += 1
        if "EEXIST" not in rest and (name != "openat" or "O_CREAT" in rest):  # "is there already" changes nothing
            found.append((name, counts[name], rest))
    return found


def faults(targets: list[tuple[str, int, str]], kinds: list[str], every: int) -> Iterator[tuple[str, int, str, str]]:
    for number, (name, nth, words) in enumerate(targets):
        for offset, kind in enumerate(kinds):
            if (number + offset) % every == 0:
                yield name, nth, words, kind


def inject(root: Path, kinds: list[str], every: int) -> dict[str, Any]:
    """Break one save at every place; how each attempt ended, what went wrong, and what a planted bug does to that."""
    place, log = Place(root), root / "strace.log"
    targets = places_to_break(place, log)
    tried = list(faults(targets, kinds, every))
    ends, bad = break_at(place, tried, log)
    if place.save() != SAVED or place.look()[0] != 2:
        bad.append("after all that, a save does not work any more")
    place.clear()
    with deaf():
        _, planted = break_at(place, [(*t, "EIO") for t in targets if t[0] == "fsync"][:3], log)
    calls = Counter(name for name, _, _ in targets)
    report = {"places": len(targets), "calls": dict(calls), "tried": len(tried), "ends": dict(ends)}
    return report | {"bad": bad, "planted": planted}


def break_at(place: Place, faults: list[tuple[str, int, str, str]], log: Path) -> tuple[Counter[str], list[str]]:
    ends, bad = Counter[str](), []
    for name, nth, words, kind in faults:
        how = "signal=KILL" if kind == "kill" else f"error={kind}"
        status = held_child(place, ["-e", f"inject={name}:{how}:when={nth}"], log)
        try:
            ends[_judge(place, kind, status)] += 1
        except Exception as error:
            bad.append(f"{kind} at {name} number {nth} ({words[:100]}): {type(error).__name__}: {error}")
        place.clear()
    return ends, bad


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """The planted bug: nobody listens to what fsync says."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        with contextlib.suppress(OSError):
            real(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
    try:
        yield
    finally:
        os.fsync = real


def _judge(place: Place, kind: str, status: int) -> str:
    step, left = place.look()
    if kind == "kill":
        assert os.WIFSIGNALED(status), f"the kill did not arrive: status {status}"
        assert set(left) <= {".step_2.partial"}, f"left behind: {left}"
        return f"killed, step {step} good"
    assert os.waitstatus_to_exitcode(status) == REFUSED, f"exit {os.waitstatus_to_exitcode(status)}, not {REFUSED}"
    assert left == [], f"left behind: {left}"
    return f"refused, step {step} good"


# -- a file system that is too small ------------------------------------------------------------


def full_disk(root: Path) -> dict[str, Any]:
    """Save into a tmpfs that is k pages too small, for every k; then into one with too few inodes."""
    mount(root, "size=64m")
    place = Place(root / "run")
    used = (os.statvfs(root).f_blocks - os.statvfs(root).f_bfree) * os.statvfs(root).f_frsize
    place.session.save(place.folder(2))
    need = (os.statvfs(root).f_blocks - os.statvfs(root).f_bfree) * os.statvfs(root).f_frsize - used
    files = 1 + sum(1 for _ in place.folder(2).rglob("*"))
    place.clear()
    ends: Counter[str] = Counter()
    for room in range(0, need + 8192, 8192):
        mount(root, f"remount,size={used + room}")
        ends[_try(place, fits=room >= need)] += 1
    mount(root, "remount,size=64m")
    taken = os.statvfs(root).f_files - os.statvfs(root).f_ffree
    for inodes in range(1, files + 1):
        mount(root, f"remount,nr_inodes={taken + inodes}")
        ends[_try(place, fits=inodes >= files) + " (inodes)"] += 1
    return {"need": need, "files": files, "ends": dict(ends)}


def _try(place: Place, *, fits: bool) -> str:
    code = place.save()
    step, left = place.look()
    assert left == [], f"left behind: {left}"
    assert code == (SAVED if fits else REFUSED), f"exit {code} where the space {'is' if fits else 'is not'} enough"
    assert step == (2 if fits else 1), f"step {step} after exit {code}"
    place.clear()
    return "saved" if fits else "refused, step 1 good"


def mount(root: Path, options: str) -> None:
    root.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(root)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["inject", "full-disk"])
    parser.add_argument("root", type=Path)
    parser.add_argument("--kinds", default="kill,ENOSPC,EIO")
    parser.add_argument("--every", type=int, default=1, help="take one in so many faults")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = full_disk(args.root) if args.what == "full-disk" else inject(args.root, args.kinds.split(","), args.every)
    print(json.dumps(report, indent=1))
    return 1 if report.get("bad") else 0


if __name__ == "__main__":
    sys.exit(main())
