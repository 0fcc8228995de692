"""Twelve secrets are planted where secrets come from; real runs must leave none of them anywhere.

Searched, byte for byte: the run folder (config, environment, verdict, metrics, rollouts, logs, event files, what W&B was
given), both output streams, and crash files. Task data and rollouts are the user's own and are kept to the letter, so
nothing is planted there. The reward has every key, because the config passes each of them on by name: what nobody has
is what `test_canaries.py` is about.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from command import Ran, surefoot
from figures import Record, note
from sink_kit import calls, put_stand_in, with_path

IN_ENVIRONMENT = {
    "HF_TOKEN": "hf_CanaryOneAbcdefghijkl",
    "WANDB_API_KEY": "c0ffee02canary02c0ffee02canary02c0ffee02",
    "AWS_SECRET_ACCESS_KEY": "/canary+three/AbCdEfGh0123456789+=",
    "OPENAI_API_KEY": "sk-proj-canaryfour4444444444444444",
    "DB_PASSWORD": 'can"ary five\\ü',
    "SERVICE_TOKEN": "canary-six-first-line\ncanary-six-second-line",
}
BEARER = "canarySevenAbcdef0123456789"
PRINTED = "ghp_canaryEight0123456789abcdef"
IN_CONFIG = "canary-nine-in-an-address"
ON_COMMAND_LINE = "canary-ten-on-the-command-line"
IN_REMOTE = "canary-eleven-of-git"
IN_QUERY = "canary-twelve-in-a-query"
PLANTED = [*IN_ENVIRONMENT.values(), BEARER, PRINTED, IN_CONFIG, ON_COMMAND_LINE, IN_REMOTE, IN_QUERY]
"""Twelve."""

REWARDS = f"""
import os, sys

def talkative(completions, **columns):
    print("environment:", dict(os.environ))
    print(os.environb, file=sys.stderr)
    for value in os.environ.values():
        print(value)
    print("cloned with {PRINTED}")
    sys.stdout.write("no end of line: " + os.environ["HF_TOKEN"])
    return [float(len(text) % 2) for text in completions]

def failing(completions, **columns):
    headers = {{"Authorization": "Bearer {BEARER}"}}
    raise ConnectionError(
        f"GET https://example.org/grade?api_key={IN_QUERY}&n=1 with {{headers}} and {{dict(os.environ)}} \\x1b[2J\\u202e"
    )

def dying(completions, **columns):
    print("last words:", dict(os.environ), "{PRINTED}", flush=True)
    os._exit(3)

def odd(completions, **columns):
    return [os.environ["DB_PASSWORD"] + "{PRINTED}" for _ in completions]
"""
TINY = [
    "num_tasks=200", "tasks_per_step=2", "num_generations=4", "max_completion_length=4", "eval_tasks=8",
    "preflight_tasks=0", "reward_workers=1", "threads=1", "max_steps=2", "guard.mode=off", "eval_on_start=false",
    f"pass_env={list(IN_ENVIRONMENT)}",
]  # fmt: skip
BUG = """
import os, sys
def plant():
    from surefoot import run as assemble
    def train(*words, **keys):
        secret = os.environ["SERVICE_TOKEN"]
        try:
            raise KeyError(os.environ["DB_PASSWORD"])
        except KeyError as error:
            raise RuntimeError(f"{secret} {os.environ} \\x1b[31m") from error
    assemble.train = train
plant()
"""
NO_REDACTION = """
import surefoot.system.text
surefoot.system.text.redact = lambda text, environ=None: text
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkout with a password in the address of its remote, and reward functions that talk."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "r.py").write_text(REWARDS)
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=n@example.org"]
    for words in (
        ["init", "-q"], ["remote", "add", "origin", f"https://me:{IN_REMOTE}@example.org/x.git"], ["add", "."],
        ["commit", "-q", "-m", "m"],
    ):  # fmt: skip
        subprocess.run([*git, *words], check=True, capture_output=True)
    (tmp_path / "crashes").mkdir()
    return folder


def train(place: Path, *words: str, customised: str = "", stand_in: str = "") -> Ran:
    """`surefoot train` with every secret in its environment; `customised` is run when each of its processes starts."""
    hooks = place.parent / "hooks"
    hooks.mkdir(exist_ok=True)
    (hooks / "sitecustomize.py").write_text(customised)
    source = Path(__file__).parents[2] / "src"
    env = IN_ENVIRONMENT | {"TMPDIR": str(place.parent / "crashes"), "WANDB_STAND_IN": stand_in, "PYTHONUTF8": "1"}
    wandb = place.parent / "stand in"
    if not wandb.exists():
        put_stand_in(place.parent)
    return surefoot(*words, *TINY, cwd=place, env=env | with_path(hooks, wandb, source))


def leaks(place: Path, ran: Ran) -> list[str]:
    """Where a secret is, in any spelling that a reader could undo."""
    texts = {"stdout": ran.out.encode(), "stderr": ran.err.encode()}
    for root in (ran.run, place.parent / "crashes"):
        for path in root.rglob("*"):
            texts[f"name of {path.name}"] = os.fsencode(path.name)
            if path.is_file():
                texts[str(path.relative_to(place.parent))] = path.read_bytes()
    return sorted(
        f"{where}: {secret[:14]}" for where, text in texts.items() for secret in PLANTED
        for form in set(_spellings(secret)) if form in text
    )  # fmt: skip


def _spellings(secret: str) -> Iterator[bytes]:
    for part in [secret, *secret.splitlines()]:
        yield part.encode()
        yield json.dumps(part)[1:-1].encode()
        yield repr(part)[1:-1].encode()
        yield repr(part.encode())[2:-1].encode()
        yield quote(part, safe="").encode()
        yield base64.b64encode(part.encode())


def wide_open(run: Path) -> list[str]:
    """Files and folders that others may read."""
    found = [run, *run.rglob("*")]
    return [f"{path.name} {path.stat().st_mode & 0o777:o}" for path in found if path.stat().st_mode & 0o077]


GOOD = [
    "train", "reward_funcs=['r.py:talkative']", f"system_prompt=Ask https://me:{IN_CONFIG}@example.org/",
    "target_metric=eval_reward", "target_value=0.0", "report_to=['tensorboard', 'wandb']",
]  # fmt: skip


def test_a_run_whose_reward_prints_everything_keeps_no_secret(place: Path, record_property: Record) -> None:
    ran = train(place, *GOOD, stand_in="print")
    assert ran.code == 0, ran.err
    assert leaks(place, ran) == []
    log = (ran.run / "logs/rewards.log").read_text()
    assert log.count("***") > 12, "the reward did print"
    assert "no end of line: ***" in log
    assert "https://***@example.org/" in (ran.run / "config.toml").read_text()
    assert "https://***@example.org/" in json.dumps(calls(ran.run)["init"])
    assert "'WANDB_API_KEY': '***'" in (ran.run / "logs/wandb.log").read_text(), "the one key that it needs"
    assert wide_open(ran.run) == []
    note(record_property, "P20", "secrets planted around a run: none in its folder, output or sinks", 12)


@pytest.mark.nightly  # seconds of a whole run; its neighbours show the same every day
@pytest.mark.parametrize("functions", [["failing", "odd"], ["dying"]], ids="-".join)
def test_a_run_that_fails_with_secrets_in_its_hands_names_none(place: Path, functions: list[str]) -> None:
    ran = train(place, "train", f"reward_funcs={[f'r.py:{name}' for name in functions]}")
    assert ran.code == 4, ran.err
    assert "***" in ran.err
    assert all(name in ran.err for name in functions)
    assert leaks(place, ran) == []
    assert not any(char in ran.err + ran.out for char in "\x1b\u202e\x9b")
    assert ("\\x1b[2J" in ran.err) == ("failing" in functions)
    assert not ran.run.exists() or wide_open(ran.run) == []


def test_a_config_that_is_refused_is_shown_without_its_password(place: Path) -> None:
    address = f"https://me:{ON_COMMAND_LINE}@example.org/model\x1b[31m"
    ran = train(place, "train", f"model={address}", f"lerning_rate={address}")
    assert ran.code == 2
    assert leaks(place, ran) == []
    ran = train(place, "train", f"model={address}")
    assert ran.code in (2, 4)
    assert "***@example.org/model" in ran.err
    assert leaks(place, ran) == []
    assert "\x1b" not in ran.err + ran.out


def test_a_crash_file_holds_a_traceback_and_no_secret(place: Path) -> None:
    ran = train(place, "train", customised=BUG)
    assert ran.code == 70
    (crash,) = (place.parent / "crashes").glob("surefoot-crash-*")
    assert "RuntimeError" in crash.read_text()
    assert "KeyError" in crash.read_text()
    assert "\x1b" not in crash.read_text() + ran.err
    assert leaks(place, ran) == []
    assert crash.stat().st_mode & 0o777 == 0o600


def test_planted_redactor_that_does_nothing_is_caught(place: Path) -> None:
    """Teeth: the same runs with redaction taken out leak from every place that is guarded."""
    found = leaks(place, ran := train(place, *GOOD, customised=NO_REDACTION, stand_in="print"))
    assert ran.code == 0, ran.err
    places = {leak.partition(":")[0].rpartition("/")[2] for leak in found}
    assert {"rewards.log", "wandb.log", "config.toml", "calls.jsonl"} <= places
    found += leaks(place, train(place, "train", customised=NO_REDACTION + BUG))
    assert any(leak.startswith("stderr") for leak in found)
    assert any(leak.startswith("crashes/surefoot-crash") for leak in found)
    out = {secret for secret in PLANTED if any(leak.endswith(f": {secret[:14]}") for leak in found)}
    assert out >= {*IN_ENVIRONMENT.values(), PRINTED, IN_CONFIG}
