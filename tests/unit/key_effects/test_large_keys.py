"""Keys of runs from task files that are not held in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.errors import ConfigError, TaskError
from surefoot.run.inputs import read_inputs

KEYS: dict[str, Any] = {
    "tasks": "big.jsonl", "reward_funcs": ["r.py:f"], "max_prompt_length": 12, "stream_tasks": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    rows = [{"id": f"t{i}", "prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(300)]
    (tmp_path / "big.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.py").write_text(
        "def f(completions, answer, **_):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )


@pytest.mark.config_key("stream_tasks")
def test_a_streamed_run_trains_on_the_same_split_without_holding_it(configure: Any, assembled: Any) -> None:
    held = configure(**(KEYS | {"stream_tasks": False}))
    streamed = configure(**KEYS)
    one, other = (read_inputs(loaded.config, loaded.base) for loaded in (held, streamed))
    assert isinstance(other.train, StreamingDataset)
    assert {task.id for task in one.train} == {task.id for task in other.train}
    assert one.heldout == other.heldout
    assert one.task_set.fingerprint == other.task_set.fingerprint
    parts = assembled(**KEYS)
    groups = parts.runtime.collect(list(parts.train[:2]), 1)
    assert [g.task.id for g in groups] == [task.id for task in parts.train[:2]]
    parts.runtime.close()


@pytest.mark.config_key("max_prompt_length")
def test_a_streamed_prompt_that_is_too_long_is_refused_by_name_when_it_comes(assembled: Any) -> None:
    parts = assembled(**(KEYS | {"max_prompt_length": 8, "heldout_fraction": 0.0, "eval_steps": 0}))
    long = next(task for task in parts.train if task.id == "t299")
    with pytest.raises(TaskError, match="the prompt of t299 has"):
        parts.runtime.collect([long], 1)
    parts.runtime.close()


@pytest.mark.config_key("max_bad_rows")
def test_malformed_rows_are_counted_up_to_the_limit(configure: Any, tmp_path: Path) -> None:
    with (tmp_path / "big.jsonl").open("a") as file:
        file.write("{broken\n")
    loaded = configure(**KEYS)
    with pytest.raises(TaskError, match="301"):
        read_inputs(loaded.config, loaded.base)
    loaded = configure(**KEYS, max_bad_rows=1)
    inputs = read_inputs(loaded.config, loaded.base)
    assert len(inputs.train) + len(inputs.heldout) <= 300
    assert isinstance(inputs.train, StreamingDataset)
    assert inputs.train.statistics().bad_rows == 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"max_prompt_length": None}, "give their limit"),
        ({"max_staleness": 1, "importance_sampling_correction": True}, "runs ahead"),
        ({"alpha_sdpo": 0.1}, "look at all tasks"),
        ({"stream_tasks": False, "max_bad_rows": 1}, "must be whole"),
    ],
)
def test_what_does_not_go_together_is_refused(configure: Any, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configure(**(KEYS | keys))


def test_generators_and_rows_are_not_streamed(configure: Any) -> None:
    loaded = configure(**(KEYS | {"tasks": "builtin:sums"}))
    with pytest.raises(ConfigError, match="a file is streamed"):
        read_inputs(loaded.config, loaded.base)
