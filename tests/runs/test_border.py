"""Held out means held out, through the real command: twins refused, left out or allowed, and nothing dealt across."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from command import Ran, python, surefoot

from surefoot.data.heldout import is_heldout

TINY = (
    "tasks=mine.jsonl tasks_per_step=2 num_generations=2 max_completion_length=4 max_steps=2 eval_steps=2 "
    "eval_tasks=40 preflight_tasks=0 reward_workers=1 threads=1 device=cpu guard.mode=off learning_rate=1e-4 "
    'target_metric=none target_value=none reward_funcs=["r.py:score"]'
).split()
AHEAD = ["max_staleness=1", "importance_sampling_correction=true"]
STREAMED = ["stream_tasks=true", "max_prompt_length=200"]
REWARD = "def score(completions, **_):\n    return [sum(map(ord, text)) % 7 / 7 for text in completions]\n"
WORDS = "river stone lantern garden winter copper silent marble orchard thunder velvet harbor meadow crystal".split()


def prose(number: int) -> str:
    return "Tell me of the " + " and the ".join(random.Random(number).sample(WORDS, 6)) + " by the sea"


def rows() -> list[dict[str, Any]]:
    """120 tasks; 28 of the held-out ones have a training twin that differs in one sign."""
    ids = [f"t{i}" for i in range(400)]
    held = [name for name in ids if is_heldout(name, 0.1)][:32]
    train = [name for name in ids if not is_heldout(name, 0.1)][:88]
    twins = [{"id": t, "prompt": prose(i) + "!", "story": f"s{i}"} for i, t in enumerate(train[:28])]
    others = [{"id": t, "prompt": prose(1000 + i), "story": f"o{i}"} for i, t in enumerate(train[28:])]
    return [*({"id": h, "prompt": prose(i) + ".", "story": f"s{i}"} for i, h in enumerate(held)), *twins, *others]


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (tmp_path / "r.py").write_text(REWARD)


def train(*words: str, cwd: Path, **more: Any) -> Ran:
    """`surefoot train` with the keys of `TINY`, less those that are given anew."""
    given = {word.partition("=")[0] for word in words}
    return surefoot("train", *(w for w in TINY if w.partition("=")[0] not in given), *words, cwd=cwd, **more)


def visited(run: Path) -> set[str]:
    kept = sorted((run / "rollouts").glob("step_*.jsonl"))
    assert kept, "the run trained on something"
    return {json.loads(line)["task"] for path in kept for line in path.read_text().splitlines()}


def twins_of(said: Ran) -> dict[str, Any]:
    return dict(said.verdict["heldout"])


# -- near-duplicates ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [["--dry-run"], [], STREAMED, [*STREAMED, "--dry-run"]], ids=" ".join)
def test_near_duplicates_are_refused_with_three_pairs_and_both_prompts(tmp_path: Path, way: list[str]) -> None:
    ran = train(*way, cwd=tmp_path)
    assert ran.code == 4, ran.out + ran.err
    assert "28 of 88 training tasks are nearly held-out tasks" in ran.err
    assert ran.err.count("      train     ") == ran.err.count("      held out  ") == 3
    assert ran.err.count("by the sea!\n") == ran.err.count("by the sea.\n") == 3, "cut to where they differ"
    assert 'heldout_near = "drop"' in ran.err
    assert not ran.run.exists(), "a start that is refused leaves nothing behind"


def test_rows_from_python_are_refused_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import json, surefoot\n"
        "rows = [json.loads(line) for line in open('mine.jsonl')]\n"
        "def score(completions, **_):\n    return [float(len(text)) for text in completions]\n"
        "surefoot.train(model='pebble', tasks=rows, reward_funcs=[score], output_dir='run')\n"
    )
    ran = python(tmp_path / "mine.py", cwd=tmp_path)
    assert ran.code != 0
    assert "28 of 88 training tasks are nearly held-out tasks" in ran.err
    assert not ran.run.exists()


@pytest.mark.config_key("heldout_near")
@pytest.mark.parametrize("way", [[], STREAMED], ids=["whole", "streamed"])
def test_dropped_twins_are_counted_never_trained_on_and_gone_after_a_resume(tmp_path: Path, way: list[str]) -> None:
    words = ["heldout_near=drop", "max_steps=3", "eval_steps=3", "tasks_per_step=30", "num_generations=2", *way]
    killed = train(*words, cwd=tmp_path, env={"SUREFOOT_FAILPOINTS": "loop.after_learn=kill@2"})
    assert killed.code == -signal.SIGKILL, killed.out + killed.err
    assert "28 twins left out of training (heldout_near = drop)" in killed.out
    assert "mine.jsonl: 60 to train on" in killed.out
    ran = surefoot("train", "--resume", "run", cwd=tmp_path, run="")
    assert ran.code in (0, 1), ran.out + ran.err
    again = Ran(0, ran.out, ran.err, tmp_path / "run")
    assert again.verdict["executed_steps"] == 3
    facts = twins_of(again)
    assert (facts["near"], facts["twins"], facts["left_out"]) == ("drop", 28, 28)
    dropped = {pair[0] for pair in facts["pairs"]}
    assert dropped == {row["id"] for row in rows()[32:60]}
    assert len(visited(again.run)) == 60, "an epoch and a half of everything that is left"
    assert not visited(again.run) & dropped


def test_allowed_twins_are_stamped_on_plan_and_verdict(tmp_path: Path) -> None:
    ran = train("heldout_near=allow", cwd=tmp_path)
    assert ran.code in (0, 1), ran.out + ran.err
    assert "28 twins in training, allowed by heldout_near = allow" in ran.out
    assert "held-out tasks have 28 near-duplicates in training: allowed by key" in ran.out
    facts = twins_of(ran)
    assert (facts["near"], facts["twins"], facts["left_out"]) == ("allow", 28, 0)


@pytest.mark.parametrize("way", [[], STREAMED], ids=["whole", "streamed"])
def test_an_equal_prompt_is_refused_even_where_near_ones_are_allowed_and_dropped_with_them(
    tmp_path: Path, way: list[str]
) -> None:
    copied = rows()
    copied[40]["prompt"] = copied[5]["prompt"].upper().replace(" ", "  ")
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in copied))
    refused = train("heldout_near=allow", "--dry-run", *way, cwd=tmp_path)
    assert refused.code == 4, refused.out + refused.err
    assert "1 held-out prompts are also training prompts" in refused.err
    assert f"{copied[40]['id']!r} has the content of {copied[5]['id']!r}" in refused.err
    left = train("heldout_near=drop", "--dry-run", *way, cwd=tmp_path)
    assert left.code == 0, left.err
    assert "28 twins left out of training" in left.out, "the copy is one of them"
    assert ": 60 to train on, 32 held out" in left.out


def test_a_file_on_the_disk_is_compared_with_what_is_evaluated(tmp_path: Path) -> None:
    ran = train("heldout_near=drop", "eval_tasks=5", "--dry-run", *STREAMED, cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert "5 held-out tasks checked against 88 training tasks for near-duplicates in " in ran.out
    assert " twins left out of training" in ran.out


@pytest.mark.turns(3)
def test_generated_tasks_lose_their_twins_unasked(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the tasks extra is not installed")
    made = ["tasks=reasoning_gym:rectangle_count", "num_tasks=100", "reward_funcs=[]", "--dry-run"]
    ran = train(*made, cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert "reasoning_gym:rectangle_count: 68 to train on, 12 held out" in ran.out
    assert "12 held-out tasks checked against 88 training tasks for near-duplicates in " in ran.out
    assert "20 twins left out of training (heldout_near = drop)" in ran.out
    refused = train(*made, "heldout_near=refuse", cwd=tmp_path)
    assert refused.code == 4
    assert "20 of 88 training tasks are nearly held-out tasks" in refused.err


def test_short_sums_are_different_tasks(tmp_path: Path) -> None:
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 20) for b in range(10, 20)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    ran = train("--dry-run", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert "9 held-out tasks checked against 91 training tasks for near-duplicates in 0." in ran.out
    assert ran.out.count("near-duplicates") == 1
    built_in = train("--dry-run", "tasks=builtin:sums", "num_tasks=2000", "heldout_near=refuse", cwd=tmp_path)
    assert built_in.code == 0, built_in.err


# -- who is on which side -------------------------------------------------------------------------


@pytest.mark.config_key("heldout_group", "heldout_seed")
def test_a_group_stays_on_one_side_of_the_run_and_of_its_resume(tmp_path: Path) -> None:
    words = ["heldout_group=story", "heldout_fraction=0.3", "heldout_seed=5", "eval_tasks=99", "tasks_per_step=40"]
    whole = train("--dry-run", *words, cwd=tmp_path)
    words += STREAMED
    killed = train(*words, cwd=tmp_path, env={"SUREFOOT_FAILPOINTS": "loop.after_learn=kill@2"})
    assert killed.code == -signal.SIGKILL, killed.out + killed.err
    assert ": none" in killed.out, "twins have a story in common, so none crosses"
    sizes = [next(line for line in ran.out.splitlines() if line.startswith("tasks ")) for ran in (whole, killed)]
    assert sizes[0] == sizes[1], "on the disk or not, it is the same split"
    ran = surefoot("train", "--resume", "run", cwd=tmp_path, run="")
    assert ran.code in (0, 1), ran.out + ran.err
    stories = {row["id"]: row["story"] for row in rows()}
    trained = {stories[task] for task in visited(tmp_path / "run")}
    held = {story for story in stories.values() if is_heldout(story, 0.3, 5)}
    assert trained == set(stories.values()) - held, "all of the others, in an epoch and more"
    assert twins_of(Ran(0, "", "", tmp_path / "run"))["twins"] == 0


def test_a_group_that_a_task_lacks_is_refused_by_its_name(tmp_path: Path) -> None:
    for way in ([], STREAMED):
        ran = train("heldout_group=tale", "--dry-run", *way, cwd=tmp_path)
        assert ran.code == 4
        assert "has the group None" in ran.err


def test_keys_of_a_split_without_a_split_are_refused(tmp_path: Path) -> None:
    ran = train("heldout_fraction=0", "eval_steps=0", "heldout_group=story", "--dry-run", cwd=tmp_path)
    assert ran.code == 2
    assert "heldout_group = 'story'" in ran.err


# -- recorded preferences -------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "code"), [(prose(3) + ".", 4), (prose(3) + " ?", 4), (prose(5000), 0)])
def test_replayed_pairs_of_held_out_tasks_are_refused(tmp_path: Path, prompt: str, code: int) -> None:
    pairs = [{"prompt": prose(6000 + i), "chosen": "1", "rejected": "2"} for i in range(3)]
    pairs.append({"prompt": prompt, "chosen": "1", "rejected": "2"})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = ["heldout_near=drop", "beta_replay=0.1", "replay_pairs=pairs.jsonl"]
    planned, ran = train(*words, "--dry-run", cwd=tmp_path), train(*words, "max_steps=1", "eval_steps=0", cwd=tmp_path)
    assert (planned.code, ran.code) == (code, code), ran.out + ran.err
    for told in (planned, ran) if code else ():
        assert "replay_pairs: the prompts of 1 of 4 pairs are held-out tasks, or nearly" in told.err
        assert prompt[12:100] in told.err
    assert ran.run.exists() == (code == 0)


# -- the border goes with the run -----------------------------------------------------------------

WAYS = {"waiting": [], "ahead": AHEAD, "streamed": STREAMED}


@pytest.mark.parametrize("way", WAYS)
def test_a_held_out_task_among_those_to_train_on_ends_the_run(tmp_path: Path, way: str) -> None:
    """Cut `border=` in run/task_plan.py or run/build.py, and one of these goes through."""
    whole = ["heldout_near=drop", *WAYS[way], "tasks_per_step=45"]  # streamed: every row is visited
    ran = train(*whole, cwd=tmp_path, planted="pool_holds_heldout")
    assert ran.code == 4, ran.out + ran.err
    assert "HeldoutLeakError" in ran.err
    assert "to train on are held out" in ran.err


@pytest.mark.parametrize("way", ["waiting", "ahead"])
def test_a_plan_that_deals_a_held_out_task_ends_the_run(tmp_path: Path, way: str) -> None:
    ran = train("heldout_near=drop", *WAYS[way], cwd=tmp_path, planted="plan_deals_heldout")
    assert ran.code == 4, ran.out + ran.err
    assert "1 task(s) to train on are held out (1 by id)" in ran.err
