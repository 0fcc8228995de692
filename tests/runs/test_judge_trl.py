"""A stranger's run, judged from what it left behind: TRL's own trainer, its TensorBoard events and trainer_state.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, surefoot

pytest.importorskip("trl", reason="needs the trl extra")
pytest.importorskip("tensorboard", reason="needs tensorboard")

pytestmark = pytest.mark.filterwarnings("default")  # their warnings are theirs


def spread_out(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A number that differs between siblings and between tasks, so that no series here is constant by accident."""
    return [-float(number + int(prompt[:2])) for number, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of TRL's GRPO on our built-in model; logs go where TRL puts them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    folder = tmp_path_factory.mktemp("trl run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
        config = GRPOConfig(
            output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, num_generations=4, logging_steps=1,
            max_completion_length=4, report_to="tensorboard", use_cpu=True, bf16=False, gradient_checkpointing=False,
            save_strategy="no", disable_tqdm=True, seed=1,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=str(ROOT / "src" / "surefoot" / "assets" / "pebble"),
            reward_funcs=spread_out,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": f"{a}+{a}="} for a in range(10, 18)]),
        )
        trainer.train()
        trainer.save_state()
    return folder


def judge(source: Path, *checks: str) -> tuple[int, list[tuple[str, str]]]:
    done = surefoot("check", str(source), *checks, "--json", cwd=source if source.is_dir() else source.parent)
    assert done.code in (0, 1), done.err
    return done.code, [(row["check"], row["status"]) for row in json.loads(done.out)["checks"]]


@pytest.mark.parametrize("source", ["trainer_state.json", "events"])
def test_a_trl_run_is_judged_by_the_names_its_user_knows(trained: Path, source: str) -> None:
    good = ['data["train/loss"]["1"] < 100', 'count(data["train/reward"]) == 2', 'max(data["train/reward"]) <= 0']
    bad = ['data["train/loss"]["2"] > 1e6', 'data["train/loss"]["3"] < 100', 'min(data["train/no_such"]) < 1']
    code, rows = judge(trained / source, *good)
    assert (code, [status for _, status in rows]) == (0, ["PASS"] * 3)
    code, rows = judge(trained / source, *good, *bad)
    assert code == 1
    assert [status for _, status in rows] == ["PASS"] * 3 + ["FAIL"] * 3
    assert [check for check, _ in rows] == good + bad


@pytest.mark.parametrize("name", ["reward", "grad_norm"])
def test_both_sources_hold_the_same_numbers(trained: Path, name: str) -> None:
    history = json.loads((trained / "trainer_state.json").read_text())["log_history"]
    first, second = (next(row[name] for row in history if row["step"] == step) for step in (1, 2))
    assert first != second, "a constant would prove nothing"
    checks = [
        f'data["train/{name}"]["{step}"] > {value - 1e-4!r} and data["train/{name}"]["{step}"] < {value + 1e-4!r}'
        for step, value in ((1, first), (2, second))
    ]
    for source in ("trainer_state.json", "events"):
        assert judge(trained / source, *checks)[0] == 0


def test_planted_nan_in_a_trl_run_is_seen(trained: Path, tmp_path: Path) -> None:
    state = json.loads((trained / "trainer_state.json").read_text())
    state["log_history"][0]["loss"] = float("nan")
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    assert judge(tmp_path / "trainer_state.json", 'min(data["train/loss"]) < 100')[0] == 1
