"""Same seed and threads: the same numbers, bit for bit. Another seed: other numbers."""

from __future__ import annotations

from pathlib import Path

from command import Ran, surefoot

CLOCKED = ("timing/", "step_time", "tokens_per_second", "killswitch/eval_share", "memory/peak")
WORDS = ["max_steps=4", "tasks_per_step=4", "eval_tasks=40", "eval_steps=2", "num_tasks=1000"]
FEW = ["max_steps=3", "tasks_per_step=4", "eval_tasks=20", "num_tasks=1000"]


def unclocked(ran: Ran) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKED)} for row in ran.metrics]


def test_same_seed_same_bits_other_seed_other_bits(tmp_path: Path) -> None:
    first = surefoot("train", *WORDS, cwd=tmp_path, run="a", fresh=True)  # another interpreter, other hashes of strings
    second = surefoot("train", *WORDS, cwd=tmp_path, run="b")
    other = surefoot("train", *WORDS, "seed=1", cwd=tmp_path, run="c")
    assert (first.code, second.code, other.code) == (0, 0, 0), first.err + second.err + other.err
    assert len(unclocked(first)) == 7, "four steps, three evaluations"
    assert unclocked(first) == unclocked(second)
    assert unclocked(first) != unclocked(other)
    name = "checkpoints/step_4/model.safetensors"
    assert (first.run / name).read_bytes() == (second.run / name).read_bytes()
    assert (first.run / name).read_bytes() != (other.run / name).read_bytes()


def test_looking_on_changes_nothing(tmp_path: Path) -> None:
    """Evaluating more often draws from other streams, so the training rows stay bit-equal."""
    often = surefoot("train", *FEW, "eval_steps=1", cwd=tmp_path, run="often")
    never = surefoot("train", *FEW, "eval_on_start=false", cwd=tmp_path, run="never")
    rows = [[r for r in unclocked(ran) if "reward" in r] for ran in (often, never)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3
