"""Solves the shipped tool tasks without a model: plays the calls that each task expects, and reads the last answer."""

from __future__ import annotations

import importlib
import json
import re
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

from surefoot.protocols import Toolbox
from surefoot.sandbox.sandbox import available

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SERVERS, TASKS = EXAMPLES / "servers", EXAMPLES / "tasks"
for folder in (SERVERS, TASKS):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
DEADLINE_S = 60.0


def module(name: str) -> ModuleType:
    """A module of the shipped examples."""
    return importlib.import_module(name)


def shipped_tasks() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / "tool_tasks.jsonl").read_text(encoding="utf-8").splitlines()]


def servers_of(task: dict[str, Any]) -> set[str]:
    return {tool.split("__")[0] for tool in task["extra_info"]["tools"]}


def contained() -> bool:
    """Whether this host can run the python server."""
    return available().usable


def solve(task: dict[str, Any], toolbox: Toolbox) -> str:
    """The answer that the expected calls lead to; fails where a call does, or says something else."""
    read: list[str] = []
    for call in task["extra_info"]["solution"]:
        arguments = {name: _filled(value, read) for name, value in call["arguments"].items()}
        answer = toolbox.call(call["tool"], arguments, DEADLINE_S)
        assert answer.outcome == "ok", f"{call['tool']}({arguments}): {answer.outcome}: {answer.text[:300]}"
        pattern = re.sub(r"<<(\d+)>>", lambda m: re.escape(read[int(m[1])]), call["read"])
        found = re.search(pattern, answer.text)
        assert found, f"{call['tool']}({arguments}) did not say {pattern}: {answer.text[:300]}"
        read.append(found[1])
    return read[-1]


def is_right(task: dict[str, Any], answer: str) -> bool:
    truth = task["reward_spec"]["ground_truth"]
    if task["reward_spec"]["verifier_type"] == "math":
        return Decimal(answer) == Decimal(truth)
    return bool(answer == truth)


def _filled(value: Any, read: list[str]) -> Any:
    """The argument with what earlier calls said in the place of its marks."""
    if not isinstance(value, str):
        return value
    whole = re.fullmatch(r"<<(\d+):int>>", value)
    return int(read[int(whole[1])]) if whole else re.sub(r"<<(\d+)>>", lambda m: read[int(m[1])], value)
