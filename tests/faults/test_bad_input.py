"""Bad input through the real command: the right exit code, what, why and fix, and nothing left behind.

Two ways to run it. What needs no model runs in a process of its own with Python's import profile on: torch must not
be in it. What needs one runs in forks of a single interpreter that has the libraries loaded and nothing of ours
started: the same `main`, without paying for the imports thirty times.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Ran, surefoot

PEBBLE = ROOT / "src/surefoot/assets/pebble"
TINY = dict(
    tasks_per_step=2, num_generations=2, max_completion_length=4, num_tasks=200, eval_tasks=4, reward_workers=1,
    threads=1, max_steps=1, preflight_tasks=2, eval_steps=0,
)  # fmt: skip
ROWS = [{"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 20) for b in range(10, 14)]
REWARDS = """
import pathlib, time

def good(completions, **_):
    return [1.0 + i for i, _ in enumerate(completions)]

def too_few(completions, **_):
    return [1.0 for _ in completions][1:]

def bare(completions, **_):
    return 1.0

def later(completions, **_):
    calls = pathlib.Path(__file__).with_name("calls")
    calls.open("a").write(".")
    if calls.stat().st_size > 2:  # two groups make the first step
        raise KeyError("the third call")
    return [1.0 + i for i, _ in enumerate(completions)]

def nobody(completions, **_):
    return [None for _ in completions]

def f(completions, crime, **_):
    if crime[0] == "raised":
        raise ZeroDivisionError("the reward's own bug")
    if crime[0] == "timeout":
        time.sleep(600)
    return {"nan": [float("nan")], "not_a_number": ["1.0"], "abstained": [None]}.get(crime[0], [1.0]) * len(completions)
"""
CRIMES = ["raised", "timeout", "nan", "not_a_number", "abstained"]
"""How a reward can fail, as `failures/f:...` is to count it; one task each."""
OWN = dict(tasks="t.jsonl", reward_funcs=["r.py:good"])
CRIMINAL = dict(
    tasks="crimes.jsonl", reward_funcs=["r.py:f"], tasks_per_step=6, num_generations=2, heldout_fraction=0,
    preflight_tasks=0, reward_timeout_s=2, eval_metric="none",
)  # fmt: skip


def words(**keys: Any) -> list[str]:
    """Overrides as they are typed; the key of a table is never needed here."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in (TINY | keys).items()]


def lines(rows: list[Any]) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def fill(folder: Path) -> Path:
    """Healthy tasks and rewards, and a task for every crime."""
    folder.mkdir(exist_ok=True)
    crimes = [{"id": crime, "prompt": f"1{i}+11=", "crime": crime} for i, crime in enumerate([*CRIMES, "none"])]
    (folder / "t.jsonl").write_text(lines(ROWS))
    (folder / "crimes.jsonl").write_text(lines(crimes))
    (folder / "r.py").write_text(REWARDS)
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def check_refusal(code: int, err: str, expected: int, said: list[str]) -> None:
    """What, why and fix, in words of ours, with the code of the table."""
    assert code == expected, err
    head, why, fix = (err.find(mark) for mark in ("Error: ", "\n  why: ", "\n  fix: "))
    assert 0 < head < why < fix, err
    assert err[fix:].removeprefix("\n  fix: ").strip(), "an empty fix helps nobody"
    assert "Traceback" not in err
    for text in said:
        assert text in err, f"{text!r} is missing in:\n{err}"


# -- what needs no model: torch is never imported ---------------------------------------------------------

PROBLEMS = """model = "pebble"
tasks = "builtin:sums"
flavour = 3
learning_rte = 1e-5
max_steps = "many"
num_generations = 1
microbatch_size = 3
"""
BAD_ROWS = [
    ROWS[0], '{"id": "x", "prompt": ', {"id": "y", "answer": "1"}, ROWS[0], {"id": "z", "prompt": 7, "answer": "1"},
    {"id": "w", "prompt": "1+1="},
]  # fmt: skip


@dataclass(frozen=True)
class Light:
    """Words after `train`, and what is to come of them."""

    words: list[str]
    code: int
    said: list[str]
    run: str = "run"
    """Where the run would go; empty when the words say so themselves."""


LIGHT = {
    "every problem of a config at once": Light(
        ["bad.toml"], 2,
        [
            "bad.toml has 5 problem(s)", "bad.toml:3: unknown key flavour",
            "bad.toml:4: unknown key learning_rte; did you mean learning_rate?", "bad.toml:5: max_steps", "whole number",
            "bad.toml:6: num_generations = 1: a group of one", "bad.toml:7: microbatch_size = 3 does not divide",
        ],
    ),
    "a misspelt override": Light(["--max-stepps", "3"], 2, ["unknown key max_stepps; did you mean max_steps?"]),
    "a value of the wrong type": Light(["temperature=warm"], 2, ['temperature = "warm": must be a finite number']),
    "a group of one": Light(["num_generations=1"], 2, ["num_generations = 1: a group of one"]),
    "a cut that does not divide": Light(
        words(microbatch_size=3), 2, ["microbatch_size = 3 does not divide", "2 x 2 = 4"]
    ),
    "a missing config file": Light(["nowhere.toml"], 2, ["nowhere.toml does not exist"]),
    "a config file that is not TOML": Light(["torn.toml"], 2, ["torn.toml:2: not valid TOML"]),
    "a missing tasks file": Light(["tasks=nowhere.jsonl"], 4, ["TaskError", "'nowhere.jsonl' does not exist"]),
    "a near miss of a tasks file": Light(["tasks=tt.jsonl"], 4, ["near it: t.jsonl"]),
    "malformed task lines": Light(
        words(tasks="bad.jsonl", reward_funcs=["r.py:good"]), 4,
        [
            "TaskError: bad.jsonl: 5 problem(s)", "bad.jsonl:2: is not JSON", "bad.jsonl:3: has no prompt",
            f"bad.jsonl:4: id '{ROWS[0]['id']}' was already used by bad.jsonl:1", "bad.jsonl:5: prompt is a number",
            "bad.jsonl:6: has no column 'answer'",
        ],
    ),
    "a tasks file without tasks": Light(words(tasks="empty.jsonl"), 4, ["empty.jsonl has no tasks"]),
    "tasks that nobody scores": Light(words(tasks="t.jsonl"), 4, ["RewardError", "reward_funcs is empty"]),
    "a missing reward file": Light(words(**OWN | {"reward_funcs": ["rr.py:good"]}), 4, ["rr.py does not exist", "did you mean r.py"]),
    "a missing reward function": Light(
        words(**OWN | {"reward_funcs": ["r.py:godo"]}), 4, ["has no function 'godo'", "did you mean good"]
    ),
    "a reward file that does not load": Light(
        words(**OWN | {"reward_funcs": ["torn.py:f"]}), 4, ["torn.py cannot be loaded", "(line 2)"]
    ),
    "an existing run": Light(words(output_dir="used"), 3, ["StateError", "used already holds a run"], run=""),
    "a folder with other things": Light(words(output_dir="full"), 3, ["full exists and is not empty"], run=""),
    "output_dir is a file": Light(words(output_dir="t.jsonl"), 3, ["t.jsonl", "is a file"], run=""),
    "output_dir below a file": Light(words(output_dir="t.jsonl/run"), 74, ["StorageError", "t.jsonl/run"], run=""),
    "output_dir cannot be made": Light(words(output_dir="/proc/no/run"), 74, ["StorageError", "/proc/no/run"], run=""),
}  # fmt: skip


def imported(err: str) -> tuple[set[str], str]:
    """Modules named in the import profile, and what the command itself said."""
    profile = [line for line in err.splitlines() if line.startswith("import time:")]
    said = [line for line in err.splitlines() if not line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in profile}, "\n".join(said)


@pytest.mark.parametrize("name", LIGHT)
def test_refused_before_anything_heavy_is_imported(name: str, tmp_path: Path) -> None:
    case, folder = LIGHT[name], fill(tmp_path / "project")
    (folder / "bad.toml").write_text(PROBLEMS)
    (folder / "torn.toml").write_text('model = "pebble"\ntasks = \n')
    (folder / "bad.jsonl").write_text(lines(BAD_ROWS))
    (folder / "empty.jsonl").write_text("")
    (folder / "torn.py").write_text("x = 1\ndef f(:\n")
    for made, holds in (("used", "metrics.jsonl"), ("full", "notes.txt")):
        (folder / made).mkdir()
        (folder / made / holds).write_text("mine")
    before = contents(folder)
    env = {"PYTHONPROFILEIMPORTTIME": "1", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp_path)}
    ran = surefoot("train", *case.words, cwd=folder, run=case.run, env=env)
    modules, said = imported(ran.err)
    check_refusal(ran.code, said, case.code, case.said)
    assert contents(folder) == before, "a start that is refused leaves nothing behind"
    assert "surefoot.cli" in modules, "the profile is alive"
    assert not modules & {"torch", "transformers"}


# -- what needs a model ---------------------------------------------------------------------------------

WARM = """
import gc, json, os, sys
import torch, transformers.models.llama.modeling_llama, transformers.models.auto.tokenization_auto
import surefoot.run.build, surefoot.loop, surefoot.cli

gc.freeze()  # the children share these pages
for case in json.load(sys.stdin):
    pid = os.fork()
    if pid == 0:
        os.chdir(case["cwd"])
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(case["cwd"] + "." + name, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
        sys.argv = ["surefoot", "train", *case["words"]]
        try:
            surefoot.cli.main()
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code)  # taking the libraries down again would cost more than the case
    with open(case["cwd"] + ".code", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
"""


def edit(*names: str, **changes: Any) -> Callable[[Path], None]:
    """A copy of the built-in model with entries of its JSON files changed."""

    def prepare(folder: Path) -> None:
        shutil.copytree(PEBBLE, folder / "m")
        for path in (folder / "m" / name for name in names):
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return prepare


def spoil(name: str, text: str | None) -> Callable[[Path], None]:
    """A copy of the built-in model with one file overwritten, or gone."""

    def prepare(folder: Path) -> None:
        shutil.copytree(PEBBLE, folder / "m", ignore=shutil.ignore_patterns(name))
        if text is not None:
            (folder / "m" / name).write_text(text)

    return prepare


def long_prompt(folder: Path) -> None:
    (folder / "t.jsonl").write_text(lines([*ROWS, {"id": "long", "prompt": "1" * 600, "answer": "1"}]))


def nothing(folder: Path) -> None: ...


@dataclass(frozen=True)
class Heavy:
    """What to spoil, the keys of the run, and what is to come of it."""

    prepare: Callable[[Path], None]
    keys: dict[str, Any]
    code: int
    said: tuple[str, ...]


MINE = dict(model="./m")
HEAVY = {
    "the tokenizer ends on another token": Heavy(
        edit("tokenizer_config.json", eos_token="<|pad|>"), MINE, 4, ("ModelError", "'<|pad|>'", "[2]")
    ),
    "the model ends on another token": Heavy(
        edit("config.json", "generation_config.json", eos_token_id=5), MINE, 4, ("ModelError", "'<|end|>'", "[5]")
    ),
    "no end token at all": Heavy(edit("tokenizer_config.json", eos_token=None), MINE, 4, ("no end token",)),
    "an end token outside the model": Heavy(edit("config.json", eos_token_id=[2, 500]), MINE, 4, ("[500]", "103 rows")),
    "an architecture nobody knows": Heavy(edit("config.json", model_type="nonsense"), MINE, 4, ("nonsense",)),
    "an architecture we do not have": Heavy(edit("config.json", model_type="t5"), MINE, 4, ("'t5'", "an encoder")),
    "an activation nobody knows": Heavy(edit("config.json", hidden_act="nonsense"), MINE, 4, ("nonsense",)),
    "weights of another model": Heavy(edit("config.json", vocab_size=90), MINE, 4, ("ModelError",)),
    "weights that do not fill the model": Heavy(
        edit("config.json", num_hidden_layers=5), MINE | dict(preflight_tasks=0), 4, ("ModelError", "layers.4")),
    "a config.json that is not JSON": Heavy(spoil("config.json", "{"), MINE, 4, ("ModelError", "config.json")),
    "a config.json that is a list": Heavy(spoil("config.json", "[1]"), MINE, 4, ("ModelError", "config.json")),
    "weights that are cut off": Heavy(spoil("model.safetensors", "short"), MINE, 4, ("ModelError",)),
    "no weights": Heavy(spoil("model.safetensors", None), MINE, 4, ("ModelError", "model.safetensors")),
    "a tokenizer that is not JSON": Heavy(spoil("tokenizer.json", "{"), MINE, 4, ("ModelError", "token")),
    "a template that does not parse": Heavy(spoil("chat_template.jinja", "{{ oops"), MINE, 4, ("ModelError", "template")),
    "a missing model folder": Heavy(nothing, MINE, 4, ("ModelError", "does not exist")),
    "a hub name without a hub": Heavy(nothing, dict(model="nobody/nothing"), 4, ("ModelError", "nobody/nothing")),
    "a prompt longer than the context": Heavy(
        long_prompt, OWN, 4, ("TaskError", "512 tokens", "first long", "max_prompt_length")
    ),
    "no prompt short enough": Heavy(nothing, OWN | dict(max_prompt_length=1), 4, ("TaskError", "max_prompt_length")),
    "a device that is not there": Heavy(nothing, dict(device="cuda"), 2, ("device = cuda is not present",)),
    "a reward of the wrong length": Heavy(
        nothing, OWN | dict(reward_funcs=["r.py:too_few"]), 4, ("too_few returned 0 values for 1 completions",)
    ),
    "a reward that is no list": Heavy(
        nothing, OWN | dict(reward_funcs=["r.py:bare"]), 4, ("a float instead of a list",)
    ),
    "rewards that fail in every way": Heavy(
        nothing, CRIMINAL | dict(preflight_tasks=6), 4,
        ("RewardError: 10 of 12 rollouts in the preflight got no verdict", "max_reward_failures", *(f"f:{c}" for c in CRIMES)),
    ),
}  # fmt: skip
GO_ON = {
    "a reward that fails in step 2": OWN | dict(
        reward_funcs=["r.py:later"], max_steps=3, preflight_tasks=0, heldout_fraction=0, eval_metric="none",
        probe_reward_tasks=0,
    ),
    "a run that nobody judged": OWN | dict(
        reward_funcs=["r.py:nobody"], max_reward_failures=1.0, preflight_tasks=0, heldout_fraction=0, eval_metric="none"
    ),
}  # fmt: skip
"""Runs that get past their start, so that a folder is left."""


@dataclass(frozen=True)
class Done:
    """A finished case, and its folder before and after."""

    ran: Ran
    before: dict[str, bytes | None]
    after: dict[str, bytes | None]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """Every case that needs a model, one after the other."""
    root = tmp_path_factory.mktemp("cases")
    names = [*HEAVY, *GO_ON]
    folders = {name: fill(root / f"case_{i}") for i, name in enumerate(names)}
    for name, case in HEAVY.items():
        case.prepare(folders[name])
    keys = {name: case.keys for name, case in HEAVY.items()} | GO_ON
    before = {name: contents(folder) for name, folder in folders.items()}
    cases = [{"cwd": str(folders[name]), "words": words(output_dir="run", **keys[name])} for name in names]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(root)}
    subprocess.run([sys.executable, "-c", WARM], input=json.dumps(cases), text=True, env=env, check=True, timeout=600)

    def read(folder: Path, ending: str) -> str:
        return folder.with_name(f"{folder.name}.{ending}").read_text()

    return {
        name: Done(
            Ran(int(read(folder, "code")), read(folder, "out"), read(folder, "err"), folder / "run"),
            before[name],
            contents(folder),
        )
        for name, folder in folders.items()
    }


@pytest.mark.turns(2, together=True)
@pytest.mark.parametrize("name", HEAVY)
def test_refused_with_nothing_left_behind(name: str, done: dict[str, Done]) -> None:
    case, result = HEAVY[name], done[name]
    check_refusal(result.ran.code, result.ran.err, case.code, list(case.said))
    assert result.after == result.before, "a start that is refused leaves nothing behind"


@pytest.mark.turns(2, together=True)
def test_a_failure_in_the_middle_leaves_a_verdict_and_the_steps_before_it(done: dict[str, Done]) -> None:
    ran = done["a reward that fails in step 2"].ran
    check_refusal(ran.code, ran.err, 4, ["in step 2 got no verdict", "later:raised"])
    assert ran.verdict["status"] == "ERROR"
    assert ran.verdict["executed_steps"] == 1
    assert "later:raised" in ran.verdict["reasons"][0]
    assert [row["step"] for row in ran.metrics] == [1]
    assert sorted(p.name for p in (ran.run / "rollouts").iterdir()) == ["step_1.jsonl"]


@pytest.mark.turns(2, together=True)
def test_the_message_shows_what_the_reward_function_raised(done: dict[str, Done]) -> None:
    assert "KeyError: 'the third call'" in done["a reward that fails in step 2"].ran.err


@pytest.mark.turns(2, together=True)
def test_a_run_that_nobody_judged_does_not_pass(done: dict[str, Done]) -> None:
    """Failures are allowed here, all of them; that is permission to go on, not evidence."""
    ran = done["a run that nobody judged"].ran
    assert ran.code != 0
    if ran.run.exists():
        assert ran.verdict["status"] != "PASS"


def test_allowed_failures_are_counted_by_reason_and_never_scored(tmp_path: Path) -> None:
    """The whole command, in a process of its own. One task in six is judged, 1.0 each; a zero would show in the mean."""
    fill(tmp_path)
    ran = surefoot("train", *words(**CRIMINAL, max_reward_failures=1.0), cwd=tmp_path)
    assert ran.code == 1, ran.err
    assert (
        ran.verdict["reasons"][0] == "nothing was learned: all rewards were equal, in none of 6 groups did they differ"
    )
    (step,) = ran.metrics
    assert {name: count for name, count in step.items() if name.startswith("failures/") and count} == {
        f"failures/f:{crime}": 2.0 for crime in CRIMES
    }
    assert step["reward"] == step["rewards/f/mean"] == 1.0
    rollouts = [json.loads(line) for line in (ran.run / "rollouts/step_1.jsonl").read_text().splitlines()]
    seen = {(r["task"], r["reward"], r["failure"]) for r in rollouts}
    assert seen == {(crime, None, f"f:{crime}") for crime in CRIMES} | {("none", 1.0, None)}
