"""What processes below us see of the environment: the list, what was named, and nothing else, in the kernel's eyes too.

Each test here starts a Python with the secrets in its environment, as a shell does: only then the kernel's own copy
(/proc/PID/environ), which a fork inherits, is part of what is looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from canary_kit import CANARIES
from command import ROOT

LISTED = {"LC_TIME": "C", "OMP_NUM_THREADS": "1", "HF_HOME": "/hf", "SUREFOOT_TEST": "s", "TMPDIR": "/tmp"}
POOL = """
import json, os, sys
from pathlib import Path
from surefoot.rewards.pool import RewardJob, RewardPool
{planted}
def look(completions, **columns):
    import subprocess
    seen = {{"own": dict(os.environ), "bytes": sorted(map(os.fsdecode, os.environb))}}
    seen["below"] = subprocess.run([sys.executable, "-I", "-S", "-c", "import os; print(dict(os.environ))"],
                                   capture_output=True, text=True, check=True).stdout
    seen["kernel"] = [Path(f"/proc/{{pid}}/environ").read_text() for pid in ("self", os.getppid())]
    Path(columns["to"][0]).write_text(json.dumps(seen))
    print("asked", os.environ.get("OPENAI_KEY"), BEFORE)
    return [0.0 for _ in completions]

def needy(completions, **columns):
    return [float(len(os.environ["JUDGE_API_KEY"])) for _ in completions]

def wrapped(completions, **columns):
    if not os.getenv("JUDGE_API_KEY"):
        raise RuntimeError("set an api_key")
    return [1.0 for _ in completions]

BEFORE = os.environ.get("DB_PASSWORD")
functions, passed, place = json.loads(sys.argv[1])
told = []
with RewardPool({{name: globals()[name] for name in functions}}, workers=1, timeout_s=120.0, pass_env=passed,
                log_path=Path(place) / "log", warn=lambda *words: told.append(words)) as pool:
    marks = pool.score([RewardJob(["p"], ["c"], {{"to": [place + "/seen"]}})])
    stories = {{reason: story for reason, (_, story) in pool.describe_failures().items()}}
ours = Path("/proc/self/environ").read_text()
kept = all(value in ours and os.environ[name] == value for name, value in json.loads(sys.argv[2]).items())
print(json.dumps({{"marks": [{{name: mark.value for name, mark in row.items()}} for row in marks], "told": told,
                  "stories": stories, "kept": kept}}))
"""
AS_BEFORE = "import surefoot.rewards.workers as n; n.narrow = lambda named=(): None"
"""The forked processes keep what the driver has."""
ONLY_PYTHON = "import surefoot.system.environment as c; c._wipe = lambda kept: None"
"""What Python sees is narrowed, and the kernel's copy stays."""


def scored(
    place: Path, *functions: str, passed: list[str] | None = None, planted: str = "", **more: str
) -> dict[str, Any]:
    """A pool in a Python that was started with the canaries around it."""
    script = POOL.format(planted=planted)
    asked = json.dumps([functions, passed or [], str(place)])
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), **LISTED, **CANARIES, **more}
    done = subprocess.run(
        [sys.executable, "-c", script, asked, json.dumps(CANARIES)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def canaries_in(text: str) -> set[str]:
    return {name for name, value in CANARIES.items() if value in text or json.dumps(value)[1:-1] in text}


def test_reward_processes_have_what_is_listed_and_no_secret_and_the_driver_keeps_its_own(tmp_path: Path) -> None:
    result = scored(tmp_path, "look")
    seen = json.loads((tmp_path / "seen").read_text())
    assert LISTED.items() <= seen["own"].items()
    assert "PATH" in seen["own"]
    assert set(CANARIES) & {*seen["own"], *seen["bytes"]} == set()
    assert [canaries_in(text) for text in (seen["below"], *seen["kernel"])] == [set(), set(), set()]
    assert all("OMP_NUM_THREADS=1" in text for text in seen["kernel"]), "what is passed on stays where it was"
    assert result["kept"]
    log = (tmp_path / "log").read_text()
    assert log.splitlines() == ["asked None ***"], "what a reward file read when it was imported is still hidden"
    assert result["told"] == [["the reward asked for OPENAI_KEY, which is set here and not passed on",
                               'add pass_env = ["OPENAI_KEY"]']]  # fmt: skip


@pytest.mark.parametrize(
    ("planted", "where"), [(AS_BEFORE, {"own", "kernel"}), (ONLY_PYTHON, {"kernel"})], ids=["all", "kernel"]
)
def test_planted_fork_that_keeps_the_environment_is_caught(tmp_path: Path, planted: str, where: set[str]) -> None:
    scored(tmp_path, "look", planted=planted)
    seen = json.loads((tmp_path / "seen").read_text())
    found = {name for name in ("own", "kernel") if canaries_in(str(seen[name])) | (set(CANARIES) & set(seen[name]))}
    assert found == where


def test_a_reward_has_the_key_that_the_config_names_and_only_that(tmp_path: Path) -> None:
    result = scored(tmp_path, "needy", "wrapped", "look", passed=["JUDGE_API_KEY"], JUDGE_API_KEY="key-of-11-c")
    assert result["marks"] == [{"needy": 11.0, "wrapped": 1.0, "look": 0.0}]
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["own"]["JUDGE_API_KEY"] == "key-of-11-c"
    assert set(CANARIES) & set(seen["own"]) == set()


@pytest.mark.parametrize(("function", "said"), [("needy", "KeyError"), ("wrapped", "set an api_key")])
def test_a_reward_that_fails_for_want_of_a_variable_is_told_how_to_get_it(
    tmp_path: Path, function: str, said: str
) -> None:
    result = scored(tmp_path, function, JUDGE_API_KEY="key-of-11-c")
    assert result["marks"] == [{function: None}]
    story = result["stories"]["raised"]
    assert said in story
    assert story.endswith(
        'the reward asked for JUDGE_API_KEY, which is set here and not passed on\nadd pass_env = ["JUDGE_API_KEY"]\n'
    )
    absent = scored(tmp_path, function)
    assert "pass_env" not in absent["stories"]["raised"], "one that is not set at all is no matter of passing on"


ENTERED = """
import json, os, sys
from pathlib import Path
from surefoot.runtime.ray import cluster as ray_cluster
from surefoot.system.environment import withheld
from surefoot.errors import RewardError
from surefoot.runtime.specs import ProcessSpec, WorkerSpec, FromFile
canaries = json.loads(sys.argv[1])
with ray_cluster._environment({"SUREFOOT_FLEET_MARK": "m", "RAY_AUTH_TOKEN": "of-the-cluster"}):
    during = dict(os.environ)
after = {name: os.environ.get(name) == value for name, value in canaries.items()}
recipe = ProcessSpec(Path(sys.argv[2]), 1, True, withheld=withheld(["OPENAI_KEY"])).also(["OPENAI_KEY", "NOT_SET"])
shown = repr(recipe)
os.environ.update({"RAY_AUTH_TOKEN": "of-the-cluster", "OPENAI_KEY": "of the machine over there"})
os.environ.pop("JWT")  # over there nobody has it: only its name travels
out = os.dup(1)
recipe.enter("worker 0")
Path("needs.py").write_text("import os\\nKEY = os.environ['JWT']\\ndef f(completions, **_): return []\\n")
try:
    WorkerSpec({"f": FromFile(os.path.abspath("needs.py"), "f")}, {}, None, 1, 1.0, 0, None, 0, 10).pool(Path("log"))
    told = "nothing"
except RewardError as error:
    told = str(error)
result = {"during": during, "after": after, "inside": dict(os.environ), "shown": shown, "told": told,
          "kernel": Path("/proc/self/environ").read_text()}
os.write(out, json.dumps(result).encode())
"""


def test_what_ray_is_started_with_and_what_its_processes_keep_is_the_list_and_what_was_named(tmp_path: Path) -> None:
    """The day's form of the Ray run with canaries: the environment that the cluster starts in, and a process's entry."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), **LISTED, **CANARIES}
    done = subprocess.run(
        [sys.executable, "-c", ENTERED, json.dumps(CANARIES), str(tmp_path / "logs")], env=env, capture_output=True,
        text=True, timeout=240, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert canaries_in(str(result["during"].values())) | (set(CANARIES) & set(result["during"])) == set()
    assert result["during"]["RAY_AUTH_TOKEN"] == "of-the-cluster"
    assert LISTED.items() <= result["during"].items()
    assert set(result["after"].values()) == {True}
    assert result["inside"]["OPENAI_KEY"] == CANARIES["OPENAI_KEY"], "the driver's, not that of the machine over there"
    assert set(CANARIES) & set(result["inside"]) == {"OPENAI_KEY"}
    assert result["inside"]["RAY_AUTH_TOKEN"] == "of-the-cluster"
    assert canaries_in(result["kernel"]) <= {"OPENAI_KEY"}
    assert canaries_in(result["shown"]) == set()
    assert "the reward asked for JWT, which is set here and not passed on" in result["told"]
    assert 'fix: add pass_env = ["JWT"]' in result["told"]
