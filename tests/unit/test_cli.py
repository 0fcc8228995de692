"""Through the real command: what is typed, what is said, and the exit code."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.cli.exits import guarded
from surefoot.config.load import load_config
from surefoot.errors import ConfigError, NumericsError, StateError, StoppedError, TaskError

HEAD = 'model = "pebble"\ntasks = "builtin:sums"\n'
HEAVY = "torch transformers tokenizers numpy pydantic rich".split()


def surefoot(*words: str, cwd: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", "surefoot"]
    source = str(Path(__file__).parents[2] / "src")
    env = os.environ | {"PYTHONPATH": source, "COLUMNS": "120", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *start, *words], cwd=cwd, capture_output=True, text=True, check=False, env=env, timeout=120
    )


def test_help_names_every_command_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, surefoot.cli\ntry: surefoot.cli.main()\nexcept SystemExit as end: assert not end.code\n"
        f"loaded = [name for name in {HEAVY} if name in sys.modules]\nassert loaded == [], loaded"
    )
    done = surefoot("--help", cwd=tmp_path, code=code)
    assert done.returncode == 0, done.stderr
    for command in ("train", "eval", "config", "version"):
        assert f"  {command} " in done.stdout


def test_version_is_printed(tmp_path: Path) -> None:
    done = surefoot("version", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "surefoot 0.1.0\n", "")


def test_a_wrong_config_is_2_with_every_problem_on_stderr_and_torch_untouched(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(HEAD + "max_stepps = 3\nbeta = -1\n")
    code = (
        "import sys, surefoot.cli\ntry: surefoot.cli.main()\n"
        "except SystemExit as end:\n    assert 'torch' not in sys.modules\n    raise"
    )
    done = surefoot("train", "run.toml", "--sed", "3", cwd=tmp_path, code=code)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("ConfigError: run.toml has 3 problem(s):")
    assert "run.toml:3: unknown key max_stepps; did you mean max_steps?" in done.stderr
    assert "command line: unknown key sed; did you mean seed?" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["run.toml"], "nothing was written"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train", "nowhere.toml"], 2, "nowhere.toml does not exist"),
        (["train", "--max-steps"], 2, "has no value"),
        (["train", "--num-generations", "1"], 2, "a group of one"),
        (["train", "tasks=nowhere.jsonl"], 4, "nowhere.jsonl"),
        (["train", "output_dir=used"], 3, "already holds a run"),
        (["eval", "nowhere"], 3, "is not a run folder"),
        (["eval"], 2, "RUN"),
        (["trian"], 2, "trian"),
        (["train", "model=./nowhere", "--dry-run"], 4, "nowhere"),
        (["train", "tasks=nowhere.jsonl", "--dry-run"], 4, "nowhere.jsonl"),
        (["train", "output_dir=used", "--dry-run"], 3, "already holds a run"),
        (["train", 'reward_funcs=["nowhere.py:f"]', "--dry-run"], 4, "nowhere.py"),
    ],
)
def test_what_is_refused_has_its_code_and_writes_nothing(
    tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text("")
    done = surefoot(*words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["used", "used/metrics.jsonl"]


def test_config_prints_every_key_and_its_toml_trains(tmp_path: Path) -> None:
    listed = surefoot("config", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert 'loss_type = "dapo"' in listed.stdout
    assert "Rollouts per task. Advantages compare siblings, so at least 2." in listed.stdout
    assert "model = (required)" in listed.stdout
    written = surefoot("config", "--toml", "--max-steps", "7", cwd=tmp_path)
    (tmp_path / "mine.toml").write_text(written.stdout)
    assert load_config(tmp_path / "mine.toml").config == load_config(None, ["max_steps=7"]).config


def test_a_reader_who_had_enough_is_no_error(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-m', 'surefoot', 'config'], stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "p.stdout.close()\nprint(p.wait(), p.stderr.read())"
    )
    assert surefoot(cwd=tmp_path, code=code).stdout == "0 b''\n"


# -- exits, one by one ------------------------------------------------------------


def raising(error: BaseException) -> Callable[[], int]:
    def action() -> int:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("w", "y", "f"), 2),
        (StateError("w", "y", "f"), 3),
        (TaskError("w", "y", "f"), 4),
        (StoppedError("w", "y", "f"), 75),
        (NumericsError("w", "y", "f"), 78),
        (KeyboardInterrupt(), 75),
        (OSError(errno.ENOSPC, "No space left on device"), 74),
        (ZeroDivisionError("division by zero"), 70),
    ],
)
def test_every_error_has_its_exit_code(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(error)) == code
    assert capsys.readouterr().err


def test_a_typed_error_is_shown_with_what_why_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    guarded(raising(TaskError("line 3 \x1b[2J", "no prompt", "add one")))
    assert capsys.readouterr().err == "TaskError: line 3 \\x1b[2J\n  why: no prompt\n  fix: add one\n"


def test_a_bug_of_ours_is_short_and_names_the_file_with_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert guarded(raising(ZeroDivisionError("division by zero"))) == 70
    said = capsys.readouterr().err
    (crash,) = tmp_path.glob("surefoot-crash-*.txt")
    assert str(crash) in said
    assert "Traceback" not in said
    assert "ZeroDivisionError: division by zero" in said
    assert "Traceback" in crash.read_text()
    assert crash.stat().st_mode & 0o777 == 0o600


def test_the_codes_of_a_command_pass_through() -> None:
    assert [guarded(lambda code=code: code) for code in (0, 1)] == [0, 1]  # type: ignore[misc]


# -- the dry run ------------------------------------------------------------------


def test_a_dry_run_says_what_would_happen_and_writes_nothing(tmp_path: Path) -> None:
    done = surefoot("train", "--dry-run", "max_steps=1", "threads=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in (
        "32 tasks x 8 generations = 256 rollouts",
        "at most 2048 tokens",
        "parameters",
        "weights",
        "gradients",
        "optimiser states",
        "activations",
        "KV cache",
        'activations are kept (gradient_checkpointing = "auto")',
        "time      about ",
        "; 2 evaluations of ",
        "; 1 step of ",
        " with 1 thread, with made-up weights",
        "checked the config, tasks, rewards, the device (",
        "not checked: the weights",
        "shown, not judged",
        "nothing was written",
    ):
        assert word in done.stdout, word
    assert "measuring the speed of this " in done.stderr, "it may take minutes, and nothing else is said meanwhile"
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_loads_the_rewards_without_leaving_a_cache(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompts, completions, **_):\n    return [1.0 for _ in completions]\n")
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(60)))
    (tmp_path / "run.toml").write_text('model = "pebble"\ntasks = "tasks.jsonl"\nreward_funcs = ["mine.py:score"]\n')
    done = surefoot("train", "run.toml", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mine.py:score" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.py", "run.toml", "tasks.jsonl"]
    wrong = surefoot("train", "run.toml", "--dry-run", 'reward_funcs=["mine.py:scroe"]', cwd=tmp_path)
    assert wrong.returncode == 4
    assert "score" in wrong.stderr
