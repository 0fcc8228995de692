"""Twins across the border: the same in memory and on the disk, shown in full, and never passed over in silence."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from surefoot.data import heldout as twins
from surefoot.data import near_duplicates
from surefoot.data.heldout import HeldoutLeakError, Mode, Twins, keep_apart, refuse_pairs, split_heldout
from surefoot.data.near_duplicates import ComparedText, Content, Likely, template_of
from surefoot.data.near_duplicates import near_duplicates as search
from surefoot.data.on_disk import stream
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.data.on_disk.stream import keep_apart_on_disk
from surefoot.errors import TaskError
from surefoot.records import Task

WORDS = ["".join(random.Random(i).choices("abcdefghijklmnopqrstuvwxyz", k=4 + i % 6)) for i in range(900)]
PREAMBLE = "Answer the question below as briefly as you can, and give no reason. "


def rows(n: int = 300, seed: int = 0) -> list[dict[str, Any]]:
    """Prose with a preamble, some of it with a number or a target; every third task nearly repeats the one before."""
    dice, made = random.Random(seed), []
    for i in range(n):
        prompt = PREAMBLE + "Who saw the " + " and the ".join(dice.choices(WORDS, k=8))
        prompt += f" at {dice.choice('345')} o'clock?" if i % 2 else "?"
        if i % 3 == 2:
            prompt = made[-1]["prompt"].replace("?", " ?!")
        target = None if dice.random() < 0.4 else made[-1]["answer"] if i % 3 == 2 else dice.choice(WORDS)
        made.append({"id": f"t{i}", "prompt": prompt, "answer": target})
    made[-1]["prompt"] = made[3]["prompt"].upper()
    return made


def as_tasks(made: Sequence[dict[str, Any]]) -> list[Task]:
    return [Task(id=row["id"], prompt=row["prompt"], columns={"answer": row["answer"]}) for row in made]


def on_disk(folder: Path, made: Sequence[dict[str, Any]]) -> StreamingDataset:
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return StreamingDataset(folder / "tasks.jsonl")


def compared(
    data: StreamingDataset, mode: Mode, fraction: float = 0.3, evaluated: int = 10_000
) -> tuple[StreamingDataset, Twins]:
    train, heldout = data.sides(fraction)
    return keep_apart_on_disk(data, train, heldout, heldout.smallest(evaluated), mode)


def by_task(found: Twins) -> dict[str, tuple[str, float]]:
    return {leak.task_id: (leak.how, round(leak.overlap, 9)) for leak in found.found}


# -- in memory and on the disk ----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_file_on_the_disk_has_the_twins_that_a_list_has(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_AT_ONCE", 16)
    made = rows(seed=seed)
    train, heldout = split_heldout(as_tasks(made), 0.3)
    left, whole = keep_apart(train, heldout, "drop")
    kept, streamed = compared(on_disk(tmp_path, made), "drop")
    assert 20 < len(whole.found) < len(train)
    assert by_task(streamed) == by_task(whole)
    assert {task.id for task in kept} == {task.id for task in left}
    assert len(left) == len(train) - len(whole.found)
    assert not keep_apart(left, heldout, "refuse")[1].found, "and what is left has none"


def test_planted_template_of_a_piece_finds_other_twins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is template is decided on all tasks: pieces of sixteen would take the preamble for a likeness."""
    made = rows()
    whole = keep_apart(*split_heldout(as_tasks(made), 0.3), "drop")[1]
    monkeypatch.setattr(stream, "_AT_ONCE", 16)
    monkeypatch.setattr(stream.Sample, "template", lambda self: frozenset())
    assert by_task(compared(on_disk(tmp_path, made), "drop")[1]) != by_task(whole)


def test_every_training_copy_of_a_held_out_prompt_is_found_whichever_row_came_first(tmp_path: Path) -> None:
    made = rows(60)
    same = [0, 7, 19, 23, 31, 44, 52]
    for at in same:
        made[at]["prompt"] = "Name the river that runs through Vienna."
    data = on_disk(tmp_path, made)
    train, heldout = data.sides(0.3)
    sides = {task.id for task in train} & {f"t{at}" for at in same}
    assert sides, "the copies are on both sides"
    assert len(sides) < len(same), "the copies are on both sides"
    found = {data.table.task(row).id for row, _ in data.crossing(train, heldout)}
    assert sides <= found
    kept, _ = compared(data, "drop")
    assert not any(task.prompt.startswith("Name the river") for task in kept)


def test_tasks_of_another_file_count_as_held_out_too(tmp_path: Path) -> None:
    made = rows(60)
    data = on_disk(tmp_path, made)
    train, heldout = data.sides(0.3)
    asked = next(iter(train))
    others = [Task(id="exam/1", prompt=asked.prompt, columns={"answer": "another one"})]
    for _ in range(2):  # the second time from the note
        left, found = keep_apart_on_disk(data, train, heldout, others, "drop")
        assert ("exam/1", "content") in {(leak.heldout_id, leak.how) for leak in found.found}
        assert asked.id not in {task.id for task in left}
        with pytest.raises(HeldoutLeakError, match="has the content of"):
            keep_apart_on_disk(data, train, heldout, others, "refuse")


def test_what_may_be_alike_is_asked_of_the_rule_itself() -> None:
    contents = [Content.of(task.messages(), task.columns["answer"]) for task in as_tasks(rows())]
    few, many = [content for content in contents[::7] if content.targets], contents
    likely = Likely(few)
    found = {pair.left for pair in search(many, few, template=template_of(map(ComparedText.of, contents)))}
    passed = {at for at, content in enumerate(many) if ComparedText.of(content) in likely}
    assert found <= passed, "nothing alike is passed over"
    assert len(passed) < len(many), "and something is"


# -- what an earlier start found ----------------------------------------------------------------


def test_the_second_start_remembers_and_other_tasks_are_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rows()
    first = compared(on_disk(tmp_path, made), "drop")[1]
    assert not first.known
    looked: list[int] = []
    real = stream._near
    monkeypatch.setattr(stream, "_near", lambda *args: looked.append(1) or real(*args))
    again = compared(StreamingDataset(tmp_path / "tasks.jsonl"), "drop")[1]
    assert (again.known, again.found, looked) == (True, first.found, [])
    assert "(remembered from an earlier start)" in again.line()
    compared(StreamingDataset(tmp_path / "tasks.jsonl"), "drop", evaluated=20)
    assert len(looked) == 1, "against other held-out tasks"
    made[5]["prompt"] += " Really?"
    compared(on_disk(tmp_path, made), "drop")
    assert len(looked) == 2, "an edited task"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1}', '{"key": "K", "pairs": [[1]]}', "\0"])
def test_a_note_that_cannot_be_read_is_no_note(tmp_path: Path, text: str) -> None:
    first = compared(on_disk(tmp_path, rows()), "drop")[1]
    (note,) = (tmp_path / ".surefoot").glob("*.near.json")
    note.write_text(text.replace("K", json.loads(note.read_text())["key"]))
    again = compared(StreamingDataset(tmp_path / "tasks.jsonl"), "drop")[1]
    assert (again.known, again.found) == (False, first.found)


# -- what becomes of them -----------------------------------------------------------------------


def two(train: str, heldout: str, **columns: Any) -> tuple[list[Task], list[Task]]:
    return [Task(id="a", prompt=train, columns=columns), Task(id="b", prompt="Who?")], [Task(id="c", prompt=heldout)]


def test_long_prompts_are_shown_from_where_they_differ() -> None:
    long = "The lantern of the harbor is lit every evening by a careful woman. " * 30
    with pytest.raises(HeldoutLeakError) as caught:
        keep_apart(*two(long + "Why is that?", long + "Why is this?"), "refuse")
    said = str(caught.value)
    assert "Why is that?" in said
    assert "Why is this?" in said
    assert max(map(len, said.splitlines()[:4])) < 140
    assert caught.value.leaks[0].task_id == "a"
    assert caught.value.exit_code == 4


def test_a_prompt_with_another_answer_is_a_copy_all_the_same() -> None:
    sides = two("Name a river.", "name a  RIVER.", answer="Rhine")
    with pytest.raises(HeldoutLeakError, match="1 held-out prompts are also training prompts"):
        keep_apart(*sides, "allow")
    assert [task.id for task in keep_apart(*sides, "drop")[0]] == ["b"]


def test_too_many_to_read_are_refused_unless_they_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates, "MAX_COMPARISONS", 0)
    sides = two("Name a river of Austria.", "Name a river of Hungary.")
    for mode in ("refuse", "drop"):
        with pytest.raises(TaskError, match="heldout_near"):
            keep_apart(*sides, mode)  # type: ignore[arg-type]
    train, found = keep_apart(*sides, "allow")
    assert len(train) == 2
    assert "too many" in (found.warning() or "")
    assert found.facts()["twins"] is None


def test_planted_search_that_finds_nothing_lets_twins_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "near_duplicates", lambda *_, **__: [])
    assert len(keep_apart(*two("Name a river of Austria!", "Name a river of Austria?"), "refuse")[0]) == 2


def test_pairs_are_compared_by_their_prompts_alone() -> None:
    held = [Task(id="1", prompt="Name a river.", columns={"answer": "Rhine"})]
    refuse_pairs([Task(id="1", prompt="Name a mountain.", columns={"answer": "Rhine"})], held, "refuse")
    for mode in ("refuse", "drop", "allow"):
        with pytest.raises(HeldoutLeakError, match="1 of 1 pairs"):
            refuse_pairs([Task(id="9", prompt="Name a river.", columns={"answer": "Elbe"})], held, mode)  # type: ignore[arg-type]
    nearly = [Task(id="9", prompt="Name a river ...")]
    refuse_pairs(nearly, held, "allow")
    with pytest.raises(HeldoutLeakError):
        refuse_pairs(nearly, held, "drop")
