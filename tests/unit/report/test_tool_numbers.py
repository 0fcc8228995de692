"""What rollouts with tools look like in numbers, to a person, and in the report."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tool_kit import Box, Kit, call, play

from surefoot.loop_state import PATIENCE, ToolAlarms
from surefoot.protocols import Request, ToolAnswer
from surefoot.records import Group, Rollout, Task, ToolCall, Turn
from surefoot.report.page import rollouts
from surefoot.run.store import _lines
from surefoot.tracking.metrics import group_metrics, lookup


def one_in_two(request: Request, context: str) -> str:
    """Sibling 0 calls twice, one call unknown; sibling 1 answers at once."""
    if "<|tool|>" in context or request.id.split("/")[3] == "1":
        return "42"
    return call(x=1) + call("nobody")


def played(answer: Any = "42") -> Any:
    (one,) = play(one_in_two, Kit(lambda rollout: Box(lambda *_: answer)))
    return one.group


def test_calls_failures_turns_and_ends_are_counted() -> None:
    group = played()
    metrics = {k: v for k, v in group_metrics([group]).items() if k.startswith(("tools/", "num_turns/"))}
    assert metrics == {
        "num_turns/mean": 1.5, "num_turns/max": 2.0, "tools/call_frequency": 1.0, "tools/called_share": 0.5,
        "tools/failure_frequency": 0.5, "tools/calls/tool": 0.5, "tools/ended/answered": 1.0,
        "tools/rerendered_tokens": 0.0, "tools/reply_tokens": pytest.approx(metrics["tools/reply_tokens"]),
    }  # fmt: skip
    first, second = group.rollouts[0].turns
    between = len(second.prompt_ids) - len(first.prompt_ids) - len(first.completion_ids)
    assert metrics["tools/reply_tokens"] == between / 2
    assert all(lookup(name) is not None for name in metrics), "a name that the log would refuse"


def test_an_error_of_the_tool_counts_as_a_failed_call() -> None:
    assert group_metrics([played(ToolAnswer("no", "error"))])["tools/failure_frequency"] == 1.0


def test_runs_without_tools_have_no_such_numbers() -> None:
    turn = Turn((1,), (2,), (-0.5,), 0)
    metrics = group_metrics([Group(Task("t", "?"), "g", (Rollout("t", "g", 0, (turn,), reward=1.0),))])
    assert not any(name.startswith(("tools/", "num_turns/")) for name in metrics)


def test_tools_that_nobody_calls_are_told_once_after_some_patience() -> None:
    alarms = ToolAlarms()
    said = [list(alarms.step({"tools/called_share": 0.0}, [])) for _ in range(2 * PATIENCE)]
    assert [bool(each) for each in said] == [False] * (PATIENCE - 1) + [True] + [False] * PATIENCE
    assert "no rollout has called a tool" in said[PATIENCE - 1][0][0]


def test_one_call_in_a_while_keeps_the_alarm_quiet() -> None:
    alarms = ToolAlarms()
    for step in range(4 * PATIENCE):
        assert not list(alarms.step({"tools/called_share": 0.01 if step % PATIENCE == 0 else 0.0}, []))
    assert not list(alarms.step({}, []))


def told(alarms: ToolAlarms, steps: str) -> list[int]:
    """Steps at which failing calls were told of: `b` is mostly bad calls, `g` good ones, `h` half, `q` none."""
    groups = {kind: [called(*outcomes)] for kind, outcomes in
              {"b": ("error", "refused", "ok"), "g": ("ok",), "h": ("ok", "error"), "q": ()}.items()}  # fmt: skip
    said = [list(alarms.step({"tools/called_share": 1.0}, groups[kind])) for kind in steps]
    return [step for step, pairs in enumerate(said, 1) if any("tool calls keep failing" in what for what, _ in pairs)]


def called(*outcomes: str) -> Group:
    calls = tuple(ToolCall("tool", "{}", "said", outcome) for outcome in outcomes)
    turn = Turn((1,), (2,), (-0.5,), 0, calls=calls)
    return Group(Task("t", "?"), "g", (Rollout("t", "g", 0, (turn,), reward=1.0, ended="answered"),))


def test_many_failed_calls_are_told_once() -> None:
    assert told(ToolAlarms(), "b" * 12) == [PATIENCE]
    assert told(ToolAlarms(), "h" * 30) == told(ToolAlarms(), "g" * 30) == []
    said = list(ToolAlarms(asked=4, calls=12, failed=8).step({"tools/called_share": 1.0}, [called("error")]))
    assert said[0][0].startswith("tool calls keep failing: 9 of 13 in this run were refused or answered with an error")


def test_one_quiet_or_good_step_does_not_begin_the_count_anew() -> None:
    assert told(ToolAlarms(), "bbbbqb") == [6], "nobody called in step 5"
    assert told(ToolAlarms(), "bbbbgb") == [5], "13 calls by then, 8 of them failed"
    assert told(ToolAlarms(), "bqbqbqbqb") == [9]


def test_tools_that_break_late_in_a_long_run_are_told_of_too() -> None:
    assert told(ToolAlarms(), "g" * 400 + "bbbgbbb") == [407], "a share of the whole run would take hundreds of steps"


def test_planted_bug_a_count_that_begins_anew_misses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ToolAlarms._count

    def forgetful(self: ToolAlarms, groups: Any) -> None:
        before = self.failed
        real(self, groups)
        if self.failed == before:
            self.asked = self.calls = self.failed = self.failing = 0

    monkeypatch.setattr(ToolAlarms, "_count", forgetful)
    assert told(ToolAlarms(), "bbbbqbbbbq") == []


def test_the_report_shows_turns_calls_masks_and_rewards_by_part() -> None:
    hostile = "<script>alert(1)</script>\x1b[31m"
    rows = [json.loads(line) for line in _lines([played(hostile)])]
    page = rollouts([(1, rows)])
    assert "<script>" not in page
    for shown in ("turn 1", "turn 2", "tokens, trained", "tokens read, masked", "tool (ok)", "nobody (refused)",
                  "<span>answered</span>", "2 turns", "&lt;script&gt;"):  # fmt: skip
        assert shown in page, shown


def test_kept_rollouts_tell_what_was_read_and_what_was_said() -> None:
    group = played()
    row = json.loads(next(iter(_lines([group]))))
    first, second = group.rollouts[0].turns
    assert row["ended"] == "answered"
    assert [turn["completion_ids"] for turn in row["turns"]] == [
        list(first.completion_ids),
        list(second.completion_ids),
    ]
    assert row["turns"][1]["read_ids"] == list(second.prompt_ids[len(first.prompt_ids) + len(first.completion_ids) :])
    assert [c["outcome"] for c in row["turns"][0]["calls"]] == ["ok", "refused"]


def test_a_run_whose_code_nobody_contained_says_so_in_its_report() -> None:
    from types import SimpleNamespace

    from surefoot.report.page import machine

    stamped, plain = (machine(SimpleNamespace(environment={"unsafe_code": flag})) for flag in (True, False))  # type: ignore[arg-type]
    assert "without a sandbox" in stamped
    assert "without a sandbox" not in plain
