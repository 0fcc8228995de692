"""Scripts of other trainers, as they are: taken, or refused with what, why and fix; and what a run hands back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command import python, surefoot

import surefoot as api
from surefoot.errors import ConfigError, ModelError, RewardError, StateError, SurefootError, TaskError, ToolError
from surefoot.records import Verdict
from surefoot.report.view import PlainView
from surefoot.storage import run_folder
from surefoot.storage.run_folder import RunFolder
from surefoot.system.text import duration

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 9) for b in range(3, 9)]
OTHERS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(40, 43) for b in range(3, 6)]
KEYS: dict[str, Any] = {
    "max_steps": 2, "tasks_per_step": 2, "num_generations": 4, "max_completion_length": 4, "threads": 1, "eval_tasks": 4,
    "preflight_tasks": 0, "reward_workers": 1, "learning_rate": 1e-3, "device": "cpu",
}  # fmt: skip
WEIGHTS = "checkpoints/step_2/model.safetensors"


def score(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [len(set(text) & set(gold)) / 2 - 0.1 * len(text) for text, gold in zip(completions, answer, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


class Clocked(PlainView):
    """Remembers when the plan was shown, and when held-out tasks were last answered."""

    planned = answered = 0.0

    def start(self, plan_lines: Sequence[str]) -> None:
        self.planned = time.perf_counter()
        super().start(plan_lines)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.answered = time.perf_counter()
        super().evaluated(step, metrics)


@dataclass
class Told:
    outcome: api.Outcome
    said: str
    least_s: float
    """From the plan, before anything is loaded, to the last evaluation."""


@pytest.fixture(scope="module")
def trl_shaped(folder: Path) -> Told:
    """What a GRPOTrainer is given, empty arguments included."""
    with (folder / "said.txt").open("w") as screen:
        view = Clocked(2, screen)
        outcome = api.train(
            "pebble", score, train_dataset=ROWS, eval_dataset=OTHERS, callbacks=None, peft_config=None,
            optimizers=(None, None), output_dir=str(folder / "run"), view=view, **KEYS,
        )  # fmt: skip
    return Told(outcome, (folder / "said.txt").read_text(), view.answered - view.planned)


def test_trl_s_arguments_train_and_the_evaluation_set_is_measured_and_never_trained_on(trl_shaped: Told) -> None:
    run = trl_shaped.outcome.run_dir
    assert trl_shaped.outcome.verdict is Verdict.PASS
    assert trl_shaped.outcome.metrics["eval/eval_dataset/n"] == 4
    answers = [json.loads(line) for line in (run / "rollouts/eval_000002.jsonl").read_text().splitlines()]
    asked = {row["prompt"] for row in answers if row["set"] == "eval_dataset"}
    prompts = {row["prompt"] for row in OTHERS}
    assert len(asked) == 4
    assert asked <= prompts
    trained = [json.loads(line) for n in (1, 2) for line in (run / f"rollouts/step_{n}.jsonl").read_text().splitlines()]
    assert not {row["prompt"] for row in trained} & prompts


def test_an_outcome_has_history_weights_rollouts_and_is_short_to_look_at(trl_shaped: Told) -> None:
    outcome = trl_shaped.outcome
    lines = (outcome.run_dir / "metrics.jsonl").read_text().splitlines()
    assert outcome.history == [json.loads(line) for line in lines]
    assert [row["step"] for row in outcome.history] == [0, 1, 2, 2]
    assert outcome.checkpoint == outcome.run_dir / "checkpoints/step_2"
    assert sorted(path.name for path in outcome.rollouts.glob("step_*")) == ["step_1.jsonl", "step_2.jsonl"]
    assert outcome.report.read_text().startswith("<!doctype html>")
    best = json.loads((outcome.run_dir / "verdict.json").read_text())["best"]
    expected = None if best["step"] == 0 else outcome.run_dir / best["checkpoint"]
    assert outcome.best_checkpoint == expected
    assert repr(outcome) == f"Outcome(PASS, 'all 2 planned steps ran', run_dir={str(outcome.run_dir)!r})"


class Tags(HTMLParser):
    """Every tag and the text of a piece of HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_notebook_shows_an_outcome_as_a_table_in_which_nothing_is_markup(
    trl_shaped: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Tags()
    shown.feed(trl_shaped.outcome._repr_html_())
    for words in (
        "PASS",
        "all 2 planned steps ran",
        "eval_accuracy",
        "eval/eval_dataset/accuracy",
        "checkpoints/step_2",
    ):
        assert words in shown.text
    hostile = api.Outcome(
        Verdict.FAIL, ("<script>alert(1)</script>\x1b[2J",), tmp_path / "<img src=x>", 1, {"eval/<b>/accuracy": 0.5}
    )
    odd = Tags()
    odd.feed(hostile._repr_html_())
    assert odd.tags == {"div", "b", "br", "table", "tr", "th", "td"}
    assert "<script>alert(1)</script>\\x1b[2J" in odd.text
    assert "<img src=x>" in odd.text
    monkeypatch.setattr("surefoot.report.view.esc", lambda text, limit=0: str(text))
    planted = Tags()
    planted.feed(hostile._repr_html_())
    assert {"script", "img"} <= planted.tags, "a text that is not escaped is seen"


def test_one_definition_of_wall_time_on_screen_page_and_status(trl_shaped: Told) -> None:
    outcome = trl_shaped.outcome
    seconds = json.loads((outcome.run_dir / "verdict.json").read_text())["seconds"]
    assert outcome.seconds == seconds
    assert seconds > trl_shaped.least_s, "loading the model is part of it"
    told = duration(seconds)
    assert f"PASS  after 2 of 2 steps in {told}\n" in trl_shaped.said
    assert f"<b>{told}</b><span>wall time</span>" in outcome.report.read_text()
    assert f"took {told}" in surefoot("status", str(outcome.run_dir), cwd=outcome.run_dir).out
    assert f"in {told}\n" in surefoot("train", "--resume", str(outcome.run_dir), cwd=outcome.run_dir, run="").out


def test_what_it_says_to_do_next_works_and_the_command_names_the_same_call(
    trl_shaped: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = trl_shaped.outcome
    run = outcome.run_dir
    arguments = "tasks=rows, reward_funcs=[score], eval_dataset=eval_rows"
    call = f'surefoot.evaluate("{run}", {arguments})'
    assert f"next        {call}\n" in trl_shaped.said
    names = {"surefoot": api, "rows": ROWS, "eval_rows": OTHERS, "score": score}
    again = eval(outcome.evaluate_with, names)
    for name in ("eval_accuracy", "eval_reward", "eval/eval_dataset/accuracy", "eval/eval_dataset/n"):
        assert again[name] == outcome.metrics[name], name
    asked = surefoot("eval", str(run), cwd=run.parent)
    assert (asked.code, call in asked.err) == (3, True), asked.err
    over = surefoot("train", "--resume", str(run), cwd=run.parent, run="")
    assert f'make it longer with surefoot.resume("{run}", {arguments}, max_steps=N) in Python' in over.out
    longer = surefoot("train", "--resume", str(run), "max_steps=3", cwd=run.parent, run="")
    assert longer.code == 3
    assert f'use surefoot.resume("{run}", {arguments}, max_steps=3) in Python' in longer.err


def test_the_evaluation_set_is_needed_to_go_on_and_to_look_again(trl_shaped: Told) -> None:
    run = trl_shaped.outcome.run_dir
    with pytest.raises(StateError, match="was given an evaluation set in Python"):
        api.resume(run, tasks=ROWS, reward_funcs=score, max_steps=3)
    with pytest.raises(StateError, match=r"eval_sets.eval_dataset changed|changed since the run began"):
        api.resume(run, tasks=ROWS, reward_funcs=score, eval_dataset=OTHERS[:-1], max_steps=3)
    with pytest.raises(ConfigError, match="this run has no such set"):
        api.resume(run, tasks=ROWS, reward_funcs=score, eval_dataset={"another": OTHERS}, max_steps=3)
    with pytest.raises(StateError, match="was given an evaluation set in Python") as refused:
        api.evaluate(run, tasks=ROWS)
    assert "eval_dataset=eval_rows" in refused.value.fix
    with pytest.raises(ConfigError, match="eval_dataset with tasks that are not a run's own"):
        api.evaluate(run, tasks=OTHERS, eval_dataset=OTHERS)


def test_a_stopped_run_of_python_says_in_its_status_how_to_go_on(trl_shaped: Told, tmp_path: Path) -> None:
    run = trl_shaped.outcome.run_dir
    for name in ("config.toml", "environment.json", "status.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    said = " ".join(surefoot("status", str(tmp_path), "--json", cwd=tmp_path).out.split())
    assert r"surefoot.resume(\"" in said
    assert "tasks=rows, reward_funcs=[score], eval_dataset=eval_rows" in said
    (tmp_path / "environment.json").write_text("{")
    assert "surefoot train --resume" in surefoot("status", str(tmp_path), "--json", cwd=tmp_path).out


# -- a model that is in memory --------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_memory() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = Path(api.__file__).parent / "assets/pebble"
    return AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)


def test_a_model_object_is_trained_as_the_model_that_it_is(
    in_memory: tuple[Any, Any], trl_shaped: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = in_memory
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = tmp_path / "run"
    outcome = api.train(
        model, score, tasks=ROWS, eval_dataset=OTHERS, processing_class=tokenizer, output_dir=str(run), **KEYS
    )
    named = trl_shaped.outcome.run_dir
    assert (run / WEIGHTS).read_bytes() == (named / WEIGHTS).read_bytes(), "bit for bit the run that names the folder"
    assert all((value == before[name]).all() for name, value in model.state_dict().items()), (
        "the object stays as it was"
    )
    said = capsys.readouterr().out
    assert "the model object was saved in start_model/ of the run folder" in said
    assert f'model = "{run}/start_model"' in (run / "config.toml").read_text()
    sealed = json.loads((run / "start_model/manifest.json").read_text())
    assert (sealed["given"], "model.safetensors" in sealed["files"]) == ("LlamaForCausalLM", True)
    assert (run / "start_model").stat().st_mode & 0o777 == 0o700
    assert outcome.checkpoint == run / "checkpoints/step_2"
    longer = api.resume(run, tasks=ROWS, reward_funcs=score, eval_dataset=OTHERS, max_steps=3)  # without the object
    assert longer.history[-1]["step"] == 3


def test_a_refused_start_takes_the_saved_object_back(in_memory: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = in_memory

    def abstains(completions: list[str], **_: Any) -> list[None]:
        return [None for _ in completions]

    keys = KEYS | {"preflight_tasks": 4}
    with pytest.raises(RewardError, match="abstain"):
        api.train(model, abstains, tasks=ROWS, processing_class=tokenizer, output_dir=str(tmp_path / "run"), **keys)
    assert not (tmp_path / "run").exists()


def test_objects_that_would_not_be_saved_whole_are_refused(in_memory: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = in_memory

    def refusal(**arguments: Any) -> SurefootError:
        with pytest.raises(ModelError) as refused:
            api.train(**{"reward_funcs": score, "tasks": ROWS, "output_dir": str(tmp_path / "run"), **arguments})
        assert not (tmp_path / "run").exists()
        return refused.value

    alone = refusal(model=model)
    assert "no tokenizer with it" in alone.what
    assert "processing_class=AutoTokenizer.from_pretrained(" in alone.fix
    assert "a str as tokenizer" in refusal(model=model, processing_class="pebble").what
    for mark, fix in (("peft_config", "merge_and_unload"), ("is_quantized", "without quantization_config")):
        model.__dict__[mark] = {"default": True}
        assert fix in refusal(model=model, processing_class=tokenizer).fix
        del model.__dict__[mark]
    with pytest.raises(ModelError, match="the first argument is a LlamaForCausalLM") as refused:
        api.evaluate(model, tasks=ROWS)  # type: ignore[arg-type]
    assert "model.save_pretrained(folder)" in refused.value.fix
    with pytest.raises(RewardError, match="reward_funcs holds a LlamaForCausalLM"):
        api.train("pebble", model, tasks=ROWS)


# -- what is refused -----------------------------------------------------------------------------


class Page:
    """An object whose own text is pages long."""

    def __repr__(self) -> str:
        return "page " * 10_000


@dataclass
class GRPOConfig:
    """In the form of TRL's: a dataclass."""

    learning_rate: float = 1e-6
    max_steps: int = -1
    gradient_checkpointing: bool = True
    report_to: Any = None


class Frame:
    columns = ("prompt",)

    def to_dict(self, form: str) -> Any:
        raise AssertionError("it is not asked")


BASE: dict[str, Any] = {"model": "pebble", "tasks": ROWS, "reward_funcs": score}
REFUSED: list[tuple[dict[str, Any], type[SurefootError], str, str]] = [
    ({"model": None}, ConfigError, "model is missing", "surefoot config"),
    ({"tasks": None}, ConfigError, "tasks is missing", "surefoot config"),
    ({"train_dataset": ROWS}, ConfigError, "tasks and train_dataset are both given", "keep one"),
    ({"tasks": {"train": ROWS, "test": OTHERS}}, TaskError, "with the keys train, test", "tasks=dataset['train']"),
    ({"tasks": Frame()}, TaskError, "tasks is a Frame", 'table.to_dict("records")'),
    ({"tasks": 7}, TaskError, "tasks is an int", 'tasks=[{"prompt"'),
    ({"eval_dataset": 7}, TaskError, "eval_dataset['eval_dataset'] is an int", "prompt"),
    ({"eval_dataset": OTHERS, "eval_sets": {"eval_dataset": "x.jsonl"}}, ConfigError, "both have a set", "rename one"),
    ({"eval_dataset": [ROWS[0]]}, SurefootError, "1 held-out prompts are also training prompts", "remove them"),
    ({"reward_funcs": Page()}, RewardError, "reward_funcs holds a Page", "reward_funcs=[f]"),
    ({"reward_funcs": [score, 3]}, RewardError, "reward_funcs holds an int", "reward_funcs=[f]"),
    ({"reward_weights": 2.0}, ConfigError, "reward_weights = 2.0", "a list of numbers"),
    ({"tools": [3]}, ToolError, "tools holds an int", "tools=[f]"),
    ({"model": Page()}, ModelError, "model is an object of type Page", "a hub name"),
    ({"processing_class": Page()}, ConfigError, "processing_class with model='pebble'", "leave it out"),
    ({"args": GRPOConfig(2e-5, 50, False)}, ConfigError, "args is a GRPOConfig",
     "surefoot.train(..., learning_rate=2e-05, max_steps=50, gradient_checkpointing=False)"),
    ({"args": {"max_steps": 3}}, ConfigError, "args is a mapping", "**args"),
    ({"callbacks": [Page()]}, ConfigError, "callbacks is not taken", "surefoot.prepare"),
    ({"peft_config": Page()}, ConfigError, "peft_config is a", "give a LoraConfig of PEFT"),
    ({"quantization_config": Page()}, ConfigError, "quantization_config is not taken", "nf4"),
    ({"optimizers": (Page(), None)}, ConfigError, "optimizers is not taken", "learning_rate"),
    ({"reward_processing_classes": Page()}, ConfigError, "reward_processing_classes is not taken", "inside the function"),
    ({"rollout_func": score}, ConfigError, "rollout_func is not taken", "environment_factory"),
    ({"learning_rate": Page()}, ConfigError, "learning_rate is a Page", "surefoot config"),
    ({"learning_rte": 1}, ConfigError, "did you mean learning_rate", "surefoot config"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "what", "fix"), REFUSED)
def test_every_other_shape_is_refused_by_name_with_why_and_fix(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    error: type[SurefootError],
    what: str,
    fix: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as refused:
        api.train(**BASE | changed)
    assert what in refused.value.what
    assert fix in refused.value.fix
    assert len(str(refused.value)) < 1500, "never the object's own text"
    assert list(tmp_path.iterdir()) == []


def test_arguments_without_a_name_are_model_and_rewards_only() -> None:
    with pytest.raises(ConfigError, match="1 more argument without a name, first a GRPOConfig"):
        api.train("pebble", score, GRPOConfig(), tasks=ROWS)


# -- what the command line cannot know ------------------------------------------------------------

TOOLS = '''
import surefoot

def double(number: int) -> int:
    """Twice the number.

    Args:
        number: any whole number.
    """
    return 2 * number

def right(completions, **_):
    return [float(len(talk[-1]["content"]) % 3) for talk in completions]

outcome = surefoot.train(
    "pebble_tools", right, tasks="mine.jsonl", tools={"functions": double, "in_prompt": False}, max_steps=1,
    tasks_per_step=2, num_generations=4, max_completion_length=8, max_turns=2, preflight_tasks=0, output_dir="run",
    threads=1, eval_tasks=4, reward_workers=1,
)
again = eval(outcome.evaluate_with)
assert again["eval_reward"] == outcome.metrics["eval_reward"]
print("followed")
'''


def test_a_run_with_tools_from_python_is_never_evaluated_without_them(tmp_path: Path) -> None:
    """Nor without its reward functions, where nothing else judges; both are named in the call that works."""
    rows = [{"prompt": f"{a}+{a}="} for a in range(40)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "script.py").write_text(TOOLS)
    ran = python(tmp_path / "script.py", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert "followed" in ran.out
    call = 'surefoot.evaluate("run", reward_funcs=[right], tools=[double])'
    assert f"next        {call}" in ran.out
    for more in ([], ["--tasks", "mine.jsonl"]):
        asked = surefoot("eval", "run", *more, cwd=tmp_path)
        assert asked.code == 3, asked.out + asked.err
        assert f"use {call} in Python" in asked.err
    other = [{"prompt": f"{a}-1=", "answer": str(a - 1)} for a in range(1, 5)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    words = ("eval", "run", "--tasks", "other.jsonl")
    assert surefoot(*words, cwd=tmp_path).code == 3
    assert surefoot(*words, cwd=tmp_path, planted="evaluate_what_is_there").code == 0, "a number, of another model"
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    environment["from_python"].remove("tools=[double]")  # as if it had been given rewards alone
    (tmp_path / "run/environment.json").write_text(json.dumps(environment))
    asked = surefoot("eval", "run", cwd=tmp_path)
    assert asked.code == 4
    assert 'use surefoot.evaluate("run", reward_funcs=[right]) in Python' in asked.err


def test_the_package_shows_what_a_user_calls_and_loads_nothing_for_it() -> None:
    code = (
        "import surefoot, sys\nnames = dir(surefoot)\nprint(*names)\n"
        "heavy = [n for n in ('torch', 'transformers', 'pydantic', 'numpy') if n in sys.modules]\nassert heavy == [], heavy\n"
        "assert surefoot.errors.ConfigError.exit_code == 2\n"
        "assert 'learning_rate' in surefoot.Config.model_fields\n"
        "assert all(getattr(surefoot, name) is not None for name in names)\n"
        "from surefoot import *\nassert evaluate is surefoot.evaluate\n"
        "assert 'torch' not in sys.modules and not hasattr(surefoot, 'nothing')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (
        "Callback Config Evaluation Outcome TrainingRun __version__ errors evaluate prepare resume train".split()
    )


def test_a_run_folder_knows_the_start_model_as_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for forgotten in ((), ("start_model",)):
        folder = RunFolder.create(tmp_path / "run", "run", tmp_path)
        (folder.root / "start_model").mkdir()
        known = tuple(name for name in run_folder.FOLDERS if name not in forgotten)
        monkeypatch.setattr(run_folder, "FOLDERS", known)
        folder.discard()
        assert folder.root.exists() == bool(forgotten), "one that it does not know would be left behind"
