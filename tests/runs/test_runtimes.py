"""The same claims on every runtime: one process, Ray, and Ray with vLLM.

Where a claim holds only for some of them it says so. With our own engine a run on Ray is bit for bit the run in one
process (tests/parity); vLLM samples other tokens, so there the journal is what can be repeated bit for bit.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from command import SHORT, Ran, ledger, surefoot

HAS_VLLM = importlib.util.find_spec("vllm") is not None
RUNTIMES = {
    "local": [],
    "ray": ["runtime.kind=ray", "runtime.engines=2"],
    "ray_vllm": ["runtime.kind=ray", "runtime.engines=1", "engine.kind=vllm"],
}
MARKS = {
    "local": [],
    "ray": [pytest.mark.ray, pytest.mark.turns(3)],
    "ray_vllm": [
        pytest.mark.vllm,
        pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed here; make test-vllm runs it"),
    ],
}
EVERYWHERE = [pytest.param(name, id=name, marks=MARKS[name]) for name in RUNTIMES]
RAY_AT_NIGHT = pytest.param("ray", id="ray", marks=[pytest.mark.ray, pytest.mark.nightly])
"""By day these claims are tried on Ray with vLLM (`make test-vllm`)."""
CLOCKED = ("timing/", "step_time", "tokens_per_second", "killswitch/eval_share", "async/wait_s", "memory/peak")
TINY = ["tasks_per_step=4", "eval_tasks=20", "max_completion_length=8"]


def trained_rows(ran: Ran) -> list[dict[str, float]]:
    rows = [row for row in ran.metrics if "reward" in row]
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKED)} for row in rows]


@pytest.fixture(scope="module", params=EVERYWHERE[1:])  # local: test_learning.py
def learned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Ran]:
    words = [*SHORT, *RUNTIMES[request.param]]
    return request.param, surefoot("train", *words, cwd=tmp_path_factory.mktemp(request.param))


def test_the_built_in_run_learns_there(learned: tuple[str, Ran]) -> None:
    where, ran = learned
    assert ran.code == 0, f"{where}: {ran.err}"
    assert ran.verdict["status"] == "PASS"
    assert ran.verdict["executed_steps"] == ran.verdict["planned_steps"]
    accuracies = [row["eval_accuracy"] for row in ran.metrics if "eval_accuracy" in row]
    assert accuracies[0] <= 0.4, "the warm start solves 10 to 40 % of held-out tasks"
    assert accuracies[-1] >= 0.6


def test_every_sync_was_proved(learned: tuple[str, Ran]) -> None:
    where, ran = learned
    rows = trained_rows(ran)
    replicas = 2.0 if where == "ray" else 1.0
    assert all(row["sync/replicas"] == replicas for row in rows), where
    assert all(0 <= row["sync/probe_gap"] < 1e-4 for row in rows)
    assert max(row["sync/probe_move"] for row in rows) > 1e-3, "the canary could tell new weights from old ones"


def test_sampler_and_learner_agree_there(learned: tuple[str, Ran]) -> None:
    where, ran = learned
    step_1 = trained_rows(ran)[0]
    assert 0 < step_1["sampling/sampling_logp_difference/max"] < 1e-4, where
    assert step_1["probs_ratio"] == 1.0


def test_every_task_is_accounted_for(learned: tuple[str, Ran]) -> None:
    _, ran = learned
    account = ledger(ran)
    steps = ran.verdict["executed_steps"]
    assert account["trained"] == 32 * steps
    assert account["dropped"] == {}
    assert account["planned"] == account["pending"] + account["trained"], "nothing is left in anybody's hands"


@pytest.mark.parametrize("where", [RAY_AT_NIGHT, EVERYWHERE[2]])
def test_nothing_is_learned_there_at_learning_rate_0(where: str, tmp_path: Path) -> None:
    words = [word for word in SHORT if not word.startswith(("max_steps", "eval_steps", "eval_tasks"))]
    words += ["max_steps=6", "eval_steps=6", "eval_tasks=100", "learning_rate=0", *RUNTIMES[where]]
    ran = surefoot("train", *words, cwd=tmp_path)
    assert ran.code == 1, ran.err
    assert ran.verdict["status"] == "FAIL"


@pytest.mark.nightly
@pytest.mark.ray
def test_the_built_in_run_cut_short_passes_there_and_its_target_is_not_judged(tmp_path: Path) -> None:
    """Nothing but the runtime and the length is said."""
    ran = surefoot("train", "max_steps=6", "runtime.kind=ray", cwd=tmp_path)
    assert ran.code == 0, ran.out + ran.err
    assert ran.verdict["status"] == "PASS"
    assert "it is shown, not judged" in ran.out


@pytest.mark.turns(5)
def test_planted_torn_copy_ends_a_run_that_samples_ahead_before_it_is_served(tmp_path: Path) -> None:
    """In one process too the checksums of what an engine copied are compared: the same publisher as between many."""
    words = ["max_steps=3", "eval_on_start=false", "max_staleness=1", "importance_sampling_correction=true", *TINY]
    ran = surefoot("train", *words, cwd=tmp_path, planted="torn_copy")
    assert ran.code == 4, ran.out + ran.err
    assert "EngineError: the engine does not hold version" in ran.err
    assert "tensors differ, first" in ran.err


@pytest.mark.parametrize("where", [EVERYWHERE[0], RAY_AT_NIGHT, EVERYWHERE[2]])
def test_what_the_journal_holds_is_repeated_bit_for_bit(where: str, tmp_path: Path) -> None:
    """Killed in step 4 without a checkpoint: steps 1 to 3 are learned from the journaled groups once more."""
    words = ["max_steps=5", "eval_on_start=false", *TINY, *RUNTIMES[where]]
    killed = surefoot("train", *words, cwd=tmp_path, env={"SUREFOOT_FAILPOINTS": "loop.before_log=kill@4"})
    before = trained_rows(killed)
    assert len(before) == 3, killed.err
    resumed = surefoot("train", "--resume", "run", cwd=tmp_path, run="")
    assert resumed.code == 0, resumed.err
    assert "4 journaled batches are learned from again" in resumed.out
    assert trained_rows(killed)[:3] == before
    assert ledger(killed)["trained"] == 20


@pytest.mark.parametrize(
    "where", [pytest.param("local", id="local", marks=pytest.mark.turns(2)), RAY_AT_NIGHT, EVERYWHERE[2]]
)
@pytest.mark.config_key("max_staleness")
def test_sampling_ahead_learns_too_and_nothing_is_older_than_allowed(where: str, tmp_path: Path) -> None:
    # Older samples teach less: with the same steps it gets less far than the synchronous run, and further than nothing.
    words = [word for word in SHORT if not word.startswith("target_value")]
    words += ["target_value=0.36", "learning_rate=1.5e-4", "max_staleness=1", "importance_sampling_correction=true"]
    ran = surefoot("train", *words, *RUNTIMES[where], cwd=tmp_path)
    assert ran.code == 0, ran.err
    rows = trained_rows(ran)
    assert max(row["async/staleness_max"] for row in rows) == 1, "sampling went on while the learner learned"
    assert ledger(ran)["trained"] == 32 * ran.verdict["executed_steps"]
