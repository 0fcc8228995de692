"""The batch arithmetic in words, printed before a run starts: two numbers given, the rest derived and shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.config import MICROBATCH_TOKENS, Config
from surefoot.config.choices import is_own, loss_facts
from surefoot.config.schedule import Answered, cadence_of, most_tasks
from surefoot.system.text import counted


def batch_arithmetic(
    config: Config,
    *,
    microbatch_size: int | None = None,
    train_tasks: int | None = None,
    heldout_tasks: int | None = None,
    parameters: int | None = None,
    sets: Sequence[str] = (),
    set_tasks: int = 0,
) -> list[str]:
    """Lines for the start of a run; what is not known yet is left out, and the guard's own follow (`guards.arming`).

    Args:
        microbatch_size: rollouts per forward pass, as the learner derived it; the config's when left out.
        train_tasks: tasks that are trained on.
        heldout_tasks: tasks that are held out, all of them.
        parameters: size of the policy.
        sets: evaluation sets, each in a few words.
    """
    model = f"model     {config.model}" + (f" ({parameters:,} parameters)" if parameters else "")
    return [
        model,
        _tasks(config, train_tasks, heldout_tasks),
        _step(config, microbatch_size or config.microbatch_size),
        *_loss(config),
        _run(config, train_tasks),
        *_replicas(config),
        _evaluation(config, heldout_tasks, set_tasks),
        *(f"          set {line}" for line in sets),
    ]


def _replicas(config: Config) -> list[str]:
    """Who runs where, and how old samples may be; nothing for a run in one process that takes turns."""
    keys, lines = config.runtime, []
    if keys.kind == "ray":
        where = "a private Ray cluster" if keys.address is None else f"the Ray cluster at {keys.address}"
        kind = "" if config.engine.kind == "auto" else f"{config.engine.kind} "
        lines.append(
            f"runtime   {where}: 1 learner, {keys.engines} {kind}"
            f"engine{'s' if keys.engines > 1 else ''}, {keys.workers} rollout worker{'s' if keys.workers > 1 else ''}"
        )
    if keys.learner_ranks > 1:
        lines.append(f"learner   {keys.learner_ranks} ranks share weights, optimiser and samples (FSDP2)")
    if config.max_staleness:
        every = "every step" if config.weight_sync_steps == 1 else f"every {config.weight_sync_steps} steps"
        lines.append(
            f"ahead     sampling runs on while the learner learns; samples at most "
            f"{counted(config.max_staleness, 'version')} old, weights synced after {every}"
        )
    return lines


def _tasks(config: Config, train: int | None, heldout: int | None) -> str:
    counts = "" if train is None else f": {train} to train on, {heldout or 0} held out"
    return f"tasks     {config.tasks}{counts}"


def _step(config: Config, piece: int) -> str:
    rollouts = config.rollouts_per_step
    line = (
        f"one step  {counted(config.tasks_per_step, 'task')} x {config.num_generations} generations = "
        f"{rollouts} rollouts, at most {rollouts * _longest(config)} tokens"
    )
    if config.tools.on:
        line += f" ({counted(config.max_turns, 'turn')} of {config.max_completion_length})"
    if piece:
        return line + f", {_pieces(-(-rollouts // piece))} of {piece} rollouts"
    groups = max(1, MICROBATCH_TOKENS // (config.num_generations * _longest(config)))
    most = -(-config.tasks_per_step // groups)
    if config.device == "cuda" and config.cuda_kernels:
        return line + ", in pieces of whole groups, as large as the GPU's memory allows"
    return line + f", {_pieces(most)} (whole groups, about {MICROBATCH_TOKENS} tokens each at most)"


def _longest(config: Config) -> int:
    """Tokens that one rollout may sample: with tools, max_completion_length is that of a turn."""
    return config.max_completion_length * (config.max_turns if config.tools.on else 1)


def _loss(config: Config) -> list[str]:
    """What one ratio per row means under this loss_type; nothing for one ratio per token, the usual case."""
    if is_own(config.loss_type):
        return [f"loss      {Path(config.loss_type).name}: of your own, held to the invariants of ours before step 1"]
    if config.ratio_level == "token":
        return []
    if loss_facts(config.loss_type).row_means:
        return ["loss      GSPO: one ratio per row, every row counts the same"]
    return [f'loss      {config.loss_type}, one ratio per row: rows weigh by length; GSPO is loss_type = "gspo"']


def loss_warning(config: Config) -> tuple[str, str] | None:
    """(what, remedy) when rows that have one ratio each are weighed by their length."""
    if config.ratio_level == "token" or is_own(config.loss_type) or loss_facts(config.loss_type).row_means:
        return None
    return (
        f"importance_sampling_level = sequence with loss_type = {config.loss_type} weighs rows by length",
        'GSPO is loss_type = "gspo"',
    )


def _pieces(count: int) -> str:
    return f"{count} microbatch{'es' if count > 1 else ''}"


def _run(config: Config, train: int | None) -> str:
    batches = config.max_steps // config.num_iterations
    visits = batches * config.tasks_per_step
    line = f"run       {counted(config.max_steps, 'step')}"
    if config.num_iterations > 1:
        line += f" ({counted(batches, 'collection')}, each trained on {config.num_iterations} times)"
    line += f", {counted(visits, 'task visit')}"
    if train:
        line += f" = {visits / train:.2g} epochs"
    return line + f", at most {batches * config.rollouts_per_step * _longest(config)} tokens"


def _evaluation(config: Config, heldout: int | None, set_tasks: int) -> str:
    if not config.holds_out:
        return "held out  nothing (heldout_fraction = 0)"
    tasks = most_tasks(config) if heldout is None else min(most_tasks(config), heldout)
    asked = Answered(tasks if config.heldout_fraction > 0 else 0, set_tasks)
    cadence = cadence_of(config, asked)
    often = "every step" if cadence.every == 1 else f"every {cadence.every} steps"
    when = often if cadence.every < config.max_steps else "at the end"
    if cadence.auto:
        when += f" (auto: {100 * cadence.share:.1f} % of the sampled tokens)"
    what = counted(tasks, "task") if config.heldout_fraction > 0 else "evaluation sets"
    line = f"held out  {what} x {counted(config.num_generations_eval, 'answer')} {when}"
    if config.eval_on_start:
        line += " and before the first"
    if config.target_metric is not None:
        line += f"; target {config.target_metric} >= {config.target_value}"
    return line
