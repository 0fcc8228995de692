"""How a run is judged and what verdict.json says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.guards.verdict import Judgement, best_facts, guard_facts, judge_run
from surefoot.pulse import beat
from surefoot.records import Verdict
from surefoot.store.failpoints import failpoint
from surefoot.store.identity import resumes
from surefoot.store.ledger import Balance
from surefoot.tracking.view import best_text

if TYPE_CHECKING:
    from surefoot.assemble.keeper import Keeper
    from surefoot.assemble.surroundings import Surroundings
    from surefoot.loop import Run


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    verdict: Verdict
    reasons: tuple[str, ...]
    run_dir: Path
    exit_code: int
    metrics: Mapping[str, float]
    """The last evaluation's and the last step's."""


def finish(around: Surroundings, run: Run, code: int | None = None) -> Outcome:
    """Judge, write the verdict, then show it; `code` is the exit code where the verdict alone does not decide it."""
    target = None if run.config.target_metric is None else (run.config.target_metric, run.config.target_value or 0.0)
    metrics, keeper = run.last_metrics | run.last_eval, around.keeper
    keeper.ledger.check()
    balance = keeper.ledger.balance()
    judgement = judge_run(
        planned=run.config.max_steps, executed=run.step, target=target, metrics=metrics,
        refused=run.step - run.learner.version, samples=run.checked["samples"],
        moved=0 if run.learner.census is None else run.learner.census.moved, collapse=collapse(run),
        unaccounted=abs(balance.lost) + balance.leased,
    )  # fmt: skip
    write_verdict(around, run, judgement)
    code = (0 if judgement.status is Verdict.PASS else 1) if code is None else code
    outcome = Outcome(judgement.status, judgement.reasons, keeper.folder.root, code, metrics)
    around.view.note([*_notes(run, keeper), *around.sinks.summary()])
    around.view.finish(outcome)
    return outcome


def collapse(run: Run) -> str:
    """Why the guard fired; empty while it has not."""
    status = None if run.guard is None else run.guard.last_status
    return status.reason if status is not None and status.fire else ""


def best(run: Run, keeper: Keeper) -> dict[str, Any] | None:
    """The best evaluation; its weights are named only where they are."""
    kept = run.best and keeper.folder.checkpoint(run.best[0]).is_dir()
    return best_facts(run.best, run.heldout_metric, at_start=run.at_start, kept=kept)


def write_verdict(around: Surroundings, run: Run, judgement: Judgement) -> None:
    """Keep status, reasons, and the numbers that they rest on."""
    keeper, sinks, shown_target = around.keeper, around.sinks, around.loaded.shown_target
    beat("writing the verdict")
    sinks.close()  # their last rows first, so that the verdict can say what became of them
    failpoint("session.before_verdict")
    keeper.folder.write_verdict(judgement.status, judgement.reasons, {
        "planned_steps": run.config.max_steps,
        "executed_steps": run.step,
        "version": run.learner.version,
        "target": None if run.config.target_metric is None else [run.config.target_metric, run.config.target_value],
        "shown_target": None if shown_target is None else list(shown_target),
        "best": best(run, keeper),
        "guard": guard_facts(run.guard, run.config.guard.mode, run.heldout_metric),
        "ledger": balance_facts(keeper.ledger.balance()),
        "resumes": resumes(keeper.journal),
        "sinks": sinks.facts(),
        "metrics": run.last_metrics | run.last_eval,
        "invariants_checked": run.checked | {"trained_tokens": run.learner.checked_tokens},
        "seconds": run.seconds,
    })  # fmt: skip
    failpoint("session.after_verdict")
    around.lookout.timeline.save()
    around.lookout.report()


def balance_facts(balance: Balance) -> dict[str, Any]:
    """Where every planned item is, for verdict.json."""
    return dataclasses.asdict(balance) | {"lost": balance.lost}


def _notes(run: Run, keeper: Keeper) -> list[str]:
    """For the last block: the two curves of a run that the guard stopped, the best weights, the account."""
    curves = run.guard.curves().splitlines() if run.guard is not None and collapse(run) else []
    found = best(run, keeper)
    account = f"{'ledger':<18} {keeper.ledger.balance()}"
    return [*curves, account] if found is None else [*curves, best_text(found), account]
