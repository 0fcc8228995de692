"""`runtime.learner_ranks` through the command: the run of one rank, whatever becomes of a rank on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command import surefoot
from families import save_family
from rank_runs import WORDS, metrics, ranks_of, weights
from safetensors.torch import load_file

from surefoot.system.process import is_alive

MODES: dict[str, tuple[str, ...]] = {
    "every_weight": (),
    "adapter": ("lora.rank=4", "learning_rate=1e-3"),
    "channels": ("alpha_sdpo=0.3", "beta_replay=0.2", "replay_pairs=pairs.jsonl"),
    "sgd": ("optim=sgd", "learning_rate=0.05"),
}
LOW = ("dtype=bfloat16",)
"""What differs between the runs that are compared on one and on two ranks."""
PAIRS = "".join(
    json.dumps({"prompt": f"{n} + {n} =", "chosen": str(2 * n), "rejected": str(3 * n)}) + "\n" for n in range(1, 5)
)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_on_two_ranks_is_the_run_on_one(tmp_path: Path, mode: str) -> None:
    words = (*WORDS, "max_steps=4", *MODES[mode])
    (tmp_path / "pairs.jsonl").write_text(PAIRS)
    one = surefoot("train", *words, cwd=tmp_path, run="one")
    more = ("runtime.learner_ranks=2", "gradient_checkpointing=true")  # computed again from gathered weights
    two = surefoot("train", *words, *more, cwd=tmp_path, run="two")
    assert (one.code, two.code) == (0, 0), one.err + two.out + two.err
    assert len(ranks_of(tmp_path / "two")) == 1
    assert not ranks_of(tmp_path / "one")
    names = ("loss", "grad_norm", "reward", "kl", "trained_tokens", "sequences/mean_length", "learning_rate")
    names += ("updates/changed_share", "updates/published_share", "sdpo/loss", "replay/loss", "sdpo/live_fraction")
    rows = [[{n: r[n] for n in names if n in r} for r in metrics(tmp_path / run) if "grad_norm" in r] for run in ("one", "two")]  # fmt: skip
    assert len(rows[0]) == len(rows[1]) >= 4
    for first, second in zip(*rows, strict=True):
        assert second == pytest.approx(first, rel=1e-4, abs=1e-6)
    ours, theirs = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert max(float((ours[n] - theirs[n]).norm() / ours[n].norm()) for n in ours) < 1e-4, (
        "Adam from the same gradients"
    )
    assert surefoot("eval", str(tmp_path / "two"), cwd=tmp_path, run="").code == 0, "one process answers"


@pytest.mark.usefixtures("bfloat16_products")
def test_a_run_in_bfloat16_on_two_ranks_trains_float32_masters(tmp_path: Path) -> None:
    one = surefoot("train", *WORDS, *LOW, "max_steps=2", cwd=tmp_path, run="one")
    two = surefoot("train", *WORDS, *LOW, "max_steps=2", "runtime.learner_ranks=2", cwd=tmp_path, run="two")
    assert (one.code, two.code) == (0, 0), one.err + two.out + two.err
    rows = [[row for row in metrics(tmp_path / run) if "grad_norm" in row] for run in ("one", "two")]
    for first, second in zip(*rows, strict=True):  # of one sampling: products of other shapes are rounded otherwise
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=0.02)
        assert second["reward"] == first["reward"]
        assert second["loss"] == pytest.approx(first["loss"], abs=1e-3)
    saved = next((tmp_path / "two/checkpoints").glob("step_2"))
    computed, masters = load_file(saved / "model.safetensors"), load_file(saved / "training/masters.safetensors")
    assert computed.keys() == masters.keys()
    assert all(torch.equal(computed[name], masters[name].bfloat16()) for name in masters)
    assert any(not torch.equal(computed[name].float(), masters[name]) for name in masters), "they say more"


def test_what_was_never_cut_over_ranks_is_refused_by_name_in_a_dry_run_too(tmp_path: Path) -> None:
    save_family("gemma2", tmp_path / "gemma")
    ranks = "runtime.learner_ranks=2"
    for dry in ((), ("--dry-run",)):
        ran = surefoot("train", *WORDS, "model=gemma", "tasks=builtin:sums", ranks, *dry, cwd=tmp_path)
        assert ran.code == 4, ran.out + ran.err
        assert "were never cut over ranks here" in ran.err
    for word in ("optim=adamw_8bit", "quantization=nf4"):
        ran = surefoot("train", *WORDS, ranks, word, "lora.rank=4", "--dry-run", cwd=tmp_path)
        assert ran.code == 2, ran.out + ran.err
        assert "runtime.learner_ranks = 2 with " + word.partition("=")[0] in ran.err, ran.err


class Under:
    """A run under way, in an interpreter of its own."""

    def __init__(
        self, folder: Path, *words: str, path: Path | None = None, output: str = "run", **variables: str
    ) -> None:
        self.run = folder / output
        entry = [
            sys.executable,
            "-m",
            "surefoot",
            "train",
            *WORDS,
            "runtime.learner_ranks=2",
            *words,
            f"output_dir={output}",
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **({"PYTHONPATH": str(path)} if path else {})}
        environ |= variables
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            entry, cwd=folder, env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )

    def at_step(self, step: int) -> list[int]:
        """Wait until it has logged so many steps; its rank processes so far."""
        until = time.monotonic() + 200
        while sum("grad_norm" in row for row in metrics(self.run)) < step:
            assert time.monotonic() < until, "it does not move"
            assert self.process.poll() is None, self.process.stdout.read()  # type: ignore[union-attr]
            time.sleep(0.02)
        return ranks_of(self.run)

    def end(self) -> tuple[int, str]:
        """Exit code, and all that it said."""
        said, _ = self.process.communicate(timeout=250)
        return self.process.returncode, said


KILLED, STOPPED = (signal.SIGKILL, "rank 1 was ended by SIGKILL"), (signal.SIGSTOP, "rank 1 gave no sign for")


@pytest.mark.parametrize(
    ("number", "told", "mode"),
    [(*KILLED, ()), (*STOPPED, ()), (*KILLED, MODES["adapter"]), (*KILLED, LOW), (*KILLED, MODES["channels"])],
    ids=["killed", "stopped", "killed_adapter", "killed_bfloat16", "killed_channels"],
)
def test_a_lost_rank_ends_the_group_and_the_run_goes_on_to_the_same_end(
    tmp_path: Path, number: int, told: str, mode: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    if mode == LOW:
        request.getfixturevalue("bfloat16_products")
    (tmp_path / "pairs.jsonl").write_text(PAIRS)
    words = ("max_steps=8", "save_steps=2", *mode)
    words += ("stall_timeout_s=60",) if number == signal.SIGSTOP else ()
    whole = surefoot("train", *WORDS, "runtime.learner_ranks=2", *words, cwd=tmp_path, run="whole")
    assert whole.code == 0, whole.out + whole.err
    run = Under(tmp_path, *words)
    (pid,) = run.at_step(3)
    os.kill(pid, number)
    code, said = run.end()
    assert code == 0, said
    assert f"the learner was lost: {told}" in said
    assert len(ranks_of(run.run)) == 2, "a new rank for the lost one"
    assert not any(is_alive(each) for each in ranks_of(run.run)), "nobody is left"
    ours, theirs = weights(tmp_path / "whole"), weights(run.run)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), "bit for bit"


def test_without_restarts_a_lost_rank_is_77_and_a_resume_goes_on(tmp_path: Path) -> None:
    run = Under(tmp_path, "max_steps=6", "save_steps=2", "runtime.max_restarts=0")
    (pid,) = run.at_step(3)
    os.kill(pid, signal.SIGKILL)
    code, said = run.end()
    assert code == 77, said
    assert "LearnerLostError: the learner was lost: rank 1 was ended by SIGKILL" in said
    again = surefoot("train", "--resume", str(run.run), cwd=tmp_path, run="")
    assert again.code == 0, again.out + again.err


PLANTED = """
import sys
if "surefoot.run.learner_rank" in sys.orig_argv:
    from surefoot.learner import grpo
    learner = grpo.GRPOLearner
    real_rate, real_backward, calls = learner._rate_at, learner._backward, []
    def rate(self, step):
        return real_rate(self, step) * (2 if step == 3 else 1)
    def backward(self, *args):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("not enough memory")
        return real_backward(self, *args)
    learner.{} = {}
"""


@pytest.mark.parametrize(
    ("bug", "code", "told"),
    [
        (("_rate_at", "rate"), 1, "InvariantError: rank 1 of the learner made something else of learn: [3, True"),
        (("_backward", "backward"), 74, "MemoryLimitError: rank 1 of the learner: memory ran out at version 2"),
    ],
    ids=["another_rate", "no_memory"],
)
def test_a_rank_that_goes_its_own_way_ends_the_run_by_name(
    tmp_path: Path, bug: tuple[str, str], code: int, told: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED.format(*bug))
    run = Under(tmp_path, "max_steps=6", path=tmp_path)
    ended, said = run.end()
    assert told in said
    assert ended == code, said
    assert not any(is_alive(each) for each in ranks_of(run.run))


OTHER_WEIGHTS = """
import sys
if "surefoot.run.learner_rank" in sys.orig_argv:
    from surefoot.learner import model
    real = model.load_policy
    def other(*args, **keys):
        policy = real(*args, **keys)
        next(policy.model.parameters()).data.view(-1)[7] += 1e-3
        return policy
    model.load_policy = other
"""


def test_planted_rank_with_other_weights_is_refused_before_anything_is_cut(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_WEIGHTS)
    run = Under(tmp_path, "max_steps=6", path=tmp_path)
    code, said = run.end()
    assert code == 4, said
    assert "ModelError: rank 1 of the learner loaded other weights than rank 0 from pebble" in said
    assert not run.run.exists(), "a start that is refused leaves no folder behind"


UNMERGED = """
import sys
if "surefoot.run.learner_rank" in sys.orig_argv:
    from surefoot.learner import sharding
    real = sharding.RankGroup.as_whole
    def as_whole(self, part, like):
        return real(self, part if like.requires_grad else self.here(like), like)
    sharding.RankGroup.as_whole = as_whole
"""


def test_an_adapter_that_one_rank_does_not_merge_is_seen_by_the_next_sync(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(UNMERGED)
    code, said = Under(tmp_path, "max_steps=6", "lora.rank=4", "learning_rate=3e-3", path=tmp_path).end()
    assert code == 78, said
    assert "probe" in said


def test_ranks_end_with_a_driver_that_is_killed_and_the_next_run_clears_up_behind_it(tmp_path: Path) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    run = Under(tmp_path, "max_steps=50", TMPDIR=str(place))
    (pid,) = run.at_step(1)
    run.process.kill()
    run.end()
    until = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < until, "an orphan"
        time.sleep(0.05)
    assert len(list(place.glob("surefoot-ranks-*"))) == 1, "nobody was there to remove it"
    code, said = Under(tmp_path, "max_steps=2", TMPDIR=str(place), output="next").end()
    assert code == 0, said
    assert not list(place.glob("surefoot-ranks-*"))


pytestmark = pytest.mark.nightly
