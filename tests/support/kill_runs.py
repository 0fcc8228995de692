"""Tiny runs to be killed, and what two of them have to have in common to be called the same.

Read next: `test_kills.py`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kill_plants
from kill_kit import MODEL, PATIENCE_S, Driver, Ended, Warm

from surefoot.storage.files import Journal
from surefoot.storage.ledger import Ledger, Trained

CLOCKED = ("timing/", "step_time", "tokens_per_second", "killswitch/eval_share", "memory/peak")
"""Metrics that tell of the clock; all others are compared to the last bit."""
CLOCKS = ("seconds_before", "eval_seconds", "journal", "seconds", "grading_seconds")
"""What else of a saved state or a rollout differs between two equal runs."""

KEYS: dict[str, Any] = dict(
    model="mini", tasks="sums.jsonl", reward_funcs=["reward.py:grade"], eval_metric="exact", tasks_per_step=2, num_generations=4, max_completion_length=4, eval_tasks=8,
    eval_steps=2, save_steps=2, threads=1, preflight_tasks=0, probe_reward_tasks=0, reward_workers=1, max_steps=6, learning_rate=1e-2,
    heldout_fraction=0.2, device="cpu", output_dir="run", reward_memory_mb=0,
)  # fmt: skip
GUARD: dict[str, Any] = dict(min_evals=2, metric="eval_reward", decline_patience=3, ema_alpha=0.1, margin_se=4.2)
JUMPY: dict[str, Any] = dict(margin_se=0.0, decline_patience=1, ema_alpha=1.0)
"""A guard that takes the first step down for a decline: for runs that it shall stop."""

REWARD = """
import time
import zlib

def grade(prompts, completions, answer, **columns):
    "Right, and a little for luck, so that no two siblings are alike."
    lucky = [zlib.crc32((p + c).encode()) % 5 / 10 for p, c in zip(prompts, completions)]
    return [float(c.strip() == right) + luck for c, right, luck in zip(completions, answer, lucky)]

def slow(prompts, completions, answer, **columns):
    "The same, one group at a time; with tools completions are messages."
    time.sleep(0.05)
    return grade(prompts, [c if isinstance(c, str) else c[0]["content"] for c in completions], answer)

def flat(prompts, completions, answer, **columns):
    "The same, and every other task gives all siblings the same."
    time.sleep(0.05)
    marks = grade(prompts, completions, answer)
    return [0.0 if zlib.crc32(p.encode()) % 2 else m for p, m in zip(prompts, marks)]

def picky(prompts, completions, answer, **columns):
    "The same, and about one answer in nine gets no verdict."
    marks = grade(prompts, completions, answer)
    return [None if zlib.crc32((c + p).encode()) % 9 == 0 else m for p, c, m in zip(prompts, completions, marks)]
"""


@dataclass(frozen=True)
class Case:
    """One kind of run: its name, and what it sets otherwise."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    rows: int = 30
    guard: dict[str, Any] = field(default_factory=dict)
    code: int = 0
    """How a whole run of it ends."""

    def __str__(self) -> str:
        return self.name

    def write(self, folder: Path) -> None:
        """Everything the run needs, in a folder of its own."""
        folder.mkdir(parents=True)
        text = _toml(KEYS | self.keys) + "\n[guard]\n" + _toml(GUARD | self.guard)
        (folder / "run.toml").write_text(text)
        (folder / "reward.py").write_text(REWARD)
        write_tasks(folder / "sums.jsonl", self.rows)
        write_set(folder / "own.jsonl")

    @property
    def visits(self) -> int:
        """Items that a whole run has trained on or dropped."""
        keys = KEYS | self.keys
        return int(keys["max_steps"] // keys.get("num_iterations", 1) * keys["tasks_per_step"])


def _toml(values: dict[str, Any]) -> str:
    return "".join(f"{name} = {_literal(value)}\n" for name, value in values.items())


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_literal(each)}" for name, each in value.items()) + " }"
    return json.dumps(value)


def write_tasks(path: Path, rows: int) -> None:
    """Small sums, one per line."""
    pairs = [(a, b) for a in range(2, 10) for b in range(2, 10)][:rows]
    path.write_text(
        "".join(json.dumps({"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs)
    )


def write_set(path: Path) -> None:
    """Tasks of an evaluation set: none of them is a training task."""
    rows = [{"id": f"{a}+2", "prompt": f"{a}-2=", "answer": str(a - 2)} for a in range(3, 8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


PLAIN = Case("plain")
SETS = Case("evaluation sets", {"eval_sets": {"own": "own.jsonl"}, "num_generations_eval": 2})
ALONE = Case("a set alone", {**SETS.keys, "heldout_fraction": 0.0}, guard={"metric": "auto"})
"""Nothing else is held out: no name of its evaluations begins with `eval_`."""
CASES = (
    PLAIN,
    Case("two passes", {"num_iterations": 2, "save_steps": 3, "max_steps": 8}),
    Case("partial groups", {"reward_funcs": ["reward.py:picky"], "max_reward_failures": 0.75}),
    Case("beta", {"beta": 0.05}),
    Case("epoch borders", {"tasks_per_step": 3, "max_steps": 7}, rows=9),
    Case("sparse log", {"logging_steps": 2}),
    Case("journal only", {"save_steps": 0, "save_minutes": 0.0, "save_best": False}),
    Case("every step", {"save_steps": 0, "save_minutes": 1e-9, "eval_steps": 1}),
    Case("guard stops", {"eval_steps": 1, "max_steps": 20, "save_steps": 0}, guard=JUMPY, code=79),
    SETS,
    ALONE,
)  # fmt: skip


@dataclass(frozen=True)
class Killed:
    """A run that was killed, and a copy of its folder to begin from again and again, always under the same path."""

    folder: Path
    copy: Path

    def fresh(self) -> Path:
        """The folder as it was after the kill, whatever the last test did to it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.copy, self.folder, symlinks=True)
        return self.folder


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run: what it left, and how long it took."""

    facts: dict[str, Any]
    seconds: float


class Bench:
    """Starts cases, resumes them, and knows what each looks like when nobody disturbs it."""

    def __init__(self, warm: Warm, root: Path) -> None:
        self.warm, self.root, self.count = warm, root, 0
        self._known: dict[str, Whole] = {}

    def folder(self, case: Case) -> Path:
        """A fresh folder with the case's files; the run itself will be `run` in it."""
        self.count += 1
        folder = self.root / f"{self.count} {case}"
        case.write(folder)
        shutil.copytree(self.warm.scratch / MODEL, folder / MODEL)
        return folder

    def start(self, folder: Path, **more: Any) -> Driver:
        """`surefoot train run.toml`."""
        return self.warm.start("train", "run.toml", cwd=folder, **more)

    def train(self, folder: Path, **more: Any) -> Ended:
        """The same, to its end."""
        return self.start(folder, **more).end()

    def resume(self, folder: Path, *words: str, **more: Any) -> Ended:
        """`surefoot train --resume run WORDS`, to its end."""
        return self.go_on(folder, *words, **more).end()

    def go_on(self, folder: Path, *words: str, **more: Any) -> Driver:
        """`surefoot train --resume run WORDS`; where no run folder was made yet, from the beginning."""
        if (folder / "run" / "config.toml").exists():
            return self.warm.start("train", "--resume", "run", *words, cwd=folder, **more)
        shutil.rmtree(folder / "run", ignore_errors=True)
        return self.start(folder, **more)

    def check(self, case: Case, folder: Path, ended: Ended) -> None:
        """The run is over, and nothing tells it from one that was never disturbed."""
        assert ended.code == case.code, f"exit {ended.code}:\n{ended.said}"
        found = differences(self.whole(case).facts, facts(folder / "run"))
        assert found == [], "it is not the same run:\n" + "\n".join(found)
        assert self.warm.orphans() == [], "processes are left"
        shutil.rmtree(folder)

    def killed(self, case: Case, failpoint: str) -> Killed:
        """The case, killed at a failpoint."""
        folder = self.folder(case)
        ended = self.train(folder, failpoints=failpoint)
        assert ended.code == -signal.SIGKILL, f"{failpoint} was not reached: exit {ended.code}\n{ended.said}"
        copy = folder.with_name(f"{folder.name}, a copy")
        shutil.copytree(folder, copy, symlinks=True)
        return Killed(folder, copy)

    def whole(self, case: Case) -> Whole:
        """The case when nobody disturbs it; run once."""
        if str(case) not in self._known:
            self._known[str(case)] = self._whole(case)
        return self._known[str(case)]

    def _whole(self, case: Case) -> Whole:
        folder = self.folder(case)
        ended = self.train(folder, before=[("trace", folder / "trace")])
        assert ended.code == case.code, ended.said
        found = facts(folder / "run")
        assert case.code or len(found["trained"]) + sum(found["verdict"]["ledger"]["dropped"].values()) == case.visits
        assert found["verdict"]["ledger"]["lost"] == found["verdict"]["ledger"]["leased"] == 0
        return Whole(found, ended.seconds)


def wait_for(trace: Path, name: str, hits: int = 1) -> None:
    """Until a run has passed a failpoint so often."""
    deadline = time.monotonic() + PATIENCE_S
    while not trace.exists() or kill_plants.passed(trace).count(name) < hits:
        assert time.monotonic() < deadline, f"{name} was not passed {hits} times"
        time.sleep(0.005)


def facts(run: Path) -> dict[str, Any]:
    """Everything a run left that must not depend on whether, when or how often it was killed."""
    verdict = json.loads((run / "verdict.json").read_text())
    final = run / "checkpoints" / f"step_{verdict['executed_steps']}"
    with Journal.open(run / "journal" / "ledger.journal", readonly=True) as journal:
        ledger = Ledger.read(journal)
    ledger.check()
    return {
        "rows": [_timeless(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()],
        "files": {str(path.relative_to(final)): _sha256(path) for path in sorted(final.rglob("*.safetensors"))},
        "state": _timeless(json.loads((final / "training" / "state.json").read_text())),
        "rollouts": {path.name: timeless_lines(path) for path in sorted((run / "rollouts").iterdir())},
        "trained": {str(item): status.step for item, status in ledger.items().items() if isinstance(status, Trained)},
        "verdict": _timeless({k: v for k, v in verdict.items() if k not in ("seconds", "resumes", "extensions")})
        | {"ledger": {k: v for k, v in verdict["ledger"].items() if k != "requeued"}},
        "left over": sorted(p.name for p in [*run.iterdir(), *(run / "checkpoints").iterdir()] if p.name[0] == "."),
        "names": sorted(path.name for path in run.iterdir()),
    }  # fmt: skip


def differences(whole: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two runs are not the same, in words."""
    found = []
    for name, value in whole.items():
        if isinstance(value, dict):
            keys = [key for key in value.keys() | other[name].keys() if value.get(key) != other[name].get(key)]
            found += [f"{name}.{key}: {value.get(key)!r} became {other[name].get(key)!r}"[:400] for key in sorted(keys)]
        elif value != other[name]:
            found.append(f"{name}: {_first_difference(value, other[name])}"[:600])
    return found


def _first_difference(one: list[Any], two: list[Any]) -> str:
    for number, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b and isinstance(a, dict):
            return f"row {number}: " + ", ".join(f"{k} {a.get(k)} {b.get(k)}" for k in a | b if a.get(k) != b.get(k))
        if a != b:
            return f"{a!r} became {b!r}"
    return f"{len(one)} became {len(two)}: {one[len(two) :] or two[len(one) :]}"


def _timeless(value: Any) -> Any:
    """Without what the clock says, at any depth."""
    if not isinstance(value, dict):
        return [_timeless(one) for one in value] if isinstance(value, list) else value
    return {k: _timeless(v) for k, v in value.items() if not k.startswith(CLOCKED) and k not in CLOCKS}


def timeless_lines(path: Path) -> list[Any]:
    """Every line of a file of JSON, without what the clock says."""
    return [_timeless(json.loads(line)) for line in path.read_text().splitlines()]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
