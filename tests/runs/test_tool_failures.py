"""Tools that fail, through the real command: the error is the tool's, the agent's own doing is shown, nothing is lost."""

from __future__ import annotations

import html
import json
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Ran, surefoot
from mcp_runs import CONFIG, TINY

pytestmark = pytest.mark.mcp
DYING = """
import os, socket, sys
try:
    socket.create_connection(("127.0.0.1", 9), 5)
except OSError:
    pass
sys.path.append(sys.argv[1])
import calculator
healthy = calculator.evaluate
def evaluate(expression):
    if expression == "6*7":
        return healthy(expression)
    print("the licence is lost, api_key='s3cr3t-0123456789' \\x1b[31m", file=sys.stderr, flush=True)
    os._exit(9)
if not os.path.exists(sys.argv[2]):
    calculator.evaluate = evaluate
del sys.argv[1:]
print("an old complaint", file=sys.stderr, flush=True)
calculator.main()
"""
"""The shipped calculator, which tries to reach the network and ends at the first call after its probe; repaired once a
file is there."""


@pytest.fixture(autouse=True)
def needs_mcp() -> None:
    pytest.importorskip("mcp", reason="needs the mcp extra")


def servers(folder: Path, name: str = "calculator", script: Path | None = None, **keys: Any) -> str:
    """`tools.servers=...` for one server."""
    words = [str(ROOT / "examples/servers/calculator.py")]
    if script is not None:
        words = [str(script), str(ROOT / "examples/servers"), str(folder / "mended")]
    probe = {"tool": "evaluate", "arguments": {"expression": "6*7"}, "expect": "42"}
    entry = {
        "command": "python", "args": words, "isolation": "shared", "idempotent": ["evaluate"], "probe": probe,
        **({"read": [str(ROOT / "examples/servers")]} if keys.get("sandbox", True) else {}),
    }  # fmt: skip
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {name: entry | keys}}))
    return f"tools.servers={folder}/mcp.json"


def dying(folder: Path, **keys: Any) -> str:
    (folder / "dying.py").write_text(DYING)
    return servers(folder, script=folder / "dying.py", **keys)


def reach(ran: Ran) -> tuple[str, str]:
    """What the run's record, and its report, say that the server could reach."""
    assert surefoot("report", str(ran.run), cwd=ran.run.parent, run="").code == 0
    page = html.unescape((ran.run / "report.html").read_text())
    row = re.search(r"tool server calculator</td><td[^>]*>([^<]*)", page)
    assert row, "no row for the server"
    return json.loads((ran.run / "environment.json").read_text())["tool_servers"]["calculator"], row[1]


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts" / name).read_text().splitlines()]


def outcomes(run: Path, steps: range) -> Counter[str]:
    found = [row for step in steps for row in rows(run, f"step_{step}.jsonl")]
    return Counter(call["outcome"] for row in found for turn in row["turns"] for call in turn["calls"])


def blames_the_server(ran: Ran, when: str) -> None:
    """Its type, its status and its own last words, safe to print; not a word about reward functions."""
    assert ran.code == 4, ran.out + ran.err
    assert re.search(rf"ToolError: \d+ of \d+ rollouts in {when} got no verdict \(tool_crashed\)", ran.err), ran.err
    assert "tool server calculator ended with status 9" in ran.err
    assert r"| the licence is lost, api_key='***' \x1b[31m" in ran.err
    for wrong in ("reward function", "grader", "an old complaint", "s3cr3t"):
        assert wrong not in ran.err, wrong


def test_a_server_that_dies_in_the_preflight_is_blamed_itself(tmp_path: Path) -> None:
    words = ["train", CONFIG, *TINY, dying(tmp_path), "max_steps=1"]
    ran = surefoot(*words, cwd=tmp_path)
    blames_the_server(ran, "the preflight")
    assert re.search(r"tool calls: (\d+), by \d+ of 32 rollouts: 0 succeeded.*, \1 lost with their server", ran.err)
    assert "no verdict: tool_crashed" in ran.err, "one transcript"
    assert 'assistant: <tool_call>{"name": "calculator__evaluate"' in ran.err
    assert "in run; once it is repaired, go on with: surefoot train --resume" in ran.err
    assert ran.verdict["status"] == "ERROR"
    assert len(rows(ran.run, "preflight.jsonl")) == 32
    assert "an old complaint" in (ran.run / "logs/calculator.log").read_text(), "the log has all of its last words"
    record, page = reach(ran)
    assert record.startswith("contained, reads /"), record
    assert re.search(r"tool server calculator tried to reach the network [1-9]\d* times", ran.out + ran.err)
    assert re.search(r"no network; tried to reach the network [1-9]\d* times, and was refused", page), page
    (tmp_path / "mended").touch()
    resumed = surefoot("train", "--resume", "run", cwd=tmp_path, run="")
    assert resumed.code == 0, resumed.out + resumed.err


def test_a_server_that_dies_in_training_is_blamed_and_the_run_goes_on_once_it_is_mended(tmp_path: Path) -> None:
    uncontained = dying(tmp_path, sandbox=False)
    ran = surefoot("train", CONFIG, *TINY, uncontained, "max_steps=2", "preflight_tasks=0", cwd=tmp_path)
    blames_the_server(ran, r"step [12]")
    assert "tool server calculator runs WITHOUT a sandbox" in ran.out + ran.err
    record, page = reach(ran)
    assert record.startswith("NOT contained")
    assert (page.startswith("NOT contained"), "tried to reach" in page) == (True, False), page
    dying(tmp_path)  # from here on contained
    assert ran.verdict["status"] == "ERROR"
    assert ran.verdict["reasons"][0].startswith("ToolError: ")
    (tmp_path / "mended").touch()
    resumed = surefoot("train", "--resume", "run", cwd=tmp_path, run="")
    assert resumed.code == 0, resumed.out + resumed.err
    assert outcomes(ran.run, range(1, 3))["ok"] > 0, "what had no verdict was played again, with the repaired server"
    record, page = reach(ran)
    for said in (record, page):
        assert re.match(r"NOT contained .*; after a resume: contained, reads ", said), "one does not hide the other"


def test_an_agent_that_calls_tools_which_are_not_there_is_shown_and_its_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "zero.py").write_text("def zero(completions, **_):\n    return [0.0] * len(completions)\n")
    words = [f'reward_funcs=["{tmp_path}/zero.py:zero"]', "reward_weights=none", "max_steps=1"]
    ran = surefoot("train", CONFIG, *TINY, servers(tmp_path, "abacus"), *words, cwd=tmp_path)
    assert ran.code == 4, ran.out + ran.err
    assert "RewardError: all 32 baseline completions on 8 tasks got reward 0" in ran.err
    kept = rows(ran.run, "preflight.jsonl")
    calls = [call for row in kept for turn in row["turns"] for call in turn["calls"]]
    assert calls, "nobody called, so nothing was shown"
    callers = sum(any(turn["calls"] for turn in row["turns"]) for row in kept)
    told = f"tool calls: {len(calls)}, by {callers} of 32 rollouts: 0 succeeded, 0 failed, {len(calls)} unknown tool, 0 invalid arguments"
    assert told in ran.err
    lines = ran.err.splitlines()
    shown = next(i for i, line in enumerate(lines) if "one of them, task " in line)
    assert [line.split(":")[0].strip() for line in lines[shown + 1 : shown + 5]] == [
        "user", "assistant", "tool calculator__evaluate (unknown tool)", "assistant"
    ]  # fmt: skip
    assert "the run folder is kept: look at rollouts/preflight.jsonl and logs/ in run" in ran.err
    assert ran.verdict["status"] == "ERROR"
    status = surefoot("status", "run", cwd=tmp_path, run="")
    assert (status.code, "ERROR" in status.out) == (0, True), status.err


def test_a_probe_with_a_wrong_answer_refuses_the_start(tmp_path: Path) -> None:
    wrong = {"tool": "evaluate", "arguments": {"expression": "6*7"}, "expect": "43"}
    ran = surefoot("train", CONFIG, *TINY, servers(tmp_path, probe=wrong), "max_steps=1", cwd=tmp_path)
    assert ran.code == 4, ran.out + ran.err
    assert "ToolError: tool server calculator" in ran.err
    assert """answered its probe evaluate {"expression": "6*7"} with '42', and '43' is expected""" in ran.err
    assert not ran.run.exists(), "nothing was played"


def test_failing_calls_are_counted_over_the_run_through_a_resume(tmp_path: Path) -> None:
    """Every call names a tool that is not there; the run is killed before the alarm could sound, and goes on."""
    killed = surefoot(
        "train", CONFIG, *TINY, servers(tmp_path, "abacus"), "max_steps=8", "save_steps=1", "preflight_tasks=0",
        cwd=tmp_path, env={"SUREFOOT_FAILPOINTS": "loop.after_learn=kill@4"},
    )  # fmt: skip
    assert killed.code == -signal.SIGKILL, killed.out + killed.err
    assert "tool calls keep failing" not in killed.out + killed.err
    resumed = surefoot("train", "--resume", "run", cwd=tmp_path, run="")
    assert resumed.code == 0, resumed.out + resumed.err
    said = re.findall(r"tool calls keep failing: (\d+) of (\d+) in this run", resumed.out + resumed.err)
    assert len(said) == 1, resumed.out + resumed.err
    sums = [outcomes(killed.run, range(1, last + 1)).total() for last in range(1, 9)]
    calling = [step for step in range(1, 9) if outcomes(killed.run, range(step, step + 1))]
    assert said[0][0] == said[0][1] == str(sums[calling[4] - 1]), "all calls since step 1, at the fifth step with any"
