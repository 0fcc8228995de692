"""The batch arithmetic in words, printed before a run starts: two numbers given, the rest derived and shown."""

from __future__ import annotations

from surefoot.config import MICROBATCH_TOKENS, Config


def batch_arithmetic(
    config: Config,
    *,
    microbatch_size: int | None = None,
    train_tasks: int | None = None,
    heldout_tasks: int | None = None,
    parameters: int | None = None,
) -> list[str]:
    """Lines for the start of a run; what is not known yet is left out.

    Args:
        microbatch_size: rollouts per forward pass, as the learner derived it; the config's when left out.
        train_tasks: tasks that are trained on.
        heldout_tasks: tasks that are held out, all of them.
        parameters: size of the policy.
    """
    model = f"model     {config.model}" + (f" ({parameters:,} parameters)" if parameters else "")
    return [
        model,
        _tasks(config, train_tasks, heldout_tasks),
        _step(config, microbatch_size or config.microbatch_size),
        _run(config, train_tasks),
        *_fleet(config),
        _evaluation(config, heldout_tasks),
        _guard(config),
    ]


def _fleet(config: Config) -> list[str]:
    """Who runs where, and how old samples may be; nothing for a run in one process that takes turns."""
    keys, lines = config.runtime, []
    if keys.kind == "ray":
        where = "a private Ray cluster" if keys.address is None else f"the Ray cluster at {keys.address}"
        lines.append(
            f"runtime   {where}: 1 learner, {keys.engines} {config.engine.kind} "
            f"engine{'s' if keys.engines > 1 else ''}, {keys.workers} rollout worker{'s' if keys.workers > 1 else ''}"
        )
    if config.max_staleness:
        every = "every step" if config.weight_sync_steps == 1 else f"every {config.weight_sync_steps} steps"
        lines.append(
            f"ahead     sampling runs on while the learner learns; samples at most {config.max_staleness} versions "
            f"old, weights synced after {every}"
        )
    return lines


def _tasks(config: Config, train: int | None, heldout: int | None) -> str:
    counts = "" if train is None else f": {train} to train on, {heldout or 0} held out"
    return f"tasks     {config.tasks}{counts}"


def _step(config: Config, piece: int) -> str:
    rollouts = config.rollouts_per_step
    line = (
        f"one step  {config.tasks_per_step} tasks x {config.num_generations} generations = {rollouts} rollouts, "
        f"at most {rollouts * config.max_completion_length} tokens"
    )
    if piece:
        return line + f", {_pieces(-(-rollouts // piece))} of {piece} rollouts"
    groups = max(1, MICROBATCH_TOKENS // (config.num_generations * config.max_completion_length))
    most = -(-config.tasks_per_step // groups)
    return line + f", {_pieces(most)} (whole groups, about {MICROBATCH_TOKENS} tokens each at most)"


def _pieces(count: int) -> str:
    return f"{count} microbatch{'es' if count > 1 else ''}"


def _run(config: Config, train: int | None) -> str:
    batches = config.max_steps // config.num_iterations
    visits = batches * config.tasks_per_step
    line = f"run       {config.max_steps} steps"
    if config.num_iterations > 1:
        line += f" ({batches} collections, each trained on {config.num_iterations} times)"
    line += f", {visits} task visits"
    if train:
        line += f" = {visits / train:.2g} epochs"
    return line + f", at most {batches * config.rollouts_per_step * config.max_completion_length} tokens"


def _evaluation(config: Config, heldout: int | None) -> str:
    if config.heldout_fraction == 0:
        return "held out  nothing (heldout_fraction = 0)"
    tasks = config.eval_tasks if heldout is None else min(config.eval_tasks, heldout)
    cadence = f"every {config.eval_steps} steps" if config.eval_steps else "at the end"
    line = f"held out  {tasks} tasks x {config.num_generations_eval} answers {cadence}"
    if config.eval_on_start:
        line += " and before the first"
    if config.target_metric is not None:
        line += f"; target {config.target_metric} >= {config.target_value}"
    return line


def planned_evaluations(config: Config) -> int:
    """How often held-out tasks are answered in a run that goes to its end."""
    if config.heldout_fraction == 0:
        return 0
    every = config.eval_steps or config.max_steps
    return -(-config.max_steps // every) + config.eval_on_start


def guard_warning(config: Config) -> tuple[str, str] | None:
    """(what, remedy) when the guard is on and cannot fire, because the run ends before it may."""
    planned, needed = planned_evaluations(config), config.guard.min_evals
    if config.guard.mode == "off" or planned == 0 or planned >= needed:
        return None
    what = f"the guard can never fire: {planned} evaluations are planned, guard.min_evals = {needed}"
    passes = config.num_iterations
    every = max(passes, config.max_steps // (2 * needed) // passes * passes)
    if planned_evaluations(config.model_copy(update={"eval_steps": every})) >= needed:
        return what, f'set eval_steps = {every}, or guard.mode = "off" to train without it'
    return what, f'{config.max_steps} steps are too few for it: lower guard.min_evals, or set guard.mode = "off"'


def _guard(config: Config) -> str:
    guard, planned = config.guard, planned_evaluations(config)
    if guard.mode == "off":
        return 'guard     off (guard.mode = "off"): nobody stops a run that is hurting the model'
    if planned == 0:
        return "guard     inactive: nothing is held out (heldout_fraction = 0)"
    if found := guard_warning(config):
        return f"guard     {guard.mode}, but {found[0].removeprefix('the guard ')}"
    ends = "stops with exit code 79" if guard.mode == "strict" else "ends with verdict FAIL"
    return (
        f"guard     {guard.mode}: a run that hurts the model {ends}, from evaluation {guard.min_evals} of {planned} on"
    )
