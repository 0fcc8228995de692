"""One measurement of memory, in a process of its own: a model of made-up weights samples and learns.

    python -m surefoot.run.memory_child < cell.json        {"shape": {...}, "work": {...}, "rank": null}

Promises   what is measured is what a run has: its engine, its learner, its optimiser, its microbatches, two steps long,
           so that moments and the gradients of the step before are there; a device that gave memory and reads 0 is an
           error, not a small number.
Never      loads a model.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from surefoot.engines.graphs import embedded_engine
from surefoot.errors import InvariantError
from surefoot.learner.footprint import FLOAT32, ModelShape, Work, predict
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.learner.lora import Adapter, LoraSettings
from surefoot.learner.memory import take_peak, unused_bytes, work_of
from surefoot.learner.model import made_up_net
from surefoot.learner.precision import split_precision
from surefoot.maths.losses import LossSettings
from surefoot.protocols import Request, StepReport
from surefoot.records import TrainSample
from surefoot.storage.files import failpoint
from surefoot.system.memory import resident_bytes

STEPS = 2
TINY = ModelShape(0, 1, 32, 64, 2, 1, 16, 64)


class _Watched(GRPOLearner):
    """Tells the peak of scoring and going back from that of the optimiser's step."""

    learning = 0

    def _apply(self, *args: Any) -> StepReport:
        self.learning = take_peak(self.device)
        return super()._apply(*args)


def measure(shape: ModelShape, work: Work, rank: int | None) -> dict[str, Any]:
    """Peaks in bytes, by phase, of a run of this work; on a CPU without what the process had before."""
    device = torch.device(work.device)
    if device.type != "cuda" and shape != TINY:  # what is loaded at first use is not the model's
        measure(TINY, replace(work, groups=1, siblings=2, prompt=4, completion=4, rows=2, microbatch_size=0), None)
    before = 0 if device.type == "cuda" else resident_bytes(os.getpid())
    free = unused_bytes(device)
    learner, spec = _learner(shape, work, rank)
    shape = replace(shape, parameters=sum(p.numel() for p in learner.weights().values()))
    if _in_use(device) == 0:
        raise InvariantError(
            f"a model of {shape.parameters:,} parameters is on {device}, which reads 0 bytes in use",
            "a reading of nothing would pass for a small peak", "look at the device's driver; measure elsewhere",
        )  # fmt: skip
    engine = embedded_engine(
        spec, rows=work.rows, max_width=work.prompt + work.completion + 1, device=work.device,
        dtype=next(learner.net.parameters()).dtype,
    )  # fmt: skip
    phases = {"made": take_peak(device)}
    for step in range(STEPS):
        engine.load_weights(learner.weights(), learner.version)
        engine.generate(_requests(shape, work, step))
        phases["sampling"] = max(phases.get("sampling", 0), take_peak(device))
        failpoint("memory.before_learn")
        phases["stepping"] = learner.learn(_samples(shape, work, learner.version)).memory_peak
        phases["learning"] = learner.learning
    lasting = _in_use(device)
    found = {name: max(0, value - before) for name, value in phases.items()}
    same = replace(
        work, free=free, fused=learner.fused, recomputes=learner.recomputes,
        adapter=work_of(learner, _samples(shape, work, 0)).adapter,
    )  # fmt: skip
    footprint = predict(shape, same)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "torch": torch.__version__,
        "peak": max(found.values()), "phases": found, "in use after": max(0, lasting - before),
        "recomputes": learner.recomputes, "fused": learner.fused, "free": free,
        "predicted then": footprint.peak, "moments": dict(footprint.moments), "lasting": dict(footprint.lasting),
        "passing": dict(footprint.passing), "piece": asdict(footprint.microbatch), "room": learner._tokens,
    }  # fmt: skip


def _learner(shape: ModelShape, work: Work, rank: int | None) -> tuple[_Watched, Any]:
    words = {
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab,
        "max_position_embeddings": work.prompt + work.completion + 64,
    }  # fmt: skip
    net, spec = made_up_net(words, shape.layers, work.device, "float32", tied=shape.tied, qk_norm=shape.qk_norm)
    dtype = torch.float32 if work.width == FLOAT32 else torch.bfloat16
    masters = split_precision(net, dtype)
    adapter = None
    if rank is not None:
        adapter, masters = Adapter(net, LoraSettings(rank, 2.0 * rank, ("all-linear",))), None
    settings = LearnerSettings(
        LossSettings(beta=0.1 if work.reference else 0.0), learning_rate=1e-5, max_steps=10**6,
        max_completion_length=work.completion, temperature=1.0, pad_token_id=0, optim=work.optim,
        microbatch_size=work.microbatch_size, gradient_checkpointing=work.recomputes,
        parity_tolerance=1e9,  # nobody sampled the tokens that are learned from
    )  # fmt: skip
    return _Watched(net, settings, masters=masters, adapter=adapter), spec


def _in_use(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes(os.getpid())


def _requests(shape: ModelShape, work: Work, step: int) -> list[Request]:
    """All rollouts of a step, siblings beside each other."""
    tokens = work.completion if work.device == "cuda" else min(work.completion, 4)  # a CPU's cache is taken at once
    return [
        Request(f"{g}/{s}", _prompt(shape, work, step * work.groups + g), tokens, 1.0, frozenset(), g * 1000 + s)
        for g in range(work.groups) for s in range(work.siblings)
    ]  # fmt: skip


def _prompt(shape: ModelShape, work: Work, group: int) -> tuple[int, ...]:
    return tuple((group + 3 * n) % (shape.vocab - 1) + 1 for n in range(work.prompt))


def _samples(shape: ModelShape, work: Work, version: int) -> list[TrainSample]:
    length = work.completion
    return [
        TrainSample(
            item_id=f"made/{g}", trainer_version=version, group=str(g), index=s, reward=float(s % 2),
            prompt_ids=_prompt(shape, work, g),
            completion_ids=tuple((g + s + 5 * n) % (shape.vocab - 1) + 1 for n in range(length)),
            sampled=(True,) * length, logprobs=(-9.0,) * length, advantage=1.0 if s % 2 else -1.0,
            finish_reason="length",
        )
        for g in range(work.groups) for s in range(work.siblings)
    ]  # fmt: skip


def read_cell(text: str) -> tuple[ModelShape, Work, int | None]:
    """What `memory_profile` asks for."""
    asked: Mapping[str, Any] = json.loads(text)
    return ModelShape(**asked["shape"]), Work(**asked["work"]), asked["rank"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(*read_cell(sys.stdin.read()))))
