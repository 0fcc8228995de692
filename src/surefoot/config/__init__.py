"""Every key: a strict typed tree from TOML or YAML, all problems reported at once.

Owns       names, types and defaults of the configuration, those of tables in `config`; ranges and forbidden
           pairs are in `config.rules`.
Promises   an unknown key is an error with the nearest name; every problem of a file is
           reported in one go; derived numbers are properties, so they cannot be set wrongly.
Never      imports torch, opens a model, or changes a value silently.

Two keys are required: `model` and `tasks`. Names are TRL's where TRL has one.

Read next: `config_load`, which turns files and command-line overrides into a `Config`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from surefoot.config import rules as config_rules
from surefoot.config.choices import ENGINES, ESTIMATORS, LOSSES, RULES, loss_facts, own_text
from surefoot.system.processors import usable_cores

# -- The tables of a config, `[engine]` to `[guard]`, and the types that every key is made of -----
# Owns       names, types and defaults of keys in tables; `config.py` has those outside.
# Never      imports torch, or knows which values go together: `config.rules` does.


def _number(value: object) -> object:
    """YAML reads `1e-5` as text; a text that is a number is that number, for every numeric key alike."""
    if isinstance(value, str):
        for kind in (int, float):
            with suppress(ValueError):
                return kind(value)
    return value


Int = Annotated[int, BeforeValidator(_number), Field(strict=True)]
Threads = Annotated[Int, AfterValidator(lambda count: count or usable_cores()), Field(validate_default=True)]
Float = Annotated[float, BeforeValidator(_number), Field(strict=True, allow_inf_nan=False)]


OwnCode = Annotated[str, AfterValidator(own_text)]
"""`file.py:name`: code of the user's own."""
if TYPE_CHECKING:  # the names stand in one table, which a type checker does not read
    LossType: TypeAlias = str
    Estimator: TypeAlias = str
    EngineKind: TypeAlias = str
    RuleName: TypeAlias = str
else:
    LossType, Estimator = Literal[tuple(LOSSES)] | OwnCode, Literal[ESTIMATORS] | OwnCode
    EngineKind, RuleName = Literal[tuple(ENGINES)] | OwnCode, Literal[tuple(RULES)] | OwnCode


class Table(BaseModel):
    """A frozen table that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class EngineConfig(Table):
    """`[engine]`: who generates."""

    kind: EngineKind = "auto"
    """Which engine samples: `auto` is `embedded`, ours, where that computes the model exactly, else `transformers`, the learner's own library for any causal language model; `vllm` is vLLM in the engine's process, `openai` a server at engine.url (it trains only where that server takes weights and token ids); or one of your own; docs/extending.md."""

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
    """GPUs that each rank of the learner reserves in the cluster, 1 at most: a process learns on one GPU; for more see learner_ranks."""

    learner_ranks: Int = 1
    """Processes that share the learner's weights, gradients, optimiser and samples (FSDP2), each on a GPU of its own where there are GPUs; on Ray they are placed together. Under torchrun or accelerate launch it is the number of processes that those start; docs/models.md, Several devices."""

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
    """An environment class as `file.py:Class`: reset(**row), public methods as tools, get_reward(), as TRL has it; or a kind of ours: `gymnasium:FrozenLake-v1`, `reasoning_gym`."""

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
"""A part of the reward `builtin:components`; `rewards/functions.py` says what each is."""
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
    """Names of the rules that are on; decline, and kl and gap when their limit is set, when left out. Rules of your own stand beside ours; docs/extending.md."""
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


class LoraConfig(Table):
    """`[lora]`: train a small adapter beside frozen weights instead of every weight; docs/models.md."""

    rank: Int | None = None
    """Rank of the two matrices beside each chosen layer; turns LoRA on. Left out, every weight is trained."""

    alpha: Float | None = None
    """The adapter's product is scaled by alpha / rank; 2 x rank when left out."""

    dropout: Float = 0.0
    """Only 0 is taken: engines sample from the model without dropout, and a learner with it would score another."""

    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get an adapter, by the ends of their names, such as ["q_proj", "v_proj"]; "all-linear" is every one but the output layer."""

    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole beside the adapter, by the ends of their names, such as ["norm"]; in float32 only."""


# -- Every key: a strict typed tree from TOML or YAML, all problems reported at once --------------


MICROBATCH_TOKENS = 4096
"""With microbatch_size = 0, whole groups are put into one forward pass up to this many tokens."""
PARITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.2}
"""dtype -> what `parity_tolerance` is when it is left out, in nats."""


class Config(Table):
    """Everything one run needs."""

    # -- what to train, on what -------------------------------------------------
    model: str
    """Folder or hub name of the model to train; "pebble" is the built-in one, "pebble_tools" one that knows a calculator."""

    tasks: str
    """JSONL, JSON or Parquet file, `reasoning_gym:NAME`, "builtin:sums" or "builtin:errands"."""

    stream_tasks: bool = False
    """Read the task file one row at a time instead of holding all of it: for files larger than memory. An index is made beside it once; needs max_prompt_length."""

    max_bad_rows: Int = 0
    """Malformed rows of a streamed task file that may be left out, counted; one more is an error."""

    num_tasks: Int = 1000
    """How many tasks a generator (`reasoning_gym:...`, `builtin:...`) makes; files are read whole."""

    reward_funcs: tuple[str, ...] = ()
    """Reward functions as `file.py:function`, in TRL's form `f(prompts, completions, **columns)`; empty means the task set's own scorer. "builtin:components" is a weighted sum of facts about a rollout with tools (docs/agents.md)."""

    reward_weights: tuple[Float, ...] | None = None
    """One weight per reward function; all 1 when left out."""

    component_weights: ComponentWeights = Field(default={})
    """For "builtin:components": the parts that count and their weights, `{ completion = 0.8, efficiency = 0.2 }`, 1 in all at most. When empty: completion 0.4, reasoning 0.15, efficiency 0.15, recovery 0.1, progress 0.05, state 0.1, response 0.05."""

    probe_reward_tasks: Int = 4
    """Tasks of each kind that the reward is probed on before a run is started, without a model: a reward that pays for nothing, for nonsense or for a list of guesses is refused with 4. 0 turns it off, for rewards that mean to; docs/verifiers.md."""

    reward_timeout_s: Float = 10.0
    """Seconds one reward call may take before its worker is ended and the sample has no verdict."""

    reward_workers: Int = 2
    """Processes that run reward functions."""

    reward_memory_mb: Int = 4096
    """Memory one reward process may take, in MiB, beyond what it started with; 0 means no cap."""

    pass_env: tuple[str, ...] = ()
    """Names of environment variables that reward functions and the processes of a Ray run may see besides those that every process needs (docs/reliability.md lists them): ["JUDGE_API_KEY"]. Each must be set; values are never kept."""

    audit_rewards: bool = False
    """Score the baseline completions of the preflight twice; a reward that changes its mind is refused by name."""

    max_reward_failures: Float = 0.0
    """Share of rollouts per step that may go without a verdict before the run stops with 4."""

    system_prompt: str = ""
    """Put before every task as a system message; empty means none."""

    chat_template: str | None = None
    """File with a chat template to use instead of the model's own, or one of ours that shows tools: "builtin:chatml_tools", "builtin:hermes_tools" (Qwen, Hermes), "builtin:llama_tools"."""

    # -- length of the run ------------------------------------------------------
    output_dir: str | None = None
    """Run folder; `runs/<time>-<name>` under the current folder when left out."""

    run_name: str = "run"
    """Used in the default run folder's name."""

    max_steps: Int = 100
    """Optimiser steps."""

    seed: Int = 0
    """The one seed: task order, every rollout's stream and evaluation derive from it."""

    threads: Threads = 0
    """Torch threads; 0 takes the machine's cores that this process may use, at most 8, and the run keeps the number. Part of the result: another count gives other last bits."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the policy lives; `auto` takes cuda, else mps, else cpu. An absent device is an error."""

    cuda_kernels: bool = True
    """On a CUDA device the embedded engine decodes in captured graphs and the learner computes with fused kernels, where they know the model; false takes the plain code there too. Without a GPU it means nothing."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the policy computes in, and what engines get. In bfloat16 the optimiser steps float32 masters of the weights (docs/engines.md, Precision); gradients and moments are float32 either way."""

    quantization: Literal["none", "nf4"] = "none"
    """What the frozen base of an adapter is held in: with nf4 its linear layers take four bits a weight (bitsandbytes), and learner, reference and engines compute with what comes back; needs lora.rank; docs/models.md."""

    # -- one step ---------------------------------------------------------------
    tasks_per_step: Int = 4
    """Groups that make up one optimiser step."""

    num_generations: Int = 8
    """Rollouts per task. Advantages compare siblings, so at least 2."""

    microbatch_size: Int = 0
    """Rollouts per forward and backward; must divide tasks_per_step x num_generations. 0 derives it. Changes memory and speed, never the gradient."""

    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Keep the inputs of layers alone for the backward pass and compute the rest again: less memory, about a third more time, the same gradient. `auto` does so where the first step would not fit into what is free then."""

    max_prompt_length: Int | None = None
    """Tasks with a longer prompt (in tokens) are left out and counted; never cut."""

    dynamic_sampling_batches: Int = 0
    """Batches that one step may draw until tasks_per_step of their groups have rewards that differ; the others are dropped. 0 trains on whatever one batch gives."""

    max_completion_length: Int = 256
    """Longest completion in tokens; with tools, of one turn."""

    max_turns: Int = 8
    """Turns of one rollout with tools: completions, the last answer included."""

    temperature: Float = 1.0
    """Sampling temperature; the learner scores tokens at this same temperature."""

    max_staleness: Int = 0
    """Weight versions that may lie between sampling and training; 0 is synchronous, above 0 sampling goes on while the learner learns."""

    weight_sync_steps: Int = 1
    """Optimiser steps between two weight syncs; above 1 it needs max_staleness of at least one less."""

    repetition: Literal["penalise", "invalid", "off"] = "penalise"
    """A training rollout whose turn goes round in circles: repetition_cost is taken off its reward, or it has no reward (reason `repetition`), or nobody looks; a loop ends a rollout with tools unless off."""

    repetition_cost: Float = 1.0
    """What a loop takes off the reward with repetition = "penalise"; in the unit of your rewards."""

    rollout_timeout_s: Float = 600.0
    """Seconds one group may take from being asked for to being graded; a slower one is given up and its task asked again."""

    # -- optimiser --------------------------------------------------------------
    optim: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    """Who steps. `adamw_8bit` keeps AdamW's two moments in 8 bits, 2 bytes of an entry instead of 8 (needs the extra `torchao`); `sgd` is plain gradient descent without momentum and keeps nothing."""
    learning_rate: Float = 1e-6
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up."""
    warmup_steps: Int = 0
    """Steps of linear warm-up; the first update already has a rate above 0."""
    weight_decay: Float = 0.0
    """Weight decay, of matrices only; with AdamW decoupled from the gradient."""
    adam_beta1: Float = 0.9
    """AdamW first moment decay."""
    adam_beta2: Float = 0.999
    """AdamW second moment decay."""
    adam_epsilon: Float = 1e-8
    """AdamW denominator floor."""
    max_grad_norm: Float = 1.0
    """Gradients are scaled down to this norm; 0 turns clipping off."""
    max_nonfinite_steps: Int = 3
    """Steps in a row that may be refused for a non-finite loss or gradient before the run stops with 78."""

    # -- the loss ---------------------------------------------------------------
    loss_type: LossType = "dapo"
    """How token losses are weighed and added up; gspo is one ratio per row and the mean over rows; see docs/maths.md. Or a loss of your own; docs/extending.md."""
    importance_sampling_level: Literal["auto", "token", "sequence"] = "auto"
    """Ratio per token, or one per sequence; auto is sequence for gspo, else token. With another loss_type sequence is not GSPO: see docs/maths.md."""
    epsilon: Float = 0.2
    """The ratio is kept above 1 - epsilon. 0 clips to exactly 1: the first update of a batch is whole, every later one is cut."""
    epsilon_high: Float | None = None
    """The ratio is kept below 1 + epsilon_high; epsilon when left out. For cispo, the cap on the weight itself (elsewhere often the cap less 1)."""
    delta: Float | None = None
    """Dual clip: an upper bound on the ratio for negative advantages; must exceed 1 + epsilon_high."""
    beta: Float = 0.0
    """Weight of the KL penalty against the reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token KL estimator."""
    reference_sync_steps: Int | Literal["never"] = "never"
    """The reference is refreshed every so many steps; with beta > 0, 1 is refused: the penalty would be dead."""
    num_iterations: Int = 1
    """Optimiser steps on the same rollouts; counts towards max_steps."""
    scale_rewards: Estimator = "group"
    """Divide centred rewards by the group's std, the batch's std, use ranks, or leave them. Or an estimator of your own; docs/extending.md."""
    partial_groups: Literal["drop", "train", "refuse"] = "drop"
    """A group that lost siblings: leave it out, train on the survivors, or stop."""
    mask_truncated_completions: bool = False
    """Completions cut by the length limit carry no loss."""
    importance_sampling_correction: bool = False
    """Weigh tokens by learner over sampler probability, truncated; corrects engine mismatch."""
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "token_truncate"
    )
    """Correct per token or per sequence; above the bound, truncate the weight or mask the tokens."""
    importance_sampling_clip_max: Float = 3.0
    """Upper bound of the correction weight."""

    # -- losses beside it -------------------------------------------------------
    alpha_sdpo: Float = 0.0
    """Weight of self-distillation: the policy that was shown a better sibling's attempt teaches the one that was not; docs/maths.md."""
    sdpo_mixing: Float = 1.0
    """How the two are compared: 1 is the reverse KL, 0 the forward KL, in between a generalised Jensen-Shannon divergence."""
    beta_replay: Float = 0.0
    """Weight of recorded preferences: raise the chosen answer of each pair above the rejected one."""
    replay_pairs: str | None = None
    """File of these pairs, one `{"prompt": ..., "chosen": ..., "rejected": ...}` per line."""
    dead_channel_steps: Int = 20
    """A loss beside the policy's that is on and gives nothing for so many steps in a row ends the run."""

    # -- evaluation and what is held out ----------------------------------------
    eval_steps: Int | Literal["auto"] = "auto"
    """Evaluate on held-out tasks every so many steps; 0 means only at start and end, "auto" as often as the guard can use for at most a tenth of the sampled tokens."""

    eval_on_start: bool = True
    """Evaluate before the first step: the verdict compares the end with it."""

    heldout_fraction: Float = 0.1
    """Share of tasks, chosen by hash of their id, that is never trained on."""

    heldout_group: str | None = None
    """Name of a column; tasks with the same value in it are on the same side, and the share counts groups."""

    heldout_seed: Int = 0
    """Another seed, another choice of held-out tasks."""

    heldout_near: Literal["auto", "refuse", "drop", "allow"] = "auto"
    """A training task that is nearly a held-out one: refused, left out and counted, or allowed and stamped on the verdict; `auto` drops for generated tasks and refuses for files and rows."""

    eval_tasks: Int | Literal["auto"] = "auto"
    """At most so many held-out tasks per evaluation; "auto" is 200, with eval_steps = "auto" no more than leave six evaluations within a tenth of the sampled tokens."""

    eval_sets: EvalSets = Field(default={})
    """Evaluation sets of your own beside or instead of heldout_fraction, by name: `{ gsm8k = "test.jsonl" }`, or `{ gsm8k = { tasks = "test.jsonl", metric = "exact" } }`; never trained on; docs/heldout.md."""

    eval_metric: str = "auto"
    """What counts as solved, apart from the reward: `file.py:function`, "exact" (the answer column), "auto" (the task set's own scorer), or "none"."""

    num_generations_eval: Int = 1
    """Answers per held-out task."""

    eval_temperature: Float | None = None
    """Sampling temperature in evaluation; the training one when left out; 0 is greedy."""

    # -- checks and the target --------------------------------------------------
    preflight_tasks: Int = 8
    """Tasks whose baseline rewards are looked at before step 1; a constant reward is refused, for each data set of the tasks too. 0 turns it off."""

    preflight_allow: tuple[str, ...] = ()
    """Data sets (column `dataset` or `data_source`) that may earn the same throughout in the preflight, such as one that is too hard at first."""

    parity_tolerance: Float | None = None
    """Largest allowed difference between sampler and learner logprobs at step 1; 1e-4 in float32, 0.2 in bfloat16 when left out."""

    target_metric: str | None = None
    """The run passes only if this metric, at its last evaluation, reaches target_value."""

    target_value: Float | None = None
    """See target_metric."""

    # -- logs, checkpoints, waiting ---------------------------------------------
    logging_steps: Int = 1
    """Write metrics every so many steps."""

    save_steps: Int = 0
    """Save weights every so many steps, as a Hugging Face folder or, with [lora], as an adapter in PEFT's form; the end is always saved."""

    save_minutes: Float = 10.0
    """Save also every so many minutes, so that a killed run has little to do again; of these the newest two stay. 0 means never."""

    save_best: bool = True
    """Keep the weights of the best evaluation too, if it is better than before training; the former best goes when a better one is complete."""

    save_rollouts: bool = True
    """Keep every rollout (text, tokens, logprobs, rewards) under rollouts/."""

    stall_timeout_s: Float = 300.0
    """Seconds without any progress before the run shows where it is stuck and ends with 76."""

    stop_timeout_s: Float = 10.0
    """Seconds from SIGTERM, SIGINT or SIGUSR1 to the end of the process, with 75; a save that takes longer is given up, so raise it for a large model on a slow disk."""

    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where numbers go beside RUN/metrics.jsonl; a sink that is slow or broken loses lines, never time."""

    lora: LoraConfig = LoraConfig()
    engine: EngineConfig = EngineConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    tools: ToolsConfig = ToolsConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    guard: GuardConfig = GuardConfig()

    # -- derived ----------------------------------------------------------------
    @property
    def rollouts_per_step(self) -> int:
        """tasks_per_step x num_generations."""
        return self.tasks_per_step * self.num_generations

    @property
    def ratio_level(self) -> Literal["token", "sequence"]:
        """importance_sampling_level with `auto` resolved: one ratio per row for gspo, else one per token."""
        if self.importance_sampling_level == "auto":
            return "sequence" if loss_facts(self.loss_type).row_ratio else "token"
        return self.importance_sampling_level

    @property
    def holds_out(self) -> bool:
        """Whether there is anything to evaluate on: a share of the tasks, or sets of one's own."""
        return self.heldout_fraction > 0 or bool(self.eval_sets)

    def problems(self) -> Iterator[str]:
        """Every range and pair that is refused, one line each, both values quoted."""
        yield from config_rules.problems(self)
