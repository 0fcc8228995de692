"""Engines that take weights honestly, and twenty ways to say so without doing it.

    world = World(learning_rate=1e-3)
    await world.sync(lie="old_head", liar=1, seed=7)     one optimiser step, then a publish in which engine 1 lies

The learner, its optimiser steps, the engines and the publisher are the real ones, on the built-in model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpoint_kit import draw
from torch import Tensor

from surefoot.engines.decoder import StackedLinear
from surefoot.engines.embedded import EmbeddedEngine
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.learner.model import load_policy
from surefoot.maths.checksums import checksums
from surefoot.maths.losses import LossSettings
from surefoot.protocols import Completion, Request
from surefoot.runtime.weights import Publisher, make_probes

Tensors = dict[str, Tensor]
TOLERANCE = 1e-4
WIDTH = 128


class EngineReplica:
    """An embedded engine as the publisher sees one: stages copies, sums them up, loads them."""

    def __init__(self, name: str, spec: Any, *, width: int = WIDTH) -> None:
        self.name = name
        self.engine = EmbeddedEngine(spec, rows=8, max_width=width)
        self.staged: Tensors = {}
        self.in_force: Tensors = {}
        self.first: Tensors = {}

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, int]:
        self.staged = {name: tensor.detach().clone() for name, tensor in weights.items()}
        return checksums(self.staged)

    async def commit(self, version: int) -> Mapping[str, int]:
        self.engine.load_weights(self.staged, version)
        self.in_force = self.staged
        self.first = self.first or self.staged
        return {}

    async def ask(self, requests: Sequence[Request]) -> list[Completion]:
        return self.engine.generate(requests)


class Liar(EngineReplica):
    """Honest until `lie` names what it does in the next sync; see `LIES`."""

    lie: str | None = None
    dice = random.Random(0)

    def __init__(self, name: str, spec: Any, *, width: int = WIDTH) -> None:
        super().__init__(name, spec, width=width)
        self.tape: list[Completion] = []
        self.kept: dict[tuple[int, ...], Any] = {}

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, int]:
        told = await super().prepare(weights, version)
        lie, echoed = _split(self.lie)
        if lie in SPOILERS:
            SPOILERS[lie](self.staged, self.in_force, self.dice)
        if lie == "acknowledges_nothing":
            return self.dice.choice([{}, None])  # type: ignore[return-value]
        if lie == "acknowledges_half":
            return dict(list(told.items())[::2])
        return told if echoed else checksums(self.staged)

    async def commit(self, version: int) -> Mapping[str, int]:
        old_head = self.engine.decoder.head
        if self.lie == "keeps_old_weights":
            self.engine._version = version
        elif self.lie == "restarted_from_the_start":
            self.engine.load_weights(self.first, version)
        elif self.lie != "never_commits":
            await super().commit(version)
        if self.lie == "old_head" and old_head is not None:
            self.engine.decoder.head = StackedLinear(old_head.weights, None, self.engine.rows)
        return {}

    async def ask(self, requests: Sequence[Request]) -> list[Completion]:
        self._cache(stale=self.lie == "stale_prefix_cache")
        said = await super().ask(requests)
        before, self.tape = self.tape, said
        if self.lie == "plays_a_tape":
            return [replace(c, request_id=r.id, version=said[0].version, version_end=said[0].version)
                    for r, c in zip(requests, before, strict=True)]  # fmt: skip
        if self.lie == "old_stamp":
            return [replace(c, version=c.version - 1) for c in said]
        if self.lie == "mixed_stamp":
            return [*said[:-1], replace(said[-1], version_end=said[-1].version - 1)]
        if self.lie == "no_logprobs":
            return [replace(c, logprobs=(0.0,) * len(c.logprobs)) for c in said]
        if self.lie == "answers_less":
            return said[:-1]
        return said

    def _cache(self, *, stale: bool) -> None:
        """Keys and values of every prompt are kept; only a liar still has those of an older version."""
        decoder = self.engine.decoder
        real = type(decoder).prefill
        if not stale:
            self.kept = {}

        def prefill(prompt_ids: tuple[int, ...]) -> Any:
            if prompt_ids not in self.kept:
                self.kept[prompt_ids] = real(decoder, prompt_ids)
            return self.kept[prompt_ids]

        decoder.prefill = prefill  # type: ignore[method-assign]


def _split(lie: str | None) -> tuple[str, bool]:
    """The deed, and whether the engine tells the learner's own sums instead of those of what it holds."""
    return (lie or "").removesuffix("_and_echoes"), (lie or "").endswith("_and_echoes")


Spoiler = Callable[[Tensors, Tensors, random.Random], None]


def _matrices(tensors: Tensors) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.dim() == 2]


def one_tensor_old(new: Tensors, old: Tensors, dice: random.Random) -> None:
    name = dice.choice(_matrices(new))
    new[name] = old[name].clone()


def half_the_layers(new: Tensors, old: Tensors, dice: random.Random) -> None:
    new.update({name: old[name].clone() for name in list(new)[len(new) // 2 :]})


def two_tensors_swapped(new: Tensors, old: Tensors, dice: random.Random) -> None:
    layer = dice.choice([name.removesuffix("gate_proj.weight") for name in new if name.endswith("gate_proj.weight")])
    one, two = layer + "gate_proj.weight", layer + "up_proj.weight"
    new[one], new[two] = new[two], new[one]


def rounded_to_bfloat16(new: Tensors, old: Tensors, dice: random.Random) -> None:
    new.update({name: tensor.bfloat16().float() for name, tensor in new.items()})


def not_a_number(new: Tensors, old: Tensors, dice: random.Random) -> None:
    new[dice.choice(_matrices(new))].view(-1)[dice.randrange(64)] = float("nan")


def one_bit(new: Tensors, old: Tensors, dice: random.Random) -> None:
    words = new[dice.choice(list(new))].view(-1).view(torch.int32)
    words[dice.randrange(words.numel())] ^= 1


def zeros(new: Tensors, old: Tensors, dice: random.Random) -> None:
    new[dice.choice(_matrices(new))].zero_()


SPOILERS: dict[str, Spoiler] = {
    f.__name__: f
    for f in (one_tensor_old, half_the_layers, two_tensors_swapped, rounded_to_bfloat16, not_a_number, one_bit, zeros)
}
BY_CHECKSUM = ["acknowledges_nothing", "acknowledges_half", *SPOILERS]
"""The engine tells what it holds, and it is not what was sent."""
BY_CANARY = [
    "keeps_old_weights", "old_head", "stale_prefix_cache", "restarted_from_the_start", "plays_a_tape", "no_logprobs",
    *(f"{name}_and_echoes" for name in SPOILERS if name not in ("one_bit", "not_a_number")),
]  # fmt: skip
"""The engine tells what it was sent, and does something else."""
BY_FORM = ["never_commits", "old_stamp", "mixed_stamp", "answers_less", "not_a_number_and_echoes"]
"""What it answers is no answer, or bears another version."""
LIES = [*BY_CHECKSUM, *BY_CANARY, *BY_FORM]


class World:
    """A learner that steps, and engines that are to follow it."""

    def __init__(self, *, learning_rate: float, engines: int = 2) -> None:
        policy = load_policy("pebble", base=Path.cwd(), device="cpu", dtype="float32")
        settings = LearnerSettings(
            loss=LossSettings(), learning_rate=learning_rate, max_steps=1000, max_completion_length=9, temperature=1.0,
            pad_token_id=0, lr_scheduler_type="constant",
        )  # fmt: skip
        self.learner = GRPOLearner(policy.model, settings)
        self.replicas = [Liar(f"engine {i}", policy.spec) for i in range(engines)]
        prompts = [(1, 5, 9, 12), (1, 7, 7, 30, 22), (1, 40, 41)]
        probes = make_probes(prompts, temperature=1.0, max_width=WIDTH)
        self.publisher = Publisher(probes, self.learner.score, tolerance=TOLERANCE)

    def step(self) -> None:
        """One optimiser step on answers that nobody gave: any change of the weights will do."""
        self.learner.learn(draw(self.learner, self.learner.version))

    async def publish(self) -> dict[str, float]:
        weights = {name: tensor.detach() for name, tensor in self.learner.weights().items()}
        return await self.publisher.publish(self.replicas, weights, checksums(weights), self.learner.version)

    async def sync(self, *, lie: str | None = None, liar: int = 0, seed: int = 0) -> dict[str, float]:
        """Step and publish; with `lie`, one engine does something else than it says."""
        self.step()
        for replica in self.replicas:
            replica.lie = None
        self.replicas[liar].lie, self.replicas[liar].dice = lie, random.Random(seed)
        return await self.publish()
