"""Engines and workers of a real run are killed at random, again and again: the run ends as if nothing had happened."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from command import surefoot
from figures import Record, note
from ray_kit import TINY, RayRun, left_after, litter, litter_of, mark_of, numbers, place, ray_run, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow]
MEMBERS = ("engine 0", "engine 1", "worker 0", "worker 1")
LEAST_PERIOD_S = 5.0


def torment(run: RayRun, seconds: float, seed: int) -> tuple[list[float], list[float]]:
    """Kill one member after another; replacement times, and the periods that followed them."""
    rng, took, periods = random.Random(seed), [], []
    began = time.monotonic()
    while time.monotonic() - began < seconds and run.process.poll() is None:
        name, struck = rng.choice(MEMBERS), time.monotonic()
        pid = run.kill(name)
        wait_for(lambda name=name, pid=pid: run.process.poll() is not None or run.is_ready(name, pid), name)  # type: ignore[misc]
        if run.process.poll() is None:
            took.append(time.monotonic() - struck)
            periods.append(max(LEAST_PERIOD_S, 3 * max(took)))
            while time.monotonic() - struck < periods[-1] and run.process.poll() is None:
                time.sleep(0.05)
    return took, periods


def chaos(tmp_path: Path, *, seconds: float, steps: int, seed: int) -> tuple[list[float], list[float]]:
    before = litter()
    words = [*place(tmp_path), f"max_steps={steps}", "learning_rate=1e-3", "eval_metric=exact"]
    alone = surefoot("train", *(w for w in TINY if not w.startswith("runtime.")), *words, cwd=tmp_path, run="alone")
    assert alone.code in (0, 1), alone.out + alone.err
    with ray_run(tmp_path / "run", *words, env={"SLOW_REWARD": "0.25"}) as run:
        run.wait_step(1)
        mark = mark_of(run.pid("learner"))
        took, periods = torment(run, seconds, seed)
        code, said = run.end(patience_s=300.0 + steps)  # what is left to do after the last kill
    assert code == alone.code, said
    assert numbers(run.metrics) == numbers(alone.metrics)
    assert len(took) >= 3, f"only {len(took)} were killed: the run was over too soon"
    assert left_after(mark, 5.0) == []
    pids = {pid for name in (*MEMBERS, "learner") for pid in run.pids(name)} | {run.process.pid}
    assert litter_of(pids, before) == []
    return took, periods


def told(took: list[float], periods: list[float]) -> str:
    return (
        f"{len(took)} killed, one every {min(periods):.1f} to {max(periods):.1f} s; replaced within "
        f"{sorted(took)[len(took) // 2]:.1f} s (median), {max(took):.1f} s (longest)"
    )


def test_a_minute_of_chaos_changes_not_one_number(tmp_path: Path, record_property: Record) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    took, periods = chaos(tmp_path, seconds=60.0, steps=70, seed=7)
    print(told(took, periods))
    note(record_property, "P8", "engine or worker killed at random: run equal to the undisturbed one", len(took), told(took, periods))  # fmt: skip


@pytest.mark.nightly
def test_ten_minutes_of_chaos_change_not_one_number(tmp_path: Path, record_property: Record) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    took, periods = chaos(tmp_path, seconds=600.0, steps=600, seed=11)
    print(told(took, periods))
    note(record_property, "P8", "ten minutes: run equal to the undisturbed one", len(took), told(took, periods))
