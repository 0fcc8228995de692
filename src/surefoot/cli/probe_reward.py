"""`surefoot probe-reward`: can the reward of a config be trusted?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from surefoot.cli.exits import guarded

if TYPE_CHECKING:
    from surefoot.assemble.inputs import Inputs
    from surefoot.envs.rewards.reward_pool import RewardPool
    from surefoot.envs.verify.reward_pay import Pay
    from surefoot.envs.verify.reward_probe import KindReport, ProbeReport

SHOWN = 6
"""Findings printed per kind; --json has all."""


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("probe-reward", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
        probe_reward
    )


def probe_reward(
    words: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer resolves this spelling in every version we allow
        typer.Argument(metavar="CONFIG | KEY=VALUE", help="A config, then overrides of its keys.", show_default=False),
    ] = None,
    tasks: Annotated[int, typer.Option("--tasks", min=1, help="Tasks of each kind that are probed.")] = 8,
    adversarial: Annotated[int, typer.Option("--adversarial", min=1, help="Wrong answers to each of them.")] = 20,
    full: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--full", help="The full reward; the best of the gold answers when left out.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask the reward of CONFIG about answers whose worth is known: right, empty and cleverly wrong ones, twice.

    Exits 0 when it tells them apart, 1 when it does not or when there is no gold answer to ask about, 4 when it cannot
    be run at all. No model is needed, and no tool server: where there are tools, answers come as messages.
    """
    sys.exit(guarded(partial(_probe, words or [], tasks, adversarial, full, as_json)))


def _probe(words: Sequence[str], tasks: int, adversarial: int, full: float | None, as_json: bool) -> int:
    from surefoot.assemble.inputs import read_inputs
    from surefoot.assemble.probing import probe_pool
    from surefoot.cli.commands import _load
    from surefoot.envs.verifiers import verifier_reward, verifier_scorer
    from surefoot.records import Verdict

    loaded = _load(words)
    inputs = read_inputs(loaded.config, loaded.base)
    _refuse_a_world(inputs)
    if verifier_reward in inputs.functions.values():
        verifier_scorer(inputs.task_set.tasks)  # refuses by name what no verifier can judge
    with probe_pool(loaded.config, inputs, loaded.config.reward_workers) as pool:
        report = _ask(inputs, pool, tasks, adversarial, full)
        _refuse_if_silent(report, inputs, pool)
    if as_json:
        print(json.dumps(_as_json(report), indent=2))
    else:
        _print(_lines(report))
    return 0 if report.verdict is Verdict.PASS else 1


def _ask(inputs: Inputs, pool: RewardPool, tasks: int, adversarial: int, full: float | None) -> ProbeReport:
    from surefoot.assemble.probing import Asker, full_mark, kind_of
    from surefoot.envs.verify.reward_probe import probe_reward

    return probe_reward(
        Asker(inputs, pool), inputs.task_set.tasks, k=adversarial, per_kind=tasks, full=full,
        kind_of=partial(kind_of, inputs), busy=None if inputs.tools is None else Asker(inputs, pool, calls=True),
        full_mark=full_mark(inputs),
    )  # fmt: skip


def _refuse_a_world(inputs: Inputs) -> None:
    """Where no function judges, there is nobody to ask."""
    from surefoot.errors import RewardError

    if not inputs.weights:
        raise RewardError(
            "no reward function judges this run: the rollouts' own world does",
            "what it says depends on what was done in it, and nothing is played here",
            "look at `surefoot report RUN` after a few steps, or add reward_funcs",
        )


def _refuse_if_silent(report: ProbeReport, inputs: Inputs, pool: RewardPool) -> None:
    """A reward that scored nothing at all was not probed: it is broken."""
    from surefoot.errors import RewardError

    asked = [kind for kind in report.kinds if kind.tasks]
    if asked and all(kind.full is None and kind.highest is None for kind in asked):
        stories = "".join(f"\n    {count} x {reason}: {story.strip().splitlines()[-1]}"
                          for reason, (count, story) in pool.describe_failures().items())  # fmt: skip
        raise RewardError(
            f"the reward {'+'.join(inputs.weights)} gave no score to any answer{stories}",
            "a reward that cannot be run cannot be probed, or trained with",
            "call it by hand on one gold answer",
        )


def _lines(report: ProbeReport) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("kind", "tasks", "gold", "empty", "adversarial", "repeated", "verdict")]
    rows += [_row(kind) for kind in report.kinds]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for kind in report.kinds:
        yield from _story(kind)
    yield f"{report.verdict}"


def _row(kind: KindReport) -> tuple[str, ...]:
    """Gold and repeated: how many were as they should be; empty and adversarial: how many were rewarded."""
    right = {check: f"{kind.asked[check] - kind.wrong(check)}/{kind.asked[check]} ok" for check in ("gold", "repeated")}
    paid = {check: f"{kind.wrong(check)}/{kind.asked[check]} paid" for check in ("empty", "adversarial")}
    return (
        kind.kind,
        str(kind.tasks),
        right["gold"],
        paid["empty"],
        paid["adversarial"],
        right["repeated"],
        kind.verdict,
    )


def _story(kind: KindReport) -> Iterator[str]:
    if kind.without_gold:
        places = "answer, ground_truth, reward_spec.ground_truth"
        yield f"  {kind.kind}: {kind.without_gold} task(s) have no gold answer (looked for in {places})"
    if kind.full is not None and kind.highest is not None:
        yield f"  {kind.kind}: full reward {kind.full:g}; the best wrong answer earned {kind.highest:g}"
    yield from (f"  {kind.kind}: {line}" for line in (() if kind.pay is None else kind.pay.lines()))
    seen: dict[tuple[str, str], int] = {}
    for finding in kind.findings:
        key = (finding.check, finding.trap)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] == 1 and len(seen) <= SHOWN:
            what = f"{finding.check}: {finding.trap}, {finding.answer!r} to {finding.task_id}"
            yield f"  {kind.kind}: {what}, {finding.says}"
    if len(seen) > SHOWN:
        yield f"  {kind.kind}: and {len(seen) - SHOWN} more; --json shows all"


def _as_json(report: ProbeReport) -> dict[str, Any]:
    kinds = [
        {
            "kind": kind.kind, "verdict": str(kind.verdict), "tasks": kind.tasks, "without_gold": kind.without_gold,
            "full": kind.full, "highest_adversarial": kind.highest, "asked": kind.asked,
            "wrong": {check: kind.wrong(check) for check in (*kind.asked, "pay", "missing")},
            "pay": None if kind.pay is None else _pay_as_json(kind.pay),
            "findings": [finding._asdict() for finding in kind.findings],
        }
        for kind in report.kinds
    ]  # fmt: skip
    return {"verdict": str(report.verdict), "kinds": kinds}


def _pay_as_json(pay: Pay) -> dict[str, Any]:
    """What right, wrong and empty answers earn on average, and whether a run with this reward would be refused."""
    columns = ("right", "wrong", "nonsense", "guesses", "empty", "busy")
    return {
        "form": pay.way.form, "calls": pay.way.calls, "compares": pay.compares, "unsteady": pay.unsteady,
        "refused": [refusal.check for refusal in pay.refusals()], **{name: pay.mean(name) for name in columns},
    }  # fmt: skip


def _print(lines: Iterator[str]) -> None:
    from surefoot.tracking.text import printable

    for line in lines:
        print(printable(line))
