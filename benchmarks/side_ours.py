"""surefoot's side of `end_to_end.py`: the product's own loop, waiting for its turn between two steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from end_to_end import GENERATIONS, LEARNING_RATE, Cell, fingerprint, first_row, reward, side_arguments
from sides import Gate

from surefoot.config import Config
from surefoot.rewards.pool import RewardPool
from surefoot.run.inputs import FromPython, read_inputs

if TYPE_CHECKING:
    from surefoot.records import Group, Task
    from surefoot.run.build import Parts


class Over(Exception):
    """Not an error: the parent wants no more steps."""


class Turns:
    """Feeds tasks in file order and reports what each step did with them."""

    def __init__(self, gate: Gate, parts: Parts) -> None:
        self.gate, self.parts = gate, parts
        self.given = 0
        self.facts: dict[str, Any] | None = None
        self.row = first_row(parts.policy.model)
        self.parameters = sum(p.numel() for p in parts.policy.model.parameters())

    def next_tasks(self, count: int) -> list[Task]:
        """The start of a step, and so the end of the one before."""
        if not self.gate.turn(self.facts):
            raise Over
        tasks = self.parts.train
        chosen = [tasks[(self.given + i) % len(tasks)] for i in range(count)]
        self.given += count
        return chosen

    def note_groups(self, step: int, groups: Sequence[Group]) -> None:
        """What was sampled."""
        rollouts = [r for g in groups for r in g.rollouts]
        prompts = [g.rollouts[0].turns[0].prompt_ids for g in groups]
        self.facts = {
            "work": {
                "prompts": fingerprint(prompts),
                "completions": len(rollouts),
                "sampled_tokens": sum(r.sampled_tokens for r in rollouts),
            },
            "prompt_tokens": sum(map(len, prompts)),
            "parameters": self.parameters, "peak_gib": peak_gib(),
        }  # fmt: skip

    def note_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """What was trained on; comes after the groups."""
        assert self.facts is not None, "the loop keeps groups before it logs"
        self.facts["work"]["trained_tokens"] = int(metrics["trained_tokens"])
        self.facts["work"]["groups_without_signal"] = metrics["frac_reward_zero_std"]
        before, self.row = self.row, first_row(self.parts.policy.model)
        self.facts["work"]["weights_moved"] = before != self.row
        for name in ("grad_norm", "timing/collect", "timing/learn", "timing/merge", "timing/publish"):
            self.facts[name] = metrics.get(name)


def peak_gib() -> float:
    """Of this process on a GPU, since it began."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def make_config(cell: Cell, model: str, threads: int, device: str, **more: Any) -> Config:
    """Every number that also stands in `side_trl.py`."""
    return Config(
        model=model, tasks="python", max_steps=10_000, threads=threads, device=device,
        dtype="bfloat16" if device == "cuda" else "float32", **more,
        tasks_per_step=cell.tasks, num_generations=GENERATIONS, max_completion_length=cell.tokens, temperature=1.0,
        learning_rate=LEARNING_RATE, loss_type="dapo", beta=0.0, heldout_fraction=0.0, eval_on_start=False,
        eval_metric="none", preflight_tasks=0,
    )  # fmt: skip


def main() -> None:
    """Wire the product and run its loop until the parent has seen enough."""
    args = side_arguments()
    gate = Gate()
    more: dict[str, Any] = {"cuda_kernels": False} if args.plain else {}
    more |= {"lora": {"rank": args.lora}} if args.lora else {}
    more |= {"gradient_checkpointing": True} if args.checkpointing else {}
    config = make_config(args.cell, args.model, args.threads, args.device, **more)
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in json.loads(args.tasks.read_text())]
    inputs = read_inputs(config, Path.cwd(), FromPython(rows, [reward]))
    with RewardPool(inputs.functions, workers=config.reward_workers, timeout_s=60.0) as pool:
        from surefoot.loop import Hooks, Run, train
        from surefoot.run.build import build
        from surefoot.runtime.task_queue import MemoryTaskQueue, StepSampler

        parts = build(config, Path.cwd(), inputs, pool)
        parts.codec.stop_ids = frozenset()  # exactly max_completion_length tokens: nothing ends a turn early
        turns = Turns(gate, parts)
        hooks = Hooks(
            log=turns.note_metrics, save_rollouts=turns.note_groups, evaluated=lambda *_: None, warn=print,
            step_refused=lambda *_: None, save=lambda *_: None,
        )  # fmt: skip
        queue = StepSampler(MemoryTaskQueue(turns.next_tasks), parts.runtime, config)
        run = Run(config, parts.runtime, parts.learner, parts.codec, queue, (), hooks)
        gate.ready(config.model_dump(mode="json"))
        try:
            train(run)
        except Over:
            return


if __name__ == "__main__":
    main()
