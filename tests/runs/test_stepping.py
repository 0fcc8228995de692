"""A run that its caller steps is the run that `surefoot.train` makes, whatever is asked of it on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.errors import ConfigError, EngineError, RewardError, StateError
from surefoot.records import Verdict
from surefoot.run.stepping import TrainingRun

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 9) for b in range(3, 9)]
KEYS: dict[str, Any] = {
    "tasks": ROWS, "max_steps": 4, "tasks_per_step": 2, "num_generations": 4, "max_completion_length": 4, "threads": 1,
    "eval_tasks": 4, "eval_steps": 2, "preflight_tasks": 0, "reward_workers": 1, "learning_rate": 1e-3, "device": "cpu",
}  # fmt: skip
CLOCKS = ("timing/", "step_time", "tokens_per_second", "killswitch/eval_share", "memory/peak")


def score(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [len(set(text) & set(gold)) / 2 - 0.1 * len(text) for text, gold in zip(completions, answer, strict=True)]


def prepare(folder: Path, **more: Any) -> TrainingRun:
    return surefoot.prepare("pebble", score, output_dir=str(folder), **(KEYS | more))


def numbers(folder: Path) -> list[dict[str, float]]:
    """Every line of metrics without what a clock made."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(CLOCKS)} for row in rows]


def same(one: Path, other: Path) -> bool:
    """Whether two runs have the same numbers and the same weights."""
    weights = "checkpoints/step_4/model.safetensors"
    return numbers(one) == numbers(other) and (one / weights).read_bytes() == (other / weights).read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    surefoot.train("pebble", score, output_dir=str(folder), **KEYS)
    return folder


class Listener(surefoot.Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, object]] = []

    def on_step(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        self.told.append(("step", (run.steps_done, metrics["version"])))

    def on_evaluate(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        self.told.append(("evaluate", run.steps_done))

    def on_save(self, run: TrainingRun, folder: Path) -> None:
        self.told.append(("save", folder.name))

    def on_end(self, run: TrainingRun, outcome: surefoot.Outcome) -> None:
        self.told.append(("end", outcome.verdict))


def test_a_stepped_run_is_the_whole_run_whatever_is_asked_between_its_steps(whole: Path, tmp_path: Path) -> None:
    listener = Listener()
    with prepare(tmp_path / "run", callbacks=[listener]) as run:
        assert (run.steps_done, run.done, run.folder) == (0, False, tmp_path / "run")
        first = run.step()
        assert first["version"] == 1.0
        asked = run.evaluate()
        assert asked["eval_n"] == 2.0
        assert run.evaluate() == asked, "asking changes nothing"
        assert (run.save() / "manifest.json").exists()
        later = [metrics["version"] for metrics in run]
    assert later == [2.0, 3.0, 4.0]
    assert run.outcome is not None
    assert run.outcome.run_dir == tmp_path / "run"
    assert same(tmp_path / "run", whole)
    assert listener.told == [
        ("evaluate", 0), ("step", (1, 1.0)), ("evaluate", 1), ("evaluate", 1), ("save", "step_1"),
        ("evaluate", 2), ("step", (2, 2.0)), ("step", (3, 3.0)), ("evaluate", 4), ("step", (4, 4.0)),
        ("end", run.outcome.verdict),
    ]  # fmt: skip
    with pytest.raises(StateError, match="this run is over"):
        run.step()


def test_planted_evaluation_that_moves_a_weight_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot import evaluation

    real = evaluation.answer

    def moves(*words: Any) -> Any:
        found = real(*words)
        next(iter(run._alive().run.learner.net.parameters())).data.mul_(1.001)  # type: ignore[attr-defined]
        return found

    with prepare(tmp_path / "run", eval_steps=0) as run:
        run.step()
        monkeypatch.setattr(evaluation, "answer", moves)
        run.evaluate()
        monkeypatch.setattr(evaluation, "answer", real)
        with pytest.raises(EngineError, match="was changed in place"):
            run.finish()


def test_one_that_is_closed_is_incomplete_and_goes_on_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with prepare(folder) as run:
        run.step()
        run.step()
    assert run.outcome is None
    assert json.loads((folder / "verdict.json").read_text())["status"] == Verdict.INCOMPLETE
    assert (folder / "checkpoints/step_2/manifest.json").exists()
    with pytest.raises(StateError, match="this run was closed"):
        run.step()
    with surefoot.prepare(resume=folder, tasks=ROWS, reward_funcs=score) as again:
        assert again.steps_done == 2
        again.step()
    with surefoot.prepare(resume=folder, tasks=ROWS, reward_funcs=score) as last:
        assert last.steps_done == 3
        outcome = last.finish()
    assert outcome.verdict == json.loads((whole / "verdict.json").read_text())["status"]
    assert same(folder, whole)


def test_an_error_of_the_callers_own_closes_it_too(tmp_path: Path) -> None:
    def careless() -> None:
        with prepare(tmp_path / "run") as run:
            run.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        careless()
    assert json.loads((tmp_path / "run/verdict.json").read_text())["status"] == Verdict.INCOMPLETE
    assert surefoot.resume(tmp_path / "run", tasks=ROWS, reward_funcs=score).exit_code in (0, 1)


def test_what_ends_a_run_ends_a_stepped_one_and_is_its_verdict(tmp_path: Path) -> None:
    def fails(completions: list[str], **_: Any) -> list[float]:
        return [float("nan")] * len(completions)

    with (
        surefoot.prepare("pebble", fails, output_dir=str(tmp_path / "run"), **(KEYS | {"eval_on_start": False})) as run,
        pytest.raises(RewardError) as error,
    ):
        run.finish()
    assert error.value.exit_code == 4
    assert json.loads((tmp_path / "run/verdict.json").read_text())["status"] == Verdict.ERROR
    assert run.outcome is None


def test_the_callers_own_time_is_no_stall(tmp_path: Path) -> None:
    with prepare(tmp_path / "run", stall_timeout_s=1.0, reward_timeout_s=0.5, max_steps=1) as run:
        time.sleep(2.5)
        run.step()
    assert run.outcome is not None


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a class, not an instance": (lambda folder: prepare(folder, callbacks=[Listener]), "callbacks holds Listener"),
    "something else": (lambda folder: prepare(folder, callbacks=[print]), "callbacks holds"),
    "a model to a resumed run": (lambda folder: surefoot.prepare("pebble", resume=folder), "together with a model"),
    "keys to a resumed run": (lambda folder: surefoot.prepare(resume=folder, beta=0.1), "together with beta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    ask, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        ask(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_anything_held_out_there_is_nothing_to_answer(tmp_path: Path) -> None:
    with (
        prepare(tmp_path / "run", heldout_fraction=0.0, eval_steps=0, eval_on_start=False) as run,
        pytest.raises(ConfigError, match="no task is held out"),
    ):
        run.evaluate()
