"""One training run inside its folder: start or resume, go, and leave a verdict whatever happens.

Promises   a start that is refused leaves no folder behind, unless it was an agent's baseline; once the config is on the
           disk every instant can be resumed from; once step 1 has begun there is always a verdict.json that says how
           it ended; the final weights are saved before the verdict, and so are those of a run that the guard stopped.

Read next: `store.py`, what is kept on disk; `resume.py`, the way back.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from surefoot.config import Config
from surefoot.config.load import LoadedConfig
from surefoot.data.curriculum import SuccessCurriculum
from surefoot.data.tasks import Mixture, TaskStream, mixture_of
from surefoot.errors import (
    CollapseStopError,
    InvariantError,
    LearnerLostError,
    LearnerStartError,
    MemoryLimitError,
    RewardError,
    StoppedError,
    StorageError,
    SurefootError,
    ToolError,
)
from surefoot.guards.arming import guard_lines, judge_arming, refuse_unarmed
from surefoot.guards.verdict import RunJudgement, way_out
from surefoot.learner.architectures import told
from surefoot.protocols import TaskQueue
from surefoot.records import Task, Verdict
from surefoot.report.console import View, batch_arithmetic
from surefoot.report.plan import loss_warning
from surefoot.report.view import RunMonitor
from surefoot.rewards.pool import RewardPool
from surefoot.run.arguments import refuse_missing, way_on
from surefoot.run.guarding import calibration, calibration_lines, judge_first_value, make_guard
from surefoot.run.inputs import NOTHING, FromPython, Inputs, read_inputs, sandbox_facts, weaker_words
from surefoot.run.launcher import LaunchedRanks, refuse_launcher
from surefoot.run.outcome import (
    Outcome,
    best,
    collapse,
    final_verdict,
    finish,
    refuse_longer,
    show_again,
    write_verdict,
)
from surefoot.run.preflight import look_at_baseline, probe_start
from surefoot.run.resume import Extension, compare_machines, finish_extension, go_on, plan_extension
from surefoot.run.store import (
    RunStore,
    keep_checkpoints,
    load_run_config,
    make_hooks,
    read_run_config,
    refuse_code,
    refuse_lost_journal,
)
from surefoot.run.tasks import check_pairs
from surefoot.run.watchdog import Watchdog
from surefoot.storage.checkpoints import refuse_older_format
from surefoot.storage.files import failpoint, switched_on
from surefoot.storage.lock import RunLock
from surefoot.storage.run_folder import RunFolder, environment_record
from surefoot.storage.run_journal import assert_same_run, recorded_facts
from surefoot.system.memory import importing
from surefoot.system.signals import StopRequested, StopSignals, last_heartbeat
from surefoot.system.text import printable
from surefoot.tracking.process_logs import attempts_of, hosts_of
from surefoot.tracking.sinks import Sinks, check_sinks

if TYPE_CHECKING:
    from surefoot.loop import Run
    from surefoot.loop_state import Hooks
    from surefoot.run.build import Parts


# -- What a run lives in: its config, what the user brought, its folder, its helpers and its screen


@dataclass(frozen=True)
class RunContext:
    """Everything around the loop. Whoever makes one closes it."""

    loaded: LoadedConfig
    inputs: Inputs
    keeper: RunStore
    pool: RewardPool
    sinks: Sinks
    stop: StopSignals
    view: View
    monitor: RunMonitor
    began: float = field(default_factory=time.perf_counter)
    """When this life of the run began."""
    launched: LaunchedRanks | None = None
    """The other ranks of the learner, where a launcher has started them."""
    cleanup: ExitStack = field(default_factory=ExitStack)
    """What else has to be closed, the last one first: the runtime with its processes, above all."""

    @property
    def config(self) -> Config:
        """The checked config."""
        return self.loaded.config

    def close(self) -> None:
        """Engines, workers, sinks and screen first, the folder's lock last."""
        try:
            self.cleanup.close()
            self.pool.close()
            self.sinks.close()
            self.view.close()
        finally:
            self.keeper.close()


# -- One training run inside its folder: start or resume, go, and leave a verdict whatever happens


_STREAMED = 512
"""Tasks of a streamed file among which data sets are looked for."""


class BetweenSteps(NamedTuple):
    """A run that is whole: before its first step, or after one."""

    run: Run
    folder: RunFolder


Steps = Generator[BetweenSteps, None, Outcome]
"""A run that is under way: handed out before its first step and after each one; and what it came to."""


def train(
    loaded: LoadedConfig, *, view: View, given: FromPython = NOTHING, launched: LaunchedRanks | None = None
) -> Outcome:
    """Train as the config says; returns the verdict, raises a typed error when the run could not go on.

    Args:
        launched: the other processes of a launcher that has started this one.
    """
    return drained(train_steps(loaded, view=view, given=given, launched=launched))


def drained(run: Steps) -> Outcome:
    """Every step that is left, and what it came to."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome


def train_steps(
    loaded: LoadedConfig, *, view: View, given: FromPython = NOTHING, launched: LaunchedRanks | None = None
) -> Steps:
    """`train`, one step at a time; closed early, it leaves a run that can be resumed."""
    if launched is None:
        refuse_launcher(os.environ, "a run was started")
    config = loaded.config
    with StopSignals(limit_s=config.stop_timeout_s) as stop:
        with stop.part("start"):
            check_sinks(config.report_to)
            inputs = read_inputs(config, loaded.base, given)
            check_pairs(config, loaded.base, inputs.border)
            if config.guard.require:
                refuse_unarmed(config, judge_arming(config, heldout=inputs.answered, metric=inputs.heldout_metric))
            loaded = replace(loaded, notes=(*loaded.notes, *probe_start(config, inputs)))
        output = None if config.output_dir is None else loaded.path(config.output_dir)
        folder = RunFolder.create(output, config.run_name, Path.cwd())
        lock = RunLock(folder.root)
        failpoint("session.folder_made")
        try:
            if given.model is not None:
                loaded = given.model.save(loaded, folder)
            folder.write_config(loaded.resolved)
            failpoint("session.config_written")
            keeper = RunStore(folder, lock)
        except BaseException:
            lock.close()
            folder.discard()
            raise
        try:
            return (yield from _live(loaded, inputs, keeper, stop, view, resumed=False, launched=launched))
        except LearnerLostError as error:
            lost = _unless_asked(error, stop)
    if not folder.config.exists():  # lost before step 1: the start took its folder back
        raise lost if isinstance(lost, LearnerStartError) else _never_began(lost)
    if launched is not None:
        raise _not_ours_to_replace(lost, folder.root)
    return (yield from _revive(folder.root, lost, config.runtime.max_restarts, view=view, given=given))


def resume(
    run_dir: Path, *, view: View, given: FromPython = NOTHING, max_steps: int | None = None, allow_code: bool = False,
    launched: LaunchedRanks | None = None,
) -> Outcome:  # fmt: skip
    """Go on with an interrupted run, to the same end as if it had never been interrupted; see `resume_steps`."""
    steps = resume_steps(run_dir, view=view, given=given, max_steps=max_steps, allow_code=allow_code, launched=launched)
    return drained(steps)


def resume_steps(
    run_dir: Path, *, view: View, given: FromPython = NOTHING, max_steps: int | None = None, allow_code: bool = False,
    launched: LaunchedRanks | None = None,
) -> Steps:  # fmt: skip
    """`resume`, one step at a time.

    A run that is over is shown once more, and nothing in its folder changes.

    Args:
        max_steps: the run's new length; one that is over goes on from its last checkpoint.
        allow_code: code that lies in the run folder itself may be run.
        launched: the other processes of a launcher that has started this one.
    """
    if launched is None:
        refuse_launcher(os.environ, "a run was resumed")
    folder = RunFolder.open(run_dir)
    config = load_run_config(folder).config
    over = final_verdict(folder, config)
    if max_steps is not None and max_steps != config.max_steps:
        refuse_longer(folder, over)
    elif over is not None:
        return show_again(folder, config, over, view)
    refuse_older_format(folder.root)
    try:
        return (yield from _resume(run_dir, view, given, max_steps, allow_code=allow_code, launched=launched))
    except LearnerLostError as error:
        lost = error
    if launched is not None:
        raise _not_ours_to_replace(lost, run_dir)
    times = read_run_config(RunFolder.open(run_dir)).config.runtime.max_restarts
    again = _revive(run_dir, lost, times, view=view, given=given, max_steps=max_steps, allow_code=allow_code)
    return (yield from again)


def _revive(
    run_dir: Path, lost: LearnerLostError, times: int, *, view: View, given: FromPython, max_steps: int | None = None,
    allow_code: bool = False,
) -> Steps:  # fmt: skip
    """The learner's process died, not this one: what a person would type next, up to `times` times."""
    for left in range(times, 0, -1):
        view.warn(
            f"{lost.what}; the run goes on from its last checkpoint and the journal, {left} such losses are left",
            f"see {run_dir / 'logs'} for its last words",
        )
        try:
            return (yield from _resume(run_dir, view, given, max_steps, allow_code=allow_code))
        except LearnerLostError as again:
            lost = again
    raise lost


def _not_ours_to_replace(lost: LearnerLostError, run_dir: Path) -> StoppedError:
    return StoppedError(
        lost.what, "the ranks are a launcher's processes, and only the launcher can start them again",
        f"have the launcher start them again: surefoot train --resume {run_dir}; torchrun --max-restarts does it by "
        "itself, with the first words, where output_dir is given",
    )  # fmt: skip


def _never_began(lost: LearnerLostError) -> LearnerLostError:
    return LearnerLostError(
        lost.what, "it was lost before step 1: nothing was trained, and there is nothing to go on from",
        "start the run again; its last lines above say what ended it",
    )  # fmt: skip


def _unless_asked(lost: LearnerLostError, stop: StopSignals) -> LearnerLostError:
    """A learner that is lost after a request to stop is not missed: the signal may have been sent to all processes."""
    if stop.asked:
        raise StoppedError(f"{stop.reason}; {lost.what}", stop.reason, f"go on with: {stop.resume}") from lost
    return lost


def _resume(
    run_dir: Path, view: View, given: FromPython, max_steps: int | None = None, *, allow_code: bool = False,
    launched: LaunchedRanks | None = None,
) -> Steps:  # fmt: skip
    folder = RunFolder.open(run_dir)
    with StopSignals() as stop:
        lock = RunLock(folder.root)
        try:
            finish_extension(folder)
            refuse_lost_journal(folder)
            loaded = load_run_config(folder)
            refuse_code(folder, loaded.config, allow_code=allow_code)
            extension = plan_extension(folder, loaded, max_steps)
            loaded = loaded if extension is None else extension.loaded
            stop.limit_s = loaded.config.stop_timeout_s
            check_sinks(loaded.config.report_to)
            refuse_missing(folder, loaded.config, given, max_steps)
            inputs = read_inputs(loaded.config, loaded.base, given)
            check_pairs(loaded.config, loaded.base, inputs.border)
            keeper = RunStore(folder, lock)
        except BaseException:
            lock.close()
            raise
        shown = (recorded_facts(keeper.journal, "inputs") or {}).get("shown_target")
        loaded = replace(loaded, shown_target=None if shown is None else (shown[0], shown[1]))
        try:
            steps = _live(loaded, inputs, keeper, stop, view, resumed=True, extension=extension, launched=launched)
            return (yield from steps)
        except LearnerLostError as error:
            raise _unless_asked(error, stop) from None


def _live(
    loaded: LoadedConfig, inputs: Inputs, keeper: RunStore, stop: StopSignals, view: View, *, resumed: bool,
    extension: Extension | None = None, launched: LaunchedRanks | None = None,
) -> Steps:  # fmt: skip
    """Everything between a folder with a config and a folder with a verdict."""
    config, folder = loaded.config, keeper.folder
    stop.resume = way_on(folder.root, inputs.from_python)
    pool = RewardPool(
        inputs.functions, workers=config.reward_workers, timeout_s=config.reward_timeout_s,
        memory_mb=config.reward_memory_mb, log_path=folder.logs / "rewards.log", forked=inputs.forked,
        pass_env=config.pass_env, warn=view.warn,
    )  # fmt: skip
    shown = loaded.resolved.model_dump(mode="json")
    sinks = Sinks(config.report_to, folder.root, config.run_name, shown, view.warn)
    monitor = RunMonitor(folder.root, max_steps=config.max_steps, warn=view.warn)
    ctx = RunContext(loaded, inputs, keeper, pool, sinks, stop, view, monitor, launched=launched)
    keep_folder = resumed  # a refused start takes its folder back, a refused resume changes nothing
    try:
        assert_same_run(keeper.journal, "inputs", inputs.sources | {"seed": config.seed} | _shown_target(loaded))
        pool.start()  # before torch: a fork of a threaded process is not safe
        if not resumed:  # a refused resume leaves what others see as it was
            ctx.cleanup.enter_context(monitor)
        with Watchdog(config.stall_timeout_s, dump=folder.logs / "stacks.txt", resume=stop.resume):
            run = _start(ctx, resumed=resumed, extension=extension)
            keep_folder = True  # from here on the folder stays, with a verdict, however it ends
            return (yield from _go(ctx, run))
    except StopRequested as asked:  # before the first step; it is not refused: what is there can be resumed
        keep_folder = True
        raise StoppedError(
            f"{asked}; nothing was trained by this start", "asked to stop", f"go on with: {stop.resume}"
        ) from asked
    except KeyboardInterrupt:
        keep_folder = True
        raise
    except LearnerLostError:
        keep_folder = keep_folder or stop.asked  # it may have been asked to stop too: that can be resumed
        raise
    finally:
        ctx.close()
        if not keep_folder and not folder.verdict.exists():  # an agent's baseline leaves one, and what it played
            folder.discard()


def _shown_target(loaded: LoadedConfig) -> dict[str, Any]:
    """The target that is not judged: config.toml does not have it, and a resume ends with the same words."""
    return {} if loaded.shown_target is None else {"shown_target": list(loaded.shown_target)}


def _start(ctx: RunContext, *, resumed: bool, extension: Extension | None = None) -> Run:
    """Load, wire, look at the baseline, go back to a checkpoint; everything that can refuse the run before step 1."""
    config, keeper, view, stop = ctx.config, ctx.keeper, ctx.view, ctx.stop
    sizes = {"train_tasks": len(ctx.inputs.train), "heldout_tasks": len(ctx.inputs.heldout)}
    border = [] if ctx.inputs.twins is None else [ctx.inputs.twins.line()]
    tighter, guarded = _plan_guard(ctx)
    plan = batch_arithmetic(config, **sizes, sets=ctx.inputs.set_lines, set_tasks=ctx.inputs.set_tasks)
    view.start([*ctx.loaded.notes, *plan, *guarded, *border, *keeper.notes()])
    with stop.part("start"):
        failpoint("session.before_build")
        with importing():
            from surefoot.run.build import build  # torch: after the plan is on the screen

        parts = build(config, ctx.loaded.base, ctx.inputs, ctx.pool, keeper.folder.logs, launched=ctx.launched)
        ctx.cleanup.callback(_warn_of_egress, keeper.folder.logs, view)  # called after the next one
        ctx.cleanup.callback(parts.close_learner)
        ctx.cleanup.callback(parts.runtime.close)
        if parts.status is not None:
            ctx.cleanup.enter_context(ctx.monitor.asking(parts.status))
        assert_same_run(keeper.journal, "parts", dict(parts.identity))
        line = told(parts.policy.spec.model_type, parts.policy.spec.beyond)
        view.note([] if line is None else [f"model     {line}"])
        _write_environment(ctx, line)
        _warn_of_tasks(parts, config, view)
        if found := loss_warning(config):
            view.warn(*found)
        _warn_of_guard(config, ctx.inputs, view)
    if config.preflight_tasks and not (resumed and keeper.batches.steps_or_groups):
        with stop.part("preflight"):
            parts.runtime.publish(*parts.learner.published())
            mixture = _mixture(parts, config)
            probe = mixture.first(config.preflight_tasks) if mixture.tasks else _first_tasks(parts, config)
            _warn_of_many(mixture, view)
            look_at_baseline(ctx, parts.runtime, probe, mixture.tasks)
    run = _make_run(ctx, parts, tighter)
    if resumed:
        with stop.phase("going back to a checkpoint"):
            go_on(run, keeper, view, extension)
        ctx.cleanup.enter_context(ctx.monitor)
        ctx.monitor.resumed(run.step, run.clock.seconds_before)
    return run


def _write_environment(ctx: RunContext, architecture: str | None) -> None:
    """The machine, once; a resume on another one is told.

    Args:
        architecture: what is said of a model that is not plain.
    """
    tasks, folder = ctx.inputs.task_set, ctx.keeper.folder
    tools = ctx.inputs.tools
    record = environment_record() | {
        "tasks": tasks.name, "architecture": architecture, **ctx.inputs.sources, "failpoints": switched_on(),
        "unsafe_code": ctx.inputs.unsafe, "sandbox": sandbox_facts(), "from_python": list(ctx.inputs.from_python),
        "tool_servers": {} if tools is None else {server.name: server.containment for server in tools.startable},
    }  # fmt: skip
    if words := weaker_words():
        ctx.view.warn(f"the sandbox is weaker on this host: {words}", "its other walls stand; see docs/sandbox.md")
    if tools is not None and tools.uncontained is not None:
        ctx.view.warn(tools.uncontained, "grant it what it needs with read, write and network instead (docs/agents.md)")
    if ctx.inputs.unsafe:
        ctx.view.warn(
            "model-written code runs WITHOUT a sandbox on this host (tools.allow_unsafe)", "use a host that has one"
        )
    if folder.environment.exists():
        compare_machines(folder, record, ctx.view)
    else:
        folder.write_environment(record)


def _warn_of_egress(logs: Path, view: View) -> None:
    asked = hosts_of(logs)
    for server, attempts in attempts_of(logs).items():
        named = f" (asked for {', '.join(asked[server][:5])})" if server in asked else ""
        view.warn(
            f"tool server {printable(server)[:40]} tried to reach the network {attempts} times in this run: refused"
            + named,
            'look at what it wants there; "network" in the servers file grants it, host by host or whole',
        )


def _warn_of_tasks(parts: Parts, config: Config, view: View) -> None:
    if parts.left_out:
        view.warn(
            f"{parts.left_out} tasks left out: their prompts have more than {config.max_prompt_length} tokens",
            "raise max_prompt_length to train on them",
        )
    if parts.cramped:
        view.warn(
            f"{parts.cramped} prompts leave less room in the context than max_completion_length: cut sooner",
            "lower max_completion_length, or leave them out with max_prompt_length",
        )


def _warn_of_guard(config: Config, inputs: Inputs, view: View) -> None:
    fell_back = config.guard.metric == "auto" and inputs.heldout_metric.endswith("reward")
    if fell_back and config.guard.mode != "off" and (inputs.heldout or inputs.eval_sets):
        view.warn(
            f"the guard watches {inputs.heldout_metric}, the reward itself: these tasks have no metric of their own",
            "give eval_metric, so that a gamed reward can be told from a solved task",
        )


def _plan_guard(ctx: RunContext) -> tuple[dict[str, float], list[str]]:
    """Limits from a healthy run, and the guard's part of the plan."""
    config, heldout, metric = ctx.config, ctx.inputs.answered, ctx.inputs.heldout_metric
    base, journal = ctx.loaded.base, ctx.keeper.journal
    tighter = calibration(config, base, heldout=heldout, metric=metric, journal=journal)
    guard = make_guard(config, heldout, metric, tighter)
    limits = None if guard is None else guard.limits
    lines = guard_lines(config, heldout=heldout, metric=metric, limits=limits)
    return tighter, [*lines, *calibration_lines(config, tighter)]


def _make_run(ctx: RunContext, parts: Parts, tighter: dict[str, float] | None = None) -> Run:
    from surefoot.loop_state import Run, StepClock

    config, keeper = ctx.config, ctx.keeper
    successes = SuccessCurriculum(config.seed) if config.curriculum.kind == "success" else None
    hooks = make_hooks(ctx)
    queue = _make_task_queue(ctx, parts, hooks, successes)
    run = Run(
        config=config, runtime=parts.runtime, learner=parts.learner, codec=parts.codec, queue=queue,
        heldout=parts.heldout, hooks=hooks, eval_sets=parts.eval_sets,
        guard=make_guard(config, ctx.inputs.answered, ctx.inputs.heldout_metric, tighter),
        heldout_metric=ctx.inputs.heldout_metric, successes=successes, clock=StepClock(began=ctx.began),
        datasets=_mixture(parts, config).words,
    )  # fmt: skip
    run.hooks.extra_metrics = queue.metrics
    run.hooks.published = queue.advance
    keep_checkpoints(run, keeper)
    judge_first_value(run)
    return run


def _first_tasks(parts: Parts, config: Config) -> list[Task]:
    """Those that the preflight looks at."""
    n = min(config.preflight_tasks, len(parts.train))
    if not config.stream_tasks:
        return TaskStream(parts.train, config.seed).take(n)
    from surefoot.data.on_disk.stream import LargeTaskStream

    return LargeTaskStream(parts.train, config.seed).take(n)


def _mixture(parts: Parts, config: Config) -> Mixture:
    """The data sets of the training tasks; of a streamed file, those among the first tasks that the run visits."""
    if not config.stream_tasks:
        names = {task.dataset for task in parts.train}
        return mixture_of(TaskStream(parts.train, config.seed).take(len(parts.train)) if len(names) > 1 else ())
    from surefoot.data.on_disk.stream import LargeTaskStream

    return mixture_of(LargeTaskStream(parts.train, config.seed).take(min(_STREAMED, len(parts.train))))


def _warn_of_many(mixture: Mixture, view: View) -> None:
    if mixture.total > len(mixture.tasks) > 0:
        view.warn(
            f"the tasks belong to {mixture.total} data sets: only the {len(mixture.tasks)} largest are looked at by "
            "themselves, before step 1 and in the metrics",
            "give small ones a name in common in the column dataset",
        )


def _make_task_queue(ctx: RunContext, parts: Parts, hooks: Hooks, successes: SuccessCurriculum | None) -> TaskQueue:
    from surefoot.run.task_plan import make_task_order
    from surefoot.runtime.task_queue import StepSampler

    if parts.ahead is None:
        order = make_task_order(ctx.config, ctx.keeper, ctx.inputs, parts.train, successes)
        return StepSampler(order, parts.runtime, ctx.config, stop=hooks.stop, phase=hooks.phase)
    from surefoot.run.build import make_async_queue

    queue = make_async_queue(ctx, parts, parts.ahead)
    ctx.cleanup.callback(queue.close)
    ctx.cleanup.enter_context(ctx.monitor.asking(queue.status))
    return queue


@contextlib.contextmanager
def closing_task_queue(run: Run) -> Iterator[None]:
    """A stream's thread owns the ledger until it is closed; whoever writes a verdict reads it after that."""
    try:
        yield
    except (RewardError, ToolError):
        run.queue.graders_failed()
        raise
    finally:
        run.queue.close()


def _go(ctx: RunContext, run: Run) -> Steps:
    """The loop, and the verdict on however it ended."""
    from surefoot.loop import steps

    root = ctx.keeper.folder.root
    try:
        with closing_task_queue(run):
            between = BetweenSteps(run, ctx.keeper.folder)
            for _ in steps(run):
                yield between
    except GeneratorExit:  # whoever goes on step by step has had enough
        _stopped(ctx, run)
        raise
    except KeyboardInterrupt as asked:
        raise _stopped(ctx, run) from asked
    except CollapseStopError as stop:
        with contextlib.suppress(StorageError):  # as below
            finish(ctx, run, code=stop.exit_code)
        raise CollapseStopError(
            stop.what, stop.why, way_out(best(run, ctx.keeper), run.config.model, root), stop.status
        ) from None
    except Exception as error:
        status = Verdict.FAIL if isinstance(error, InvariantError) or collapse(run) else Verdict.ERROR
        what = error.what if isinstance(error, SurefootError) else str(error)
        reasons = (f"{type(error).__name__}: {what}", *filter(None, [collapse(run)]))
        with contextlib.suppress(StorageError):  # the error itself matters more than its record
            write_verdict(ctx, run, RunJudgement(status, reasons))
        if out_of_memory := _memory_error(error):
            raise out_of_memory from error
        raise
    run.hooks.save(run.step)
    return finish(ctx, run)


def _stopped(ctx: RunContext, run: Run) -> StoppedError:
    """Save what is whole, say how far it got, and how to go on.

    After the last step only its evaluation is left: a checkpoint without it would stand in the way of the final one.
    """
    stop, folder = ctx.stop, ctx.keeper.folder
    whole = stop.may_save and run.step < run.config.max_steps
    if whole:
        run.hooks.save(run.step)
    kept = f"saved in {folder.checkpoint(run.step)}" if whole else "what was under way is in the journal"
    how = f"stopped after step {run.step} of {run.config.max_steps}; {kept}"
    write_verdict(ctx, run, RunJudgement(Verdict.INCOMPLETE, (f"{how} ({stop.reason})",)))
    return StoppedError(how, stop.reason, f"go on with: {stop.resume}")


def _memory_error(error: Exception) -> MemoryLimitError | None:
    """Out of memory outside the learner, which has its own answer to it: nothing can be cut smaller there."""
    from surefoot.learner.memory import is_out_of_memory

    if isinstance(error, SurefootError) or not is_out_of_memory(error):
        return None
    return MemoryLimitError(
        f"out of memory while {last_heartbeat().stage}: {str(error)[:300]}",
        "this part of a step cannot be cut into smaller pieces",
        "lower tasks_per_step, num_generations, max_completion_length or engine.rows; the run can be resumed elsewhere",
    )


__all__ = ["Outcome", "resume", "train"]
