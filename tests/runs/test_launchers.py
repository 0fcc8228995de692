"""`surefoot train` under torchrun and accelerate launch: rank 0 is the run, the others are ranks of its learner."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command import ROOT, surefoot
from rank_runs import WORDS, metrics, ranks_of, weights

from surefoot.system.process import is_alive

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = (
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
)  # fmt: skip
"""`--multi_gpu` is its word for several processes of one machine; it asks nobody for a GPU."""
PATIENCE_S = 240.0
ENDS_S = 15.0
"""How long a rank may take to notice that rank 0 has gone."""


class Launched:
    """A launcher at work in `folder`, its run in `folder/run`."""

    def __init__(self, folder: Path, launcher: tuple[str, ...], *words: str, path: Path | None = None) -> None:
        self.run = folder / "run"
        entry = [*launcher, "-m", "surefoot", "train", *words]
        paths = [str(each) for each in (path, ROOT / "src") if each is not None]
        environ = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self.said = (folder / "said.txt").open("w+")
        self.process = subprocess.Popen(
            entry, cwd=folder, env=environ, stdout=self.said, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )  # fmt: skip

    def at_step(self, step: int) -> int:
        """Wait until so many steps are logged; the process of rank 1."""
        self.until(lambda: sum("grad_norm" in row for row in metrics(self.run)) >= step)
        return ranks_of(self.run)[-1]

    def until(self, holds: Callable[[], bool]) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while not holds():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < give_up, self.text()
            time.sleep(0.02)

    def text(self) -> str:
        self.said.seek(0)
        return self.said.read()

    def end(self) -> tuple[int, str]:
        """The launcher's exit code, and what all of them said."""
        code = self.process.wait(PATIENCE_S)
        assert not any(is_alive(pid) for pid in ranks_of(self.run)), "a rank outlived the launcher"
        return code, self.text()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """`launched(launcher, *words)`; whatever the test does, it is over afterwards."""
    made: list[Launched] = []

    def start(launcher: tuple[str, ...], *words: str, path: Path | None = None) -> Launched:
        made.append(Launched(tmp_path, launcher, *words, path=path))
        return made[-1]

    yield start
    for each in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.wait()
        each.said.close()


SHORT = (*WORDS, "max_steps=8", "save_steps=2")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, whose ranks are its own processes."""
    folder = tmp_path_factory.mktemp("here")
    ran = surefoot("train", *SHORT, "runtime.learner_ranks=2", cwd=folder, run="run")
    assert ran.code == 0, ran.out + ran.err
    return folder / "run"


def check_same(run: Path, here: Path) -> None:
    """Bit for bit."""
    ours, theirs = weights(here), weights(run)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def has_accelerate() -> bool:
    return importlib.util.find_spec("accelerate") is not None


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_a_launched_run_is_the_run_with_so_many_ranks(
    launched: Callable[..., Launched], here: Path, launcher: tuple[str, ...]
) -> None:
    if launcher is ACCELERATE and not has_accelerate():
        pytest.skip("accelerate comes with the trl extra")
    run = launched(launcher, *SHORT, "output_dir=run")
    code, said = run.end()
    assert code == 0, said
    assert "2 ranks share weights, optimiser and samples" in said
    assert said.count("PASS  after 8 of 8 steps") == 1, "one run, not two"
    assert len(ranks_of(run.run)) == 1
    check_same(run.run, here)
    assert "learner_ranks = 2" in (run.run / "config.toml").read_text(), "a resume needs no launcher"


@pytest.mark.nightly
def test_a_lost_rank_ends_the_run_resumable_and_says_how_to_go_on(
    launched: Callable[..., Launched], here: Path, tmp_path: Path
) -> None:
    run = launched(TORCHRUN, *SHORT, "output_dir=run")
    os.kill(run.at_step(3), signal.SIGKILL)
    code, said = run.end()
    assert code == 1, "torchrun's own word for any failure"
    assert "StoppedError: " in said
    assert "the learner was lost: rank 1 (process" in said
    assert "surefoot train --resume" in said
    again = launched(TORCHRUN, "--resume", "run")
    assert again.end()[0] == 0, again.text()
    check_same(run.run, here)
    assert len(ranks_of(run.run)) == 2


@pytest.mark.nightly
def test_a_launcher_that_may_restart_brings_the_run_to_its_end(launched: Callable[..., Launched], here: Path) -> None:
    run = launched((*TORCHRUN, "--max-restarts", "1"), *SHORT, "output_dir=run")
    os.kill(run.at_step(3), signal.SIGKILL)
    code, said = run.end()
    assert code == 0, said
    assert len(ranks_of(run.run)) == 2
    check_same(run.run, here)


@pytest.mark.nightly
def test_a_stop_saves_with_all_ranks_and_can_be_resumed_without_a_launcher(
    launched: Callable[..., Launched], here: Path, tmp_path: Path
) -> None:
    run = launched(TORCHRUN, *SHORT, "output_dir=run")
    run.at_step(3)
    run.process.send_signal(signal.SIGTERM)
    code, said = run.end()
    assert code != 0
    assert "StoppedError: stopped after step" in said
    assert "saved in" in said
    resumed = surefoot("train", "--resume", "run", cwd=tmp_path, run="")
    assert resumed.code == 0, resumed.out + resumed.err
    check_same(run.run, here)


@pytest.mark.nightly
def test_a_run_that_fails_is_one_failure_of_rank_0(launched: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").write_text("not empty")
    code, said = launched(TORCHRUN, *SHORT, "output_dir=run").end()
    assert code == 1
    assert "StateError: " in said
    assert "rank      : 0 (local_rank: 0)\n  exitcode  : 3" in said
    assert "rank      : 1" not in said, "the launcher blames one process"


LOST_STEP = """
from surefoot.runtime import learner_ranks
real = learner_ranks.PipedFollower.ask
def ask(self, line, seconds):
    return self.pipe.exchange(b"", seconds) if line.startswith(b'["learn"') else real(self, line, seconds)
learner_ranks.PipedFollower.ask = ask
"""


def plant(folder: Path, code: str) -> Path:
    """A folder whose `sitecustomize` does this before the command begins."""
    planted = folder / "planted"
    planted.mkdir()
    lines = "\n".join("    " + line for line in code.strip().splitlines())
    (planted / "sitecustomize.py").write_text(f"import os\nif 'LOCAL_RANK' in os.environ:\n{lines}\n")
    return planted


@pytest.mark.nightly
def test_planted_step_that_never_reaches_a_rank_is_a_lost_rank_in_time(
    launched: Callable[..., Launched], tmp_path: Path
) -> None:
    run = launched(TORCHRUN, *SHORT, "stall_timeout_s=50", "output_dir=run", path=plant(tmp_path, LOST_STEP))
    code, said = run.end()
    assert code == 1, said
    assert not any("grad_norm" in row for row in metrics(run.run)), "no step was applied"
    assert "the learner was lost: rank 1 gave no sign for 40 s: it hangs, or was stopped" in said


def by_hand(launched: Callable[..., Launched], *words: str, path: Path | None = None) -> tuple[Launched, Launched]:
    """Both processes without a launcher, which would end the one when the other has gone."""
    common = ("env", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={os.getpid()}")
    first, second = (
        launched((*common, f"RANK={rank}", f"LOCAL_RANK={rank}", sys.executable), *SHORT, "output_dir=run", path=path)
        for rank in (0, 1)
    )
    return first, second


@pytest.mark.nightly
def test_a_rank_ends_with_rank_0_whatever_ends_that(launched: Callable[..., Launched]) -> None:
    first, second = by_hand(launched)
    first.at_step(2)
    first.process.kill()
    assert second.process.wait(ENDS_S) == 0, "what became of the run is rank 0's exit code"


OUTLIVES = """
from surefoot.run import launcher
launcher._leave_with_rank_0 = lambda connection: __import__("time").sleep(1000)
"""


@pytest.mark.nightly
def test_planted_rank_that_does_not_watch_rank_0_outlives_it(launched: Callable[..., Launched], tmp_path: Path) -> None:
    """Teeth of the test above."""
    first, second = by_hand(launched, path=plant(tmp_path, OUTLIVES))
    first.at_step(2)
    first.process.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        second.process.wait(ENDS_S)
