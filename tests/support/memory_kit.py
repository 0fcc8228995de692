"""A step in a process whose memory really is too small; the program that `test_out_of_memory.py` starts.

python tests/support/memory_kit.py 250     learn one step within 250 MiB above what the process has, print what came
"""

from __future__ import annotations

import copy
import json
import random
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint_kit import make_net

from surefoot.errors import SurefootError
from surefoot.learner.forward import score_batch
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.learner.samples import to_samples
from surefoot.maths.losses import LossSettings
from surefoot.maths.packing import make_batch
from surefoot.records import STOP, Group, Rollout, Task, TrainSample, Turn

ROWS, WIDTH = 16, 128
"""2,048 tokens; with 4,096 wide layers, each activation of the whole batch has 32 MiB."""


def make_learner(net: Any) -> GRPOLearner:
    settings = LearnerSettings(
        loss=LossSettings(), learning_rate=1e-2, max_steps=9, max_completion_length=WIDTH, temperature=1.0,
        pad_token_id=0,
    )  # fmt: skip
    return GRPOLearner(copy.deepcopy(net), settings)


def draw(net: Any, rows: int, width: int) -> list[TrainSample]:
    """Siblings of one task as the net's own sampler would have stamped them, scored row by row."""
    stream, prompt = random.Random("memory"), (4, 9, 5)
    said = [tuple(stream.randrange(3, 50) for _ in range(width)) for _ in range(rows)]
    rollouts = tuple(
        Rollout("t", "g", i, (Turn(prompt, ids, (0.0,) * width, 0, finish_reason=STOP),), reward=float(i))
        for i, ids in enumerate(said)
    )
    samples = to_samples([Group(Task(id="t", prompt="?"), "g", rollouts)], scale="group")
    with torch.no_grad():
        for i, sample in enumerate(samples):
            batch, _ = make_batch([sample], pad_token_id=0)
            scores = score_batch(net, batch, temperature=1.0, with_entropy=False).logprobs[0]
            object.__setattr__(samples[i], "logprobs", tuple(scores.tolist()))
    return samples


def weights(learner: GRPOLearner) -> list[torch.Tensor]:
    return [p.detach().clone() for p in learner.net.parameters()]


def equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def limited(learner: GRPOLearner, samples: Sequence[TrainSample], megabytes: int) -> dict[str, Any]:
    """One step with so much memory above what is in use now."""
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size + (megabytes << 20), hard))
    try:
        report = learner.learn(samples)
    except SurefootError as error:
        return {"code": error.exit_code, "error": type(error).__name__, "text": str(error)}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return {"code": 0, "applied": report.applied, "splits": learner.splits, "notes": report.notes}


def attempt(net: Any, samples: Sequence[TrainSample], megabytes: int) -> dict[str, Any]:
    learner = make_learner(net)
    before = weights(learner)
    told = limited(learner, samples, megabytes)
    if told["code"]:
        return told | {"untouched": equal(before, weights(learner))}
    spacious = make_learner(net)
    spacious.splits = learner.splits
    spacious.learn(samples)
    moved = not equal(before, weights(learner))
    return told | {"moved": moved, "equal": equal(weights(learner), weights(spacious))}


def main(sizes: Sequence[int]) -> int:
    """Smallest first: what a spacious step leaves to the allocator would be room for the next."""
    torch.set_num_threads(1)
    net = make_net(hidden_size=64, intermediate_size=4096)
    samples = draw(net, ROWS, WIDTH)
    make_learner(net).learn(draw(net, 2, 4))  # libraries, threads and caches are loaded before the limit
    print(json.dumps({megabytes: attempt(net, samples, megabytes) for megabytes in sorted(sizes)}))
    return 0


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]]))
