"""How a run is judged and what verdict.json says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.config import Config
from surefoot.config.load import shown_target_line
from surefoot.errors import CollapseStopError, StateError
from surefoot.guards.arming import Arming, judge_arming, tightened_in
from surefoot.guards.verdict import LearningEvidence, RunJudgement, best_facts, compare, guard_facts, judge_run, way_out
from surefoot.records import Verdict
from surefoot.report.console import View
from surefoot.report.view import best_text, report_or_warn
from surefoot.run.arguments import recorded, way_to_evaluate
from surefoot.run.inputs import sandbox_facts
from surefoot.storage.files import failpoint
from surefoot.storage.ledger import Balance
from surefoot.storage.lock import LOCK
from surefoot.storage.run_folder import RunFolder
from surefoot.storage.run_journal import extensions, resumes
from surefoot.system.signals import tick
from surefoot.system.text import python_call, shown_path
from surefoot.tracking.metrics import read_metrics

if TYPE_CHECKING:
    from surefoot.config import Config
    from surefoot.loop import Run
    from surefoot.run.session import RunContext
    from surefoot.run.store import RunStore


@dataclass(frozen=True, repr=False)
class Outcome:
    """How a run ended, and where everything is that it left; a notebook shows it as a small table."""

    verdict: Verdict
    reasons: tuple[str, ...]
    run_dir: Path
    exit_code: int
    metrics: Mapping[str, float]
    """The last evaluation's and the last step's."""
    evaluate_with: str = ""
    """How to look at its weights again."""
    seconds: float | None = None
    """How long the run took: all its lives together, from the first moment of each."""

    @property
    def history(self) -> list[dict[str, float]]:
        """Every line of metrics.jsonl: one mapping per logged step and per evaluation, with its `step`."""
        metrics = RunFolder(self.run_dir).metrics
        return read_metrics(metrics) if metrics.exists() else []

    @property
    def checkpoint(self) -> Path | None:
        """The newest weights: a plain Hugging Face folder, with [lora] an adapter in PEFT's form; None without any."""
        found = RunFolder(self.run_dir).checkpoints()
        return found[-1] if found else None

    @property
    def best_checkpoint(self) -> Path | None:
        """The weights with the best held-out number; None when no step was better than the model it began with."""
        try:
            return RunFolder(self.run_dir).best_checkpoint()
        except StateError:
            return None

    @property
    def rollouts(self) -> Path:
        """The folder with every rollout, `step_N.jsonl`, and every held-out answer, `eval_N.jsonl`."""
        return self.run_dir / "rollouts"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.run_dir / "report.html"

    def __repr__(self) -> str:
        return f"Outcome({self.verdict}, {self._first_reason()!r}, run_dir={str(self.run_dir)!r})"

    def _first_reason(self) -> str:
        return self.reasons[0] if self.reasons else ""

    def _repr_html_(self) -> str:
        """For notebooks: verdict, reasons, the numbers asked for first, and where things are."""
        from surefoot.report.view import outcome_table

        return outcome_table(self)


def finish(ctx: RunContext, run: Run, code: int | None = None) -> Outcome:
    """Judge, write the verdict, then show it; `code` is the exit code where the verdict alone does not decide it."""
    target = None if run.config.target_metric is None else (run.config.target_metric, run.config.target_value or 0.0)
    metrics, keeper = run.last_metrics | run.last_eval, ctx.keeper
    keeper.ledger.check()
    balance = keeper.ledger.balance()
    shown = ctx.loaded.shown_target
    told = {} if shown is None else {"no_target": shown_target_line(shown)}
    judgement = judge_run(
        planned=run.config.max_steps, executed=run.step, target=target, metrics=metrics,
        evidence=evidence(run), refused=run.step - run.learner.facts.version, samples=run.checked["samples"],
        collapse=collapse(run), unaccounted=abs(balance.lost) + balance.leased, **told,
    )  # fmt: skip
    judgement = count_trained(judgement, run.config, run.step, balance)
    code = (0 if judgement.status is Verdict.PASS else 1) if code is None else code
    seconds = write_verdict(ctx, run, judgement, code)
    judged = ctx.inputs.metric is not None
    again = way_to_evaluate(Path(shown_path(keeper.folder.root)), ctx.inputs.from_python, judged=judged)
    outcome = Outcome(judgement.status, judgement.reasons, keeper.folder.root, code, metrics, again, seconds)
    ctx.view.note([*_notes(run, keeper), *_border_note(ctx), *ctx.sinks.summary()])
    ctx.view.finish(outcome)
    return outcome


def count_trained(judgement: RunJudgement, config: Config, steps: int, balance: Balance) -> RunJudgement:
    """The same judgement, or FAIL when the ledger's trained items are not what so many steps train on.

    A batch is `tasks_per_step` items, trained or dropped. With dynamic sampling further items stand in for dropped
    ones, all but those of a step that was refused; a stream too replaces items that it gave up before they were in a
    batch, which their reasons do not tell from others, so there the count is bounded from both sides.
    """
    full = steps // config.num_iterations * config.tasks_per_step
    dropped = sum(balance.dropped.values())
    if config.dynamic_sampling_batches:
        dropped = balance.dropped.get("nonfinite_step", 0)
    most = full if config.max_staleness else full - dropped
    if full - dropped <= balance.trained <= most:
        return judgement
    what = (
        f"the ledger counts {balance.trained} trained items, {steps} steps of {config.tasks_per_step} tasks make "
        f"{full} less {dropped} dropped"
    )
    return RunJudgement(Verdict.FAIL, (what, *judgement.reasons))


def evidence(run: Run) -> LearningEvidence:
    """What the run can show for having learned something."""
    return LearningEvidence(
        learning_rate=run.config.learning_rate, groups=run.checked["groups"], differing=run.differing,
        changed_entries=run.learner.facts.changed_entries, metric=run.heldout_metric,
        change=compare(run.scores_at_start, run.scores), measured=bool(run.last_eval),
        channels=tuple(key for key in ("alpha_sdpo", "beta_replay") if getattr(run.config, key) > 0),
    )  # fmt: skip


def evidence_facts(run: Run) -> dict[str, Any]:
    """The same, for verdict.json."""
    found = evidence(run)
    change = None if found.change is None else dataclasses.asdict(found.change)
    return {
        "changed_entries": found.changed_entries, "groups": found.groups,
        "groups_with_rewards_that_differ": found.differing,
        "heldout": None if change is None else {"metric": found.metric} | change,
    }  # fmt: skip


def collapse(run: Run) -> str:
    """Why the guard fired; empty while it has not."""
    status = None if run.guard is None else run.guard.last_status
    return status.reason if status is not None and status.fire else ""


def arming(run: Run) -> Arming | None:
    """Whether the guard was armed, judged by the first held-out value where there is one; None without a guard."""
    if run.guard is None:
        return None
    first = run.guard.first_heldout if run.at_start is None else run.at_start
    return judge_arming(
        run.config, heldout=run.answered, metric=run.heldout_metric, first=first, limits=run.guard.limits
    )


def _guard(run: Run) -> dict[str, Any] | None:
    """What the guard thought, whether it was armed, and what a calibration had tightened."""
    tightened = {} if run.guard is None else tightened_in(run.config, run.guard.limits)
    return guard_facts(run.guard, run.config.guard.mode, run.heldout_metric, arming(run), tightened)


def best(run: Run, keeper: RunStore) -> dict[str, Any] | None:
    """The best evaluation; its weights are named only where they are."""
    kept = run.best and keeper.folder.checkpoint(run.best[0]).is_dir()
    measured = run.last_eval_step > 0
    return best_facts(run.best, run.heldout_metric, at_start=run.at_start, kept=kept, measured=measured)


def write_verdict(ctx: RunContext, run: Run, judgement: RunJudgement, code: int | None = None) -> float:
    """Keep status, reasons, and the numbers that they rest on; how long the run took, as it is written there.

    Args:
        code: the exit code of a run that is over; None while it can go on.
    """
    keeper, sinks, shown_target = ctx.keeper, ctx.sinks, ctx.loaded.shown_target
    tick("writing the verdict")
    sinks.close()  # their last rows first, so that the verdict can say what became of them
    failpoint("session.before_verdict")
    seconds = run.clock.seconds
    keeper.folder.write_verdict(judgement.status, judgement.reasons, {
        "planned_steps": run.config.max_steps,
        "executed_steps": run.step,
        "version": run.learner.facts.version,
        "target": None if run.config.target_metric is None else [run.config.target_metric, run.config.target_value],
        "shown_target": None if shown_target is None else list(shown_target),
        "evidence": evidence_facts(run),
        "sandbox": sandbox_facts(),
        "best": best(run, keeper),
        "heldout": None if ctx.inputs.twins is None else ctx.inputs.twins.facts(),
        "guard": _guard(run),
        "ledger": balance_facts(keeper.ledger.balance()),
        "resumes": resumes(keeper.journal),
        "extensions": extensions(keeper.journal),
        "exit_code": code,
        "sinks": sinks.facts(),
        "metrics": run.last_metrics | run.last_eval,
        "invariants_checked": run.checked | {"trained_tokens": run.learner.facts.checked_tokens},
        "seconds": seconds,
    })  # fmt: skip
    failpoint("session.after_verdict")
    ctx.monitor.timeline.save()
    ctx.monitor.report()
    return seconds


def balance_facts(balance: Balance) -> dict[str, Any]:
    """Where every planned item is, for verdict.json."""
    return dataclasses.asdict(balance) | {"lost": balance.lost}


def _border_note(ctx: RunContext) -> list[str]:
    """What crosses the border because a key allowed it."""
    found = None if ctx.inputs.twins is None else ctx.inputs.twins.warning()
    return [] if found is None else [f"{'held out':<18} {found}"]


def _notes(run: Run, keeper: RunStore) -> list[str]:
    """For the last block: the two curves of a run that the guard stopped, the best weights, the account."""
    curves = run.guard.curves().splitlines() if run.guard is not None and collapse(run) else []
    found = best(run, keeper)
    judged = arming(run)
    armed = [] if judged is None else [f"{'guard':<18} {judged.words()}"]
    account = f"{'ledger':<18} {keeper.ledger.balance()}"
    return [*curves, *armed, *([] if found is None else [best_text(found, run.last_eval)]), account]


# -- A run that is over is asked for once more: its verdict is shown again, and not one byte of its folder changes
# Promises   only a run whose last process ended in order is taken for finished: its verdict is final, of the length
# that its config has, and nobody's lock is left. Everything else goes on as usual.
# Promises   what a full disk kept from being written behind the verdict, the report, is written then.


def final_verdict(folder: RunFolder, config: Config) -> dict[str, Any] | None:
    """What verdict.json says of a run that is over; None when it is not."""
    verdict = folder.read_verdict()
    if type(verdict.get("exit_code")) is not int or not _is_ours(verdict):
        return None  # stopped, failed on the way, of a version that did not say, or changed by somebody
    whole = verdict["planned_steps"] == verdict["executed_steps"] or stopped_by_guard(verdict)
    if not whole or verdict["planned_steps"] != config.max_steps or (folder.root / LOCK).exists():
        return None
    return verdict


def _is_ours(verdict: dict[str, Any]) -> bool:
    """Whether everything that is shown of it has the form in which a run writes it."""
    best, guard = verdict.get("best"), verdict.get("guard")
    reasons, numbers = verdict.get("reasons"), verdict.get("metrics")
    return (
        verdict["exit_code"] in (0, 1, CollapseStopError.exit_code)
        and verdict.get("status") in [str(each) for each in Verdict]
        and all(type(verdict.get(name)) is int for name in ("planned_steps", "executed_steps"))
        and isinstance(reasons, list)
        and all(isinstance(reason, str) for reason in reasons)
        and isinstance(numbers, dict)
        and all(map(_is_number, [*numbers.values(), verdict.get("seconds")]))
        and (best is None or (isinstance(best, dict) and isinstance(best.get("checkpoint", None), str | None)))
        and (best is None or {"step", "checkpoint"} <= best.keys())
        and (
            guard is None
            or (isinstance(guard, dict) and (not guard.get("fired") or {"step", "reason"} <= guard.keys()))
        )
        and (verdict["exit_code"] != CollapseStopError.exit_code or stopped_by_guard(verdict))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def stopped_by_guard(verdict: dict[str, Any]) -> bool:
    """Whether the guard ended the run."""
    guard = verdict.get("guard")
    return isinstance(guard, dict) and guard.get("fired") is True


def show_again(folder: RunFolder, config: Config, verdict: dict[str, Any], view: View) -> Outcome:
    """Print the last block once more; a run that a strict guard stopped ends as it did then."""
    rows = read_metrics(folder.metrics) if folder.metrics.exists() else []
    wanted = recorded(folder, config)
    outcome = Outcome(
        Verdict(verdict["status"]), tuple(verdict["reasons"]), folder.root, verdict["exit_code"], verdict["metrics"],
        way_to_evaluate(Path(shown_path(folder.root)), wanted, judged=_judged(verdict)),
        verdict["seconds"],
    )  # fmt: skip
    longer = f"{python_call('resume', folder.root, [*wanted, 'max_steps=N'])} in Python" if wanted else "max_steps=N"
    how = "the guard stopped it" if stopped_by_guard(verdict) else f"make it longer with {longer}"
    late = not outcome.report.exists() and report_or_warn(folder.root, view.warn) is not None
    kept = "its report, which was lacking, was written" if late else "nothing in it was changed"
    view.resumed(f"{folder.root} is finished, and {kept}; {how}", rows)
    view.finish(outcome)
    if outcome.exit_code == CollapseStopError.exit_code:
        raise CollapseStopError(
            f"step {verdict['guard']['step']}: {verdict['guard']['reason']}",
            "the guard stopped this run, and a run that it stopped does not go on",
            way_out(verdict["best"], config.model, folder.root),
        )
    return outcome


def _judged(verdict: dict[str, Any]) -> bool:
    """Whether a metric judged the held-out tasks, and not the reward alone."""
    return any(name == "eval_accuracy" or name.endswith("/accuracy") for name in verdict["metrics"])


def refuse_longer(folder: RunFolder, verdict: dict[str, Any] | None) -> None:
    """A run that the guard stopped is not made longer: the guard would stop it again at once."""
    if verdict is not None and stopped_by_guard(verdict):
        raise StateError(
            f"the guard stopped {folder.root} after step {verdict['executed_steps']}: {verdict['guard']['reason']}",
            "a run that the guard stopped does not go on, whatever its length",
            "start a new run from a checkpoint before the fall: model=RUN/checkpoints/step_N",
        )
