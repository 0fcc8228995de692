"""1,000 numbers that are none, at every place where one can come in: not one of them reaches a weight.

A reward or a sampler's logprob costs its own sample: the result is, bit for bit, that of a run in which nobody could
grade it. A loss, a gradient or a moment costs the step: nothing moves, and the guilty one is named.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import surefoot
from figures import note
from numerics_kit import KINDS, World, inject
from one_thread import one_torch_thread

from surefoot.errors import SurefootError
from surefoot.guards import reward_values
from surefoot.learner import grpo
from surefoot.learner.samples import ComparableGroups
from surefoot.records import Group
from surefoot.runtime import rollout


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_torch_thread():
        yield World()


def run(world: World, kind: str, seed: int) -> str | None:
    """What went wrong with one injection, as a line that repeats it; None when nothing did."""
    try:
        inject(world, kind, seed)
    except (AssertionError, SurefootError) as error:
        return f"inject(World(), {kind!r}, seed={seed}): {error}"
    return None


@pytest.mark.parametrize("injections", [200, pytest.param(1000, marks=pytest.mark.nightly)])
def test_injections_leave_every_weight_finite(world: World, injections: int, record_property: Any) -> None:
    order = [(kind, seed) for seed in range(injections) for kind in KINDS][:injections]
    failures = [line for kind, seed in order if (line := run(world, kind, seed))]
    counts = Counter(kind for kind, _ in order)
    told = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
    assert len(order) == injections
    assert min(counts.values()) >= injections // len(KINDS)
    assert failures == [], "\n".join(failures[:5])
    note(
        record_property,
        "P12",
        "numbers that are not finite: none reached a weight",
        len(order),
        told,
        seeds=range(injections),
    )


def test_the_world_moves_and_masking_any_sample_is_another_result(world: World) -> None:
    """Otherwise equality would say nothing."""
    results = {world.masked((task, index), "train") for task in range(2) for index in range(3)}
    assert len(results) == 6
    assert world.clean not in results


# -- through the command ------------------------------------------------------------------------------

GRADER = """
def mark(prompts, completions, **columns):
    return [{broken} if len(c) % 3 == 1 else float(len(c)) for c in completions]
"""


@pytest.mark.nightly  # seconds of a whole run; its neighbours show the same every day
def test_a_grader_that_returns_nan_gives_the_same_weights_as_one_that_abstains(tmp_path: Path) -> None:
    """A third of the answers, by their length; the real command, real reward processes, two steps."""
    digests = {}
    for name, broken in (("nan", 'float("nan")'), ("abstains", "None")):
        (tmp_path / f"{name}.py").write_text(GRADER.format(broken=broken))
        done = surefoot(
            "train", "model=pebble", "tasks=builtin:sums", f'reward_funcs=["{name}.py:mark"]', "max_steps=2",
            "max_reward_failures=1.0", "partial_groups=train", "eval_on_start=false", "eval_tasks=4",
            "preflight_tasks=0", "max_completion_length=8", "threads=1", "learning_rate=1e-3",
            cwd=tmp_path, run=name,
        )  # fmt: skip
        reason = {"nan": "nan", "abstains": "abstained"}[name]
        assert done.metrics[0][f"failures/mark:{reason}"] > 0, done.out + done.err
        assert all(math.isfinite(value) for line in done.metrics for value in line.values())
        digests[name] = hashlib.sha256((done.run / "checkpoints/step_2/model.safetensors").read_bytes()).hexdigest()
    assert digests["nan"] == digests["abstains"]


# -- teeth --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["loss", "gradient", "advantage in the loss", "moment"])
def test_planted_catch_and_continue_on_nan_is_seen(kind: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every finite check of the learner is out: the step goes on, whatever the numbers are."""
    monkeypatch.setattr(grpo, "not_finite", lambda metrics: ())
    monkeypatch.setattr(grpo, "all_finite", lambda tensors: True)
    found = [run(world, kind, seed) for seed in range(8)]
    assert None not in found
    assert any("was applied" in line for line in found if line), found


@pytest.mark.parametrize("kind", ["gradient", "moment"])
def test_planted_learner_that_forgets_the_first_of_its_two_checks_is_still_stopped_before_anything_is_saved(
    kind: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the first check stands a second: weights that are not finite end the run."""
    monkeypatch.setattr(grpo, "not_finite", lambda metrics: ())
    monkeypatch.setattr(grpo.GRPOLearner, "_broken_memory", lambda self: ())
    found = [run(world, kind, seed) for seed in range(8)]
    assert None not in found
    assert any("made weights that are not finite" in line for line in found if line), found


def test_planted_collector_that_lets_logprobs_pass_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "are_logprobs", lambda values: True)
    assert all(run(world, "sampler logprob", seed) for seed in range(4))


def test_planted_grader_that_makes_nan_a_zero_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "numerics_kit.parse_reward",
        lambda value: reward_values.RewardValue(0.0, None) if value != value else reward_values.parse_reward(value),
    )
    assert any(run(world, "reward", seed) for seed in range(8))


def test_planted_sort_out_that_keeps_the_masked_sample_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout without a verdict becomes a zero: the other siblings' baseline moves."""
    monkeypatch.setattr(
        "numerics_kit.drop_ungraded", lambda groups, partial: ComparableGroups([fill(g) for g in groups], Counter())
    )
    assert all(run(world, "sampler logprob", seed) for seed in range(4))


def fill(group: Group) -> Group:
    """Every failed rollout gets the turn of its neighbour and reward 0."""
    turns = next(r.turns for r in group.rollouts if r.turns)
    rollouts = tuple(
        r if r.reward is not None else dataclasses.replace(r, turns=r.turns or turns, reward=0.0, failure=None)
        for r in group.rollouts
    )
    return dataclasses.replace(group, rollouts=rollouts)
