"""Which values of a config are refused, alone or together.

Owns       ranges and forbidden pairs, one line each, both values quoted.
Promises   a rule that speaks of a value names its key, so that the reader finds the place.
Never      changes a value, or stops at the first problem.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from surefoot.config.choices import engine_facts, environment_problem, is_own, loss_facts, refused_values
from surefoot.config.schedule import schedule_of
from surefoot.errors import ConfigError
from surefoot.system.environment import misnamed

if TYPE_CHECKING:
    from surefoot.config import Config

SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
"""A set's name is part of metric names and task ids."""
HELDOUT = "heldout"
"""What the share of the tasks that is held out is called where sets have names."""
HARD_TURNS = 12
"""The most turns that `tools.turns_by_complexity` gives."""
BUILTIN = "builtin:"
"""How a name of something that comes with surefoot begins; models have a name alone."""
BUILTIN_MODELS = ("pebble", "pebble_tools", "smollm2")
"""Names that never mean a folder, even where one of that name lies around."""
TEMPLATES = ("chatml_tools", "hermes_tools", "llama_tools")
"""Chat templates that show tools; `learner.chat` has them."""
_SUM_TOLERANCE = 1e-6
_POSITIVE = (
    "num_tasks reward_timeout_s reward_workers max_steps tasks_per_step max_completion_length temperature "
    "adam_epsilon max_nonfinite_steps num_iterations importance_sampling_clip_max eval_tasks num_generations_eval "
    "logging_steps dead_channel_steps stall_timeout_s stop_timeout_s rollout_timeout_s weight_sync_steps runtime.engines "
    "runtime.workers runtime.learner_ranks runtime.start_timeout_s runtime.restart_timeout_s max_turns tools.max_calls tools.call_timeout_s "
    "tools.max_result_tokens tools.concurrency guard.min_evals guard.decline_patience guard.ema_alpha "
    "guard.min_entropy_ratio guard.saturation_patience repetition_cost lora.rank lora.alpha"
).split()
_NOT_NEGATIVE = (
    "max_bad_rows seed threads microbatch_size learning_rate warmup_steps weight_decay max_grad_norm epsilon beta eval_steps "
    "dynamic_sampling_batches curriculum.steps heldout_seed "
    "preflight_tasks probe_reward_tasks save_steps save_minutes reward_memory_mb engine.rows alpha_sdpo beta_replay max_staleness "
    "runtime.max_restarts runtime.engine_gpus runtime.learner_gpus guard.min_drop"
).split()
_NOT_NEGATIVE_OPTIONAL = (
    "epsilon_high eval_temperature target_value guard.kl_hard_stop guard.max_proxy_real_gap".split()
)
_POSITIVE_OPTIONAL = "max_prompt_length parity_tolerance".split()
_SHARES = {"max_reward_failures": (0.0, 1.0), "heldout_fraction": (0.0, 0.9), "adam_beta1": (0.0, 0.9999)}
_SHARES |= {"adam_beta2": (0.0, 0.999999), "guard.margin_se": (0.0, 20.0), "sdpo_mixing": (0.0, 1.0)}
_SHARES |= {"engine.gpu_memory_utilization": (0.01, 1.0), "guard.min_entropy_ratio": (0.0, 1.0)}


def problems(config: Config) -> Iterator[str]:
    """Every range and pair that is refused."""
    yield from _range_problems(config)
    yield from _pair_problems(config)


def _range_problems(config: Config) -> Iterator[str]:
    for name in _POSITIVE + _POSITIVE_OPTIONAL:
        value = _number(config, name)
        if value is not None and value <= 0:
            yield f"{name} = {value}: must be above 0"
    for name in _NOT_NEGATIVE + _NOT_NEGATIVE_OPTIONAL:
        value = _number(config, name)
        if value is not None and value < 0:
            yield f"{name} = {value}: must not be negative"
    for name, (low, high) in _SHARES.items():
        value = _number(config, name)
        if value is not None and not low <= value <= high:
            yield f"{name} = {value}: must lie between {low} and {high}"
    if 0 < config.temperature < 0.05:
        yield (
            f"temperature = {config.temperature}: below 0.05 engines clamp silently and logprobs overflow; "
            "use 0.05 or more"
        )


def _number(config: Config, name: str) -> float | None:
    """The value of a key; None where it is left out or "auto", which no range speaks of."""
    value = attrgetter(name)(config)
    return None if value is None or value == "auto" else float(value) if isinstance(value, float) else int(value)


def _eval_steps(config: Config) -> int:
    """The number that was written; 0 for "auto", which derives one that fits the others."""
    return config.eval_steps if isinstance(config.eval_steps, int) else 0


def _pair_problems(config: Config) -> Iterator[str]:
    if config.num_generations < 2:
        yield (
            f"num_generations = {config.num_generations}: a group of one has no sibling to compare with; use 2 or more"
        )
    yield from _batch_problems(config)
    yield from _wait_problems(config)
    yield from _schedule_problems(config)
    yield from _ray_problems(config)
    yield from _rank_problems(config)
    yield from _tool_problems(config)
    yield from _dynamic_problems(config)
    yield from _stream_problems(config)
    yield from _curriculum_problems(config)
    yield from _loss_problems(config)
    yield from _lora_problems(config)
    if config.model.startswith(BUILTIN):
        yield f'model = "{config.model}": a model that comes with surefoot has a name alone: {", ".join(BUILTIN_MODELS)}'
    yield from _optimiser_problems(config)
    if config.reward_weights is not None and len(config.reward_weights) != max(1, len(config.reward_funcs)):
        yield (
            f"reward_weights has {len(config.reward_weights)} entries for {max(1, len(config.reward_funcs))} "
            "reward function(s); give one weight per function"
        )
    yield from _component_problems(config)
    for name in misnamed(config.pass_env):
        yield f"pass_env holds {name!r}: give names of variables, one by one, and never their values"
    if (config.target_metric is None) != (config.target_value is None):
        yield (
            f"target_metric = {config.target_metric!r} with target_value = {config.target_value!r}: set both or neither"
        )
    if config.preflight_allow and not config.preflight_tasks:
        yield (
            f"preflight_allow = {list(config.preflight_allow)} with preflight_tasks = 0: nothing is looked at, so "
            "nothing has to be allowed; remove one of them"
        )
    yield from _set_problems(config)
    if not config.holds_out and (_eval_steps(config) > 0 or (config.target_metric or "").startswith("eval_")):
        yield (
            f"heldout_fraction = 0 with eval_steps = {config.eval_steps} and target_metric = {config.target_metric!r}: "
            "nothing is held out to evaluate on"
        )
    if config.heldout_fraction == 0 and (config.heldout_group is not None or config.heldout_seed):
        yield (
            f"heldout_fraction = 0 with heldout_group = {config.heldout_group!r} and heldout_seed = "
            f"{config.heldout_seed}: nothing is divided; set heldout_fraction, or remove the others"
        )


def _optimiser_problems(config: Config) -> Iterator[str]:
    if config.optim == "sgd":
        for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            if getattr(config, name) != type(config).model_fields[name].default:
                yield f'{name} = {getattr(config, name)} with optim = "sgd": it has no moments; leave {name} out'


def _lora_problems(config: Config) -> Iterator[str]:
    lora = config.lora
    if lora.dropout:
        yield (
            f"lora.dropout = {lora.dropout}: engines sample from the model without dropout, so the learner's ratios and "
            "KL would be noise (docs/failures.md, entry 14); leave it 0"
        )
    if lora.rank is None:
        for name in ("alpha", "target_modules", "modules_to_save"):
            if getattr(lora, name) != type(lora).model_fields[name].default:
                yield f"lora.{name} without lora.rank: every weight is trained, there is no adapter; set lora.rank"
        if config.quantization != "none":
            yield (
                f"quantization = {config.quantization} without lora.rank: four bits cannot be trained, only an adapter "
                "beside them; set lora.rank, or leave quantization out"
            )
        return
    if isinstance(lora.target_modules, tuple):
        if "all-linear" in lora.target_modules:
            yield 'lora.target_modules has "all-linear" in a list: write lora.target_modules = "all-linear"'
        if not lora.target_modules or not all(lora.target_modules):
            yield f"lora.target_modules = {list(lora.target_modules)}: an adapter beside nothing would train nothing"
    if not all(lora.modules_to_save):
        yield f"lora.modules_to_save = {list(lora.modules_to_save)}: holds an empty name, which every module ends in"
    if lora.modules_to_save and config.dtype != "float32":
        yield (
            f"lora.modules_to_save = {list(lora.modules_to_save)} with dtype = {config.dtype}: a module that is trained "
            'whole has no float32 master; use dtype = "float32", or leave lora.modules_to_save out'
        )
    if config.reference_sync_steps != "never":
        yield (
            f"lora.rank = {lora.rank} with reference_sync_steps = {config.reference_sync_steps}: the reference is the "
            'base with its adapter off and cannot follow; leave reference_sync_steps = "never"'
        )


def _component_problems(config: Config) -> Iterator[str]:
    weights = config.component_weights
    if not weights:
        return
    shown = ", ".join(f"{name} = {weight:g}" for name, weight in weights.items())
    if "builtin:components" not in config.reward_funcs:
        yield f'component_weights = {{ {shown} }} without "builtin:components" in reward_funcs: nobody weighs by them'
    total = math.fsum(weights.values())
    if min(weights.values()) < 0 or not 0 < total <= 1 + 1e-9:
        yield (
            f"component_weights = {{ {shown} }}: none may be negative, and their sum, {total:g}, lies above 0 and is 1 "
            "at most"
        )


def _set_problems(config: Config) -> Iterator[str]:
    for name, keys in config.eval_sets.items():
        if not SET_NAME.fullmatch(name) or name == HELDOUT:
            yield (
                f"eval_sets has a set called {name!r}: letters, digits, dash and underscore, at most 40, "
                f"and not {HELDOUT}, which is the name of what heldout_fraction holds out"
            )
        for key, least in (("num_tasks", 1), ("seed", 0)):
            if (value := getattr(keys, key)) is not None and value < least:
                yield f"eval_sets.{name}.{key} = {value}: must be at least {least}"
        if not keys.reward and keys.metric == "none":
            yield f"eval_sets.{name} has reward = false and metric = none: nobody would judge its answers"
    target = config.target_metric or ""
    if config.eval_sets and config.heldout_fraction == 0 and target.startswith("eval_"):
        yield (
            f"target_metric = {target!r} with heldout_fraction = 0: only the evaluation sets are measured; "
            f'write for example "eval/{next(iter(config.eval_sets))}/accuracy"'
        )
    of_set = target.split("/")[1] if target.count("/") > 1 and target.startswith("eval/") else None
    if of_set is not None and of_set not in config.eval_sets:
        yield f"target_metric = {target!r}: eval_sets has no {of_set}; {_listed(config.eval_sets)}"
    yield from _watched_problems(config)


def _watched_problems(config: Config) -> Iterator[str]:
    """`guard.metric` names something that is measured."""
    wanted, sets, split = config.guard.metric, config.eval_sets, config.heldout_fraction > 0
    curves = [f"eval/{name}/{kind}" for name in sets for kind in ("accuracy", "reward")]
    known = ["auto", "eval_accuracy", "eval_reward", *curves]
    if wanted not in known:
        listed = ", ".join(f'"{name}"' for name in known)
        yield f'guard.metric = "{wanted}": must be one of {listed}' + ("" if sets else ", or name a set of eval_sets")
    elif sets and not split and wanted in ("eval_accuracy", "eval_reward"):
        yield f"guard.metric = {wanted} with heldout_fraction = 0: only the sets are measured; use {' or '.join(curves)}"
    elif wanted == "auto" and not split and len(sets) > 1:
        yield (
            f"guard.metric = auto with heldout_fraction = 0 and {len(sets)} sets in eval_sets: it is also what the best "
            f"checkpoint is chosen by, so name one of {', '.join(curves)}"
        )
    elif wanted.endswith("/accuracy") and sets[wanted.split("/")[1]].metric == "none":
        yield f"guard.metric = {wanted} with metric = none of that set: it is never measured"


def _listed(sets: Iterable[str]) -> str:
    return f"there is {', '.join(sets)}" if sets else "it is empty"


def _wait_problems(config: Config) -> Iterator[str]:
    if config.stall_timeout_s <= config.reward_timeout_s:
        yield (
            f"stall_timeout_s = {config.stall_timeout_s} with reward_timeout_s = {config.reward_timeout_s}: a reward "
            "that uses its time would be taken for a stall; set stall_timeout_s higher"
        )


def _dynamic_problems(config: Config) -> Iterator[str]:
    batches = config.dynamic_sampling_batches
    if batches and config.max_staleness:
        yield (
            f"dynamic_sampling_batches = {batches} with max_staleness = {config.max_staleness}: a step that draws "
            "again cannot be sampled ahead; set one of them to 0"
        )


def _stream_problems(config: Config) -> Iterator[str]:
    if not config.stream_tasks:
        if config.max_bad_rows:
            yield f"max_bad_rows = {config.max_bad_rows} with stream_tasks = false: a file that is held must be whole"
        return
    if config.max_prompt_length is None:
        yield "stream_tasks = true with max_prompt_length left out: nobody has read all prompts, so give their limit"
    if config.max_staleness:
        yield f"stream_tasks = true with max_staleness = {config.max_staleness}: not while sampling runs ahead; use 0"
    if config.alpha_sdpo or config.beta_replay:
        yield "stream_tasks = true with alpha_sdpo or beta_replay above 0: those look at all tasks at once; use 0"


def _curriculum_problems(config: Config) -> Iterator[str]:
    named = config.curriculum
    if named.kind == "none":
        return
    if config.max_staleness:
        yield (
            f"curriculum.kind = {named.kind} with max_staleness = {config.max_staleness}: not while sampling runs "
            "ahead; use max_staleness = 0"
        )
    if named.kind == "success":
        if config.stream_tasks:
            yield "curriculum.kind = success with stream_tasks = true: it weighs all tasks at every step; use levels"
        return
    if len(set(named.levels)) != len(named.levels) or not named.levels:
        yield f"curriculum.levels = {list(named.levels)}: each level once, at least one"
    for name, shares in (("curriculum.start", named.start), ("curriculum.end", named.end)):
        if len(shares) != len(named.levels):
            yield f"{name} = {list(shares)} with curriculum.levels = {list(named.levels)}: one share per level"
        elif min(shares, default=0.0) < 0 or abs(math.fsum(shares) - 1) > _SUM_TOLERANCE:
            yield f"{name} = {list(shares)}: shares are not negative and sum to 1"


def _tool_problems(config: Config) -> Iterator[str]:
    tools = config.tools
    if (tools.mode == "live") != (tools.cassette is None):
        yield f"tools.mode = {tools.mode} with tools.cassette = {tools.cassette!r}: it goes with record and replay"
    if tools.environment is not None and (problem := environment_problem(tools.environment)):
        yield f'tools.environment = "{tools.environment}": {problem}'
    template = config.chat_template or ""
    if template.startswith(BUILTIN) and template.removeprefix(BUILTIN) not in TEMPLATES:
        known = ", ".join(f'"{BUILTIN}{name}"' for name in TEMPLATES)
        yield f'chat_template = "{template}": there is no such template; there is {known}, or name a file'
    if tools.format != "auto" and not tools.on:
        yield f"tools.format = {tools.format} without tools; set tools.servers, tools.functions or tools.environment"
    if tools.mode != "live" and not tools.on:
        yield f"tools.mode = {tools.mode} without tools; set tools.servers, tools.functions or tools.environment"
    if tools.turns_by_complexity and config.max_turns < HARD_TURNS:
        yield (
            f"tools.turns_by_complexity = true with max_turns = {config.max_turns}: hard tasks have {HARD_TURNS} turns; "
            f"set max_turns = {HARD_TURNS} or more, or leave it out"
        )
    if tools.mode == "record" and config.runtime.kind == "ray":
        yield 'tools.mode = record with runtime.kind = ray: one process writes a cassette; record with "local"'
    if tools.on and tools.call_timeout_s >= config.stall_timeout_s:
        yield (
            f"tools.call_timeout_s = {tools.call_timeout_s} with stall_timeout_s = {config.stall_timeout_s}: a tool "
            "that uses its time would be taken for a stall; set stall_timeout_s higher"
        )


def _schedule_problems(config: Config) -> Iterator[str]:
    """What `config.schedule` refuses; sizes that are no sizes have been named already."""
    if min(config.weight_sync_steps, config.num_iterations, config.tasks_per_step) > 0 and config.max_staleness >= 0:
        try:
            schedule_of(config)
        except ConfigError as error:
            yield f"{error.what}; {error.fix}"


def _ray_problems(config: Config) -> Iterator[str]:
    runtime, engine = config.runtime, config.engine
    if config.max_staleness > 0 and not config.importance_sampling_correction:
        yield (
            f"max_staleness = {config.max_staleness} with importance_sampling_correction = false: samples from older "
            "weights would be weighed as if they were new; set importance_sampling_correction = true"
        )
    if _eval_steps(config) % max(1, config.weight_sync_steps):
        yield (
            f"eval_steps = {config.eval_steps} is not a multiple of weight_sync_steps = {config.weight_sync_steps}: "
            "only weights that were synced can be evaluated"
        )
    if runtime.kind == "local" and runtime.engines > 1:
        yield f'runtime.engines = {runtime.engines} with runtime.kind = "local": one process has one engine; use "ray"'
    if runtime.kind == "local" and runtime.address is not None:
        yield f'runtime.address = {runtime.address!r} with runtime.kind = "local": it needs runtime.kind = "ray"'
    facts = engine_facts(engine.kind)
    yield from refused_values("engine.kind", f'"{engine.kind}"', facts.refuses, lambda key: attrgetter(key)(config))
    if not is_own(engine.kind) and facts.has_url != (engine.url is not None):
        yield f"engine.kind = {engine.kind!r} with engine.url = {engine.url!r}: an address goes with openai, always"


def _rank_problems(config: Config) -> Iterator[str]:
    """What a learner over several ranks does not do, and what would reserve GPUs for nobody."""
    runtime = config.runtime
    if runtime.learner_gpus > 1:
        yield (
            f"runtime.learner_gpus = {runtime.learner_gpus:g}: a rank of the learner computes on one GPU, and the others "
            f"would be reserved for nobody; set it to 1, and runtime.learner_ranks to how many learn together"
        )
    if runtime.learner_ranks <= 1:
        return
    ranks = f"runtime.learner_ranks = {runtime.learner_ranks}"
    not_yet = {
        'engine.kind = "vllm": both want the one process group of this process; use "embedded"': (
            config.engine.kind == "vllm"
        ),
        f'quantization = "{config.quantization}": packed weights are not cut; leave one of the two out': (
            config.quantization != "none"
        ),
        'optim = "adamw_8bit": 256 entries share a scale, and other ones with every number of ranks; use "adamw"': (
            config.optim == "adamw_8bit"
        ),
        'device = "mps": it has no collectives; use "cpu" or "cuda"': config.device == "mps",
    }
    yield from (f"{ranks} with {what}" for what, found in not_yet.items() if found)
    yield from _rank_size_problems(config, ranks)


def _rank_size_problems(config: Config, ranks: str) -> Iterator[str]:
    """Ranks that would have nothing to do, or no GPU to do it on. Nothing has to divide: shares go by tokens."""
    runtime, rollouts = config.runtime, config.rollouts_per_step
    if runtime.learner_ranks > rollouts > 0:
        yield (
            f"{ranks} with tasks_per_step x num_generations = {config.tasks_per_step} x {config.num_generations} = "
            f"{rollouts}: each sample is scored by one rank, and {runtime.learner_ranks - rollouts} of them would never "
            f"have one; use {rollouts} ranks at most"
        )
    if runtime.kind == "ray" and (
        0 < runtime.learner_gpus < 1 or (config.device == "cuda" and not runtime.learner_gpus)
    ):
        yield (
            f"{ranks} with runtime.learner_gpus = {runtime.learner_gpus:g}: ranks would share a GPU, which NCCL refuses; "
            "set it to 1, a GPU for each"
        )


def _batch_problems(config: Config) -> Iterator[str]:
    rollouts, piece = config.rollouts_per_step, config.microbatch_size
    if piece > 0 and rollouts % piece:
        yield (
            f"microbatch_size = {piece} does not divide tasks_per_step x num_generations = "
            f"{config.tasks_per_step} x {config.num_generations} = {rollouts}"
        )
    if config.max_steps % max(1, config.num_iterations):
        yield (
            f"max_steps = {config.max_steps} is not a multiple of num_iterations = {config.num_iterations}: "
            "the last rollouts would be trained on fewer times than the others"
        )
    if _eval_steps(config) % max(1, config.num_iterations):
        yield (
            f"eval_steps = {config.eval_steps} is not a multiple of num_iterations = {config.num_iterations}: "
            "weights are published after the last pass over a batch, so only there can they be evaluated"
        )


def _loss_problems(config: Config) -> Iterator[str]:
    if (config.beta_replay > 0) != (config.replay_pairs is not None):
        yield (
            f"beta_replay = {config.beta_replay} with replay_pairs = {config.replay_pairs!r}: "
            "nothing would be replayed; set both or neither"
        )
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if config.epsilon >= 1:
        yield f"epsilon = {config.epsilon}: 1 - epsilon must stay above 0"
    if config.delta is not None and config.delta <= 1 + high:
        yield f"delta = {config.delta} with upper clip 1 + {high}: the dual clip must lie above 1 + epsilon_high"
    if config.beta > 0 and config.reference_sync_steps == 1:
        yield (
            f"beta = {config.beta} with reference_sync_steps = 1: a reference refreshed every step equals the policy, "
            'so the penalty is always 0; use "never" or a larger number'
        )
    if config.reference_sync_steps != "never" and config.reference_sync_steps < 1:
        yield f'reference_sync_steps = {config.reference_sync_steps}: use a positive number of steps or "never"'
    if config.reference_sync_steps not in ("never", 1) and config.beta == 0:
        yield f"reference_sync_steps = {config.reference_sync_steps} with beta = 0: there is no reference to refresh"
    yield from refused_values(
        "loss_type", config.loss_type, loss_facts(config.loss_type).refuses, lambda key: attrgetter(key)(config)
    )
    if config.ratio_level == "sequence" and config.importance_sampling_mode.startswith("token") \
            and config.importance_sampling_correction:  # fmt: skip
        by_name = loss_facts(config.loss_type).row_ratio
        chosen = f"loss_type = {config.loss_type}" if by_name else "importance_sampling_level = sequence"
        yield (
            f"{chosen} with importance_sampling_mode = {config.importance_sampling_mode}: "
            "a sequence ratio takes a sequence correction; use sequence_truncate or sequence_mask"
        )
