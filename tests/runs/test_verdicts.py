"""What a run is called at its end, through the real command: PASS needs evidence that something was learned."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import Ran, surefoot

SMALL = {
    "num_tasks": "1000", "tasks_per_step": "4", "max_completion_length": "6", "max_steps": "2", "eval_tasks": "20",
    "learning_rate": "1e-4",
}  # fmt: skip
"""Two steps of the built-in run; `max_steps` was overridden, so its target is shown and not judged."""
REWARDS = """
def half(completions, **columns):
    return [0.5 for _ in completions]

def graded(completions, answer, **columns):
    return [0.1 + 0.01 * len(text) for text in completions]

def parts(completions, answer, **columns):
    return [len(set(text) & set(gold)) / 100 for text, gold in zip(completions, answer)]
"""


def small(*words: str) -> list[str]:
    """`train` with the keys of SMALL, and these instead or beside them."""
    keys = SMALL | dict(word.split("=", 1) for word in words)
    return ["train", *(f"{key}={value}" for key, value in keys.items())]


def project(folder: Path) -> Path:
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def failed_first_by(ran: Ran, said: str) -> bool:
    """FAIL, exit 1, and this is the first thing that the verdict and the screen say of it."""
    reasons, lines = ran.verdict["reasons"], ran.out.splitlines()
    verdict = next((number for number, line in enumerate(lines) if line.startswith("FAIL  after")), None)
    on_screen = verdict is not None and lines[verdict + 1].strip() == reasons[0]
    return ran.code == 1 and ran.verdict["status"] == "FAIL" and reasons[0].startswith(said) and on_screen


# -- nothing was learned ----------------------------------------------------------------------------


@pytest.mark.config_key("learning_rate")
def test_a_learning_rate_of_0_fails_by_that_name(tmp_path: Path) -> None:
    ran = surefoot(*small("learning_rate=0"), cwd=tmp_path)
    assert failed_first_by(ran, "nothing was learned: learning_rate = 0"), ran.out + ran.err
    assert ran.verdict["evidence"]["changed_entries"] == 0


@pytest.mark.config_key("preflight_tasks")
def test_a_reward_that_is_the_same_for_all_fails_without_a_preflight_too(tmp_path: Path) -> None:
    words = ('reward_funcs=["rewards.py:half"]', "weight_decay=0.5")
    ran = surefoot(*small(*words, "preflight_tasks=0"), cwd=project(tmp_path))
    assert failed_first_by(ran, "nothing was learned: all rewards were equal, in none of 8 groups did they differ"), (
        ran.out + ran.err
    )
    refused = surefoot(*small(*words, "preflight_tasks=8"), cwd=tmp_path, run="refused")
    assert refused.code == 4, "with a preflight it does not even begin"


def test_a_run_that_changed_no_parameter_entry_fails(tmp_path: Path) -> None:
    ran = surefoot(*small(), cwd=tmp_path, planted="never_steps")
    assert failed_first_by(ran, "nothing was learned: no parameter entry ever changed"), ran.out + ran.err
    assert ran.verdict["evidence"]["groups_with_rewards_that_differ"] > 0, "the rewards were not to blame"


def test_a_run_whose_every_step_was_refused_fails_by_that(tmp_path: Path) -> None:
    ran = surefoot(*small(), cwd=tmp_path, planted="no_finite_gradient")
    assert failed_first_by(ran, "nothing was learned: none of 2 updates was finite"), ran.out + ran.err
    assert ran.verdict["executed_steps"] == 2, "version and refused steps add up to the steps, or it would have ended"


def test_planted_entries_that_nobody_hands_on_are_seen(tmp_path: Path) -> None:
    """Teeth: a judge who is not told how many entries changed lets the same run pass."""
    ran = surefoot(*small(), cwd=tmp_path, planted="forget_changed_entries")
    assert not failed_first_by(ran, "nothing was learned: no parameter entry ever changed")
    assert ran.code == 0, ran.err


def test_planted_rewards_that_nobody_compares_are_seen(tmp_path: Path) -> None:
    words = ('reward_funcs=["rewards.py:half"]', "weight_decay=0.5", "preflight_tasks=0")
    ran = surefoot(*small(*words), cwd=project(tmp_path), planted="forget_equal_rewards")
    assert not failed_first_by(ran, "nothing was learned")
    assert ran.code == 0, "weight decay alone changes entries: only the rewards tell"


# -- what held-out tasks say ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return surefoot(*small("save_steps=1"), cwd=tmp_path_factory.mktemp("a short run"))


def test_a_short_run_passes_and_says_that_its_change_cannot_be_measured(short: Ran) -> None:
    assert short.code == 0, short.err
    heldout, evaluations = short.verdict["evidence"]["heldout"], [m for m in short.metrics if "eval_accuracy" in m]
    (said,) = [reason for reason in short.verdict["reasons"] if reason.startswith("no measurable change (±")]
    counts = [f"{m['eval_right']:.0f} of 20" for m in evaluations]
    assert said.endswith(f" at 20 tasks): eval_accuracy {counts[0]} -> {counts[-1]}")
    assert (heldout["before"], heldout["after"]) == tuple(m["eval_accuracy"] for m in evaluations)
    assert abs(heldout["after"] - heldout["before"]) <= heldout["noise"]
    assert f"  held-out accuracy  {counts[0]} -> {counts[-1]}\n" in short.out, "a share of 20 answers is a count"
    assert short.verdict["target"] is None, "max_steps was overridden"
    assert short.verdict["shown_target"] == ["eval_accuracy", 0.85]


NOT_JUDGED = "eval_accuracy 0.85 is the target of the built-in length: with max_steps set it is shown, not judged"


def test_the_last_lines_say_of_the_target_what_the_plan_said(short: Ran) -> None:
    plan, _, end = short.out.partition("PASS  after")
    assert NOT_JUDGED in plan
    assert NOT_JUDGED in end
    assert short.verdict["reasons"][-1] == NOT_JUDGED
    assert "no target was set" not in short.out


def test_a_resumed_run_says_the_same_of_a_target_that_is_not_judged(tmp_path: Path) -> None:
    killed = surefoot(*small(), cwd=tmp_path, env={"SUREFOOT_FAILPOINTS": "loop.after_learn=kill@1"})
    assert killed.code != 0
    ran = surefoot("train", "--resume", str(killed.run), cwd=tmp_path, run="")
    assert ran.code == 0, ran.out + ran.err
    assert killed.verdict["reasons"][-1] == NOT_JUDGED
    assert killed.verdict["shown_target"] == ["eval_accuracy", 0.85]


def test_a_model_that_got_worse_fails_when_no_guard_looks_on(tmp_path: Path) -> None:
    """The reward pays for long answers; held-out accuracy asks for the right ones."""
    words = ('reward_funcs=["rewards.py:graded"]', "eval_metric=exact", "guard.mode=off", "learning_rate=1e-3")
    ran = surefoot(*small(*words, "max_steps=8", "eval_tasks=60"), cwd=project(tmp_path))
    assert failed_first_by(ran, "worse than the model you started with: eval_accuracy 0."), ran.out + ran.err
    heldout = ran.verdict["evidence"]["heldout"]
    assert heldout["before"] - heldout["after"] > heldout["noise"] > 0
    assert heldout["tasks"] == 60


def test_without_held_out_tasks_nothing_is_claimed_about_them(tmp_path: Path) -> None:
    ran = surefoot(*small("heldout_fraction=0", "eval_steps=0"), cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert "held-out: not measured" in ran.verdict["reasons"]
    assert ran.verdict["evidence"]["heldout"] is None
    assert ran.verdict["best"] is None


@pytest.mark.config_key("eval_on_start")
def test_one_evaluation_is_shown_as_one_and_compared_with_nothing(tmp_path: Path) -> None:
    ran = surefoot(*small("eval_on_start=false", "eval_steps=0"), cwd=tmp_path)
    assert ran.code == 0, ran.err
    said = "held-out: not measured before training, nothing to compare with (see eval_on_start)"
    assert said in ran.verdict["reasons"]
    (evaluation,) = [m for m in ran.metrics if "eval_accuracy" in m]
    count = f"{evaluation['eval_right']:.0f} of 20"
    assert f"  held-out accuracy  {count}  (measured once, after step 2)\n" in ran.out
    assert f"{count} -> " not in ran.out
    page = (ran.run / "report.html").read_text()
    assert f"<b>{count}</b><span>held-out accuracy, measured once, after step 2</span>" in page


def test_a_metric_that_is_not_0_or_1_is_a_mean_and_no_share_of_answers(tmp_path: Path) -> None:
    words = ("eval_metric=rewards.py:parts", "eval_tasks=4")
    ran = surefoot(*small(*words), cwd=project(tmp_path))
    assert ran.code == 0, ran.out + ran.err
    evaluations = [m for m in ran.metrics if "eval_accuracy" in m]
    assert all("eval_right" not in m for m in evaluations)
    assert all(m["eval_accuracy_stderr"] < 0.02 for m in evaluations), "marks up to 0.03: no binomial of 4 answers"
    assert " of 4" not in ran.out


# -- and it survives a resume -----------------------------------------------------------------------


def test_what_a_run_learned_before_it_was_killed_still_counts(short: Ran, tmp_path: Path) -> None:
    """Killed in the last step: rewards, entries and the first evaluation come from the checkpoint."""
    killed = surefoot(*small("save_steps=1"), cwd=tmp_path, env={"SUREFOOT_FAILPOINTS": "loop.before_log=kill@2"})
    assert killed.code == -9
    resumed = surefoot("train", "--resume", "run", cwd=tmp_path, run="")
    verdict = Ran(resumed.code, "", "", tmp_path / "run").verdict
    assert resumed.code == 0, resumed.err
    for fact in ("status", "reasons", "evidence", "best"):
        assert verdict[fact] == short.verdict[fact], fact
