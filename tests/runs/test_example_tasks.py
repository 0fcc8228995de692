"""The shipped tool tasks and the data behind them: made again byte for byte, well formed, in need of a tool."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from example_solver import SERVERS, TASKS, module, shipped_tasks

from surefoot.data.files import read_task_file, tool_problems
from surefoot.data.heldout import task_content
from surefoot.data.near_duplicates import near_duplicates
from surefoot.rewards.verifiers.multi import MultiVerifier
from surefoot.tools.mcp.servers import read_servers

drafts, mail, world = module("drafts"), module("mail"), module("world")
ROWS = shipped_tasks()


def test_data_and_tasks_are_made_again_byte_for_byte(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SERVERS / "make_data.py"), str(tmp_path)], check=True)
    subprocess.run([sys.executable, str(TASKS / "make_tool_tasks.py"), str(tmp_path / "tool_tasks.jsonl")], check=True)
    shipped = [*sorted((SERVERS / "data").iterdir()), TASKS / "tool_tasks.jsonl"]
    assert len(shipped) == 7
    assert [file.name for file in shipped if file.read_bytes() != (tmp_path / file.name).read_bytes()] == []
    assert sum(file.stat().st_size for file in shipped) < 2_000_000


def test_there_are_a_thousand_tasks_of_every_kind_and_none_twice() -> None:
    assert len(ROWS) >= 1000
    assert len({row["task_metadata"]["task_id"] for row in ROWS}) == len(ROWS)
    assert len({row["prompt"][0]["content"] for row in ROWS}) == len(ROWS)
    kinds = Counter((row["category"], row["complexity"]) for row in ROWS)
    assert len(kinds) == 20
    assert min(kinds.values()) >= 40


def test_every_row_is_a_tool_task() -> None:
    assert [found for row in ROWS for found in tool_problems(row)] == []


def test_every_expected_tool_is_one_that_a_shipped_server_offers() -> None:
    offered = {f"{server.name}__" for server in read_servers(SERVERS / "servers.json")[0]}
    used = {tool for row in ROWS for tool in row["extra_info"]["tools"]}
    assert {re.match(r"\w+?__", tool)[0] for tool in used} == offered  # type: ignore[index]
    assert all(row["extra_info"]["tools"] for row in ROWS), "a task without a tool"


def test_no_question_gives_its_own_answer_away() -> None:
    for row in ROWS:
        question = row["prompt"][0]["content"]
        assert not re.search(rf"(?<![\w.]){re.escape(row['reward_spec']['ground_truth'])}(?!\w)", question), question


def test_planted_give_away_is_refused() -> None:
    call = drafts.Call("calculator__evaluate", {"expression": "42"})
    draft = drafts.Draft("Is 42 equal to 42?", "42", drafts.NUMBER, [call], "easy")
    with pytest.raises(ValueError, match="gives its own answer away"):
        draft.written("calculator", 1)


def test_no_two_tasks_are_so_alike_that_one_could_not_be_held_out() -> None:
    contents = [task_content(task) for task in read_task_file(TASKS / "tool_tasks.jsonl")]
    assert len(contents) == len(ROWS)
    assert [pair for pair in near_duplicates(contents, contents) if pair.left != pair.right] == []


def test_the_task_in_the_documentation_is_one_of_them() -> None:
    page = (TASKS.parents[1] / "docs" / "servers.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```json\n(\{\"task_metadata.*?)\n```", page, flags=re.DOTALL)
    shown = json.loads(text)
    (row,) = [row for row in ROWS if row["task_metadata"] == shown["task_metadata"]]
    row["extra_info"]["solution"] = row["extra_info"]["solution"][:1]
    assert shown == row


def test_planted_twins_are_left_out() -> None:
    """Teeth: the same question about two companies with one answer between them."""
    twins = [drafts.Draft(f"Where has {name} its seat?", "Brolm", drafts.NAME, [], "easy") for name in ("VRX", "KVR")]
    with pytest.raises(ValueError, match="only 1 of 2 different questions"):
        drafts.distinct(twins, 2)


def test_the_truth_earns_all_and_silence_or_another_tasks_truth_earns_nothing() -> None:
    """The first of each kind of task; two kinds of answer, three answers each."""
    first = {(row["category"], row["reward_spec"]["verifier_type"]): row for row in reversed(ROWS)}
    with MultiVerifier() as verifier:
        for (category, kind), row in first.items():
            truth = row["reward_spec"]["ground_truth"]
            said = f"<answer>{truth}</answer>" if kind == "math" else truth
            scores = [verifier.verify(row, answer).score for answer in (said, "", "-17.25")]
            assert scores == [1.0, 0.0, 0.0], (category, kind)


def test_every_fact_of_the_country_stands_once_in_its_article() -> None:
    things = world.World(2024).things()
    lost = [
        (thing.slug, fact)
        for thing in things
        for fact, value in thing.facts.items()
        if re.findall(world.READ[fact], thing.text) != [str(value)]
    ]
    assert lost == []
    assert len({thing.slug for thing in things}) == len(things) >= 300


def test_every_letter_has_a_subject_of_its_own() -> None:
    letters = mail.messages(2027, ["A B"])
    assert len({letter["subject"] for letter in letters}) == len(letters)
