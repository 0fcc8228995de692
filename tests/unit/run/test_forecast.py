"""A forecast counts every part of a run, at a pace that is measured on this machine with the run's own parts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from surefoot.config import Config
from surefoot.config.schedule import Answered
from surefoot.learner.footprint import ModelShape
from surefoot.run import estimate
from surefoot.run.estimate import (
    REFERENCE_S,
    START_S,
    Forecast,
    Pace,
    ToolTimes,
    forecast,
    forecast_lines,
    interpreter_seconds,
    measure,
)

ROOT = Path(__file__).parents[3]
PEBBLE = ModelShape(1_095_680, 4, 128, 576, 4, 2, 32, 103)
PACE = Pace(decode=0.01, prefill=0.02, pack=0.03, learn_fixed=0.5, learn_sample=0.1, rows=8)


def config(**keys: object) -> Config:
    usual: dict[str, object] = dict(
        max_steps=10, tasks_per_step=2, num_generations=4, max_completion_length=6, preflight_tasks=0, save_best=False,
        eval_steps=0, eval_on_start=False, num_generations_eval=2, threads=2,
    )  # fmt: skip
    return Config.model_validate({"model": "m", "tasks": "t", **usual, **keys})


def planned(
    tools: ToolTimes | None = None, pace: Pace = PACE, asked: int = 5, slow: float = 1.0, **keys: object
) -> Forecast:
    return forecast(
        config(**keys), pace, parameters=1_000_000, prompt_tokens=100, asked=Answered(asked),
        interpreter_s=slow * REFERENCE_S, tools=tools,
    )  # fmt: skip


def test_a_step_is_what_is_sampled_learned_and_kept() -> None:
    found = planned()
    assert found.learning == pytest.approx(0.5 + 8 * 0.1), "eight rollouts"
    proof = 8 * 0.01 + 3 * 0.02
    assert found.sampling == pytest.approx(2 * 0.02 + 6 * 0.01 + 0.03 + proof), (
        "two prompts, six tokens for one full house"
    )
    assert planned(tasks_per_step=4).sampling - found.sampling == pytest.approx(2 * 0.02 + 6 * 0.01), "a second house"
    assert found.evaluation == pytest.approx(5 * 0.02 + 2 * 6 * 0.01, rel=0.05), "five prompts, ten answers, two houses"
    assert found.total > 10 * found.step + found.start + found.evaluation


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        (dict(max_steps=20), "steps"), (dict(preflight_tasks=8), "preflight"), (dict(eval_steps=2), "evaluations"),
        (dict(save_steps=1), "saving"), (dict(max_completion_length=60), "sampling"),
    ],
)  # fmt: skip
def test_every_part_makes_the_run_longer(keys: dict[str, object], part: str) -> None:
    usual, more = planned(), planned(**keys)
    assert getattr(more, part) > getattr(usual, part)
    assert more.total > usual.total
    without = replace(more, **{part: getattr(usual, part)})
    assert without.total < more.total, "planted: a part that is forgotten is missed"


def test_what_does_not_depend_on_the_model_goes_with_the_interpreter() -> None:
    usual, slow = planned(), planned(slow=3.0)
    assert slow.start - usual.start > 1.9 * START_S
    assert slow.keeping == pytest.approx(3 * usual.keeping)
    assert slow.learning == usual.learning, "measured as slow as it is"


def test_tools_cost_turns_calls_and_servers() -> None:
    bare = planned(max_turns=3)
    shared = planned(ToolTimes(isolated=False, call_s=0.0), max_turns=3)
    late = planned(ToolTimes(isolated=False, call_s=0.5), max_turns=3)
    own = planned(ToolTimes(isolated=True, call_s=0.0, server_s=2.0), max_turns=3)
    assert shared.sampling > bare.sampling + (4 + 2) * 0.02, "four, then two rollouts read a history of their own"
    assert late.sampling - shared.sampling == pytest.approx(2 * 0.5), "two rounds of calls, each side by side"
    assert own.sampling - shared.sampling == pytest.approx(4 * 2.0 / 2), "four servers on two threads"


def test_the_words_promise_nothing_that_was_not_measured() -> None:
    said = "\n".join(forecast_lines(planned(), "this CPU with 2 threads", ["a note"]))
    assert "at most" not in said
    assert "10 steps of 1.6s" in said
    assert "a note" in said


def test_a_measurement_is_of_this_model_and_leaves_torch_as_it_was() -> None:
    before = torch.get_num_threads(), torch.random.get_rng_state()
    keys = config(threads=1, beta=0.1, max_steps=1)
    found = measure(keys, PEBBLE, 9, "cpu")
    assert all(value > 0 for value in (found.decode, found.prefill, found.learn_sample))
    assert found.rows == 8
    assert (torch.get_num_threads(), torch.equal(torch.random.get_rng_state(), before[1])) == (before[0], True)
    assert 0 < interpreter_seconds() < 10


def test_a_large_model_is_stretched_from_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def sliced(config: Config, shape: ModelShape, layers: int, *_: object) -> object:
        asked.append(layers)
        return estimate._Slice(1.0 + layers, 10.0 + layers, 0.0, 2.0, 0.5 * layers)

    monkeypatch.setattr(estimate, "_measure", sliced)
    found = measure(config(), replace(PEBBLE, parameters=10**8, layers=30), 9, "cpu")
    assert asked == [1, 4]
    assert (found.decode, found.prefill, found.learn_fixed, found.learn_sample) == (31.0, 40.0, 2.0, 15.0)


@pytest.mark.nightly
@pytest.mark.parametrize("run", ["built-in", "tools"])
def test_a_run_takes_what_the_plan_said_within_a_factor_of_two(run: str) -> None:
    if run == "tools" and importlib.util.find_spec("mcp") is None:
        pytest.skip("needs the mcp extra")
    done = subprocess.run(
        [sys.executable, "forecast.py", "--processor-time", "--only", run, "--steps", "10"], cwd=ROOT / "benchmarks",
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
