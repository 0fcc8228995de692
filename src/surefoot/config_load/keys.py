"""What is known about each key: its path, its kind in words, its neighbours, its names elsewhere.

Owns       the list of dotted keys, the nearest-name hint, aliases, and what other trainers call things.
Promises   a key with one wrong character is answered with the right key.
Never      reads a file or validates a value.
"""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from surefoot.config import Config

ALIASES = {"group_size": "num_generations"}
"""Accepted under this name, and said so in the notes."""

_BENDS = "not supported: it bends the distribution that is sampled from, so logprobs no longer belong to the policy"
_VLLM = 'use engine.kind = "vllm"; see engine.gpu_memory_utilization'
_LORA = "not supported: every weight is trained"
FOREIGN: dict[str, str] = {
    **dict.fromkeys(["top_p", "top_k", "min_p", "repetition_penalty"], f"{_BENDS}; leave it out, or use temperature"),
    **dict.fromkeys(["lr", "actor_lr", "learning_rates"], "use learning_rate"),
    **dict.fromkeys(["kl_coef", "kl_loss_coef", "kl_ctl", "reference_policy_kl_penalty", "use_kl_loss"], "use beta"),
    **dict.fromkeys(["kl_loss_type", "kl_penalty"], "use kl_estimator (k1, k2 or k3)"),
    **dict.fromkeys(["clip_ratio", "clip_range", "cliprange", "eps_clip", "clip_ratio_low"], "use epsilon"),
    **dict.fromkeys(["clip_ratio_high", "eps_clip_high"], "use epsilon_high"),
    **dict.fromkeys(["clip_ratio_c", "eps_clip_higher"], "use delta"),
    **dict.fromkeys(["n", "n_samples", "n_samples_per_prompt", "num_generations_per_prompt"], "use num_generations"),
    **dict.fromkeys(["eval_n_samples_per_prompt", "val_num_generations_per_prompt"], "use num_generations_eval"),
    **dict.fromkeys(
        ["max_new_tokens", "max_tokens", "max_completion_tokens", "max_response_length", "max_generate_length"],
        "use max_completion_length",
    ),
    **dict.fromkeys(
        ["max_seq_length", "max_input_seq_length"], "use max_prompt_length (a filter) and max_completion_length"
    ),
    **dict.fromkeys(
        ["per_device_train_batch_size", "batch_size", "train_batch_size", "num_prompts_per_step"],
        "use tasks_per_step for the groups of one step and microbatch_size for the rollouts of one forward pass",
    ),
    **dict.fromkeys(
        ["gradient_accumulation_steps", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu"],
        "use microbatch_size: the number of accumulation steps follows from it",
    ),
    **dict.fromkeys(
        ["generation_batch_size", "steps_per_generation", "train_global_batch_size"],
        "use tasks_per_step x num_generations rollouts, trained on num_iterations times",
    ),
    **dict.fromkeys(["ppo_epochs", "update_epochs_per_batch"], "use num_iterations"),
    **dict.fromkeys(["num_train_epochs", "total_epochs", "epochs", "steps", "num_steps"], "use max_steps"),
    **dict.fromkeys(["use_vllm", "vllm_mode", "vllm_gpu_memory_utilization"], _VLLM),
    "use_liger_kernel": "not needed: logits are never built whole",
    **dict.fromkeys(["bf16", "fp16"], 'use dtype = "bfloat16" or "float32"'),
    **dict.fromkeys(["test_freq", "val_period", "eval_interval"], "use eval_steps"),
    **dict.fromkeys(["val_before_train", "val_at_start", "eval_before_train"], "use eval_on_start"),
    **dict.fromkeys(["save_freq", "save_interval"], "use save_steps"),
    **dict.fromkeys(["loss_mode", "loss_agg_mode", "loss_aggregation", "policy_loss_type"], "use loss_type"),
    **dict.fromkeys(["norm_adv_by_std_in_grpo", "normalize_rewards", "grpo_norm_by_std"], "use scale_rewards"),
    **dict.fromkeys(["overlong_filtering", "apply_overlong_filtering"], "use mask_truncated_completions"),
    **dict.fromkeys(
        ["vllm_importance_sampling_correction", "use_tis", "truncated_importance_sampling_ratio"],
        "use importance_sampling_correction, _mode and _clip_max",
    ),
    **dict.fromkeys(["sync_ref_model", "ref_model_sync_steps"], "use reference_sync_steps"),
    **dict.fromkeys(["model_name_or_path", "model_name", "model_path"], "use model"),
    **dict.fromkeys(["dataset", "dataset_name", "train_file", "train_files", "data"], "use tasks"),
    **dict.fromkeys(
        ["reward_fn", "reward_func", "reward_function", "reward_model"], 'use reward_funcs = ["file.py:f"]'
    ),
    **dict.fromkeys(["lora_rank", "lora_alpha", "lora_r", "use_peft", "lora_target_modules"], _LORA),
    **dict.fromkeys(
        ["max_off_policy_threshold", "max_trajectory_age_steps", "max_off_policy_steps", "max_head_offpolicyness"],
        "use max_staleness, in weight versions",
    ),
    **dict.fromkeys(["logging_dir", "wandb_project"], "leave it out; numbers go to RUN/metrics.jsonl and report_to"),
    **dict.fromkeys(["lr_scheduler", "scheduler"], "use lr_scheduler_type"),
    **dict.fromkeys(["gradient_clipping", "clip_grad", "grad_clip"], "use max_grad_norm"),
    **dict.fromkeys(["num_workers", "dataloader_num_workers"], "use reward_workers for reward processes"),
    **dict.fromkeys(
        ["max_tool_calling_iterations", "max_rollout_turns", "max_assistant_turns"],
        "use max_turns, the answer included",
    ),
    **dict.fromkeys(["environment_factory", "env", "environment"], 'use tools.environment = "file.py:Class"'),
    **dict.fromkeys(["tool_config_path", "mcp_servers", "mcpServers"], 'use tools.servers = "mcp.json"'),
    **dict.fromkeys(
        ["use_dynamic_sampling", "filter_groups", "dynamic_sampling_max_gen_batches", "max_num_gen_batches"],
        "use dynamic_sampling_batches",
    ),
    "dryrun": "use --dry-run",
    "log_completions": "use save_rollouts",
    "warmup_ratio": "use warmup_steps",
}
"""What other trainers call it -> what to write here."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key: dotted path, annotation and the docstring that stands under it."""

    path: str
    field: FieldInfo

    @property
    def annotation(self) -> Any:
        """The declared type, constraints stripped."""
        return self.field.annotation

    @property
    def doc(self) -> str:
        """The docstring under the key."""
        return self.field.description or ""

    def takes(self, kind: type) -> bool:
        """Whether a value of exactly this Python type can be meant (`str` for free text, not for choices)."""
        return kind in _members(self.annotation)


@cache
def all_keys() -> dict[str, Key]:
    """Every dotted key in the order of `config.py`; tables are not keys."""
    found: dict[str, Key] = {}
    for name, field in Config.model_fields.items():
        if table := _table_of(field):
            found |= {f"{name}.{inner}": Key(f"{name}.{inner}", f) for inner, f in table.model_fields.items()}
        else:
            found[name] = Key(name, field)
    return found


@cache
def tables() -> tuple[str, ...]:
    """Names of the tables, such as `engine`."""
    return tuple(name for name, field in Config.model_fields.items() if _table_of(field))


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, `Annotated` unwrapped: `Int | None` gives (int, NoneType)."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(annotation) for member in _members(part))
    return (annotation,)


def allowed(annotation: Any) -> str:
    """What may be written, in words: "a whole number or one of "never""."""
    words = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
    parts = []
    for member in _members(annotation):
        if typing.get_origin(member) is Literal:
            parts.append("one of " + ", ".join(f'"{choice}"' for choice in typing.get_args(member)))
        elif typing.get_origin(member) is tuple:
            inner = allowed(typing.get_args(member)[0]).replace("a finite number", "numbers")
            parts.append(f"a list of {inner}")
        elif member is not types.NoneType:
            parts.append(words[member])
    return " or ".join(parts)


def hint(path: str) -> str:
    """What to say after `unknown key PATH`: the right name, another trainer's name for it, or where to look."""
    leaf = path.rsplit(".", 1)[-1]
    if leaf in FOREIGN:
        return FOREIGN[leaf]
    if path.startswith("no_") and path[3:] in all_keys():
        return f"write {path[3:]}=false"
    names = nearest(path)
    if not names:
        return "nothing has a similar name"
    return f"did you mean {' or '.join(names)}?"


@cache
def nearest(path: str) -> tuple[str, ...]:
    """The keys with the fewest edits from `path` (all of them, if several), or none when nothing is close."""
    leaf = path.rsplit(".", 1)[-1]
    limit = max(1, len(leaf) // 3)
    scored: dict[str, int] = {}
    for name in [*all_keys(), *ALIASES]:
        target = ALIASES.get(name, name)
        forms = {name, name.rsplit(".", 1)[-1]}
        pairs = [(mine, form) for mine in {path, leaf} for form in forms if abs(len(mine) - len(form)) <= limit]
        best = min((_edits(mine, form, limit) for mine, form in pairs), default=limit + 1)
        if best <= limit:
            scored[target] = min(best, scored.get(target, best))
    low = min(scored.values(), default=0)
    return tuple(name for name, edits in scored.items() if edits == low)[:3]


def _edits(a: str, b: str, limit: int) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours from `a` to `b`, up to `limit` + 1."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], before[j - 2] + 1)
        if min(min(row), min(last)) > limit:
            return limit + 1
        before, last = last, row
    return last[-1]
