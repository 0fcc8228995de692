"""What docs/extending.md promises of the inside: how many files of ours one touches to add one of each kind.

One of each is really added, to a copy of the package and in exactly the files that the page names, and a run of the copy
uses them. A file that was forgotten on the page, and so is not edited, turns that run red.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repo_tree import PACKAGE, ROOT

PAGE = ROOT / "docs" / "extending.md"
ISSUED = {
    "a loss type": 3,
    "a verifier kind": 3,
    "a built-in reward": 3,
    "an engine": 2,
    "an environment": 2,
    "a config key": 2,
}
"""The most files that each may need."""

Edit = tuple[str, str, str]
"""(file, the text before which it is inserted, what is inserted); an empty anchor is a new file."""

ENGINE = '''"""An engine of one more name: ours, made in another place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from surefoot.protocols import EngineInputs, ServingEngine


@dataclass(frozen=True)
class TwinSpec:
    """What it takes to build it."""

    inputs: EngineInputs
    shares_tensors: ClassVar[bool] = True

    @property
    def variables(self) -> tuple[str, ...]:
        """None."""
        return ()

    def build(self) -> ServingEngine:
        """In the process where it will run."""
        from surefoot.engines.embedded import EmbeddedEngine
        from surefoot.engines.serving import EngineLoop

        print("the twin was built")
        i = self.inputs
        return EngineLoop(EmbeddedEngine(i.decoder, rows=i.rows, max_width=i.max_width), copy_weights=i.shares_weights)


def spec(inputs: EngineInputs) -> TwinSpec:
    """For the table of engines."""
    return TwinSpec(inputs)
'''
LOBBY = '''"""A room with one bell."""

from __future__ import annotations

from surefoot.protocols import Toolkit
from surefoot.tools.python.environments import EnvironmentToolkit


class Lobby:
    """Its reward is what nobody did."""

    def reset(self, **row: object) -> None:
        """Nothing has rung."""
        self.rung = 0

    def ring(self) -> str:
        """Ring the bell."""
        self.rung += 1
        return "a bell"

    def get_reward(self) -> float:
        """Silence pays."""
        return 0.25 if self.rung == 0 else 0.5


def lobby(_: str) -> Toolkit:
    """For the table of environments."""
    print("the lobby was built")
    return EnvironmentToolkit(Lobby)
'''
ADDED: dict[str, list[Edit]] = {
    "a loss type": [
        ("config/choices.py", '    "grpo": LossFacts(', '    "linear": LossFacts(),\n'),
        (
            "maths/losses.py", '    "grpo": LossKind(',
            '    "linear": LossKind(objective=lambda i: -i.ratio * i.advantages, caps_ratio=True, sums=_pull),\n',
        ),
        (
            "maths/losses.py", "LOSSES: dict[str, LossKind] = {",
            'def _pull(inputs: LossInputs) -> Sums:\n    return {"pull": (inputs.ratio * inputs.mask).sum()}\n\n\n',
        ),
        (
            "reference.py", "LOSSES = {",
            "def _linear(new: list[Tensor], row: ReferenceRow, t: int, o: ReferenceOptions) -> Tensor:\n"
            "    return -_ratio(new, row, t, o) * row.advantage\n\n\n",
        ),
        ("reference.py", '    "grpo": ReferenceLoss(', '    "linear": ReferenceLoss(_linear, _mean_over_tokens),\n'),
    ],
    "an advantage estimator": [
        ("config/choices.py", '"batch", "rank", "none")', '"half", '),
        ("maths/advantages.py", '    "group": _by_group_std', '    "half": lambda values, std: (values - values.mean()) / 2,\n'),
        (
            "reference.py", '        elif scale == "rank":',
            '        elif scale == "half":\n            result.append((reward - math.fsum(siblings) / len(siblings)) / 2)\n',
        ),
    ],
    "a verifier kind": [
        (
            "rewards/verifiers/NEW.py", "",
            '"""The answer from right to left."""\n\n\ndef verify_backwards(gold: object, said: str) -> float:\n'
            '    """1.0 when it is the gold answer, turned round."""\n    return float(said.strip() == str(gold)[::-1])\n',
        ),
        (
            "rewards/verifiers/multi.py", "    \"exact\": VerifierKind(",
            '    "backwards": VerifierKind(lambda p, said: backwards.verify_backwards(_needed_gold(p), said), _needed_gold),\n',
        ),
        ("rewards/verifiers/multi.py", "from surefoot.rewards.verifiers import choice", "from surefoot.rewards.verifiers import NEW as backwards\n"),
    ],
    "a built-in reward": [
        (
            "rewards/NEW.py", "",
            '"""A reward that differs."""\n\n\ndef short(completions, **columns):  # type: ignore[no-untyped-def]\n'
            '    """A number from the letters."""\n    return [sum(map(ord, said)) % 7 / 7 for said in completions]\n',
        ),
        (
            "rewards/functions.py", "BUILTIN_REWARDS: dict[str, RewardMaker] = {",
            "def _short(solved: object, weights: object) -> RewardFunction:\n"
            "    from surefoot.rewards.NEW import short\n\n    return short\n\n\n",
        ),
        ("rewards/functions.py", '"builtin:components": _components', '"builtin:short": _short, '),
    ],
    "an engine": [
        ("engines/NEW.py", "", ENGINE),
        ("config/choices.py", '    "vllm": EngineFacts(', '    "twin": EngineFacts(makes="surefoot.engines.NEW:spec"),\n'),
    ],
    "an environment": [
        ("tools/python/NEW.py", "", LOBBY),
        (
            "config/choices.py", '    "reasoning_gym": EnvironmentFacts(',
            '    "lobby": EnvironmentFacts(makes="surefoot.tools.python.NEW:lobby"),\n',
        ),
    ],
    "a guard rule": [
        ("config/choices.py", "decline gap kl", "seen_enough "),
        (
            "guards/collapse_rules.py", '    "decline": Rule(',
            '    "seen_enough": Rule(lambda c, l: c.heldout.count > 2, lambda c, l: "it has seen enough", lambda l: 1),\n',
        ),
        ("guards/collapse_rules.py", '    "decline": "', '    "seen_enough": "after the third evaluation",\n'),
    ],
    "a config key": [
        (
            "config/__init__.py", '    run_name: str = "run"',
            '    encores: Int = Field(default=0, ge=0, le=9)\n    """How often the plan says its first line again."""\n\n',
        ),
        ("report/plan.py", "        *_loss(config),", "        *([model] * config.encores),\n"),
    ],
}  # fmt: skip
USES = """
import json
from pathlib import Path
import surefoot
import torch
from surefoot import reference
from surefoot.config.load import config_from_values
from surefoot.errors import CollapseStopError, ConfigError
from surefoot.maths.advantages import compute_advantages
from surefoot.maths.losses import LossSettings, StepTotals, policy_loss
from surefoot.report.plan import batch_arithmetic

# the oracle agrees with the fast path
rows = [([-1.0, -2.0, -0.5], [-1.2, -1.5, -0.5], 1.0), ([-0.3, -2.0], [-0.1, -2.2], -0.5)]
mask = torch.tensor([[True] * 3, [True, True, False]])
pad = lambda values: values + [0.0] * (3 - len(values))
logp, old = (torch.tensor([pad(row[i]) for row in rows], dtype=torch.float64) for i in (0, 1))
fast = policy_loss(logp, old, torch.tensor([1.0, -0.5], dtype=torch.float64), mask,
                   settings=LossSettings(loss_type="linear"), totals=StepTotals(2, 5, 9)).loss
slow = reference.step_loss(
    [reference.ReferenceRow([1], [1] * len(new), "g", 0.0, [True] * len(new), was, advantage=a) for new, was, a in rows],
    [list(torch.tensor(new, dtype=torch.float64)) for new, _, _ in rows], reference.ReferenceOptions(loss_type="linear"))
assert abs(float(fast) - float(slow)) < 1e-12, (fast, slow)
assert compute_advantages([1.0, 0.0], [1, 1], scale="half").tolist() == [0.25, -0.25]
assert reference.advantages([1.0, 0.0], ["g", "g"], "half") == [0.25, -0.25]
named = config_from_values({"model": "pebble", "tasks": "builtin:sums", "encores": 2}, source="here", base=Path.cwd())
assert [line.partition(" ")[0] for line in batch_arithmetic(named.config)].count("model") == 3
# a run uses all of them
keys = dict(model="pebble", tasks_per_step=2, max_completion_length=4, preflight_tasks=0, probe_reward_tasks=0, threads=1,
            loss_type="linear", scale_rewards="half", engine={"kind": "twin"}, eval_tasks=4)
rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "verifier_type": "backwards"} for a in range(10, 20) for b in range(10, 16)]
outcome = surefoot.train(tasks=rows, max_steps=1, output_dir="one", encores=2, guard={"mode": "off"}, **keys)
steps = [json.loads(line) for line in open("one/metrics.jsonl")]
assert len([row for row in steps if "learning_rate" in row]) == 1, steps
surefoot.train(tasks=rows, max_steps=1, output_dir="room", tools={"environment": "lobby", "in_prompt": False}, max_turns=2,
               guard={"mode": "off"}, **keys)
played = [json.loads(line) for file in Path("room/rollouts").glob("step_*.jsonl") for line in open(file)]
assert {row["own_reward"] for row in played if row["failure"] is None} & {0.25, 0.5}, played
try:
    surefoot.train(tasks=rows, max_steps=6, eval_steps=1, output_dir="two", reward_funcs="builtin:short",
                   guard={"rules": ["decline", "seen_enough"], "min_evals": 1}, **keys)
    raise SystemExit("the rule of the guard was not asked")
except CollapseStopError as stopped:
    assert "it has seen enough" in stopped.what, stopped
steps = [json.loads(line) for line in open("two/metrics.jsonl")]
assert any("loss/pull" in row for row in steps), steps
assert any("rewards/short/mean" in row for row in steps), steps
try:
    surefoot.train(tasks=rows, encores=10, output_dir="three", **keys)
    raise SystemExit("the range of the key was not looked at")
except ConfigError as refused:
    assert "encores = 10: must be at most 9" in refused.what, refused
print("ALL USED")
"""


def promised() -> dict[str, tuple[int, list[str]]]:
    """Kind -> the number and the files of its row on the page."""
    found = {}
    for kind, count, cell in re.findall(
        r"^\| (an? [\w -]+) \| (\d+) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M
    ):
        found[kind] = (int(count), sorted(re.findall(r"`([\w/]+\.py)`", cell)))
    return found


def copied(folder: Path) -> Path:
    """The package alone, in a folder of its own; its assets are links."""
    package = folder / "src" / "surefoot"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    (package / "assets").symlink_to(PACKAGE / "assets")
    return package


def add(package: Path, edits: list[Edit]) -> None:
    for file, anchor, text in edits:
        path = package / file
        if not anchor:
            path.write_text(text, encoding="utf-8")
            continue
        source = path.read_text(encoding="utf-8")
        assert anchor in source, f"{file} no longer has {anchor!r}"
        before, _, after = source.partition(anchor)
        path.write_text(before + text + anchor + after, encoding="utf-8")


def changed(package: Path) -> set[str]:
    """Files of the copy that differ from ours, or that we have not."""
    found = set()
    for path in package.rglob("*.py"):
        name = path.relative_to(package)
        ours = PACKAGE / name
        if "assets" not in name.parts and (not ours.exists() or ours.read_bytes() != path.read_bytes()):
            found.add(name.as_posix())
    return found


def use(package: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run what uses all of them on the copy, in an interpreter of its own."""
    env = os.environ | {"PYTHONPATH": str(package.parent), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    (folder / "use.py").write_text(USES)
    return subprocess.run(
        [sys.executable, "use.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_page_counts_what_it_lists_and_no_more_than_was_decided() -> None:
    rows = promised()
    assert set(rows) == set(ADDED)
    assert {kind: (count, len(files)) for kind, (count, files) in rows.items()} == {
        kind: (count, count) for kind, (count, _) in rows.items()
    }
    assert [kind for kind, most in ISSUED.items() if rows[kind][0] > most] == []


@pytest.mark.parametrize("kind", ADDED)
def test_adding_one_touches_exactly_the_files_that_the_page_names(kind: str, tmp_path: Path) -> None:
    package = copied(tmp_path)
    assert changed(package) == set()
    add(package, ADDED[kind])
    assert sorted(changed(package)) == promised()[kind][1]


@pytest.mark.slow
@pytest.mark.turns(2)
def test_one_of_each_added_in_those_files_alone_is_used_by_a_run(tmp_path: Path) -> None:
    package = copied(tmp_path)
    for edits in ADDED.values():
        add(package, edits)
    ran = use(package, tmp_path)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-5000:]
    assert "ALL USED" in ran.stdout
    assert "the twin was built" in ran.stdout
    assert "the lobby was built" in ran.stdout


@pytest.mark.slow
@pytest.mark.turns(10)
@pytest.mark.parametrize(
    ("kind", "file"), [(kind, file) for kind, edits in ADDED.items() for file in sorted({edit[0] for edit in edits})]
)
def test_each_of_those_files_is_needed(kind: str, file: str, tmp_path: Path) -> None:
    """With the edits of one file left out, whatever it is, the run is red: it would be, were one missing on the page."""
    package = copied(tmp_path)
    for name, edits in ADDED.items():
        add(package, [edit for edit in edits if (name, edit[0]) != (kind, file)])
    assert use(package, tmp_path).returncode != 0
