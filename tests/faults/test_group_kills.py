"""A kill in the middle of a batch, or after its last rollout: what was graded is neither sampled, played nor graded again.

Each group is on the disk as soon as it is graded. Runs here write down, outside of the run folder, every completion
that is asked of the engine, every rollout that is graded and every call of a tool, by rollout and by call; after kill and
resume those of groups that were on the disk are there once, and the run is the run that was never killed.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from figures import Record, note
from kill_kit import Ended
from kill_runs import Bench, Case, differences, facts

from surefoot.records import Task
from surefoot.storage.batches import BatchLog

WORLD = """
import os


class World:
    def reset(self, **row):
        return None

    def look(self, place: str) -> str:
        "Look there.\\n\\nArgs:\\n    place: where.\\n\\nReturns:\\n    What is there."
        with open("calls.txt", "a") as file:
            file.write(f"{place!r}\\n")
        return "no"
"""
SLOW = Case("slow grades", {"reward_funcs": ["reward.py:slow"], "tasks_per_step": 3, "max_steps": 4})
DYNAMIC = Case(
    "dynamic", {"reward_funcs": ["reward.py:flat"], "tasks_per_step": 2, "max_steps": 3, "dynamic_sampling_batches": 6},
    rows=40,
)  # fmt: skip
TOOLS = Case(
    "own world",
    {"reward_funcs": ["reward.py:slow"], "tasks_per_step": 3, "max_steps": 3, "eval_tasks": 4,
     "tools.environment": "world.py:World", "tools.in_prompt": False, "max_turns": 3},
)  # fmt: skip
KILLS = [
    (SLOW, "loop.after_collect=kill@1"), (SLOW, "loop.after_collect=kill@3"), (SLOW, "books.delivered=kill@1"),
    (SLOW, "books.on_disk=kill@3"), (SLOW, "batches.after_append=kill@3"), (DYNAMIC, "books.delivered=kill@2"),
    (DYNAMIC, "loop.after_collect=kill@2"), (TOOLS, "loop.after_collect=kill@2"), (TOOLS, "books.delivered=kill@2"),
]  # fmt: skip


def folder_of(bench: Bench, case: Case) -> Path:
    folder = bench.folder(case)
    (folder / "world.py").write_text(WORLD)
    return folder


def before(case: Case, folder: Path) -> list[tuple[Any, ...]]:
    """Everything is written down; a model that makes no sense calls tools too."""
    return [("requests", folder / "requests"), *([("calls_by_every_word",)] if case is TOOLS else [])]


def undisturbed(bench: Bench, case: Case) -> dict[str, Any]:
    """What a whole run of the case leaves, and what it asked, graded and called."""
    known: dict[str, dict[str, Any]] = bench.__dict__.setdefault("group_kills", {})
    if str(case) not in known:
        folder = folder_of(bench, case)
        ended = bench.train(folder, before=before(case, folder))
        assert ended.code == 0, ended.said
        known[str(case)] = {"facts": facts(folder / "run"), "done": done(folder)}
        if case is TOOLS:
            told = [line.split(maxsplit=4) for line in (folder / "requests").read_text().splitlines()]
            asked = Counter(repr(json.loads(words[4])["place"]) for words in told if words[0] == "called")
            assert asked == Counter((folder / "calls.txt").read_text().splitlines()), "told is what was made"
            assert asked.total() >= 36, "one a rollout"
    return known[str(case)]


def done(folder: Path) -> Counter[str]:
    """Every completion asked for, world opened, tool called and rollout graded while training, counted."""
    lines = (folder / "requests").read_text().splitlines()
    return Counter(line for line in lines if line.split()[1].startswith("train/"))


def group_of(line: str) -> str:
    """`train/2/0` of `asked train/2/0/3/1`: step, place, then rollout, turn or call."""
    return "/".join(line.split()[1].split("/")[:3])


def on_disk(folder: Path) -> set[str]:
    """Names of the groups that the journal holds after a kill, those of whole batches included."""
    copy = Path(shutil.copytree(folder / "run" / "journal", folder / "copy"))  # opening it cuts what is torn
    log = BatchLog(copy)
    rows = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    tasks = {row["id"]: Task(id=row["id"], prompt=row["prompt"]) for row in rows}
    groups = log.read_delivered(log.delivered(), tasks)
    found = {group.id for group in groups} | {g.id for step in log.steps() for g in log.load(step, tasks)}
    log.close()
    shutil.rmtree(copy)
    return found


def killed_and_resumed(bench: Bench, case: Case, failpoint: str, plant: str = "") -> tuple[Path, set[str], Ended]:
    """The folder, the groups that were on the disk after the kill, and how the resumed run ended."""
    folder = folder_of(bench, case)
    first = [*before(case, folder), *([("plant", plant)] if plant else [])]
    ended = bench.train(folder, failpoints=failpoint, before=first)
    assert ended.code == -signal.SIGKILL, f"{failpoint} was not reached: exit {ended.code}\n{ended.said}"
    kept = on_disk(folder)
    if failpoint.startswith(("loop.after_collect", "books.delivered")) and not plant:
        shown = bench.warm.run("ledger", "run", "--json", cwd=folder)
        newest = max(int(name.split("/")[1]) for name in kept)
        assert json.loads(shown.said)["delivered"] == sum(name.startswith(f"train/{newest}/") for name in kept)
    return folder, kept, bench.resume(folder, before=first)


def check(bench: Bench, case: Case, folder: Path, kept: set[str], ended: Ended) -> int:
    """Nothing that was on the disk was done again, everything else at most once more, and the end is the same."""
    assert ended.code == 0, ended.said
    whole, now = undisturbed(bench, case), done(folder)
    again = {name: n for name, n in now.items() if n > whole["done"][name]}
    repeated = [name for name in again if group_of(name) in kept]
    kinds = Counter(name.split()[0] for name in repeated)
    assert repeated == [], f"on the disk, and done again: {dict(sorted(kinds.items()))}, {repeated[:5]}"
    assert now.keys() == whole["done"].keys()
    assert differences(whole["facts"], facts(folder / "run")) == []
    return len(kept)


@pytest.mark.turns(3)
@pytest.mark.parametrize(("case", "failpoint"), KILLS, ids=lambda value: str(value))
def test_what_was_graded_before_a_kill_is_not_done_again(
    bench: Bench, case: Case, failpoint: str, record_property: Record
) -> None:
    folder, kept, ended = killed_and_resumed(bench, case, failpoint)
    whole = {group_of(name) for name in undisturbed(bench, case)["done"]}
    assert kept, "a kill before the first grade shows nothing"
    assert kept < whole, "nor does one after the last"
    if failpoint.startswith("loop.after_collect"):  # every rollout of the step was graded
        step = int(failpoint.rpartition("@")[2])
        assert {name for name in whole if int(name.split("/")[1]) <= step} == kept
        assert done(folder) == undisturbed(bench, case)["done"], "no completion, no call, no grade came twice"
    n = check(bench, case, folder, kept, ended)
    note(record_property, "P4", "kill in the middle of a batch, resumed: graded groups that were played again: 0", n)


@pytest.mark.parametrize(
    ("case", "again"),
    [(SLOW, r"\{'asked': 12, 'graded': 12\}"), (TOOLS, r"\{'asked': \d+, 'called': \d+, 'graded': 12, 'opened': 12\}")],
)
def test_the_check_sees_a_journal_that_is_written_at_the_end_of_the_batch(bench: Bench, case: Case, again: str) -> None:
    """The planted bug: groups are held back until their batch is whole, as they were before."""
    folder, kept, ended = killed_and_resumed(bench, case, "loop.after_collect=kill@2", plant="journaled_at_the_end")
    assert {name.split("/")[1] for name in kept} == {"1"}, "nothing of step 2 was on the disk"
    step = {f"train/2/{place}" for place in range(3)}
    with pytest.raises(AssertionError, match=f"on the disk, and done again: {again}"):
        check(bench, case, folder, kept | step, ended)


def test_groups_without_a_verdict_are_played_again_when_their_grader_is_mended(bench: Bench) -> None:
    folder = folder_of(bench, SLOW)
    good = (folder / "reward.py").read_text()
    broken = good + (
        "\ndef slow(prompts, completions, answer, **columns):\n"
        "    if prompts[0] in open('broken.txt').read().split():\n        raise RuntimeError('no verdict')\n"
        "    return grade(prompts, completions, answer)\n"
    )
    (folder / "reward.py").write_text(broken)
    trained = undisturbed(bench, SLOW)["facts"]["trained"]
    item = next(item for item, step in trained.items() if step == 2)
    (folder / "broken.txt").write_text(item.partition("#")[0] + "=")
    ended = bench.train(folder, before=before(SLOW, folder))
    assert ended.code == 4, ended.said
    assert "4 of 12 rollouts in step 2 got no verdict" in ended.said
    (folder / "reward.py").write_text(good)
    ended = bench.resume(folder, before=before(SLOW, folder))
    assert ended.code == 0, ended.said
    again = [name for name, n in done(folder).items() if n > 1]
    assert len(again) == 8, "four completions of one group, asked for and graded again"
    assert len({group_of(name) for name in again}) == 1
    assert differences(undisturbed(bench, SLOW)["facts"], facts(folder / "run")) == []


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_random_instants_nothing_that_was_graded_is_done_again(
    bench: Bench, seed: int, record_property: Record
) -> None:
    rng = random.Random(seed)
    case = (SLOW, DYNAMIC, TOOLS)[seed % 3]
    sure = undisturbed(bench, case)
    hits = len({group_of(name) for name in sure["done"]})
    name = rng.choice(["books.on_disk", "books.delivered", "batches.after_append", "journal.after_write"])
    folder, kept, ended = killed_and_resumed(bench, case, f"{name}=kill@{rng.randint(2, max(2, hits // 2))}")
    n = check(bench, case, folder, kept, ended)
    note(record_property, "P4", "kill in the middle of a batch, resumed: graded groups that were played again: 0", n)
