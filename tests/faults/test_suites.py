"""Suites through the real command line: exit codes, stops, clusters that are small scripts on PATH.

`docker`, `sbatch`, `squeue` and `srun` are stand-ins that write down how they were called. The stand-in for `sbatch`
runs the job at once, so that a whole chain can be watched and judged here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Ran, surefoot

TRAINER = """
import json, os, pathlib, sys
run, steps, mode = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
print("prompt: answer with PASS or FAIL", flush=True)
(run / "seen.json").write_text(json.dumps({"argv": sys.argv[4:], "env": dict(os.environ)}))
if mode == "crash":
    sys.exit(3)
if mode == "forever":
    import time
    print("ready", os.getpid(), flush=True)
    time.sleep(600)
table = {"train/loss": {str(s): (9.0 if mode == "bad" else 1.0) for s in range(1, steps + 1)}}
(run / "metrics.json").write_text(json.dumps(table))
"""
SUITE = """
gpus_per_node = 8
gpu_hours = 100
[[recipe]]
name = "grpo-tiny-2n8g-ddp"
nodes = 2
max_steps = 4
steps_per_run = 2
minutes = 30
command = ["{python}", "-S", "trainer.py", "{run}", "{steps}", "MODE", "--resume={resume}"]
checks = ['max(data["train/loss"]) < 2', 'count(data["train/loss"]) == 4']
"""
CLUSTER = {
    "CONTAINER": "registry/image:1", "ACCOUNT": "acc", "PARTITION": "part", "MOUNTS": "/data:/data",
    "HF_HOME": "/hf home", "HF_DATASETS_CACHE": "/hf/data", "WATCH_INTERVAL": "0.05",
}  # fmt: skip
RECORD = """
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""
SBATCH = """
import subprocess
number = sum(1 for line in open(os.environ["CALLS"]) if line.startswith('["sbatch"'))
log = [word for word in sys.argv if word.startswith("--output=")][0].removeprefix("--output=")
if not os.environ.get("LOSE_JOBS"):
    subprocess.run(["bash", sys.argv[-1]], stdout=open(log, "a"), stderr=subprocess.STDOUT)
print(100 + number)
"""
SRUN = """
words = sys.argv[1:]
while words[0].startswith("--container"):
    words.pop(0)
words[0] = sys.executable if words[0] == "python" else words[0]
os.execvp(words[0], words)
"""
DOCKER = """
at = sys.argv.index(os.environ["CONTAINER"])
words = sys.argv[at + 1:]
os.chdir(sys.argv[sys.argv.index("--workdir") + 1])
os.execvp(sys.executable, [sys.executable, *words[1:]])
"""


@dataclass
class Place:
    """A repository of its own, stand-ins first on PATH, and the calls they recorded."""

    root: Path

    @property
    def out(self) -> Path:
        return self.root / "runs/suites"

    def folder(self) -> Path:
        return self.out / "try/grpo-tiny-2n8g-ddp"

    def git(self, *words: str) -> None:
        who = [f"GIT_{role}_{what}=a@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")]
        subprocess.run(["env", *who, "git", *words], cwd=self.root, check=True, capture_output=True)

    def suite(self, mode: str = "good", text: str = SUITE, *, commit: bool = True) -> None:
        (self.root / "suites").mkdir(exist_ok=True)
        (self.root / "suites/try.toml").write_text(text.replace("MODE", mode))
        if commit:
            self.git("add", "-A")
            self.git("commit", "-q", "--allow-empty", "-m", "state")

    def env(self, **more: str) -> dict[str, str]:
        path = f"{self.root.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "CALLS": str(self.root.parent / "calls"), **more}

    def __call__(self, *words: str, **env: str) -> Ran:
        return surefoot("suite", *words, cwd=self.root, env=self.env(**env))

    def calls(self, tool: str) -> list[list[str]]:
        path = self.root.parent / "calls"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line[1:] for line in lines if line[0] == tool]

    def verdict(self) -> dict[str, Any]:
        return dict(json.loads((self.folder() / "verdict.json").read_text()))

    def seen(self) -> dict[str, Any]:
        return dict(json.loads((self.folder() / "run/seen.json").read_text()))

    def listing(self) -> dict[str, int]:
        """Every path with its time of change, git's own files included."""
        return {str(path): path.lstat().st_mtime_ns for path in sorted(self.root.rglob("*"))}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "bin").mkdir()
    tools = {"docker": DOCKER, "sbatch": SBATCH, "srun": SRUN, "squeue": "", "scancel": ""}
    for name, body in tools.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!{sys.executable} -S\n{RECORD}{body}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "a repository").mkdir()
    found = Place(tmp_path / "a repository")
    (found.root / "trainer.py").write_text(TRAINER)
    found.git("init", "-q")
    found.suite()
    return found


# -- local ------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "code", "status"), [("good", 0, "PASS"), ("bad", 1, "FAIL"), ("crash", 70, "ERROR")])
def test_the_exit_code_is_the_verdict(place: Place, mode: str, code: int, status: str) -> None:
    place.suite(mode)
    ran = place("run", "try")
    assert ran.code == code, ran.err
    assert place.verdict()["status"] == status
    assert f"{status:<6}  grpo-tiny-2n8g-ddp" in ran.out


def test_overrides_reach_trainer_and_verdict(place: Place) -> None:
    check = 'count(data["train/loss"]) == 4'
    ran = place(
        "run", "try", "--set", "max_steps=2", "--drop-check", check, "--reason", "only 2 steps", "--", "lr = 1", "-x"
    )
    assert ran.code == 0, ran.err
    assert place.seen()["argv"] == ["lr = 1", "-x"]
    record = place.verdict()
    assert record["extra_args"] == ["lr = 1", "-x"]
    assert record["overrides"] == ["set max_steps=2", f"drop-check {check}", "reason only 2 steps"]


@pytest.mark.parametrize(
    "words",
    [
        ["run", "tyr"],
        ["run", "try", "--recipe", "none"],
        ["run", "try", "--executor", "moon"],
        ["run", "try", "--set", "colour=red"],
        ["run", "try", "--drop-check", "x"],
        ["run", "try", "--relax", 'max(data["train/loss"]) < 2=>max(('],
        ["run"],
        ["walk"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_usage_error_is_2_and_creates_nothing(place: Place, words: list[str]) -> None:
    before = place.listing()
    assert place(*words).code == 2
    assert place.listing() == before


def test_a_dry_run_creates_nothing_at_all(place: Place) -> None:
    before = place.listing()
    for ran in (
        place("run", "try", "--dry-run"),
        place("launch", "try", "--dry-run"),
        place("launch", "try", DRYRUN="1"),
    ):
        assert ran.code == 0, ran.err
        assert "total  16 GPU-hours" in ran.out  # 2 nodes x 8 GPUs x half an hour x 2 runs
    assert place.listing() == before
    assert place.calls("sbatch") == []


def test_asked_to_stop_it_ends_the_trainer_and_says_incomplete(place: Place) -> None:
    place.suite("forever")
    running = subprocess.Popen(
        [sys.executable, "-m", "surefoot", "suite", "run", "try"], cwd=place.root, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, **place.env(PYTHONPATH=str(ROOT / "src"))},
    )  # fmt: skip
    log = place.folder() / "run.log"
    while not log.exists() or not (ready := re.search(r"ready\s+(\d+)\n", log.read_text())):  # the whole line
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    trainer = int(ready[1])
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 75, err
    assert place.verdict()["status"] == "INCOMPLETE"
    assert place.verdict()["reasons"] == ["stopped on request (run 1 of 2)"]
    with pytest.raises(ProcessLookupError):
        os.kill(trainer, 0)


def test_check_list_report_and_package_answer_with_their_codes(place: Place) -> None:
    assert place("check", "try").code == 0
    assert "grpo-tiny-2n8g-ddp" in place("list").out
    assert place("run", "try", "--results", "results").code == 0
    report = place("report", "results")
    assert (report.code, "overall  PASS" in report.out) == (0, True)
    part = place.root / "results/grpo-tiny-2n8g-ddp.json"
    part.write_text(part.read_text().replace('"success": true', '"success": false'))
    assert place("report", "results").code == 1
    assert place("report", "suites").code == 3
    assert place("package", "runs", "-o", "out").code == 3
    place.suite(text=SUITE.replace("gpu_hours = 100", "gpu_hours = 1"))
    broken = place("check", "try")
    assert (broken.code, "16 GPU-hours, the budget is 1" in broken.out) == (1, True)


def test_outside_of_git_nothing_runs(place: Place, tmp_path: Path) -> None:
    (tmp_path / "plain/suites").mkdir(parents=True)
    (tmp_path / "plain/suites/try.toml").write_text(SUITE)
    ran = surefoot("suite", "run", "try", cwd=tmp_path / "plain", env=place.env())
    assert ran.code == 3
    assert "not a git work tree" in ran.err


def test_a_reader_that_leaves_does_not_turn_a_failure_into_0(place: Place) -> None:
    place.suite("bad")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "surefoot", "suite", "run", "try"], cwd=place.root, stdout=writing,
            stderr=subprocess.PIPE, env={**os.environ, **place.env(PYTHONPATH=str(ROOT / "src"))}, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert done.returncode == 1, done.stderr
    assert place.verdict()["status"] == "FAIL"


# -- docker -----------------------------------------------------------------------------


def test_docker_runs_the_same_recipe_with_the_same_verdict(place: Place) -> None:
    ran = place("run", "try", "--executor", "docker", "--", "a b", CONTAINER="image:1")
    assert ran.code == 0, ran.err
    assert place.seen()["argv"] == [f"--resume={place.folder() / 'run'}", "a b"]
    (first, second) = place.calls("docker")
    assert first[0] == second[0] == "run"
    assert place.calls("docker")[0][-1] == "a b"
    assert place.verdict()["container"] == "image:1"
    assert place("run", "try", "--executor", "docker").code == 2


def test_docker_passes_the_trainers_failure_on(place: Place) -> None:
    place.suite("crash")
    assert place("run", "try", "--executor", "docker", CONTAINER="image:1").code == 70
    assert "exit 3" in place.verdict()["reasons"][0]


# -- slurm ------------------------------------------------------------------------------


def test_every_missing_variable_is_named(place: Place) -> None:
    before = place.listing()
    ran = place("launch", "try", **dict.fromkeys(CLUSTER, "") | {"ACCOUNT": "acc"})
    assert ran.code == 2
    assert "CONTAINER PARTITION HF_HOME HF_DATASETS_CACHE" in ran.err
    assert place.listing() == before


def test_what_git_does_not_know_is_not_launched(place: Place) -> None:
    place.git("rm", "-q", "--cached", "suites/try.toml")
    ran = place("launch", "try", **CLUSTER)
    assert (ran.code, "is not tracked" in ran.err) == (2, True)
    assert place.calls("sbatch") == []


def test_the_second_dry_run_makes_a_snapshot_and_nothing_else(place: Place) -> None:
    ran = place("launch", "try", DRYRUN="2")
    assert ran.code == 0, ran.err
    assert sorted(path.name for path in place.out.iterdir()) == [".gitignore", "code_snapshots"]
    assert place.calls("sbatch") == []
    assert place("launch", "try", DRYRUN="3").code == 2


@pytest.mark.parametrize(
    ("mode", "words", "code"), [("good", "METRIC PASS", 0), ("bad", "METRIC FAIL", 1), ("crash", "GENERAL FAIL", 70)]
)
def test_a_watched_launch_is_judged(place: Place, mode: str, words: str, code: int) -> None:
    place.suite(mode)
    ran = place("launch", "try", **CLUSTER, WATCH="1")
    assert ran.code == code, ran.err
    assert f"{words:<12}  grpo-tiny-2n8g-ddp" in ran.out


def test_jobs_that_vanish_are_a_general_failure(place: Place) -> None:
    ran = place("launch", "try", **CLUSTER, WATCH="1", LOSE_JOBS="1")
    assert (ran.code, "GENERAL FAIL" in ran.out) == (3, True)
    assert place.verdict()["status"] == "ERROR"
    assert "left the queue without an exit status" in place.verdict()["reasons"][0]


def test_a_launch_chains_its_jobs_and_records_where_they_come_from(place: Place) -> None:
    more = {"EXTRA_ENV": "A=1 B='x y'", "EXTRA_SCRIPT_ARGS": "lr=1 'a b'", "SLURM_JOB_SUFFIX": "-mine"}
    ran = place("launch", "try", **CLUSTER, **more)
    assert ran.code == 0, ran.err
    first, second = place.calls("sbatch")
    assert "--dependency=afterany:101" in second
    assert not any(word.startswith("--dependency") for word in first)
    assert "--job-name=try-grpo-tiny-2n8g-ddp-1.2-mine" in first
    assert {"--nodes=2", "--gres=gpu:8", "--time=30:00", "--account=acc", "--partition=part"} <= set(first)
    assert f"--output={place.folder() / 'slurm_2.2.log'}" in second
    seen = place.seen()
    assert seen["argv"] == [f"--resume={place.folder() / 'run'}", "lr=1", "a b"]
    assert (seen["env"]["A"], seen["env"]["B"], seen["env"]["HF_HOME"]) == ("1", "x y", "/hf home")
    record = json.loads((place.folder() / "provenance.json").read_text())
    assert (record["container"], record["jobs"], record["dirty"]) == ("registry/image:1", ["101", "102"], None)
    assert record["extra_args"] == ["lr=1", "a b"]
    judged = place("run", "try", "--executor", "slurm", **CLUSTER, **more)  # the jobs have ended: judge them now
    assert judged.code == 0, judged.err
    assert len(place.calls("sbatch")) == 2
    assert place.verdict()["status"] == "PASS"


def test_gres_can_be_left_out(place: Place) -> None:
    assert place("launch", "try", **CLUSTER, EXCLUDE_GRES="1").code == 0
    assert not [word for call in place.calls("sbatch") for word in call if word.startswith("--gres")]


def test_the_continue_script_submits_what_has_not_ended_well(place: Place) -> None:
    assert place("launch", "try", **CLUSTER).code == 0
    (place.folder() / "exit_2").write_text("1\n")
    script = place.folder() / "continue.sh"
    environment = {**os.environ, **place.env(), **CLUSTER}
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "run 2: job 103\n"
    assert len(place.calls("sbatch")) == 3
    assert (place.folder() / "exit_2").read_text() == "0\n"


def test_a_release_refuses_a_dirty_tree_and_adds_its_words(place: Place) -> None:
    place.suite(text=SUITE + 'release_args = ["tag={commit}"]\n')
    (place.root / "trainer.py").write_text(TRAINER + "# edited\n")
    assert place("launch", "try", **CLUSTER, IS_RELEASE="1").code == 2
    place.git("commit", "-aqm", "clean")
    assert place("launch", "try", **CLUSTER, IS_RELEASE="1").code == 0
    commit = json.loads((place.folder() / "provenance.json").read_text())["commit"]
    assert place.seen()["argv"][-1] == f"tag={commit}"


def test_a_secret_is_not_written_into_a_job_script(place: Place) -> None:
    ran = place("launch", "try", **CLUSTER, EXTRA_ENV="MY_TOKEN=abcdef123")
    assert (ran.code, "abcdef123" in ran.err) == (2, False)
    assert not place.out.exists()


def test_settings_of_one_recipe_do_not_reach_the_next_in_one_launch(place: Place) -> None:
    other = (
        SUITE[SUITE.index("[[recipe]]") :].replace("tiny", "other").replace("nodes = 2\n", "").replace("2n8g", "1n8g")
    )
    place.suite(text=SUITE + 'env = {ONLY = "1"}\nsegment_size = 2\n' + other)
    assert place("launch", "try", **CLUSTER).code == 0
    calls = place.calls("sbatch")
    assert ["--segment=2" in call for call in calls] == [True, True, False, False]
    assert ["--nodes=2" in call for call in calls] == [True, True, False, False]
    scripts = [Path(call[-1]).read_text() for call in calls]
    assert ["export ONLY=1" in script for script in scripts] == [True, True, False, False]
    assert all(shlex.split(line)[0] == "srun" for script in scripts for line in script.splitlines() if "srun" in line)
