"""A small learner that saves, dies and goes on: what the tests of checkpoints share, and the program they start.

    python tests/support/checkpoint_kit.py go-on FOLDER STEPS   restore FOLDER into a fresh model, train on, print

Samples are drawn from a stream of their own and scored with the weights of the moment, so a wrong bit in the weights
is a wrong bit in every later number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as hf_logging

from surefoot.learner.checkpoint import TrainingState, capture, load_training_checkpoint, save_training_checkpoint
from surefoot.learner.forward import score_batch
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.learner.lora import Adapter, LoraSettings
from surefoot.learner.precision import split_precision
from surefoot.learner.quantised import quantise
from surefoot.maths.losses import LossSettings
from surefoot.maths.packing import make_batch
from surefoot.records import Group, Rollout, Task, TrainSample, Turn
from surefoot.storage.files import MANIFEST, manifest_text

ROOT = Path(__file__).parents[2]
PASSES = 2
"""Optimiser steps over the same samples: a checkpoint between two of them needs the old logprobs."""
_spec = importlib.util.spec_from_file_location("unit_conftest", ROOT / "tests/unit/conftest.py")
assert _spec is not None, "the tiny models live in tests/unit/conftest.py"
assert _spec.loader is not None, "a file of Python has a loader"
_unit = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_unit)
make_net, make_tokenizer = _unit._make_net, _unit._make_tokenizer
hf_logging.disable_progress_bar()


def make_learner(
    kind: str = "llama", *, seed: int = 0, beta: float = 0.1, sync: int | None = None, dtype: str = "float32",
    lora: LoraSettings | None = None, optim: str = "adamw",
) -> GRPOLearner:  # fmt: skip
    settings = LearnerSettings(
        loss=LossSettings(beta=beta), learning_rate=1e-2, max_steps=40, max_completion_length=9, temperature=1.0,
        pad_token_id=0, lr_scheduler_type="cosine", warmup_steps=3, weight_decay=0.1, reference_sync_steps=sync,
        parity_tolerance=1e-4 if dtype == "float32" else 0.2, optim=optim,
    )  # fmt: skip
    net = make_net(kind, seed=seed)
    packed = (
        None
        if lora is None or lora.quantization == "none"
        else quantise(net, lora.modules_to_save, getattr(torch, dtype))
    )
    masters = split_precision(net, getattr(torch, dtype))
    adapter = None if lora is None else Adapter(net, lora, masters, packed)
    return GRPOLearner(net, settings, None, masters, adapter=adapter)


def draw(learner: GRPOLearner, collect: int) -> list[TrainSample]:
    """Samples as an engine with the learner's weights would have stamped them."""
    from surefoot.learner.samples import to_samples

    stream = random.Random(f"draw/{collect}")
    groups = []
    for g in range(2):
        name, prompt = f"train/{collect}/{g} é", tuple(stream.randrange(3, 50) for _ in range(3 + g))
        rollouts = []
        for i in range(3):
            said = tuple(stream.randrange(3, 50) for _ in range(stream.randrange(2, 9)))
            turn = Turn(prompt, said, (0.0,) * len(said), learner.version, finish_reason="stop")
            rollouts.append(Rollout(f"t{g}", name, i, (turn,), reward=float(stream.random())))
        groups.append(Group(Task(id=f"t{g}", prompt="?"), name, tuple(rollouts)))
    samples = to_samples(groups, scale="group")
    batch, _ = make_batch(samples, pad_token_id=0)
    with torch.no_grad():
        scores = score_batch(learner.net, batch, temperature=1.0, with_entropy=False).logprobs
    return [
        dataclasses.replace(s, logprobs=tuple(scores[row, : len(s.completion_ids)].tolist()))
        for row, s in enumerate(samples)
    ]


@dataclasses.dataclass
class Session:
    """A learner, the samples under way, and every step's numbers."""

    learner: GRPOLearner
    step: int = 0
    held: list[TrainSample] = dataclasses.field(default_factory=list)
    metrics: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def train(self, steps: int) -> Session:
        for _ in range(steps):
            if self.step % PASSES == 0:
                self.held = draw(self.learner, self.step)
            report = self.learner.learn(self.held, iteration=self.step % PASSES)
            assert report.applied, "a refused step compares nothing"
            self.metrics.append(dict(report.metrics))
            self.step += 1
        return self

    def save(self, folder: Path) -> Path:
        extra = {"held": [dataclasses.asdict(s) for s in self.held]}
        return save_training_checkpoint(self.learner, make_tokenizer(), folder, step=self.step, extra=extra)

    @classmethod
    def load(cls, folder: Path, learner: GRPOLearner) -> Session:
        loaded = load_training_checkpoint(learner, folder)
        held = [
            TrainSample(**{k: tuple(v) if isinstance(v, list) else v for k, v in record.items()})
            for record in loaded.extra["held"]
        ]
        return cls(learner, loaded.step, held)


def fingerprint(state: TrainingState) -> str:
    """One digest of every bit of a state."""
    digest = hashlib.sha256()
    groups = {"weights": state.weights, "reference": state.reference or {}, "masters": state.masters or {}}
    groups |= state.moments
    for group in sorted(groups):
        for name in sorted(groups[group]):
            value = groups[group][name].detach().contiguous()
            digest.update(f"{group}/{name}/{value.dtype}/{tuple(value.shape)}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    for key in sorted(state.old):
        digest.update(repr(key).encode() + state.old[key].numpy().tobytes())
    counts = (state.version, state.pushes, state.checked_tokens, state.changed_entries)
    rest = (*counts, state.kl_seen, state.parameter_updates, sorted(state.idle.items()))
    digest.update(repr(rest).encode())
    return digest.hexdigest()


def resealed(
    folder: Path, *, sizes: Mapping[str, int] | None = None, digests: Mapping[str, Any] | None = None, **facts: Any
) -> Path:
    """Make the manifest agree with the files again, as an attacker would; `sizes` and `digests` may lie."""
    old = json.loads((folder / MANIFEST).read_text())
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            known = (digests or {}).get(name)
            sha = known["sha256"] if known else hashlib.sha256(path.read_bytes()).hexdigest()
            files[name] = {"size": (sizes or {}).get(name, path.stat().st_size), "sha256": sha}
    kept = {key: value for key, value in old.items() if key not in ("format", "files", "digest")}
    (folder / MANIFEST).write_text(manifest_text(kept | facts, files))
    return folder


def go_on(folder: Path, steps: int, kind: str, beta: float, dtype: str = "float32") -> dict[str, Any]:
    """In a fresh model whose weights are all wrong: restore, then train on."""
    session = Session.load(folder, make_learner(kind, seed=99, beta=beta, dtype=dtype))
    session.train(steps)
    return {"metrics": session.metrics, "state": fingerprint(capture(session.learner)), "step": session.step}


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    command, *rest = words
    if command == "go-on":
        print(json.dumps(go_on(Path(rest[0]), int(rest[1]), rest[2], float(rest[3]), *rest[4:])))
        return 0
    raise SystemExit(f"unknown command {command!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
