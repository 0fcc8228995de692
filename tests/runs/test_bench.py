"""`surefoot bench` through the real command: what it prints was measured, and what was not measured is an error."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Ran, surefoot

from surefoot.config.keys import describe_keys
from surefoot.errors import ConfigError, NumericsError
from surefoot.report.pace import ChosenKeys, HalfStep, MachineRates, PaceReport, ToolCalls, sound

SMALL = ["threads=1", "device=cpu", "tasks_per_step=4", "num_generations=2", "max_completion_length=4", "num_tasks=60"]


def bench(cwd: Path, *words: str, planted: str | None = None, seconds: float = 1) -> Ran:
    return surefoot("bench", *words, "--seconds", str(seconds), cwd=cwd, planted=planted)


def numbers(found: Any) -> Iterator[float]:
    """Every number of a JSON object."""
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        for each in found:
            yield from numbers(each)
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield found


# -- through the command --------------------------------------------------------------------------


def test_a_config_is_measured_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'model = "pebble"\ntasks = "builtin:sums"\nnum_tasks = 60\noutput_dir = "run"\n'
    )
    ran = bench(tmp_path, "mine.toml", *SMALL, "num_iterations=2", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert all(math.isfinite(each) and each >= 0 for each in numbers(found))
    assert (found["model"], found["device"], found["threads"], found["rollouts"]) == ("pebble", "cpu", 1, 8)
    assert (found["length"], found["full_length"], found["sampling"]["tokens"]) == (4, 4, 32)
    parts = [found[name] for name in ("sampling", "learning", "weights")]
    assert sum(part["seconds"] for part in parts) == pytest.approx(found["step_s"])
    assert sum(part["share"] for part in parts) == pytest.approx(1)
    for half in parts[:2]:
        assert half["tokens_per_s"] == pytest.approx(32 / half["seconds"])
        assert half["share_of_limit"] == pytest.approx(half["tokens_per_s"] / half["limit_tokens_per_s"])
    assert found["rates"]["flops_s"] > 1e8
    assert found["peak_bytes"] > 100e6
    assert "left" in ran.err, "nobody sees that it is at work"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_a_model_is_measured_as_the_built_in_run_would_train_it(tmp_path: Path) -> None:
    ran = bench(tmp_path, "pebble", *SMALL)
    assert ran.code == 0, ran.err
    heads = [line[:9].strip() for line in ran.out.splitlines() if line[:9].strip()]
    assert heads == ["bench", "step", "sampling", "learning", "memory", "limits", "bound", "keys"]
    assert re.search(r"sampling  [\d,.]+ tokens/s, ([\d.]+ % of the|more than the measured) limit", ran.out)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["num_generation=4"], 2, "did you mean num_generations"),
        (["nowhere.toml"], 2, "nowhere.toml"),
        (["./nowhere"], 4, "nowhere"),
        (["on_ray.toml"], 2, "add runtime.kind=local"),
        (["engine.kind=openai", "engine.url=http://127.0.0.1:9"], 2, "another machine samples there"),
        (["tasks=nowhere.jsonl"], 4, "nowhere.jsonl"),
        (["device=cuda:9"], 2, "device"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_what_is_wrong_is_told_as_train_tells_it(tmp_path: Path, words: list[str], code: int, says: str) -> None:
    (tmp_path / "on_ray.toml").write_text('model = "pebble"\ntasks = "builtin:sums"\nruntime.kind = "ray"\n')
    ran = bench(tmp_path, *words)
    assert (ran.code, ran.out) == (code, ""), ran.err
    assert says in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["on_ray.toml"]


def test_less_time_than_the_smallest_measurement_takes_is_refused(tmp_path: Path) -> None:
    ran = bench(tmp_path, "threads=1", "device=cpu", "num_generations=20000", "num_tasks=60")
    assert ran.code == 2, ran.err
    assert "the smallest measurement takes" in ran.err


def test_a_machine_on_which_the_first_step_takes_too_long_is_told_before_the_second() -> None:
    from types import SimpleNamespace

    from surefoot.run.bench import OVERTIME_S, _measure, _Round

    made: list[int] = []

    def step(tasks: int, siblings: int, length: int) -> _Round:
        made.append(length)
        return _Round(length, tasks * siblings, 10, tasks * siblings * length, 8.0, 8.0, 1.0)

    config = SimpleNamespace(tasks_per_step=4, num_generations=2, max_completion_length=64)
    rig: Any = SimpleNamespace(config=config, step=step)
    with pytest.raises(ConfigError, match="the smallest measurement takes 44s"):
        _measure(rig, lambda: 16.0, lambda line: None)
    assert made == [4]
    seen, wholes, halves = _measure(rig, lambda: 17.0 * 1.7 - OVERTIME_S, lambda line: None)
    assert (len(seen), len(wholes), len(halves)) == (1, 1, 1)


@pytest.mark.parametrize(
    ("planted", "code", "says"),
    [
        ("clock_stands", 78, "measured as 0"),
        ("clock_shows_nothing", 78, "measured as nan"),
        ("answers_from_nowhere", 78, "sampler and learner disagree"),
        ("learner_rests", 1, "what was not learned has no pace"),
    ],
)
def test_planted_what_nobody_measured_is_no_figure(tmp_path: Path, planted: str, code: int, says: str) -> None:
    """The cut wires: no clock, no engine, no learner."""
    ran = bench(tmp_path, *SMALL, planted=planted)
    assert (ran.code, ran.out) == (code, ""), ran.err
    assert says in ran.err


# -- what is made of the figures ------------------------------------------------------------------


def half(*, share: float = 0.1, of_half: float = 0.5, memory: float = 0.5, seconds: float = 1.0) -> HalfStep:
    limit = share * seconds
    return HalfStep(seconds, 1000, limit, memory * limit, of_half)


def report(**changes: Any) -> PaceReport:
    plain = dict(
        model="m", device="cpu", threads=2, dtype="float32", loaded_s=1.0, took_s=9.0, steps=4, length=8, full_length=8,
        sampling=half(), learning=half(), weights_s=0.01, tools=None, peak_bytes=10**9,
        rates=MachineRates(1e11, 1e10, "bfloat16", 1e10), keys=ChosenKeys(64, 64, 1, 1, True, 32), slow_paths=(),
    )  # fmt: skip
    return PaceReport(**(plain | changes))


def named(found: PaceReport) -> list[tuple[str, str]]:
    return [(each.key, each.direction) for each in found.advice()]


@pytest.mark.parametrize(
    ("measured", "bound"),
    [
        (half(share=0.6), "arithmetic"), (half(share=0.6, memory=1.1), "memory bandwidth"),
        (half(of_half=0.9), "launches and Python"), (half(of_half=0.5), "work beside the matrix products"),
        (half(share=1.6), "what cannot be said"),
    ],
)  # fmt: skip
def test_what_bounds_a_half_is_read_off_its_own_figures(measured: HalfStep, bound: str) -> None:
    assert measured.bound == bound
    assert f"sampling by {bound}" in "\n".join(report(sampling=measured).lines())


def test_every_key_is_named_by_a_figure_and_by_none_without() -> None:
    assert named(report()) == []
    assert "keys      none" in "\n".join(report().lines())
    flat, bound = half(of_half=0.9), half(share=0.9)
    slow = MachineRates(1e11, 1e10, "bfloat16", 4e11, 8, 3e11)
    keys = ChosenKeys(64, 16, 3, 1, False, 32)
    tools = ToolCalls(3.0, 40, 0.1)
    assert named(report(sampling=flat)) == [("num_generations, tasks_per_step", "up")]
    assert named(report(learning=flat)) == [("tasks_per_step", "up")]
    assert named(report(learning=bound, rates=slow)) == [("threads", "8"), ("dtype", "bfloat16")]
    assert named(report(sampling=flat, keys=keys, device="cuda")) == [
        ("engine.rows", "up to 64"),
        ("cuda_kernels", "true"),
    ]
    assert named(report(learning=half(seconds=2.0), keys=ChosenKeys(64, 64, 3, 1, True, 32))) == [
        ("num_iterations", "down")
    ]
    assert named(report(weights_s=2.0, tools=tools)) == [
        ("weight_sync_steps", "up, with max_staleness"),
        ("tools.concurrency", "up from 32"),
    ]


def test_a_half_that_beat_its_limit_shows_that_the_limit_was_wrong_and_speaks_for_no_key() -> None:
    """Measured so on a machine that others used: 200 % of the limit, and advice that rested on its rates."""
    beyond = report(learning=half(share=1.6), rates=MachineRates(1e11, 1e10, "bfloat16", 4e11, 8, 3e11))
    text = "\n".join(beyond.lines())
    assert "more than the measured limit" in text
    assert "160 %" not in text
    assert "other programs held down; run it again" in text
    assert beyond.as_json()["learning"]["limit_holds"] is False
    assert named(beyond) == []


def test_every_key_that_can_be_named_exists() -> None:
    known = "\n".join(describe_keys())
    everything = [
        report(sampling=half(of_half=0.9), weights_s=9.0, tools=ToolCalls(9.0, 9, 1.0)),
        report(
            sampling=half(of_half=0.9), learning=half(share=0.9, seconds=9.0), device="cuda",
            rates=MachineRates(1e11, 1e10, "bfloat16", 4e11, 8, 3e11), keys=ChosenKeys(64, 16, 3, 1, False, 32),
        ),
    ]  # fmt: skip
    keys = {key for found in everything for each in found.advice() for key in each.key.split(", ")}
    assert len(keys) == 9
    assert [key for key in keys if key not in known] == []


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_planted_measurement_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(NumericsError, match="was measured as"):
        sound("sampling", value)
