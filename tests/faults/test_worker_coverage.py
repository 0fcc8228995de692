"""Coverage through the real command line: workers that return, fork, leave early, and are killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command import surefoot

WORK = """
def in_subprocess():
    return 1

def in_fork():
    return 2

def before_exit():
    return 3

def on_sigterm():
    return 4

def before_exec():
    return 5

def in_pool(x):
    return x * 6

def in_actor():
    return 7

def never():
    return 8
"""
START = "import os, signal, subprocess, sys\nPYTHON = sys.executable\nfrom my_work import jobs\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "a project [1]"  # a space and a pattern in the name: neither may matter
    (folder / "my_work").mkdir(parents=True)
    (folder / "my_work" / "__init__.py").write_text("")
    (folder / "my_work" / "jobs.py").write_text(WORK)
    return folder


def cover(project: Path, code: str, *options: str, env: dict[str, str] | None = None) -> int:
    (project / "main.py").write_text(START + code)
    done = surefoot(
        "cover", "run", "--source", "my_work", *options, "--", sys.executable, "main.py", cwd=project, env=env
    )
    return done.code


def report(project: Path) -> dict[str, Any]:
    done = surefoot("cover", "report", "--json", cwd=project)
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


def missing(project: Path) -> int:
    (found,) = [one for one in report(project)["files"] if one["file"].endswith("jobs.py")]
    return int(found["missing"])


ALL = 8  # functions in jobs.py, one line each
LIVES = {
    "a subprocess": "subprocess.run([PYTHON, '-c', 'from my_work import jobs; jobs.in_subprocess()'], check=True)",
    "a grandchild below a shell": (
        "subprocess.run(['sh', '-c', PYTHON + ' -c \"from my_work import jobs; jobs.in_subprocess()\"'], check=True)"
    ),
    "a fork that calls os._exit": "pid = os.fork()\nif pid == 0:\n    jobs.in_fork()\n    os._exit(0)\nos.waitpid(pid, 0)",
    "a child that gets SIGTERM": (
        "child = subprocess.Popen([PYTHON, '-c', 'from my_work import jobs; jobs.on_sigterm(); print(1, flush=True);"
        " import signal; signal.pause()'], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nchild.terminate()\nassert child.wait() == -signal.SIGTERM, child.returncode"
    ),
    "a process that execs another": (
        "subprocess.run([PYTHON, '-c', 'from my_work import jobs; jobs.before_exec(); import os, sys;"
        ' os.execv(sys.executable, [sys.executable, "-c", "1"])\'], check=True)'
    ),
}


@pytest.mark.parametrize("code", LIVES.values(), ids=LIVES)
def test_code_that_ran_only_in_a_worker_is_covered(project: Path, code: str) -> None:
    assert cover(project, code) == 0
    assert missing(project) == ALL - 1
    assert report(project)["lower_bound"] is False


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_pool_workers_are_covered_and_end_in_peace(project: Path, how: str) -> None:
    code = (
        "import multiprocessing\nif __name__ == '__main__':\n"
        f"    with multiprocessing.get_context({how!r}).Pool(2) as pool:\n"
        "        pool.map(jobs.in_pool, range(4))\n        pool.close()\n        pool.join()\n"
    )
    assert cover(project, code) == 0
    assert missing(project) == ALL - 1
    assert report(project)["lower_bound"] is False


KILLED = (
    "child = subprocess.Popen([PYTHON, '-c', 'from my_work import jobs; jobs.in_subprocess(); print(1, flush=True);"
    " import signal; signal.pause()'], stdout=subprocess.PIPE)\nchild.stdout.readline()\nchild.kill()\nchild.wait()\n"
)


def test_a_killed_worker_makes_the_number_a_lower_bound(project: Path) -> None:
    assert cover(project, KILLED + "jobs.never()") == 0
    done = surefoot("cover", "report", "--fail-under", "99", cwd=project)
    assert done.code == 1
    assert "coverage >= " in done.out
    assert "lower bound: 1 worker left no data" in done.out
    assert "warning: left no data: " in done.out
    assert missing(project) == ALL - 1, "only what the parent ran is known"


def test_planted_report_that_trusts_every_worker_is_seen(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: were no process thought to have anything to lose, the killed worker would go unnoticed."""
    from dataclasses import replace

    from surefoot.harness import worker_coverage

    assert cover(project, KILLED + "jobs.never()") == 0
    data, real = project / ".surefoot" / "coverage", worker_coverage.processes
    assert worker_coverage.report(data).lower_bound
    monkeypatch.setattr(worker_coverage, "processes", lambda folder: (replace(p, touched=False) for p in real(folder)))
    assert not worker_coverage.report(data).lower_bound


def test_a_python_that_cannot_be_followed_makes_the_number_a_lower_bound(project: Path) -> None:
    code = "subprocess.run([PYTHON, '-I', '-c', '1'])\nsubprocess.run([PYTHON, '-c', '1'], env={})\njobs.never()\n"
    assert cover(project, code) == 0
    found = report(project)
    assert found["lower_bound"] is True
    assert ["-I" in why or "environment of its own" in why for why in found["blind"]] == [True, True]


def test_a_worker_with_a_preexec_function_is_not_taken_for_a_lost_one(project: Path) -> None:
    code = "jobs.never()\nsubprocess.run(['true'], preexec_fn=lambda: None)\n"
    assert cover(project, code) == 0
    assert report(project)["lower_bound"] is False


def test_another_tracer_in_the_process_is_not_hidden(project: Path) -> None:
    assert cover(project, "jobs.never()\nsys.settrace(lambda *event: None)\njobs.in_fork()\n") == 0
    found = report(project)
    if sys.version_info < (3, 14):  # later ones measure without a trace function
        assert found["lower_bound"] is True
        assert "another tracer took over" in found["blind"][0]


def test_runs_add_up_until_a_fresh_one(project: Path) -> None:
    assert cover(project, "jobs.in_fork()\n") == 0
    assert cover(project, "jobs.never()\n") == 0
    assert missing(project) == ALL - 2
    assert report(project)["runs"] == 2
    assert cover(project, "jobs.never()\n", "--fresh") == 0
    assert missing(project) == ALL - 1


def test_a_file_that_never_ran_counts_as_missing(project: Path) -> None:
    (project / "my_work" / "forgotten.py").write_text("x = 1\ny = 2\n")
    assert cover(project, "jobs.never()\n") == 0
    (found,) = [one for one in report(project)["files"] if one["file"].endswith("forgotten.py")]
    assert (found["statements"], found["missing"]) == (2, 2)


@pytest.mark.parametrize(("code", "expected"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("1/0", 1)])
def test_the_exit_code_is_the_commands_own(project: Path, code: str, expected: int) -> None:
    assert cover(project, code) == expected


def test_the_sitecustomize_that_was_there_still_runs(project: Path) -> None:
    (project / "mine").mkdir()
    (project / "mine" / "sitecustomize.py").write_text("import builtins\nbuiltins.was_there = True\n")
    code = "import sitecustomize\nassert was_there and sitecustomize.__file__.startswith(os.getcwd() + '/mine'), 'hidden'\n"
    src = str(Path(__file__).parents[2] / "src")
    assert cover(project, code, env={"PYTHONPATH": f"{src}:{project / 'mine'}"}) == 0


def test_a_damaged_data_file_is_a_worker_that_left_no_data(project: Path) -> None:
    assert cover(project, LIVES["a subprocess"] + "\njobs.never()\n") == 0
    largest = max((project / ".surefoot" / "coverage").glob("run-*/*.cov"), key=lambda path: path.stat().st_mtime)
    largest.write_bytes(b"z" + b"torn")
    found = report(project)
    assert found["lower_bound"] is True
    assert len(found["lost"]) == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["run"], 2),
        (["run", "--", "no-such-program"], 127),
        (["run", "--source", "nowhere", "--", "true"], 2),
        (["report"], 3),
        (["report", "--fail-under", "nan"], 3),
    ],
)
def test_usage_and_missing_evidence_have_their_own_exit_codes(tmp_path: Path, words: list[str], code: int) -> None:
    done = surefoot("cover", *words, cwd=tmp_path)
    assert done.code == code, done.err
    assert "Traceback" not in done.err


@pytest.mark.ray
@pytest.mark.turns(2, 1)
def test_code_that_ran_only_in_a_ray_actor_is_covered(project: Path) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    code = (
        "import ray\nray.init(include_dashboard=False, num_cpus=1, log_to_driver=False)\n"
        "@ray.remote\nclass Actor:\n    def act(self):\n        from my_work import jobs\n        return jobs.in_actor()\n"
        "    def leave(self):\n        ray.actor.exit_actor()\n"
        "actor = Actor.remote()\nassert ray.get(actor.act.remote()) == 7, 'the actor'\n"
        "try:\n    ray.get(actor.leave.remote())\nexcept ray.exceptions.RayActorError:\n    pass\n"
    )
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "HOME": str(project)}
    assert cover(project, code, env=quiet) == 0
    assert missing(project) == ALL - 1
    assert report(project)["lower_bound"] is False, "the actor left of its own accord; the rest of Ray ran none of this"
