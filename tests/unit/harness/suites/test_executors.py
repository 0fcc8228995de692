from __future__ import annotations

import csv
import os
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError, StateError
from surefoot.harness.suites import executors
from surefoot.harness.suites.executors import (
    DockerExecutor,
    Job,
    JobState,
    LocalExecutor,
    SlurmExecutor,
    SlurmSettings,
    docker_argv,
    job_script,
    mount,
    sbatch_argv,
)

ODD = ("a b", "it's", '"x"', "$HOME `id` $(id)", "line\nbreak", "*", "naïve", "", "--flag=a b", "\\n")
SETTINGS = SlurmSettings(
    account="acc", partition="part one", container="img", mounts="/data:/data", env={"EXTRA": "x y"}
)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    def make(*argv: str, **changes: Any) -> Job:
        folder = tmp_path / "a folder's"
        folder.mkdir(exist_ok=True)
        given: dict[str, Any] = dict(
            name="try-one", argv=argv or ("true",), cwd=tmp_path, folder=folder, log=folder / "run.log",
            exit_file=folder / "exit_1", minutes=5.0,
        )  # fmt: skip
        return Job(**given | changes)

    return make


def stand_in(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable} -S\nimport json, os, sys\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def finished(executor: Any, job_id: str) -> JobState:
    while not (state := executor.poll(job_id)).done:
        os.sched_yield()
    return state


ECHO = "import sys; print(sys.argv[1:])"


# -- local ------------------------------------------------------------------------------


def test_local_words_arrive_exactly_and_the_exit_status_is_kept(job: Any) -> None:
    executor = LocalExecutor()
    job_id = executor.submit(job(sys.executable, "-S", "-c", ECHO + "; sys.exit(42)", *ODD))
    assert finished(executor, job_id) == JobState(True, 42)
    assert executor.fetch(job_id) == f"{list(ODD)}\n"
    assert job().exit_file.read_text() == "42\n"


def test_local_cancel_ends_the_whole_group(job: Any) -> None:
    executor = LocalExecutor()
    script = "sleep 600 & echo $!; trap '' HUP; wait"
    job_id = executor.submit(job("bash", "-c", script))
    while not (text := executor.fetch(job_id)).endswith("\n"):
        os.sched_yield()
    executor.cancel(job_id)
    assert finished(executor, job_id).exit_code != 0
    assert not _alive(int(text))


def test_local_leaves_no_process_behind_when_the_leader_ends(job: Any) -> None:
    executor = LocalExecutor()
    job_id = executor.submit(job("bash", "-c", "sleep 600 & echo $!"))
    assert finished(executor, job_id).exit_code == 0
    left, give_up = int(executor.fetch(job_id)), time.monotonic() + 5
    while _alive(left) and time.monotonic() < give_up:  # it was killed; a busy machine takes a moment to let it die
        time.sleep(0.01)
    assert not _alive(left)


def _alive(pid: int) -> bool:
    """A zombie of another parent does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_local_input_is_empty_so_nothing_waits_for_a_person(job: Any) -> None:
    executor = LocalExecutor()
    assert finished(executor, executor.submit(job("cat"))).exit_code == 0


def test_local_variables_do_not_reach_the_next_job(job: Any) -> None:
    executor = LocalExecutor()
    show = ("bash", "-c", 'echo "${ONLY_HERE-unset}"')
    for env in ({"ONLY_HERE": "1 2"}, {}):
        finished(executor, last := executor.submit(job(*show, env=env)))
    assert executor.fetch(last).split("\n")[:2] == ["1 2", "unset"]


# -- docker -----------------------------------------------------------------------------


def test_docker_passes_words_variables_and_exit_status_exactly(
    job: Any, bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    stand_in(
        bin_folder,
        "docker",
        f"json.dump([sys.argv, dict(os.environ)], open({str(tmp_path / 'call')!r}, 'w')); sys.exit(9)",
    )
    executor = DockerExecutor("image:1")
    state = finished(executor, executor.submit(job("train", *ODD, env={"A": "x y"}, gpus_per_node=2)))
    assert state.exit_code == 9
    import json

    argv, environ = json.loads((tmp_path / "call").read_text())
    assert argv[1] == "run"
    assert argv[argv.index("image:1") + 1 :] == ["train", *ODD]
    options = argv[2 : argv.index("image:1")]
    assert not {"-i", "-t", "-it", "--interactive", "--tty"} & set(options)
    assert [options[i + 1] for i, word in enumerate(options) if word == "--env"] == ["A", "HF_TOKEN"]
    assert not any("hf_secret" in word or "x y" in word for word in argv)
    assert (environ["A"], environ["HF_TOKEN"]) == ("x y", "hf_secret")
    mounts = [next(csv.reader([options[i + 1]])) for i, word in enumerate(options) if word == "--mount"]
    assert [m[1:] for m in mounts[:2]] == [[f"source={p}", f"target={p}"] for p in (tmp_path, tmp_path / "a folder's")]
    assert options[options.index("--workdir") + 1] == str(tmp_path)
    assert options[options.index("--gpus") + 1] == "2"
    assert "--rm" in options


def test_docker_own_failure_is_not_the_trainers(job: Any, bin_folder: Path) -> None:
    stand_in(bin_folder, "docker", "sys.exit(125)")
    executor = DockerExecutor("image")
    assert finished(executor, executor.submit(job())).infrastructure


def test_docker_cancel_stops_the_container_by_its_name(job: Any, bin_folder: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    body = f"open({str(calls)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\nif sys.argv[1] == 'run':\n    import time; time.sleep(600)"
    stand_in(bin_folder, "docker", body)
    executor = DockerExecutor("image")
    job_id = executor.submit(job())
    while not (calls.exists() and calls.read_text().endswith("\n")):
        os.sched_yield()
    executor.cancel(job_id)
    run, kill = calls.read_text().splitlines()
    words = run.split()
    assert kill == f"kill {words[words.index('--name') + 1]}"
    assert finished(executor, job_id).done


def test_docker_refuses_an_image_that_looks_like_an_option(job: Any) -> None:
    with pytest.raises(ConfigError):
        docker_argv(job(), "--privileged", "name")
    with pytest.raises(ConfigError, match="no container"):
        DockerExecutor().submit(job())


def test_docker_mounts_quote_commas_and_quotes() -> None:
    assert next(csv.reader([mount(Path('/a,b/"c"'))])) == ["type=bind", 'source=/a,b/"c"', 'target=/a,b/"c"']
    with pytest.raises(StateError):
        mount(Path("relative"))


# -- slurm ------------------------------------------------------------------------------

SRUN = (
    "argv = sys.argv[1:]\nwhile argv and argv[0].startswith('--container'):\n    argv.pop(0)\nos.execvp(argv[0], argv)"
)


def run_script(job: Job, bin_folder: Path) -> subprocess.CompletedProcess[str]:
    stand_in(bin_folder, "srun", SRUN)
    script = job.folder / "job.sh"
    script.write_text(job_script(job, SETTINGS))
    return subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)


def test_slurm_script_keeps_every_word_and_value(job: Any, bin_folder: Path) -> None:
    show = "import os, sys; print([sys.argv[1:], os.environ['A'], os.environ['EXTRA'], os.getcwd()])"
    made = job(sys.executable, "-S", "-c", show, *ODD, env={"A": "it's $HOME\n`id`"})
    done = run_script(made, bin_folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[list(ODD), made.env['A'], 'x y', str(made.cwd)]}\n"
    assert made.exit_file.read_text() == "0\n"


@pytest.mark.parametrize("code", [1, 42, 137])
def test_slurm_script_writes_the_exit_status_and_passes_it_on(job: Any, bin_folder: Path, code: int) -> None:
    made = job("bash", "-c", f"exit {code}")
    assert run_script(made, bin_folder).returncode == code
    assert made.exit_file.read_text() == f"{code}\n"


@pytest.mark.parametrize(("former", "ran"), [("0", True), ("1", False), (None, False)])
def test_slurm_script_of_a_chain_starts_only_after_a_good_run(
    job: Any, bin_folder: Path, former: str | None, ran: bool
) -> None:
    before = job().folder / "exit_0"
    if former is not None:
        before.write_text(former + "\n")
    made = job("true", after_exit_file=before)
    assert (run_script(made, bin_folder).returncode == 0) is ran
    assert made.exit_file.exists() is ran


def test_slurm_command_names_everything(job: Any) -> None:
    made = job(nodes=4, gpus_per_node=8, segment_size=2, after="77", minutes=90.5)
    words = sbatch_argv(made, SETTINGS, Path("/x/job.sh"))
    assert words[0] == "sbatch"
    assert words[-1] == "/x/job.sh"
    for word in ("--account=acc", "--partition=part one", "--nodes=4", "--gres=gpu:8", "--segment=2", "--time=90:30"):
        assert word in words
    assert "--dependency=afterany:77" in words
    plain = sbatch_argv(job(gpus_per_node=8), SlurmSettings(account="a", partition="p", gres=False), Path("x"))
    assert not [word for word in plain if word.startswith(("--gres", "--dependency", "--segment"))]


def test_slurm_script_names_container_and_mounts(job: Any) -> None:
    text = job_script(job(container="own"), SETTINGS)
    (line,) = [line for line in text.splitlines() if line.startswith("srun")]
    words = shlex.split(line)
    folders = [str(job().cwd), str(job().folder)]
    assert words[1] == "--container-image=own"
    assert words[2] == "--container-mounts=" + ",".join(f"{f}:{f}" for f in folders) + ",/data:/data"


def answers(monkeypatch: pytest.MonkeyPatch, *replies: tuple[int, str, str]) -> None:
    left = iter(replies)

    def call(argv: list[str]) -> subprocess.CompletedProcess[str]:
        code, out, err = next(left)
        return subprocess.CompletedProcess(argv, code, out, err)

    monkeypatch.setattr(executors, "_call", call)


def test_slurm_state_comes_from_the_exit_file_then_from_the_queue(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = SlurmExecutor(SETTINGS)
    answers(monkeypatch, (0, "12;cluster\n", ""), (0, "RUNNING\n", ""), (0, "", ""))
    job_id = executor.submit(made := job())
    assert job_id == "12"
    assert not executor.poll(job_id).done
    gone = executor.poll(job_id)
    assert (gone.done, gone.exit_code) == (True, None)
    made.exit_file.write_text("5\n")
    assert executor.poll(job_id) == JobState(True, 5)


def test_slurm_forgotten_job_has_ended_and_a_deaf_queue_is_not_an_end(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = SlurmExecutor(SETTINGS)
    deaf = (1, "", "slurm_load_jobs error: Unable to contact slurm controller")
    answers(monkeypatch, (0, "12\n", ""), deaf, (1, "", "Invalid job id specified"), *[deaf] * 5)
    job_id = executor.submit(job())
    assert not executor.poll(job_id).done
    assert executor.poll(job_id).done
    for _ in range(4):
        assert not executor.poll(job_id).done
    with pytest.raises(StateError, match="squeue failed"):
        executor.poll(job_id)


@pytest.mark.parametrize("reply", [(1, "", "invalid account"), (0, "Submitted!", ""), (0, "", "")])
def test_slurm_refusal_is_told(job: Any, monkeypatch: pytest.MonkeyPatch, reply: tuple[int, str, str]) -> None:
    answers(monkeypatch, reply)
    with pytest.raises(StateError, match="sbatch refused"):
        SlurmExecutor(SETTINGS).submit(job())


def test_slurm_torn_exit_file_is_refused(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, (0, "12\n", ""))
    executor = SlurmExecutor(SETTINGS)
    job_id = executor.submit(made := job())
    made.exit_file.write_text("")
    with pytest.raises(StateError, match="exit status"):
        executor.poll(job_id)
