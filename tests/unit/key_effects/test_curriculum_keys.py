"""Keys of `[curriculum]`: config in, which tasks come next out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError, TaskError
from surefoot.run.inputs import read_inputs
from surefoot.run.task_plan import level_plan

Build = Callable[..., Any]
KEYS: dict[str, Any] = {"tasks": "leveled.jsonl", "reward_funcs": ["r.py:f"], "tasks_per_step": 4, "max_steps": 8}
LEVELS = KEYS | {"curriculum__kind": "levels"}


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    levels = ["easy", "medium", "hard"] * 40
    rows = [{"id": f"{one}-{i}", "prompt": f"{i}+1=", "answer": "1", "complexity": one} for i, one in enumerate(levels)]
    (tmp_path / "leveled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.py").write_text("def f(completions, **_):\n    return [float(len(c) % 2) for c in completions]\n")


def plan_of(configure: Build, **keys: Any) -> Any:
    loaded = configure(**(LEVELS | keys))
    return level_plan(loaded.config, read_inputs(loaded.config, loaded.base).train)


@pytest.mark.config_key("curriculum.kind")
def test_the_kind_decides_which_numbers_the_plan_tells(ran: Build) -> None:
    told = {
        kind: {name.split("/")[1] for line in ran(**KEYS, curriculum__kind=kind).metrics for name in line
               if name.startswith("curriculum/")}
        for kind in ("none", "levels", "success")
    }  # fmt: skip
    assert told["none"] == set()
    assert told["levels"] == {"share"}
    assert {"new_frequency"} <= told["success"] <= {"new_frequency", "success_rate"}


@pytest.mark.config_key("curriculum.start", "curriculum.end", "curriculum.steps")
def test_shares_move_from_start_to_end_within_the_steps(configure: Build) -> None:
    keys = {"curriculum__start": [1.0, 0.0, 0.0], "curriculum__end": [0.0, 0.5, 0.5]}
    plan = plan_of(configure, **keys, curriculum__steps=4)
    assert plan.sampler.shares(0) == {"easy": 1.0, "medium": 0.0, "hard": 0.0}
    assert plan.sampler.shares(2) == {"easy": 0.5, "medium": 0.25, "hard": 0.25}
    assert plan.sampler.shares(4) == plan.sampler.shares(7) == {"easy": 0.0, "medium": 0.5, "hard": 0.5}
    assert plan_of(configure, **keys).sampler.shares(4)["easy"] == 0.5, "0 means max_steps"


@pytest.mark.config_key("curriculum.levels")
def test_levels_are_those_that_the_tasks_name(configure: Build, tmp_path: Path) -> None:
    shares = {"curriculum__start": [0.5, 0.5], "curriculum__end": [0.5, 0.5]}
    with pytest.raises(TaskError, match=r"never reaches: .* of 'medium'"):
        plan_of(configure, curriculum__levels=["easy", "hard"], **shares)
    text = (tmp_path / "leveled.jsonl").read_text().replace("medium", "hard")
    (tmp_path / "leveled.jsonl").write_text(text)
    assert set(plan_of(configure, curriculum__levels=["easy", "hard"], **shares).levels) == {"easy", "hard"}
    with pytest.raises(TaskError, match="50% medium tasks and there are none"):
        plan_of(configure)
    text = text.replace('"easy"', "null")
    (tmp_path / "leveled.jsonl").write_text(text)
    with pytest.raises(TaskError, match="of no level"):
        plan_of(configure)


def test_a_level_too_small_for_a_step_is_refused(configure: Build) -> None:
    with pytest.raises(TaskError, match="fewer tasks than one step may need"):
        plan_of(configure, tasks_per_step=60)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"curriculum__start": [0.5, 0.5]}, "one share per level"),
        ({"curriculum__start": [0.5, 0.5, 0.5]}, "sum to 1"),
        ({"curriculum__end": [1.5, 0.0, -0.5]}, "not negative"),
        ({"curriculum__levels": ["easy", "easy", "hard"]}, "each level once"),
        ({"curriculum__steps": -1}, "must not be negative"),
        ({"max_staleness": 1, "importance_sampling_correction": True}, "runs ahead"),
        ({"curriculum__kind": "success", "stream_tasks": True, "max_prompt_length": 9}, "weighs all tasks"),
    ],
)
def test_what_does_not_go_together_is_refused(configure: Build, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configure(**(LEVELS | keys))
