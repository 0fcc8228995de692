"""The tables of a config, `[engine]` to `[guard]`, and the types that every key is made of.

Owns       names, types and defaults of keys in tables; `config.py` has those outside.
Never      imports torch, or knows which values go together: `config_rules` does.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _number(value: object) -> object:
    """YAML reads `1e-5` as text; a text that is a number is that number, for every numeric key alike."""
    if isinstance(value, str):
        for kind in (int, float):
            with suppress(ValueError):
                return kind(value)
    return value


Int = Annotated[int, BeforeValidator(_number), Field(strict=True)]
Float = Annotated[float, BeforeValidator(_number), Field(strict=True, allow_inf_nan=False)]


class Table(BaseModel):
    """A frozen table that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class EngineConfig(Table):
    """`[engine]`: who generates."""

    kind: Literal["embedded", "vllm", "openai"] = "embedded"
    """Which engine samples: `embedded` is ours, `vllm` is vLLM in the engine's process, `openai` a server at engine.url (it trains only where that server takes weights and token ids)."""

    rows: Int = 0
    """Rollouts decoded side by side; 0 means tasks_per_step x num_generations, at most 256. Rounded up to a multiple of 8 (16 where weights cannot be packed): fixed shapes are what makes a rollout independent of its neighbours."""

    url: str | None = None
    """Address of an OpenAI-compatible server, such as "http://127.0.0.1:8000/v1"; for kind = "openai" only."""

    gpu_memory_utilization: Float = 0.4
    """Share of a GPU's memory that vLLM may take for weights and cache; without a GPU it means nothing."""


class RuntimeConfig(Table):
    """`[runtime]`: who runs where; docs/scaling.md goes from a laptop to a cluster."""

    kind: Literal["local", "ray"] = "local"
    """`local` is one process; `ray` puts engines, rollout workers and the learner into processes of their own, on one machine or many."""

    address: str | None = None
    """A Ray cluster that is already there, such as "10.0.0.1:6379"; a private one is started when left out."""

    engines: Int = 1
    """Engine replicas."""

    workers: Int = 2
    """Rollout workers: processes that ask, grade and talk to tools."""

    engine_gpus: Float = 0.0
    """GPUs that each engine replica reserves in the cluster; a fraction shares one."""

    learner_gpus: Float = 0.0
    """GPUs that the learner reserves in the cluster."""

    start_timeout_s: Float = 120.0
    """Seconds that one engine, worker or learner may take to start."""

    max_restarts: Int = 5
    """How often one of them may be replaced without having finished anything in between before the run ends with 77."""


class ToolsConfig(Table):
    """`[tools]`: what the policy may call while it answers; docs/agents.md begins with your own server in 20 lines."""

    servers: str | None = None
    """JSON file with MCP servers in the form that clients share, {"mcpServers": {"clock": {"command": "python", "args": ["clock.py"]}}}; docs/agents.md lists what each may say."""

    functions: tuple[str, ...] = ()
    """Plain Python tools as `file.py:function`, with typed arguments and a docstring."""

    environment: str | None = None
    """An environment class as `file.py:Class`: reset(**row), public methods as tools, get_reward(), as TRL has it."""

    max_calls: Int = 16
    """Tool calls that one rollout may make; more end it."""

    call_timeout_s: Float = 30.0
    """Seconds one tool call may take before its server is replaced and the rollout has no verdict."""

    max_result_tokens: Int = 256
    """Longest tool answer in tokens; more is cut where the model can see it."""

    concurrency: Int = 32
    """Tool calls that are waited for at once, per process that plays rollouts."""

    in_prompt: bool = True
    """Whether the chat template shows the tools to the model; false where the policy knows them already."""

    mode: Literal["live", "record", "replay"] = "live"
    """`record` keeps every call and answer in tools.cassette; `replay` answers from it and starts no server."""

    cassette: str | None = None
    """File that tool calls are recorded to or replayed from."""

    on_miss: Literal["fail", "live"] = "fail"
    """What a call that the cassette does not hold does in a replay: end the run, or ask the real tool."""

    allow_unsafe: bool = False
    """Run model-written code without a sandbox where the host has none; stamped on the run."""

    @property
    def on(self) -> bool:
        """Whether rollouts have tools at all."""
        return bool(self.servers or self.functions or self.environment)


class CurriculumConfig(Table):
    """`[curriculum]`: which task comes next; docs/tasks.md compares the three."""

    kind: Literal["none", "levels", "success"] = "none"
    """`none` visits every task once per epoch; `levels` draws easy, medium or hard tasks by shares that move; `success` prefers tasks that the policy solves about half of the time."""

    levels: tuple[str, ...] = ("easy", "medium", "hard")
    """The levels in each task's column complexity, for kind = "levels"."""

    start: tuple[Float, ...] = (0.3, 0.5, 0.2)
    """Share of each level in the first step; they sum to 1."""

    end: tuple[Float, ...] = (0.1, 0.4, 0.5)
    """Share of each level when curriculum.steps are over; they sum to 1."""

    steps: Int = 0
    """Steps from start to end, in between in a straight line; 0 means max_steps."""


RuleName = Literal[
    "decline", "gap", "kl", "both_falling", "entropy_collapse", "length_explosion", "length_collapse", "reward_saturated"
]  # fmt: skip


class GuardConfig(Table):
    """`[guard]`: when to stop a run that is hurting the model; docs/guards.md explains each rule."""

    mode: Literal["strict", "soft", "off"] = "strict"
    """What a fired guard does: `strict` saves and stops with 79, `soft` ends the run with verdict FAIL, `off` never looks."""
    metric: Literal["auto", "eval_accuracy", "eval_reward"] = "auto"
    """The held-out curve that is watched, and by which the best checkpoint is kept; `auto` is eval_accuracy where the tasks have a metric, else eval_reward."""
    min_evals: Int = 10
    """Evaluations, the one before the first step included, before any rule may stop the run."""
    decline_patience: Int = 3
    """Evaluations in a row that have to speak for a decline."""
    ema_alpha: Float = 0.1
    """Weight of the newest evaluation in every moving average: above 0, at most 1."""
    kl_hard_stop: Float | None = None
    """Highest average KL to the initial policy; turns the rule kl on, and needs beta above 0."""
    max_proxy_real_gap: Float | None = None
    """How much more than held-out the reward may gain; turns the rule gap on."""
    rules: tuple[RuleName, ...] | None = None
    """Names of the rules that are on; decline, and kl and gap when their limit is set, when left out."""
    margin_se: Float = 4.2
    """Standard errors by which a fall has to exceed noise; 0 switches the margin off."""
