"""How much one training step goes through is counted, and growth is a decision: `scripts/walk.py` has limits here.

The aim is 40 modules and 10 kinds of records (docs/reference/modules.md, "Size"); a limit is what was reached and a little
head-room. Lower it when the tree gets smaller; raise it only with a reason in the commit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repo_tree import ROOT

LIMITS = {"modules": 54, "functions": 500, "records": 42}
CHILD = """
import json, os, sys, tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, "scripts")
import walk

def plant(step):
    # Growth in step 3: three modules, thirty functions, a dataclass and a named tuple, run by a thread of the step.
    if step != 3:
        return
    from surefoot.runtime.local import LocalRuntime
    kinds = [dataclass(type("Planted", (), {"__annotations__": {"number": int}})), NamedTuple("Tupled", [("number", int)])]
    made = [kind for kind in kinds if setattr(kind, "__module__", "surefoot.planted") is None]
    code = "".join(f"def f{i}(): pass\\n" for i in range(10))
    functions = []
    for i in range(3):
        names = {}
        exec(compile(code, walk.PACKAGE + f"planted_{i}.py", "exec"), names)
        functions += [value for name, value in names.items() if name.startswith("f")]
    real = LocalRuntime.publish
    def publish(self, weights, version):
        import threading
        def grow():
            for function in functions:
                function()
            for kind in made:
                kind(1)
        thread = threading.Thread(target=grow)
        thread.start()
        thread.join()
        return real(self, weights, version)
    LocalRuntime.publish = publish

with tempfile.TemporaryDirectory() as folder:
    print(json.dumps(walk.walk(Path(folder), [2, 3], plant)))
"""


def above(seen: dict[str, Any], limits: dict[str, int]) -> list[str]:
    """`modules: 61, at most 59` for every count that is above its limit."""
    return [f"{name}: {seen[name]}, at most {limit}" for name, limit in limits.items() if seen[name] > limit]


@pytest.fixture(scope="module")
def steps() -> dict[str, dict[str, Any]]:
    """One run: its second step as it is, its third with planted growth."""
    command = [sys.executable, "-c", CHILD]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, dict[str, Any]] = json.loads(ended.stdout)
    return found


def test_one_step_goes_through_no_more_than_it_did(steps: dict[str, dict[str, Any]]) -> None:
    seen = steps["2"]
    assert above(seen, LIMITS) == [], f"entered {seen['entered']}, made {sorted(seen['made'])}"


def test_the_limits_are_what_was_reached_and_little_more(steps: dict[str, dict[str, Any]]) -> None:
    assert above(steps["2"], {"modules": 48, "records": 38}) != [], "the step got smaller: lower LIMITS, and this"


def test_the_whole_step_is_seen(steps: dict[str, dict[str, Any]]) -> None:
    """Collecting, grading, checking, journaling, learning, publishing, logging; and nothing of what comes after."""
    entered, made = set(steps["2"]["entered"]), set(steps["2"]["made"])
    places = (
        "loop runtime/rollout engines/embedded rewards/pool guards/invariants system/journal learner/grpo maths/losses"
    )
    assert {f"{name}.py" for name in [*places.split(), "runtime/weights", "tracking/metrics"]} <= entered
    assert {"StepBatch", "Rollout", "Group", "TrainSample", "Batch", "LossTerms", "StepReport"} <= made
    assert not {"learner/checkpoint.py", "guards/collapse.py"} & entered
    assert "EvalResult" not in made


def test_planted_growth_is_seen(steps: dict[str, dict[str, Any]]) -> None:
    plain, grown = steps["2"], steps["3"]
    added = {"modules": 3, "functions": 30, "records": 2}
    assert {name for name in grown["entered"] if "planted" in name} == {f"planted_{i}.py" for i in range(3)}
    assert {"Planted", "Tupled"} <= set(grown["made"])
    exact = {name: plain[name] for name in added}
    assert len(above(grown, exact)) == 3
    for name, count in added.items():
        assert grown[name] >= plain[name] + count
    assert above(grown, LIMITS), "growth of three modules and two records is above the head-room"


def test_the_command_prints_a_table_or_json_and_refuses_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import walk

    seen = {"modules": 2, "functions": 3, "records": 1, "entered": ["loop.py", "maths/stats.py"], "made": {"Group": 4}}

    def walked(folder: Path, steps: list[int]) -> dict[int, Any]:
        return {steps[0]: seen}

    monkeypatch.setattr(walk, "walk", walked)
    assert walk.main(["--json", "--step", "5"]) == 0
    assert json.loads(capsys.readouterr().out) == {"step": 5} | seen
    assert walk.main([]) == 0
    table = capsys.readouterr().out
    assert table.startswith("step 2: 2 modules, 3 functions, 1 records\n")
    assert ["Group", "4"] in [line.split() for line in table.splitlines()]
    with pytest.raises(SystemExit):
        walk.main(["--step", "1"])
