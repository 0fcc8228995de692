"""Everything that can be known about a run before it costs anything: resolve, check, estimate, stop.

Promises   tasks, rewards and the model folder are really opened, so what would be refused in a minute is
           refused now with the same error; nothing is written; torch is not imported by us (a parameter count
           comes from the weight files' headers or from config.json).
Never      says a number without saying what it assumes; what is not known is called unknown, not 0.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.assemble.large import open_large
from surefoot.assemble.planning import level_plan
from surefoot.assemble.tooling import tool_recipe
from surefoot.config import Config
from surefoot.config_load import LoadedConfig
from surefoot.data.heldout import split_heldout
from surefoot.data.sources import load_tasks
from surefoot.data.tasks import TaskSet
from surefoot.envs.grading import load_reward
from surefoot.errors import ModelError, RewardError
from surefoot.records import Task
from surefoot.store.run_folder import RunFolder
from surefoot.tracking.plan import batch_arithmetic
from surefoot.tracking.text import duration, shown_path, size

SHIPPED = {name: Path(__file__).parent / "assets" / name for name in ("pebble", "pebble_tools")}
CHUNK_TOKENS = 128
"""Tokens whose logits are alive at once; `maths.logprobs` cuts there."""
CPU_FLOPS, GPU_FLOPS = 60e9, 40e12
"""What a training step really gets out of two CPU cores, and of one data-centre GPU; rough on purpose."""
TOKENS_PER_SECOND_CAP = 5_000.0
"""Below some model size the interpreter, not the arithmetic, sets the pace."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model folder says about itself without being loaded."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    counted_from: str


def dry_run(loaded: LoadedConfig) -> list[str]:
    """Check the whole plan and describe it, line by line."""
    config = loaded.config
    root = RunFolder.planned(
        None if config.output_dir is None else loaded.path(config.output_dir), config.run_name, Path.cwd()
    )
    tasks, train_tasks, heldout_tasks = _check_tasks(config, loaded.base)
    rewards = _check_rewards(config, tasks, loaded.base)
    facts = model_facts(config.model, loaded.base)
    lines = [*loaded.notes]
    lines += batch_arithmetic(
        config,
        train_tasks=train_tasks,
        heldout_tasks=heldout_tasks,
        parameters=facts.parameters if facts else None,
    )
    lines += _tool_lines(config, loaded.base)
    lines += [f"rewards   {rewards}", f"folder    {shown_path(root)} (not created)", ""]
    if facts is None:
        lines.append(
            f"estimate  unknown: {config.model} is not a folder on this machine, and a dry run does not download"
        )
    else:
        lines += _memory_lines(config, facts, tasks.tasks) + _time_lines(config, facts)
    return [*lines, "", "dry run: everything above was checked, nothing was written"]


def _check_tasks(config: Config, base: Path) -> tuple[TaskSet, int, int]:
    """The tasks, how many of them are trained on, and how many are held out; a streamed file is indexed for nobody."""
    if config.stream_tasks:
        with tempfile.TemporaryDirectory(prefix="surefoot-dry-") as folder:
            large = open_large(config, base, Path(folder))
            _check_levels(config, large.train)
            return large.looked_at, len(large.train), large.held_out
    tasks = load_tasks(config.tasks, base=base, num_tasks=config.num_tasks, seed=config.seed)
    train, heldout = split_heldout(tasks.tasks, config.heldout_fraction)
    _check_levels(config, train)
    return tasks, len(train), len(heldout)


def _check_levels(config: Config, train: Sequence[Task]) -> None:
    if config.curriculum.kind == "levels":
        level_plan(config, train)


def _tool_lines(config: Config, base: Path) -> list[str]:
    """What rollouts may call; the file of servers is read, no server is started."""
    recipe = tool_recipe(config, base)
    if recipe is None:
        return []
    named = [*(f"{server.name} ({server.isolation})" for server in recipe.servers), *map(str, recipe.functions)]
    named += [str(recipe.environment)] if recipe.environment is not None else []
    limits = f"{config.max_turns} turns and {config.tools.max_calls} calls at most, {config.tools.mode}"
    return [f"tools     {', '.join(named)}; {limits} (not started)"]


def _check_rewards(config: Config, tasks: TaskSet, base: Path) -> str:
    if not config.reward_funcs:
        if tasks.scorer is None and config.tools.environment is not None:
            return f"what {config.tools.environment} says of itself"
        if tasks.scorer is None:
            raise RewardError(
                f"no reward: reward_funcs is empty and {config.tasks} has no scorer of its own",
                "without a reward there is nothing to learn from",
                'set reward_funcs = ["my_rewards.py:score"]',
            )
        return f"the tasks' own scorer ({tasks.scorer})"
    keep, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # loading a reward file must not leave a cache
    try:
        for spec in config.reward_funcs:
            load_reward(spec, base)
    finally:
        sys.dont_write_bytecode = keep
    return ", ".join(config.reward_funcs)


def model_facts(model: str, base: Path) -> ModelFacts | None:
    """Numbers of a model folder; None for a hub name, whose files are not here."""
    folder = SHIPPED.get(model) or (base / Path(model).expanduser())
    if not folder.is_dir():
        if model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise ModelError(
                f"model folder {folder} does not exist", "nothing to train", "check the path (relative to the config)"
            )
        return None
    raw = _read_model_config(folder)
    try:
        return _facts(raw, folder)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder / 'config.json'} does not describe a decoder: {error}",
            "layers, widths and heads are needed to train it",
            "point model at a Llama, Mistral or Qwen folder",
        ) from error


def _read_model_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json", "it is not a model folder", "point model at one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is not readable JSON: {error}", "the architecture is unknown", "restore it"
        ) from error
    if not isinstance(raw, dict) or "auto_map" in raw:
        raise ModelError(
            f"{path} {'names remote code (auto_map)' if isinstance(raw, dict) else 'is not an object'}",
            "a model folder is data; code in it would run with your rights",
            "use a model whose architecture transformers knows",
        )
    return raw


def _facts(raw: dict[str, Any], folder: Path) -> ModelFacts:
    hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    numbers = {
        "layers": int(raw["num_hidden_layers"]),
        "hidden": hidden,
        "intermediate": int(raw["intermediate_size"]),
        "heads": heads,
        "kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": int(raw.get("head_dim") or hidden // heads),
        "vocab": int(raw["vocab_size"]),
        "context": int(raw.get("max_position_embeddings") or 0),
    }
    if any(numbers[name] < 1 for name in ("layers", "hidden", "heads", "vocab")):
        raise ValueError(f"sizes must be positive, got {numbers}")
    counted = _count_in_headers(folder)
    tied = bool(raw.get("tie_word_embeddings", False))
    total = counted if counted is not None else _count_by_formula(numbers, tied=tied)
    return ModelFacts(parameters=total, counted_from="weight files" if counted else "config.json", **numbers)


def _count_in_headers(folder: Path) -> int | None:
    """Parameters named in the headers of the safetensors files: 8 bytes of length, then JSON with shapes."""
    total = 0
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(100_000_000, path.stat().st_size):
                raise ModelError(f"{path} is not a safetensors file", "its header is longer than itself", "restore it")
            header = json.loads(file.read(length))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total if files else None


def _count_by_formula(n: dict[str, int], *, tied: bool) -> int:
    """Llama-like: embeddings, per layer attention, gated MLP and two norms, a last norm, and the head unless tied."""
    attention = n["hidden"] * n["head_dim"] * (2 * n["heads"] + 2 * n["kv_heads"])
    layer = attention + 3 * n["hidden"] * n["intermediate"] + 2 * n["hidden"]
    return n["vocab"] * n["hidden"] * (1 if tied else 2) + n["layers"] * layer + n["hidden"]


def memory_estimate(config: Config, facts: ModelFacts, prompt_tokens: int) -> dict[str, float]:
    """Bytes by purpose, for the largest moment of a step."""
    width = 2 if config.dtype == "bfloat16" else 4
    weights = float(facts.parameters * width)
    piece = config.microbatch_size or min(config.rollouts_per_step, 32)
    length = prompt_tokens + config.max_completion_length
    rows = min(config.engine.rows or config.rollouts_per_step, 256)
    per_token = 10 * facts.hidden + 4 * facts.intermediate + 3 * facts.head_dim * (facts.heads + 2 * facts.kv_heads)
    parts = {
        "weights": weights,
        "gradients": weights,
        "Adam states": 2.0 * weights,
        "reference policy": weights if config.beta > 0 else 0.0,
        "activations": float(piece * length * facts.layers * per_token * width),
        "logits of one chunk": 3.0 * CHUNK_TOKENS * facts.vocab * 4,
        "KV cache": float(rows * length * facts.layers * 2 * facts.kv_heads * facts.head_dim * width),
    }
    return {name: value for name, value in parts.items() if value}


def _memory_lines(config: Config, facts: ModelFacts, tasks: Sequence[Task]) -> list[str]:
    prompt = config.max_prompt_length or _prompt_tokens(tasks, facts.vocab)
    parts = memory_estimate(config, facts, prompt)
    # Engine and learner take turns: the cache and the activations are not alive together.
    peak = sum(parts.values()) - min(parts["KV cache"], parts["activations"] + parts["logits of one chunk"])
    lines = [f"memory    about {size(peak)} at the peak, and about 0.5 GB for Python and torch ({config.dtype}):"]
    lines += [f"            {name:<20} {size(value)}" for name, value in parts.items()]
    total = prompt + config.max_completion_length
    lines.append(f"          assuming prompts of {prompt} tokens; parameters counted from {facts.counted_from}")
    if facts.context and total > facts.context:
        lines.append(
            f"          prompt and completion may need {total} tokens, the model's context has {facts.context}"
        )
    return lines


def _prompt_tokens(tasks: Sequence[Task], vocab: int) -> int:
    """A guess without a tokenizer: one token per character for small vocabularies, one per three otherwise."""
    longest = max(sum(len(str(m.get("content", ""))) for m in task.messages()) for task in tasks)
    return longest + 8 if vocab < 1000 else longest // 3 + 32


def _time_lines(config: Config, facts: ModelFacts) -> list[str]:
    flops = GPU_FLOPS if config.device == "cuda" else CPU_FLOPS
    speed = min(TOKENS_PER_SECOND_CAP, flops / (8 * facts.parameters))
    tokens = config.max_steps // config.num_iterations * config.rollouts_per_step * config.max_completion_length
    where = "a GPU" if config.device == "cuda" else "a CPU"
    return [
        f"time      about {duration(tokens / speed)} at most, assuming {speed:,.0f} tokens/s on {where}",
        "          and completions of full length; `max_steps=5` measures the real pace (held-out answers come on top)",
    ]
