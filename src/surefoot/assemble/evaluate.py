"""Look at a finished run again: its weights, its held-out tasks, the same metric."""

from __future__ import annotations

from pathlib import Path

from surefoot.assemble.inputs import read_inputs
from surefoot.assemble.resume import load_run_config
from surefoot.config_tables import EngineConfig, RuntimeConfig
from surefoot.envs.rewards.reward_pool import RewardPool
from surefoot.errors import StateError
from surefoot.store.run_folder import RunFolder
from surefoot.tracking.console import View


def evaluate(run_dir: Path, checkpoint: str | None, view: View, *, url: str | None = None) -> dict[str, float]:
    """Held-out metrics of a run's last (or named) checkpoint, or of what a server says to the same questions.

    Args:
        checkpoint: folder name under `checkpoints/`, such as "step_150"; "best" is the one that the verdict names, and
            None the newest.
        url: an OpenAI-compatible server that answers instead, with whatever model it serves; it is asked in the token
            ids of the run's own tokenizer.
    """
    folder = RunFolder.open(run_dir)
    weights = _checkpoint(folder, checkpoint)
    loaded = load_run_config(folder)
    inputs = read_inputs(loaded.config, loaded.base)
    # Answering needs no training channels, nor the files they read.
    answering = {"model": str(weights.absolute()), "alpha_sdpo": 0.0, "beta_replay": 0.0, "replay_pairs": None}
    answering |= {"runtime": RuntimeConfig(), "max_staleness": 0, "weight_sync_steps": 1}  # one process is enough
    engine = EngineConfig() if url is None else EngineConfig(kind="openai", url=url)
    config = loaded.config.model_copy(update=answering | {"engine": engine})
    with RewardPool(
        inputs.functions, workers=config.reward_workers, timeout_s=config.reward_timeout_s,
        memory_mb=config.reward_memory_mb,
    ) as pool:  # fmt: skip
        view.start([f"evaluating {weights if url is None else f'what {url} serves'}"])
        from surefoot.assemble.build import build  # torch: after the reward workers are forked

        parts = build(config, loaded.base, inputs, pool, answer_only=True)
        if not parts.heldout:
            raise StateError("the run held no tasks out", "heldout_fraction is 0", "evaluate on another task set")
        if url is None:
            parts.runtime.publish(parts.learner.weights(), 0)
        return parts.runtime.evaluate(parts.heldout, 0).metrics()


def _checkpoint(folder: RunFolder, name: str | None) -> Path:
    if name == "best":
        return folder.best_checkpoint()
    found = [path for path in folder.checkpoints() if name in (None, path.name)]
    if not found:
        raise StateError(
            f"no checkpoint {name or ''} in {folder.root}",
            "nothing to evaluate",
            f"there are: {', '.join(p.name for p in folder.checkpoints()) or 'none yet; train saves at the end'}",
        )
    return found[-1]
