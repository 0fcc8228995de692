"""One step from questions to weights in a tiny world, and eight ways to put a number into it that is none.

The way is the real one: collector, environment, `drop_ungraded`, `to_samples`, every invariant, learner. Only the model is small,
the answers are written down, and reward functions are called without a process of their own.

    world = World()
    inject(world, "loss", seed=7)     raises AssertionError when the promise does not hold
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from checkpoint_kit import make_net
from torch import Tensor

from surefoot.errors import InvariantError
from surefoot.guards import invariants
from surefoot.guards.invariants import DiversityGuard
from surefoot.guards.reward_values import RewardValue, parse_reward
from surefoot.learner import grpo
from surefoot.learner.checkpoint import TrainingState, capture, restore
from surefoot.learner.forward import score_batch
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.learner.nonfinite import name_of
from surefoot.learner.samples import drop_ungraded, to_samples
from surefoot.maths.losses import LossSettings
from surefoot.maths.packing import make_batch
from surefoot.protocols import Completion, Request, StepReport
from surefoot.records import STOP, Group, Task, TrainSample
from surefoot.rewards.grading import SingleTurnEnvironment
from surefoot.runtime.requests import Sampling
from surefoot.runtime.rollout import RolloutCollector
from surefoot.tracking.metrics import group_metrics

NAN, INF = math.nan, math.inf
STOP_ID, VOCAB, WIDTH = 2, 61, 6
REWARDS = (0.0, 1.0, 0.25)
TASKS = [Task(id="sums/1+1", prompt="?"), Task(id="prüfung 2", prompt="?")]
PROMPTS = {"sums/1+1": (4, 9, 5), "prüfung 2": (4, 8, 8, 7, 5)}
Victim = tuple[int, int]
"""Task and sibling, counted from 0."""


class Codec:
    stop_ids, pad_token_id, vocab_size = frozenset({STOP_ID}), 0, VOCAB

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        raise AssertionError("prompts were encoded before the run")

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class Answers:
    """An engine whose answers are written down, with the log-probabilities that the learner gives them."""

    version = 0

    def __init__(self, said: Mapping[str, tuple[tuple[int, ...], tuple[float, ...]]]) -> None:
        self.said = dict(said)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [Completion(r.id, *self.said[r.id], STOP, self.version, self.version) for r in requests]

    def load_weights(self, weights: object, version: int) -> None:
        raise AssertionError("nobody publishes here")

    def close(self) -> None:
        pass


class Pool:
    """Reward functions without their processes: what a worker does with one value, `parse_reward`, is the real thing."""

    functions = ("mark",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def score(self, jobs: Sequence[Any]) -> list[dict[str, RewardValue]]:
        return [{"mark": parse_reward(self.values[text])} for job in jobs for text in job.completions]


class World:
    """A learner that has stepped once, so that its optimiser remembers something, and the answers of its next step."""

    def __init__(self) -> None:
        net = make_net(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        settings = LearnerSettings(
            loss=LossSettings(), learning_rate=1e-2, max_steps=40, max_completion_length=WIDTH, temperature=1.0,
            pad_token_id=0,
        )  # fmt: skip
        self.learner = GRPOLearner(net, settings)
        stream = random.Random("numerics")
        self.said = {
            f"train/2/{t}/{i}": (*(stream.randrange(3, 50) for _ in range(stream.randrange(1, WIDTH))), STOP_ID)
            for t in range(len(TASKS))
            for i in range(len(REWARDS))
        }
        self.logprobs = {name: (-1.0,) * len(said) for name, said in self.said.items()}
        self.start: TrainingState = self._first_step()
        self._masked: dict[tuple[Victim, str], str] = {}
        self.clean = self.after(lambda: self.play())

    def _first_step(self) -> TrainingState:
        """Score the answers with the first weights, step on them, and score them with what that made."""
        for version in (0, 1):
            Answers.version = version
            self._score(self.samples()[0])
            if version == 0:
                assert self.play().applied, "a world that cannot step shows nothing"
        return capture(self.learner).clone()

    def _score(self, samples: Sequence[TrainSample]) -> None:
        batch, _ = make_batch(samples, pad_token_id=0)
        with torch.no_grad():
            scores = score_batch(self.learner.net, batch, temperature=1.0, with_entropy=False).logprobs
        for row, sample in enumerate(samples):
            name = f"{sample.group}/{sample.index}"
            self.logprobs[name] = tuple(scores[row, : len(sample.completion_ids)].tolist())

    # -- the way from questions to weights --------------------------------------------------------

    def samples(
        self, *, rewards: Mapping[Victim, Any] | None = None, logprobs: Mapping[str, tuple[float, ...]] | None = None,
        partial: str = "train",
    ) -> tuple[list[TrainSample], list[Group]]:  # fmt: skip
        told = self.logprobs | dict(logprobs or {})
        engine = Answers({name: (said, told[name]) for name, said in self.said.items()})
        values = {
            Codec().decode(self.said[f"train/2/{t}/{i}"]): (rewards or {}).get((t, i), REWARDS[i])
            for t in range(len(TASKS))
            for i in range(len(REWARDS))
        }
        environment = SingleTurnEnvironment(Pool(values), {"mark": 1.0})  # type: ignore[arg-type]
        collector = RolloutCollector(engine, environment, Codec(), PROMPTS, seed=0, token_count=VOCAB)
        sampling = Sampling(len(REWARDS), 1.0, WIDTH, 32)
        groups = [p.group for p in collector.run_rollouts(TASKS, sampling, purpose="train", step=2)]
        invariants.check_groups(groups, vocab_size=VOCAB, stop_ids=Codec.stop_ids)
        DiversityGuard().check(groups)
        assert all(math.isfinite(v) for v in group_metrics(groups).values()), "a metric is not finite"
        for group in groups:
            json.dumps(dataclasses.asdict(group), allow_nan=False)  # what a journal would hold
        kept = drop_ungraded(groups, partial=partial)
        samples = to_samples(kept.groups, scale="group")
        invariants.check_samples(samples, kept.groups)
        invariants.check_advantages(samples)
        return samples, groups

    def play(self, **changes: Any) -> StepReport:
        return self.learner.learn(self.samples(**changes)[0])

    def after(self, step: Callable[[], StepReport]) -> str:
        """Digest of the weights and moments that an applied step leaves behind."""
        restore(self.learner, self.start)
        assert step().applied, "the step was refused"
        return digest(self.learner)

    def masked(self, victim: Victim, partial: str) -> str:
        """The same step, in which nobody could grade this one rollout."""
        if (victim, partial) not in self._masked:
            self._masked[victim, partial] = self.after(lambda: self.play(rewards={victim: None}, partial=partial))
        return self._masked[victim, partial]


def digest(learner: GRPOLearner) -> str:
    """Every bit of weights and moments."""
    state, total = capture(learner), hashlib.sha256()
    for named in (state.weights, *state.moments.values()):
        for value in named.values():
            total.update(value.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


# -- eight kinds -----------------------------------------------------------------------------------


def reward(world: World, stream: random.Random) -> None:
    """A grader returns NaN, an infinity, or an integer beyond every float."""
    victim, partial, bad = pick(stream), stream.choice(["train", "drop"]), stream.choice([NAN, INF, -INF, 10**400])
    _, groups = world.samples(rewards={victim: bad})
    assert groups[victim[0]].rollouts[victim[1]].failure == "mark:nan", "the failure has another name"
    found = world.after(lambda: world.play(rewards={victim: bad}, partial=partial))
    assert found == world.masked(victim, partial), "the weights differ from those of a masked sample"


def sampler_logprob(world: World, stream: random.Random) -> None:
    """An engine reports a log-probability that is none."""
    victim, partial = pick(stream), stream.choice(["train", "drop"])
    name = f"train/2/{victim[0]}/{victim[1]}"
    values = list(world.logprobs[name])
    values[stream.randrange(len(values))] = stream.choice([NAN, INF, -INF, 0.5, 1e308])
    broken = {name: tuple(values)}
    _, groups = world.samples(logprobs=broken)
    assert groups[victim[0]].rollouts[victim[1]].failure == "nonfinite_logprob", "the failure has another name"
    found = world.after(lambda: world.play(logprobs=broken, partial=partial))
    assert found == world.masked(victim, partial), "the weights differ from those of a masked sample"


def padding(world: World, stream: random.Random) -> None:
    """What stands behind the end of a row, in the batch or in the scores, is not finite: nobody may notice."""
    bad, side = stream.choice([NAN, INF, -INF]), stream.choice(["batch", "scores"])
    real_batch, real_scores = grpo.make_batch, grpo.score_batch
    hidden: list[int] = []

    def batch(*args: Any, **kwargs: Any) -> Any:
        made, seen = real_batch(*args, **kwargs)
        hidden.append(int((~made.mask).sum()))
        return dataclasses.replace(made, logprobs=made.logprobs.masked_fill(~made.mask, bad)), seen

    def scores(net: Any, made: Any, **how: Any) -> Any:
        found = real_scores(net, made, **how)
        hidden.append(int((~made.mask).sum()))
        return found._replace(
            logprobs=found.logprobs.masked_fill(~made.mask, bad), entropy=found.entropy.masked_fill(~made.mask, bad)
        )

    name, patched = ("make_batch", batch) if side == "batch" else ("score_batch", scores)
    with mock.patch.object(grpo, name, patched):
        assert world.after(world.play) == world.clean, "padding reached the weights"
    assert sum(hidden) > 0, "nothing was padded, so nothing was tested"


def loss(world: World, stream: random.Random) -> None:
    """The forward pass of one sample gives a log-probability that is not finite."""
    victim, bad = pick(stream), stream.choice([NAN, INF, -INF])
    with broken_scores(world, victim, lambda logp, at: logp.masked_fill(at, bad), stream):
        refused(world, victim)


def gradient(world: World, stream: random.Random) -> None:
    """The loss is fine; what comes back through one sample is not."""
    victim, bad = pick(stream), stream.choice([NAN, INF, -INF])

    def hook(logp: Tensor, at: Tensor) -> Tensor:
        if logp.requires_grad:
            logp.register_hook(lambda grad: grad.masked_fill(at, bad))
        return logp

    with broken_scores(world, victim, hook, stream):
        refused(world, victim)


def advantage(world: World, stream: random.Random) -> None:
    """The weight of one sample is not finite where the loss takes it."""
    victim, bad = pick(stream), stream.choice([NAN, INF, -INF])
    said = world.said[f"train/2/{victim[0]}/{victim[1]}"]
    real_batch, real_loss = grpo.make_batch, grpo.policy_loss
    rows: list[list[int]] = []

    def batch(samples: Sequence[TrainSample], **how: Any) -> Any:
        rows.append([i for i, s in enumerate(samples) if s.completion_ids == said])
        return real_batch(samples, **how)

    def spoiled(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **how: Any) -> Any:
        advantages = advantages.clone()
        advantages[rows[-1]] = bad
        return real_loss(logp, old, advantages, mask, **how)

    with (
        mock.patch.object(grpo, "make_batch", batch),
        mock.patch.object(grpo, "policy_loss", spoiled),
    ):
        refused(world, victim)


def advantage_record(world: World, stream: random.Random) -> None:
    """A record that cannot hold NaN was made to hold it: refused by name before any gradient."""
    victim, bad = pick(stream), stream.choice([NAN, INF, -INF])
    restore(world.learner, world.start)
    samples, _ = world.samples()
    guilty = samples[victim[0] * len(REWARDS) + victim[1]]
    object.__setattr__(guilty, "advantage", bad)
    before = digest(world.learner)
    try:
        report = world.learner.learn(samples)
    except InvariantError as error:
        assert guilty.item_id in error.what, "the task is not named"
    else:
        assert not report.applied, "the step was applied"
        named(report, guilty)
    assert digest(world.learner) == before, "a refused step moved something"


def moment(world: World, stream: random.Random) -> None:
    """The optimiser remembers a number that is none, while everything about the step is fine."""
    restore(world.learner, world.start)
    names = [name for name, _ in world.learner.net.named_parameters()]
    name, key = stream.choice(names), stream.choice(["step", "exp_avg", "exp_avg_sq"])
    value = world.learner.optimiser.state[dict(world.learner.net.named_parameters())[name]][key]
    value.view(-1)[stream.randrange(value.numel())] = stream.choice([NAN, INF])
    before = {n: p.detach().clone() for n, p in world.learner.net.named_parameters()}
    report = world.play()
    assert not report.applied, "the step was applied"
    assert any(f"{name}, {key}: 1 of" in text for text in report.suspects), f"{name} is not named: {report.suspects}"
    after = dict(world.learner.net.named_parameters())
    assert all(torch.equal(before[n], after[n]) for n in before), "a refused step moved something"


KINDS: dict[str, Callable[[World, random.Random], None]] = {
    "reward": reward, "sampler logprob": sampler_logprob, "padding": padding, "loss": loss, "gradient": gradient,
    "advantage in the loss": advantage, "advantage on the record": advantage_record, "moment": moment,
}  # fmt: skip


def inject(world: World, kind: str, seed: int) -> None:
    """One injection; afterwards the weights are finite, no gradient is left, and the kind's own promise was kept."""
    KINDS[kind](world, random.Random(f"{kind}/{seed}"))
    for name, parameter in world.learner.net.named_parameters():
        assert bool(parameter.isfinite().all()), f"{name} is not finite"


# -- tools ----------------------------------------------------------------------------------------------


def pick(stream: random.Random) -> Victim:
    return stream.randrange(len(TASKS)), stream.randrange(len(REWARDS))


@contextmanager
def broken_scores(
    world: World, victim: Victim, spoil: Callable[[Tensor, Tensor], Tensor], stream: random.Random
) -> Iterator[None]:
    """Every forward pass of this sample, alone or among others, is spoiled at one of its tokens."""
    said = world.said[f"train/2/{victim[0]}/{victim[1]}"]
    place, real = stream.randrange(len(said)), grpo.score_batch

    def score(net: Any, batch: Any, **how: Any) -> Any:
        found = real(net, batch, **how)
        at = torch.zeros_like(batch.mask)
        for row, ids in enumerate(batch.completion_ids.tolist()):
            if tuple(ids[: len(said)]) == said and int(batch.mask[row].sum()) == len(said):
                at[row, place] = True
        return found._replace(logprobs=spoil(found.logprobs, at)) if bool(at.any()) else found

    with mock.patch.object(grpo, "score_batch", score):
        yield


def refused(world: World, victim: Victim) -> None:
    """The next step is not applied, leaves nothing behind, and names this sample and no other."""
    restore(world.learner, world.start)
    samples, _ = world.samples()
    guilty = samples[victim[0] * len(REWARDS) + victim[1]]
    before = digest(world.learner)
    report = world.learner.learn(samples)
    assert not report.applied, "the step was applied"
    assert report.version == world.learner.version == world.start.version, "a refused step has no version"
    assert digest(world.learner) == before, "a refused step moved something"
    assert all(p.grad is None for p in world.learner.net.parameters()), "a gradient was left behind"
    named(report, guilty)


def named(report: StepReport, guilty: TrainSample) -> None:
    assert [text.partition(": ")[0] for text in report.suspects] == [name_of(guilty)], f"named: {report.suspects}"
