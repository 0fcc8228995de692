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

    restart_timeout_s: Float = 30.0
    """Seconds that the starts of such replacements may take in all: when a further one is lost after them, the run ends with 77, so that a dead engine is named within a minute. Never less than two whole starts, so slow engines need no other value."""


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

    turns_by_complexity: bool = False
    """Turns by each task's complexity instead of max_turns: easy 5, medium 8, hard 12; a task that names none has max_turns."""

    call_timeout_s: Float = 30.0
    """Seconds one tool call may take before its server is replaced and the rollout has no verdict."""

    max_result_tokens: Int = 256
    """Longest tool answer in tokens; more is cut where the model can see it."""

    concurrency: Int = 32
    """Tool calls that are waited for at once, per process that plays rollouts."""

    in_prompt: bool = True
    """Whether the chat template shows the tools to the model; false where the policy knows them already."""

    format: Literal["auto", "tool_call", "llama_json"] = "auto"
    """How the policy writes a call: `tool_call` is <tool_call>{"name": ..., "arguments": {...}}</tool_call>, `llama_json` a turn that is nothing but {"name": ..., "parameters": {...}}; `auto` is how the chat template writes it."""

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


class EvalSetConfig(Table):
    """One entry of `eval_sets`; a text in its place means `tasks`."""

    tasks: str
    """Where its tasks come from: what the key `tasks` takes."""

    metric: str = "auto"
    """What counts as solved in it, as `eval_metric`: `file.py:function`, "exact", "auto" or "none"."""

    num_tasks: Int | None = None
    """At most so many of its tasks per evaluation, chosen by hash; how many a generator makes. eval_tasks when left out."""

    seed: Int = 1
    """Of a generator; not the run's, so that every run is measured on the same tasks."""

    reward: bool = True
    """Whether the run's reward functions judge it too; false for tasks that they do not fit: then its metric alone does."""


def _as_table(value: object) -> object:
    return {"tasks": value} if isinstance(value, str) else value


Component = Literal["completion", "reasoning", "efficiency", "recovery", "progress", "state", "response"]
"""A part of the reward `builtin:components`; `envs/components.py` says what each is."""
ComponentWeights = dict[Component, Float]
"""Part -> weight."""


EvalSets = dict[str, Annotated[EvalSetConfig, BeforeValidator(_as_table)]]
"""Name -> set."""


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
    metric: str = "auto"
    """The held-out curve that is watched, and by which the best checkpoint is kept: eval_accuracy, eval_reward, or of an evaluation set eval/NAME/accuracy or eval/NAME/reward; `auto` is the accuracy where the tasks have a metric, else the reward."""
    require: bool = False
    """Refuse a run whose guard is not armed: in 1,000 simulations it would miss more than 200 collapses, or stop more than 10 healthy runs."""
    min_evals: Int | Literal["auto"] = "auto"
    """Evaluations, the one before the first step included, before any rule may stop the run; "auto" goes by how many are planned, as for the three keys below."""
    decline_patience: Int | Literal["auto"] = "auto"
    """Evaluations in a row that have to speak for a decline."""
    ema_alpha: Float | Literal["auto"] = "auto"
    """Weight of the newest evaluation in every moving average: above 0, at most 1."""
    kl_hard_stop: Float | None = None
    """Highest average KL to the initial policy; turns the rule kl on, and needs beta above 0."""
    max_proxy_real_gap: Float | None = None
    """How much more than held-out the reward may gain; turns the rule gap on."""
    rules: tuple[RuleName, ...] | None = None
    """Names of the rules that are on; decline, and kl and gap when their limit is set, when left out."""
    margin_se: Float | Literal["auto"] = "auto"
    """Standard errors by which a fall has to exceed noise; 0 switches the margin off."""
    min_drop: Float = 0.0
    """A fall below held-out's best that is smaller than this is of no interest, however certain."""
    min_entropy_ratio: Float = 0.1
    """For the rule entropy_collapse: share of the early entropy that has to be left."""
    max_length_ratio: Float = 3.0
    """For the rules length_explosion and length_collapse: how many times longer or shorter than at first."""
    saturation_patience: Int = 15
    """For the rule reward_saturated: evaluations in a row without any spread."""
    calibrate_from: str | None = None
    """Folder of a run that is known to be healthy: guard.kl_hard_stop and guard.max_proxy_real_gap are tightened to what it needed and half as much again."""
