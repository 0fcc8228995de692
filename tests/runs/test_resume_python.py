"""From Python: a run with rows and closures is stopped and goes on; with other rows it is refused."""

from __future__ import annotations

import datetime as dt
import signal
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.errors import ConfigError, StateError, StoppedError
from surefoot.report.view import PlainView

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 9) for b in range(3, 9)]
KEYS: dict[str, Any] = {
    "model": "pebble", "max_steps": 3, "tasks_per_step": 2, "num_generations": 4, "max_completion_length": 4, "threads": 1,
    "eval_tasks": 4, "preflight_tasks": 0, "reward_workers": 1, "learning_rate": 1e-3, "device": "cpu",
}  # fmt: skip


class Impatient(PlainView):
    """Asks for a stop after the first step."""

    def step(self, step: int, metrics: Any) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_a_run_of_rows_and_closures_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    def score(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [
            len(set(text) & set(gold)) / 2 - 0.1 * len(text) for text, gold in zip(completions, answer, strict=True)
        ]

    whole = surefoot.train(tasks=ROWS, reward_funcs=[score], output_dir=str(tmp_path / "whole"), **KEYS)
    cut = tmp_path / "cut"
    with pytest.raises(StoppedError, match="stopped after step 1 of 3; saved"):
        surefoot.train(tasks=ROWS, reward_funcs=[score], output_dir=str(cut), view=Impatient(3), **KEYS)
    with pytest.raises(StateError, match="the tasks changed since the run began"):
        surefoot.resume(cut, tasks=ROWS[:-1], reward_funcs=[score])
    resumed = surefoot.resume(cut, tasks=ROWS, reward_funcs=[score])
    assert (resumed.verdict, resumed.exit_code) == (whole.verdict, whole.exit_code)
    name = "checkpoints/step_3/model.safetensors"
    assert (cut / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


class Picture:
    """What a row from Python may hold, and no message can carry."""

    def __init__(self, gold: str) -> None:
        self.gold = gold

    def __repr__(self) -> str:
        return f"Picture({self.gold!r})"

    def __reduce__(self) -> Any:
        raise AssertionError("it was pickled")

    def __deepcopy__(self, memo: Any) -> Picture:
        return Picture(self.gold)


def test_rows_with_objects_of_their_own_are_graded_and_a_run_of_them_is_made_longer(tmp_path: Path) -> None:
    """Objects reach the reward workers by fork; three steps that become five are the run of five."""
    rows = [row | {"picture": Picture(row["answer"]), "day": dt.date(2026, 1, 1)} for row in ROWS]

    def score(completions: list[str], picture: list[Picture], day: list[dt.date], **_: Any) -> list[float]:
        pairs = zip(completions, picture, day, strict=True)
        return [len(set(text) & set(one.gold)) / 2 - 0.1 * len(text) * when.day for text, one, when in pairs]

    keys = KEYS | {"eval_steps": 1}
    surefoot.train(tasks=rows, reward_funcs=[score], output_dir=str(tmp_path / "whole"), **keys | {"max_steps": 5})
    short = surefoot.train(tasks=rows, reward_funcs=[score], output_dir=str(tmp_path / "short"), **keys)
    again = surefoot.resume(tmp_path / "short", tasks=rows, reward_funcs=[score])
    assert (again.verdict, again.exit_code, again.metrics) == (short.verdict, short.exit_code, short.metrics)
    with pytest.raises(ConfigError, match="max_steps = 2, and 3 steps of"):
        surefoot.resume(tmp_path / "short", tasks=rows, reward_funcs=[score], max_steps=2)
    surefoot.resume(tmp_path / "short", tasks=rows, reward_funcs=[score], max_steps=5)
    name = "checkpoints/step_5/model.safetensors"
    assert (tmp_path / "short" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
