"""The preflight, and what an agent did in it when it is refused.

Promises   a preflight with tools that refuses the run tells how often tools were called and what became of the calls,
           shows one rollout, and leaves the run folder: `rollouts/preflight.jsonl`, the servers' logs, a verdict.
Never      judges: `runtime/judging.py` does.

Read next: `session.py`, which begins a run with it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from surefoot.assemble.hooks import rollout_row
from surefoot.envs.tool_calls import parse_calls
from surefoot.envs.tools import kind_of_call
from surefoot.errors import InputError
from surefoot.records import Group, Rollout, Task, Verdict
from surefoot.runtime.no_verdict import from_tools
from surefoot.safe_text import printable
from surefoot.store.durable import write_lines
from surefoot.tracking.text import shown_path

if TYPE_CHECKING:
    from surefoot.assemble.surroundings import Surroundings
    from surefoot.protocols import Runtime

TOLD = ("succeeded", "failed", "unknown tool", "invalid arguments")
"""Kinds of calls that are counted even when there are none."""
LOST = "lost with their server"
MOST_MESSAGES, MOST_CHARS = 12, 300
"""Of the rollout that is shown."""


def look_at_baseline(
    around: Surroundings, runtime: Runtime, tasks: Sequence[Task], datasets: Mapping[str, Sequence[Task]]
) -> None:
    """Play and judge the first tasks; a refusal of an agent's run is told with what the agent did.

    Args:
        datasets: where there are several, tasks of each.
    """
    seen: list[Group] = []
    try:
        runtime.preflight(
            tasks, audit=around.config.audit_rewards, look=seen.extend, datasets=datasets,
            allow=around.config.preflight_allow,
        )  # fmt: skip
    except InputError as error:
        if around.inputs.tools is None:
            raise
        raise _kept(around, error, seen) from error


def _kept(around: Surroundings, error: InputError, groups: Sequence[Group]) -> InputError:
    """Write down what was played and why it was refused; the same error, with what was seen and where it is."""
    folder, files = around.keeper.folder, "logs/"
    if around.config.save_rollouts and groups:
        write_lines(
            folder.baseline, (json.dumps(rollout_row(g, r), ensure_ascii=False) for g in groups for r in g.rollouts)
        )
        files = "rollouts/preflight.jsonl and logs/"
    folder.write_verdict(
        Verdict.ERROR, [f"{type(error).__name__}: {error.what}"],
        {"planned_steps": around.config.max_steps, "executed_steps": 0, "exit_code": None},
    )  # fmt: skip
    return type(error)(
        error.what + "".join(f"\n    {line}" for line in story(groups)), error.why,
        f"{error.fix}; the run folder is kept: look at {files} in {shown_path(folder.root)}; once it is mended, go on "
        f"with: {around.stop.resume}",
    )  # fmt: skip


def story(groups: Sequence[Group]) -> Iterator[str]:
    """What became of all calls, and one rollout from beginning to end."""
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    if not rollouts:
        return
    calls = sum((calls_of(rollout) for _, rollout in rollouts), Counter[str]())
    callers = sum(calls_of(rollout).total() > 0 for _, rollout in rollouts)
    kinds = [*TOLD, *sorted(calls.keys() - set(TOLD))]
    told = ", ".join(f"{calls[kind]} {kind}" for kind in kinds)
    yield f"tool calls: {calls.total()}, by {callers} of {len(rollouts)} rollouts" + (f": {told}" if calls else "")
    yield from transcript(*max(rollouts, key=lambda one: _telling(one[1])))


def calls_of(rollout: Rollout) -> Counter[str]:
    """What became of its calls; those of a turn that its server did not survive are on no record but their text."""
    found = Counter(kind_of_call(call) for turn in rollout.turns for call in turn.calls)
    if rollout.turns and not rollout.turns[-1].calls and from_tools(rollout.failure):
        found += Counter({LOST: len(parse_calls(rollout.turns[-1].text).items)})
    return found


def _telling(rollout: Rollout) -> tuple[int, ...]:
    """The more of this, the more a rollout says about what is wrong; of equals the first is shown."""
    kinds = calls_of(rollout)
    return (rollout.failure is not None, kinds.total() - kinds["succeeded"], kinds.total())


def transcript(group: Group, rollout: Rollout) -> Iterator[str]:
    """One rollout, a line for each message."""
    reward = f"reward {rollout.reward:g}" if rollout.reward is not None else f"no verdict: {rollout.failure}"
    yield f"one of them, task {printable(rollout.task_id)[:80]}, {reward}" + (
        f", ended by {rollout.ended}" if rollout.ended else ""
    )
    lines = [f"{message['role']}: {_short(message.get('content'))}" for message in group.task.messages()]
    for turn in rollout.turns:
        lines.append(f"assistant: {_short(turn.text)}")
        lines += [f"tool {_short(call.name)} ({kind_of_call(call)}): {_short(call.answer)}" for call in turn.calls]
    if len(lines) > MOST_MESSAGES:
        lines[MOST_MESSAGES // 2 : len(lines) - MOST_MESSAGES // 2] = ["..."]
    yield from (f"  {line}" for line in lines)


def _short(text: object) -> str:
    """On one line, safe to print."""
    shown = printable(str("" if text is None else text)).replace("\n", "\\n").replace("\t", "\\t")
    return shown if len(shown) <= MOST_CHARS else f"{shown[:MOST_CHARS]}... ({len(shown)} characters)"
