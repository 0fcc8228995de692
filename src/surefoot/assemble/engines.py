"""Which engine a run samples with, and what it takes to build one here or in another process."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from surefoot.config import Config
from surefoot.engines.embedded import EmbeddedEngine
from surefoot.engines.serving import EngineLoop
from surefoot.policy.load import Policy
from surefoot.protocols import Engine, ServingEngine
from surefoot.runtime.recipes import EmbeddedRecipe, EngineRecipe

MAX_AUTO_ROWS = 256


def engine_rows(config: Config) -> int:
    """Rollouts decoded side by side."""
    return config.engine.rows or min(MAX_AUTO_ROWS, config.rollouts_per_step)


@dataclass(frozen=True)
class VllmRecipe:
    """vLLM with the numbers of this model; it has no weights before it is handed some."""

    model_config: dict[str, Any]
    max_width: int
    rows: int
    dtype: str
    device: str
    gpu_memory_utilization: float
    seed: int
    threads: int

    def build(self) -> ServingEngine:
        """In the process where it will run."""
        from surefoot.engines.vllm_engine import VllmEngine

        return VllmEngine(
            self.model_config, max_width=self.max_width, rows=self.rows, dtype=self.dtype, device=self.device,
            gpu_memory_utilization=self.gpu_memory_utilization, seed=self.seed, threads=self.threads,
        )  # fmt: skip


@dataclass(frozen=True)
class ServerRecipe:
    """A server elsewhere; refused unless it takes token ids and weights."""

    url: str
    concurrency: int
    answer_only: bool = False
    """It is asked and never trained: no weights are sent, and none need to be taken."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of variables that the process which asks has to have."""
        from surefoot.engines.http_client import KEY_VARIABLE

        return (KEY_VARIABLE,)

    def build(self) -> ServingEngine:
        """A connection to it, in the process that asks."""
        from surefoot.engines.openai_engine import OpenAIEngine

        engine = OpenAIEngine(self.url, concurrency=self.concurrency, version=0)
        try:
            if not self.answer_only:
                engine.require_training()
        except BaseException:
            engine.close()
            raise
        return engine


def engine_recipe(config: Config, policy: Policy, width: int) -> EngineRecipe:
    """What an engine's process needs to build its own."""
    parameter = next(policy.model.parameters())
    if config.engine.kind == "vllm":
        return VllmRecipe(
            json.loads(policy.model.config.to_json_string(use_diff=False)), max_width=width, rows=engine_rows(config),
            dtype=config.dtype, device=parameter.device.type, seed=config.seed, threads=config.threads,
            gpu_memory_utilization=config.engine.gpu_memory_utilization,
        )  # fmt: skip
    if config.engine.kind == "openai":
        assert config.engine.url is not None, "the config gives the two together"
        return ServerRecipe(config.engine.url, engine_rows(config))
    return EmbeddedRecipe(policy.spec, engine_rows(config), width, parameter.device.type, config.dtype)


def make_engine(config: Config, policy: Policy, width: int, *, answer_only: bool = False) -> Engine:
    """The engine of a run in one process; one that many ask at once when sampling overlaps learning."""
    if config.engine.kind != "embedded":
        recipe = engine_recipe(config, policy, width)
        return (replace(recipe, answer_only=answer_only) if isinstance(recipe, ServerRecipe) else recipe).build()
    parameter = next(policy.model.parameters())
    engine = EmbeddedEngine(
        policy.spec, rows=engine_rows(config), max_width=width, device=str(parameter.device), dtype=parameter.dtype
    )
    # The learner's own tensors change while others sample from them: the loop serves a copy.
    return EngineLoop(engine, copy_weights=True) if config.max_staleness > 0 else engine
