"""dtype = "bfloat16" through the command: it learns as float32 does, is kept as it is, and says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from command import Ran, surefoot

pytestmark = pytest.mark.usefixtures("bfloat16_products")
QUICK = {
    "device": "cpu", "threads": "1", "max_steps": "4", "learning_rate": "1e-6", "tasks_per_step": "8",
    "num_tasks": "1000", "eval_tasks": "20", "preflight_tasks": "0", "guard.mode": "off",
}  # fmt: skip


def train(tmp_path: Path, *words: str, planted: str | None = None, run: str = "run") -> Ran:
    keys = QUICK | dict(word.split("=", 1) for word in words)
    return surefoot("train", *(f"{key}={value}" for key, value in keys.items()), cwd=tmp_path, planted=planted, run=run)


def shares(ran: Ran, name: str) -> list[float]:
    return [m[f"updates/{name}_share"] for m in ran.metrics if "reward" in m]


@pytest.mark.config_key("dtype")
def test_four_steps_at_1e6_change_as_many_entries_as_in_float32(tmp_path: Path) -> None:
    coarse, fine = (train(tmp_path, f"dtype={d}", run=d) for d in ("bfloat16", "float32"))
    assert (coarse.code, fine.code) == (0, 0), coarse.err + fine.err
    assert len(shares(fine, "changed")) == 4
    assert min(shares(fine, "changed")) > 0.9
    assert shares(coarse, "changed") == pytest.approx(shares(fine, "changed"), abs=0.01)
    assert shares(fine, "published") == shares(fine, "changed"), "what is trained is what engines get"
    assert all(0 < share < 0.1 for share in shares(coarse, "published")), "in bfloat16 most of the copy stays"
    looked = surefoot("eval", "bfloat16", cwd=tmp_path)
    assert looked.code == 0, looked.err
    last = [m for m in coarse.metrics if "eval_accuracy" in m][-1]
    found = dict(line.split() for line in looked.out.splitlines() if line.startswith("eval_"))
    assert float(found["eval_accuracy"]) == pytest.approx(last["eval_accuracy"], abs=1e-4)
    assert float(found["eval_completions/mean_length"]) == pytest.approx(last["eval_completions/mean_length"], abs=1e-4)


@pytest.mark.parametrize(
    ("words", "planted", "said"),
    [
        (["dtype=bfloat16"], "pure_bfloat16", "in bfloat16"),
        (["dtype=float32", "learning_rate=1e-12"], None, "in float32"),
    ],
    ids=["planted optimiser over bfloat16", "a rate below float32's last digit"],
)
def test_planted_updates_that_are_rounded_away_stop_the_run_with_78(
    words: Sequence[str], planted: str | None, said: str, tmp_path: Path
) -> None:
    ran = train(tmp_path, *words, planted=planted)
    assert ran.code == 78, ran.err
    assert "had to move" in ran.err
    assert said in ran.err
    assert "raise learning_rate" in ran.err
    assert "dtype" in ran.err
    assert ran.verdict["status"] != "PASS"


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ("learn_twice", "after step 1 the learner has version 2, and 0 steps were refused"),
        ("own_rate", "is scheduled at learning rate"),
    ],
)
def test_planted_second_account_of_steps_or_rates_stops_the_run(planted: str, said: str, tmp_path: Path) -> None:
    ran = train(tmp_path, planted=planted)
    assert ran.code not in (0, 2), ran.err
    assert said in ran.err


def test_masters_begin_as_the_models_own_file(tmp_path: Path) -> None:
    """A model saved in float32 is not rounded on its way in; planted, the wire is cut, and the checkpoint shows it."""
    first = train(tmp_path, "dtype=float32", "max_steps=1", "learning_rate=1e-3", run="fine")
    assert first.code == 0, first.err
    words = ["dtype=bfloat16", "max_steps=1", f"model={first.run / 'checkpoints/step_1'}"]
    kept, rounded = (train(tmp_path, *words, planted=p, run=f"run_{p}") for p in (None, "rounded_start"))
    assert (kept.code, rounded.code) == (0, 0), kept.err + rounded.err
    assert far(first, kept) < 2e-6, "one step of 1e-6 away from the file"
    assert far(first, rounded) > 1e-5


def far(first: Ran, second: Ran) -> float:
    """How far the masters of a run are from the weights that it began with, at most, relative to their size."""
    from safetensors.torch import load_file

    begun = load_file(first.run / "checkpoints/step_1/model.safetensors")
    masters = load_file(second.run / "checkpoints/step_1/training/masters.safetensors")
    return max(float((masters[name] - value).abs().max()) for name, value in begun.items() if name in masters)


def test_the_dry_run_prints_what_precision_costs(tmp_path: Path) -> None:
    said = {d: surefoot("train", "--dry-run", f"dtype={d}", cwd=tmp_path, run="").out for d in ("float32", "bfloat16")}
    lines = {d: {line[:34].strip(): line[34:].strip() for line in text.splitlines()} for d, text in said.items()}
    assert "float32 masters" not in lines["float32"]
    assert lines["bfloat16"]["float32 masters"] == lines["bfloat16"]["gradients"] == lines["float32"]["weights"]
    assert lines["bfloat16"]["optimiser states"] == lines["float32"]["optimiser states"]
    assert lines["bfloat16"]["engine copy"] == lines["bfloat16"]["weights"] != lines["float32"]["weights"]


def test_a_processor_that_dies_of_bfloat16_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """The same words with float32 go on, and so does the process that asked."""
    dead = train(tmp_path, "dtype=bfloat16", planted="no_bfloat16")
    assert dead.code == 2, dead.err
    assert "dtype = bfloat16 on device cpu: a product ends its process (signal 4)" in dead.err
    assert not dead.run.exists(), "a refused start takes its folder back"
    dry = surefoot("train", "--dry-run", "device=cpu", "dtype=bfloat16", cwd=tmp_path, planted="no_bfloat16", run="")
    assert dry.code == 2, dry.err
