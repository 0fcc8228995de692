"""Evaluation sets of one's own through the real command: measured by name, kept answer by answer, never trained on."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Ran, python, surefoot

CONFIG = """
model = "pebble"
tasks = "mine.jsonl"
reward_funcs = ["mine.py:score"]
tasks_per_step = 2
num_generations = 4
max_completion_length = 4
max_steps = 2
learning_rate = 1e-4
eval_steps = 1
eval_tasks = 6
num_generations_eval = 4
preflight_tasks = 0
probe_reward_tasks = 0
reward_workers = 1
threads = 1
eval_sets = { add = "add.jsonl", digits = { tasks = "digits.jsonl", metric = "mine.py:even", num_tasks = 3 } }

[guard]
metric = "eval/add/accuracy"
min_evals = 2
"""
REWARDS = """
def score(completions, answer, **columns):
    return [float(text.strip() == gold) + 0.1 for text, gold in zip(completions, answer)]

def even(completions, **columns):
    return [float(text.strip()[-1:] in ("0", "2", "4", "6", "8")) for text in completions]
"""
SETS = {"heldout": 6, "add": 5, "digits": 3}
"""Tasks that each evaluation answers, by set; `add` has 5, and of the 7 in `digits` 3 are asked for."""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def project(folder: Path) -> Path:
    sums = [
        {"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 18) for b in range(11, 19)
    ]
    write_rows(folder / "mine.jsonl", sums)
    # The same ids as in training mean nothing: other questions.
    write_rows(
        folder / "add.jsonl", [{"id": f"10+{b}", "prompt": f"40+{b}=", "answer": str(40 + b)} for b in range(11, 16)]
    )
    write_rows(folder / "digits.jsonl", [{"prompt": f"{a}+5=", "answer": str(a + 5)} for a in range(1, 8)])
    (folder / "mine.py").write_text(REWARDS)
    (folder / "my.toml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    done = surefoot("train", "my.toml", cwd=project(tmp_path_factory.mktemp("sets")))
    assert done.code == 0, done.out + done.err
    return done


def evaluations(ran: Ran) -> list[dict[str, float]]:
    return [row for row in ran.metrics if "timing/eval" in row]


@pytest.mark.config_key("eval_sets")
def test_every_evaluation_has_every_set_by_name(ran: Ran) -> None:
    rows = evaluations(ran)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert (row["eval/add/n"], row["eval/digits/n"], row["eval_n"]) == (20, 12, 24)
        assert {f"eval/{name}/{kind}" for name in ("add", "digits") for kind in ("accuracy", "reward")} <= row.keys()
        assert {
            f"{prefix}pass@{k}" for prefix in ("eval_", "eval/add/", "eval/digits/") for k in (1, 2, 4)
        } <= row.keys()
    lines = [line for line in ran.out.splitlines() if "add accuracy" in line and line.startswith("step")]
    assert len(lines) == 3, "one line per evaluation"
    assert all("digits accuracy" in line and "held-out accuracy" in line for line in lines)


@pytest.mark.config_key("guard.metric")
def test_the_guard_and_the_best_checkpoint_go_by_the_set_that_was_named(ran: Ran) -> None:
    rows = evaluations(ran)
    assert [row["killswitch/heldout"] for row in rows[1:]] == [row["eval/add/accuracy"] for row in rows[1:]]
    verdict = ran.verdict
    assert verdict["guard"]["metric"] == "eval/add/accuracy"
    assert verdict["best"]["metric"] == "eval/add/accuracy"
    assert verdict["best"]["value"] == max(row["eval/add/accuracy"] for row in rows), "the start included"
    assert verdict["metrics"]["eval/digits/accuracy"] == rows[-1]["eval/digits/accuracy"]


def test_report_and_status_show_them(ran: Ran) -> None:
    page = (ran.run / "report.html").read_text()
    for words in ("eval/add/accuracy", "eval/digits/accuracy", "add: accuracy", "digits: accuracy", "pass@4"):
        assert words in page, words
    shown = surefoot("status", "run", cwd=ran.run.parent)
    assert "add accuracy" in shown.out
    assert "digits accuracy" in shown.out


def contradictions(ran: Ran) -> list[str]:
    """Where the kept answers and the logged numbers do not tell the same story."""
    found = []
    for row in evaluations(ran):
        file = ran.run / "rollouts" / f"eval_{int(row['step']):06d}.jsonl"
        answers = [json.loads(line) for line in file.read_text().splitlines()]
        by_set = defaultdict(list)
        for answer in answers:
            by_set[answer["set"]].append(answer)
        for name, tasks in SETS.items():
            kept, prefix = by_set[name], "eval_" if name == "heldout" else f"eval/{name}/"
            if len(kept) != 4 * tasks or len({answer["task"] for answer in kept}) != tasks:
                found.append(f"step {row['step']}: {name} has {len(kept)} answers")
                continue
            told = recomputed(kept)
            found += [
                f"step {row['step']}: {prefix}{k}" for k, v in told.items() if not math.isclose(row[prefix + k], v)
            ]
    return found


def recomputed(kept: list[dict[str, Any]]) -> dict[str, float]:
    """From the rows alone; pass@k by going through every choice of k answers."""
    by_task = defaultdict(list)
    for answer in kept:
        by_task[answer["task"]].append(answer["correct"] == 1)
    passed = {
        f"pass@{k}": sum(
            sum(map(any, itertools.combinations(right, k))) / math.comb(len(right), k) for right in by_task.values()
        ) / len(by_task)
        for k in (1, 2, 4)
    }  # fmt: skip
    return passed | {
        "accuracy": sum(answer["correct"] for answer in kept) / len(kept),
        "reward": sum(answer["reward"] for answer in kept) / len(kept),
    }


def test_every_held_out_answer_is_kept_and_gives_the_numbers_again(ran: Ran) -> None:
    assert contradictions(ran) == []
    first = json.loads((ran.run / "rollouts/eval_000002.jsonl").read_text().splitlines()[-1])
    trained = json.loads((ran.run / "rollouts/step_2.jsonl").read_text().splitlines()[0])
    assert set(first) == {*trained, "set", "correct"}
    assert (first["set"], first["version"]) == ("digits", 2)


@pytest.mark.config_key("save_rollouts")
def test_without_save_rollouts_no_answer_is_kept(tmp_path: Path) -> None:
    done = surefoot("train", "my.toml", "save_rollouts=false", "max_steps=1", cwd=project(tmp_path))
    assert done.code == 0, done.err
    assert list((done.run / "rollouts").iterdir()) == []


def test_planted_file_without_one_set_is_seen(tmp_path: Path) -> None:
    done = surefoot("train", "my.toml", cwd=project(tmp_path), planted="forget_answers_of_a_set")
    assert done.code == 0, done.err
    assert contradictions(done) == [f"step {step}: digits has 0 answers" for step in (0, 1, 2)]


# -- never trained on -----------------------------------------------------------------------------


def with_a_twin(folder: Path) -> Path:
    """One task of a set is a training task too, under another id and in other letters."""
    project(folder)
    with (folder / "add.jsonl").open("a") as file:
        file.write(json.dumps({"id": "twin", "prompt": " 10+11= ", "answer": "21"}) + "\n")
    return folder


@pytest.mark.parametrize("more", [["--dry-run"], [], ["stream_tasks=true", "max_prompt_length=32"]])
def test_a_training_task_that_is_in_a_set_is_refused_with_the_pair(tmp_path: Path, more: list[str]) -> None:
    done = surefoot("train", "my.toml", *more, cwd=with_a_twin(tmp_path))
    assert done.code == 4, done.out + done.err
    assert "10+11" in done.err
    assert "eval/add/twin" in done.err
    assert not done.run.exists()


def test_planted_border_without_sets_trains_on_the_twin(tmp_path: Path) -> None:
    """Teeth: with the list cut, nobody else refuses it."""
    done = surefoot("train", "my.toml", cwd=with_a_twin(tmp_path), planted="border_without_sets")
    assert done.code == 0, done.err


# -- what is refused, and in which words ----------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["guard.metric=eval/gsm8k/accuracy"], 2, ['guard.metric = "eval/gsm8k/accuracy"', '"eval/add/accuracy"', '"eval_reward"']),
        (["guard.metric=auto", "heldout_fraction=0"], 2, ["guard.metric = auto", "2 sets", "eval/digits/reward"]),
        (["guard.metric=eval_accuracy", "heldout_fraction=0"], 2, ["only the sets are measured"]),
        (["eval_sets.digits.metric=none", "guard.metric=eval/digits/accuracy"], 2, ["never measured"]),
        (["eval_sets.add.metrik=exact"], 2, ["unknown key eval_sets.add.metrik; a set takes tasks, metric"]),
        (["eval_sets.a/b=add.jsonl"], 2, ["a set called 'a/b'"]),
        (["eval_sets.heldout=add.jsonl"], 2, ["a set called 'heldout'"]),
        (["eval_dataset=add.jsonl"], 2, ["unknown key eval_dataset; use eval_sets, such as "]),
        (["eval_strategy=steps"], 2, ["use eval_steps"]),
        (["eval_sets.add=nowhere.jsonl"], 4, ["eval_sets.add: tasks = 'nowhere.jsonl' does not exist"]),
        (["eval_sets.digits.metric=mine.py:nobody"], 4, ["has no function 'nobody'"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_set_is_said(tmp_path: Path, words: list[str], code: int, said: list[str]) -> None:
    done = surefoot("train", "my.toml", *words, cwd=project(tmp_path))
    assert done.code == code, done.out + done.err
    for each in said:
        assert each in done.err, done.err
    assert not done.run.exists()


def test_prompts_of_a_set_are_measured_like_all_others(tmp_path: Path) -> None:
    write_rows(project(tmp_path) / "long.jsonl", [{"prompt": "1+" * 20 + f"{a}=", "answer": "9"} for a in range(3)])
    done = surefoot("train", "my.toml", "eval_sets.long=long.jsonl", "max_prompt_length=20", cwd=tmp_path)
    assert done.code == 4, done.out
    assert "eval_sets.long: every prompt is longer than max_prompt_length" in done.err
    write_rows(tmp_path / "long.jsonl", [{"prompt": "1+" * 300, "answer": "9"}])
    done = surefoot("train", "my.toml", "eval_sets.long=long.jsonl", cwd=tmp_path)
    assert done.code == 4, done.out
    assert "1 prompts leave no room in the model's context of 512 tokens, first eval/long/" in done.err


def test_a_metric_that_judges_nothing_is_no_accuracy_of_zero(tmp_path: Path) -> None:
    (project(tmp_path) / "mine.py").write_text(
        REWARDS + "\ndef silent(completions, **_):\n    return [None] * len(completions)\n"
    )
    done = surefoot("train", "my.toml", "eval_sets.digits.metric=mine.py:silent", cwd=tmp_path)
    assert done.code == 4
    assert "eval_sets.digits: its metric gave no verdict" in done.err


def test_tasks_that_the_rewards_do_not_fit_are_judged_by_their_metric(tmp_path: Path) -> None:
    """The run's reward wants a column `answer`; the set has none, and says who judges it instead."""
    write_rows(project(tmp_path) / "bare.jsonl", [{"prompt": f"{a}+3="} for a in range(4)])
    base = ["eval_sets.bare.tasks=bare.jsonl", "eval_sets.bare.metric=mine.py:even", "max_steps=1"]
    done = surefoot("train", "my.toml", *base, cwd=tmp_path)
    assert done.code == 4, done.out
    assert "rollouts in the evaluation at step 0 of bare got no verdict" in done.err
    done = surefoot("train", "my.toml", *base, "eval_sets.bare.reward=false", cwd=tmp_path, run="other")
    assert done.code == 0, done.err
    assert evaluations(done)[-1]["eval/bare/reward"] == evaluations(done)[-1]["eval/bare/accuracy"]


def test_one_set_instead_of_the_split_is_what_the_guard_watches(tmp_path: Path) -> None:
    words = ["eval_sets={add='add.jsonl'}", "heldout_fraction=0", "guard.metric=auto", "max_steps=1"]
    done = surefoot("train", "my.toml", *words, cwd=project(tmp_path))
    assert done.code == 0, done.err
    assert done.verdict["guard"]["metric"] == "eval/add/accuracy"
    assert "64 to train on, 0 held out" in done.out
    assert not any(name.startswith("eval_") for row in evaluations(done) for name in row)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.nightly
def test_ray_answers_sets_as_one_process_does(ran: Ran, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    done = surefoot("train", "my.toml", "runtime.kind=ray", cwd=project(tmp_path))
    assert done.code == 0, done.out + done.err
    same = [name for name in evaluations(ran)[0] if name.startswith(("eval_", "eval/"))]
    assert [[row[name] for name in same] for row in evaluations(done)] == [
        [row[name] for name in same] for row in evaluations(ran)
    ]
    assert contradictions(done) == []


# -- surefoot eval --------------------------------------------------------------------------------


def test_eval_answers_a_runs_own_tasks_and_sets_again(ran: Ran) -> None:
    again = surefoot("eval", "run", "--json", "--save", "again.jsonl", cwd=ran.run.parent)
    assert again.code == 0, again.err
    found, last = json.loads(again.out), evaluations(ran)[-1]
    assert found["tasks"] == SETS
    assert {name: last[name] for name in found["metrics"]} == found["metrics"]
    kept = [json.loads(line) for line in (ran.run / "rollouts/eval_000002.jsonl").read_text().splitlines()]
    saved = [json.loads(line) for line in (ran.run.parent / "again.jsonl").read_text().splitlines()]
    assert [row["text"] for row in saved] == [row["text"] for row in kept]


def test_eval_of_a_run_on_other_tasks(ran: Ran) -> None:
    other = surefoot(
        "eval", "run", "--tasks", "digits.jsonl", "--metric", "mine.py:even", "--num-tasks", "4", cwd=ran.run.parent
    )
    assert other.code == 0, other.err
    assert "4 of 7 tasks x 4 answers" in other.out
    assert "of 16 answers right, 4 tasks" in next(
        line for line in other.out.splitlines() if line.startswith("digits: ")
    )
    mixed = surefoot("eval", "run", "--tasks", "both.jsonl", cwd=_with_both(ran.run.parent))
    assert "warning: 1 of these are training tasks of the run" in mixed.out, mixed.out


def _with_both(folder: Path) -> Path:
    known = [json.loads(line) for line in (folder / "mine.jsonl").read_text().splitlines()]
    write_rows(folder / "both.jsonl", [{"prompt": "10+11=", "answer": "21"}, {"prompt": "1+1=", "answer": "2"}])
    assert "10+11=" in {row["prompt"] for row in known}
    return folder


def test_eval_of_a_model_without_a_run(tmp_path: Path) -> None:
    project(tmp_path)
    words = ["num_generations_eval=2", "threads=1", "max_completion_length=4"]
    by_name = surefoot(
        "eval", "pebble", *words, "--tasks", "add.jsonl", "--save", "a.jsonl", "--out", "o.json", cwd=tmp_path
    )
    assert by_name.code == 0, by_name.err
    found = json.loads((tmp_path / "o.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert (found["tasks"], len(rows)) == ({"add": 5}, 10)
    assert found["metrics"]["eval_accuracy"] == sum(row["correct"] for row in rows) / 10
    right = sum(row["correct"] == 1 for row in rows)
    assert f"add: {right} of 10 answers right, 5 tasks" in by_name.out
    folder = ROOT / "src/surefoot/assets/pebble"
    by_folder = surefoot("eval", str(folder), *words, "--tasks", "add.jsonl", "--json", cwd=tmp_path)
    assert json.loads(by_folder.out)["metrics"] == found["metrics"]
    assert not (tmp_path / "runs").exists(), "nothing but what was asked for is written"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["pebble"], 2, "surefoot eval pebble --tasks FILE"),
        (["pebble", "--tasks", "bare.jsonl"], 4, "give --metric exact"),
        (["pebble", "--tasks", "add.jsonl", "--checkpoint", "best"], 2, "a model has no checkpoints"),
        (["pebble", "--tasks", "add.jsonl", "learning_rate=1"], 2, "learning_rate changes nothing about an evaluation"),
        (["pebble", "--tasks", "add.jsonl", "thread=1"], 2, "thread changes nothing about an evaluation"),
        (["pebble", "--tasks", "nowhere.jsonl"], 4, "does not exist"),
        (["./nowhere", "--tasks", "add.jsonl"], 4, "nowhere"),
    ],
)
def test_what_eval_refuses(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    write_rows(project(tmp_path) / "bare.jsonl", [{"prompt": f"{a}+3="} for a in range(4)])
    done = surefoot("eval", *words, cwd=tmp_path)
    assert done.code == code, done.out + done.err
    assert said in done.err, done.err


# -- runs that were started from Python -----------------------------------------------------------

SCRIPT = """
import surefoot

def score(completions, answer, **_):
    return [0.5 * (text == gold) for text, gold in zip(completions, answer)]

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 20) for b in range(10, 20)]
keys = dict(model="pebble", max_steps=1, max_completion_length=4, eval_tasks=10, output_dir="run", threads=1)
outcome = surefoot.train(tasks=rows, reward_funcs=[score], **keys)
assert outcome.evaluate_with.startswith("surefoot.evaluate("), outcome.evaluate_with
again = eval(outcome.evaluate_with)
for name in ("eval_accuracy", "eval_reward", "eval_n"):
    assert again[name] == outcome.metrics[name], name
print("followed", again["eval_accuracy"])
"""


def test_what_a_python_run_says_to_do_next_works(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = python(tmp_path / "script.py", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert "followed" in ran.out
    line = next(line for line in ran.out.splitlines() if line.startswith("next "))
    assert line.split(maxsplit=1)[1] == 'surefoot.evaluate("run", tasks=rows, reward_funcs=[score])'
    refused = surefoot("eval", "run", cwd=tmp_path)
    assert refused.code == 3
    assert "was given its tasks as rows in Python" in refused.err
    assert "surefoot eval run --tasks FILE" in refused.err
    assert line.split(maxsplit=1)[1] in refused.err
    again = surefoot("train", "--resume", "run", cwd=tmp_path, run="")
    assert again.code == 0, "it is finished, and says so again"
    assert line in again.out
    resumed = surefoot("train", "--resume", "run", "max_steps=9", cwd=tmp_path, run="")
    assert resumed.code == 3
    assert 'use surefoot.resume("run", tasks=rows, reward_funcs=[score], max_steps=9) in Python' in resumed.err
    write_rows(tmp_path / "add.jsonl", [{"prompt": f"40+{b}=", "answer": str(40 + b)} for b in range(11, 16)])
    other = surefoot("eval", "run", "--tasks", "add.jsonl", cwd=tmp_path)
    assert other.code == 0, other.err
    assert "its reward functions were given in Python" in other.out
