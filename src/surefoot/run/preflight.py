"""The reward, asked about answers whose worth is known: by `surefoot probe-reward`, and by every start of a run.

Owns       how such an answer becomes a rollout, and what a start is refused for.
Promises   graders get what they get in a run: texts, or messages where there are tools or the prompt is messages; a
           start asks in processes of its own, which end before the run's begin, so that no grader remembers it and
           nothing random is used up; a grader that hangs or dies is asked no further, and left to the preflight.

Read next: `rewards/probe.py`, which answers are compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surefoot.config import Config
from surefoot.data.tasks import TaskStream
from surefoot.errors import InputError, RewardError
from surefoot.guards.reward_values import DIED, TIMEOUT
from surefoot.records import Group, Rollout, Task, ToolCall, Turn, Verdict
from surefoot.rewards.functions import exact_answer, expected_tools, reasoning_gym_score
from surefoot.rewards.grading import SingleTurnEnvironment
from surefoot.rewards.pool import RewardPool
from surefoot.rewards.probe import Pay, Scored, gold_answer, measure
from surefoot.rewards.verifiers.multi import TYPE, problem_of, verifier_reward
from surefoot.run.inputs import Inputs
from surefoot.run.store import rollout_row
from surefoot.runtime.base import from_tools
from surefoot.storage.files import write_lines
from surefoot.system.text import printable, shown_path
from surefoot.tools.parsing import parse_calls
from surefoot.tools.session import ANSWERED, kind_of_call

if TYPE_CHECKING:
    from surefoot.protocols import Runtime
    from surefoot.run.session import RunContext


CANDIDATES_PER_PROBE = 16
"""So many times more tasks than are probed are looked at for a gold answer."""


class Asker:
    """Scores answers as a run would: the same environment, on rollouts that say just this.

    Args:
        calls: tools are called first, those that the task expects.
        together: at most so many answers to one task in one call of a reward function; all of them when left out.
        gives_up: stop with `GivenUpError` as soon as a reward function hangs or dies.
    """

    def __init__(
        self, inputs: Inputs, pool: RewardPool, *, calls: bool = False, together: int | None = None,
        gives_up: bool = False,
    ) -> None:  # fmt: skip
        alone = inputs.tools is None or inputs.tools.environment is None
        self.environment = SingleTurnEnvironment(pool, inputs.weights, alone=alone)
        self.tools, self.calls, self.together, self.gives_up = inputs.tools is not None, calls, together, gives_up

    def __call__(self, tasks: Sequence[Task], answers: Sequence[str]) -> list[Scored]:
        """(N,) the reward of each answer, or why there is none."""
        seen: dict[str, int] = {}
        rollouts = []
        for task, answer in zip(tasks, answers, strict=True):
            place = seen[task.id] = seen.get(task.id, -1) + 1
            group = 0 if self.together is None else place // self.together
            rollouts.append(self._rollout(task, answer, f"probe/{group}", place))
        if not self.gives_up:
            return [Scored(each.reward, each.failure) for each in self.environment.grade(tasks, rollouts)]
        return list(self._carefully(tasks, rollouts))

    def _carefully(self, tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> Iterator[Scored]:
        """One call after the other; the first alone, so that one that hangs costs one deadline."""
        groups: dict[tuple[str, str], list[int]] = {}
        for place, rollout in enumerate(rollouts):
            groups.setdefault((rollout.task_id, rollout.group), []).append(place)
        found: dict[int, Scored] = {}
        for places in groups.values():
            given = self.environment.grade([tasks[i] for i in places], [rollouts[i] for i in places])
            found |= {i: Scored(each.reward, each.failure) for i, each in zip(places, given, strict=True)}
            lost = [each.failure for each in given if (each.failure or "").endswith((f":{TIMEOUT}", f":{DIED}"))]
            if lost:
                raise GivenUpError(str(lost[0]))
        return (found[i] for i in range(len(rollouts)))

    def _rollout(self, task: Task, answer: str, group: str, place: int) -> Rollout:
        turns = [_turn(answer)]
        if self.calls:
            names = expected_tools(task.columns.get("extra_info")) or ["tool"]
            turns.insert(0, _turn("", tuple(ToolCall(name, "{}", "ok") for name in names)))
        return Rollout(task.id, group, place, tuple(turns), ended=ANSWERED if self.tools else "")


class GivenUpError(Exception):
    """A reward function hangs or dies: whatever it is, the preflight will say it."""


def _turn(text: str, calls: tuple[ToolCall, ...] = ()) -> Turn:
    return Turn((0,), (0,), (0.0,), 0, text=text, calls=calls)


def kind_of(inputs: Inputs, task: Task) -> str:
    """How tasks are grouped: by verifier, by built-in scorer, or under the names of the user's functions."""
    scorers: tuple[Any, ...] = (exact_answer, reasoning_gym_score, verifier_reward)
    if any(inputs.functions[name] not in scorers for name in inputs.weights):
        return "+".join(inputs.weights)
    return str(problem_of(task.columns).get(TYPE) or inputs.task_set.scorer)


def full_mark(inputs: Inputs) -> float:
    """What an answer earns that every function gives 1."""
    return sum(max(weight, 0.0) for weight in inputs.weights.values())


def probe_pool(config: Config, inputs: Inputs, workers: int) -> RewardPool:
    """Processes for the functions that make up the reward; not those of the run."""
    return RewardPool(
        {name: inputs.functions[name] for name in inputs.weights}, workers=workers, timeout_s=config.reward_timeout_s,
        memory_mb=config.reward_memory_mb, forked=inputs.forked, pass_env=config.pass_env,
    )  # fmt: skip


def probe_start(config: Config, inputs: Inputs) -> list[str]:
    """Ask the reward about its first tasks; a `RewardError` when it must not be trained with.

    Returns what is worth a line of the plan.
    """
    if not config.probe_reward_tasks or not inputs.weights:
        return []
    kinds = _first_by_kind(config, inputs)
    if not kinds:
        return ["reward    not probed: none of the first tasks has a gold answer (answer, ground_truth)"]
    with probe_pool(config, inputs, workers=1) as pool:
        ask = Asker(inputs, pool, together=config.num_generations, gives_up=True)
        busy = Asker(inputs, pool, calls=True, together=config.num_generations, gives_up=True)
        lines: list[str] = []
        for kind, golds in kinds.items():
            try:
                ask([golds[0][0]], [golds[0][1]])
                pay = measure(
                    kind, [task for task, _ in golds], {task.id: gold for task, gold in golds}, ask,
                    None if inputs.tools is None else busy, full_mark(inputs),
                )  # fmt: skip
            except GivenUpError as lost:
                return [*lines, f"reward    not probed: {lost}"]
            _refuse(pay)
            lines += _lines(pay)
    return lines


def _first_by_kind(config: Config, inputs: Inputs) -> dict[str, list[tuple[Task, str]]]:
    """Kind -> the first tasks of the run that have a gold answer, with it."""
    count = min(config.probe_reward_tasks * CANDIDATES_PER_PROBE, len(inputs.train))
    kinds: dict[str, list[tuple[Task, str]]] = {}
    for task in _first_tasks(config, inputs, count) if count else ():
        kind = kind_of(inputs, task)
        gold = gold_answer(kind, task)
        if gold is not None and len(kinds.setdefault(kind, [])) < config.probe_reward_tasks:
            kinds[kind].append((task, gold))
    return kinds


def _first_tasks(config: Config, inputs: Inputs, count: int) -> list[Task]:
    if not config.stream_tasks:
        return TaskStream(inputs.train, config.seed).take(count)
    from surefoot.data.on_disk.stream import LargeTaskStream

    return LargeTaskStream(inputs.train, config.seed).take(count)


def _refuse(pay: Pay) -> None:
    found = next(pay.refusals(), None)
    if found is not None:
        raise RewardError(
            f"the reward {pay.kind} cannot be trained with: {found.what} (task {found.task_id}; "
            f"{len(pay.tasks)} tasks were probed, and most of them say so)",
            "a policy finds what pays, and would be taught that instead of the task",
            "repair the reward function (`surefoot probe-reward CONFIG` shows everything that it pays for); "
            "if it means to pay for that, probe_reward_tasks = 0 trains anyway",
        )


def _lines(pay: Pay) -> Iterator[str]:
    """Nothing where all is as it should be; else what is earned, and what is odd about it."""
    first, *odd = pay.lines()
    if odd:
        yield f"reward    {pay.kind}: {first}"
        yield from (f"          {line}" for line in odd)


# -- The preflight, and what an agent did in it when it is refused --------------------------------
# Promises   a preflight with tools that refuses the run tells how often tools were called and what became of the calls,
# shows one rollout, and leaves the run folder: `rollouts/preflight.jsonl`, the servers' logs, a verdict.
# Never      judges: `runtime/base.py` does.


TOLD = ("succeeded", "failed", "unknown tool", "invalid arguments")
"""Kinds of calls that are counted even when there are none."""
LOST = "lost with their server"
MOST_MESSAGES, MOST_CHARS = 12, 300
"""Of the rollout that is shown."""


def look_at_baseline(
    ctx: RunContext, runtime: Runtime, tasks: Sequence[Task], datasets: Mapping[str, Sequence[Task]]
) -> None:
    """Play and judge the first tasks; a refusal of an agent's run is told with what the agent did.

    Args:
        datasets: where there are several, tasks of each.
    """
    seen: list[Group] = []
    try:
        runtime.preflight(
            tasks, audit=ctx.config.audit_rewards, look=seen.extend, datasets=datasets,
            allow=ctx.config.preflight_allow,
        )  # fmt: skip
    except InputError as error:
        if ctx.inputs.tools is None:
            raise
        raise _kept(ctx, error, seen) from error


def _kept(ctx: RunContext, error: InputError, groups: Sequence[Group]) -> InputError:
    """Write down what was played and why it was refused; the same error, with what was seen and where it is."""
    folder, files = ctx.keeper.folder, "logs/"
    if ctx.config.save_rollouts and groups:
        write_lines(
            folder.baseline, (json.dumps(rollout_row(g, r), ensure_ascii=False) for g in groups for r in g.rollouts)
        )
        files = "rollouts/preflight.jsonl and logs/"
    folder.write_verdict(
        Verdict.ERROR, [f"{type(error).__name__}: {error.what}"],
        {"planned_steps": ctx.config.max_steps, "executed_steps": 0, "exit_code": None},
    )  # fmt: skip
    return type(error)(
        error.what + "".join(f"\n    {line}" for line in story(groups)), error.why,
        f"{error.fix}; the run folder is kept: look at {files} in {shown_path(folder.root)}; once it is repaired, go "
        f"on with: {ctx.stop.resume}",
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
