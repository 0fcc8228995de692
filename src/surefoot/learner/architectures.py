"""What is known of a model's architecture: what computes it exactly, and how its rows may be put together.

Owns       the names. `PLAIN` architectures are written out in our own decoder and share their prompts in the learner;
           those in `PADDED` were seen to score rows of different lengths side by side as they score each alone; any
           other causal language model of transformers is scored row by row.
Promises   decided by `config.json` alone, and shown in the plan; what cannot be trained is refused by name. None of it
           is believed: `any_forward.prove` asks the model itself before a run, and parity at step 1 asks the engine.
Never      imports torch or transformers.

    shared    prompts once for all siblings, rows one behind the other     forward.py, embedded engine
    padded    rows side by side, filled up on the right                    any_forward.py, transformers engine
    alone     one row after the other                                      any_forward.py, transformers engine

Read next: `any_forward.py`, the path of everything that is not plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.errors import ModelError

SHARED, PADDED_ROWS, ALONE = "shared", "padded", "alone"
"""How rows are put together."""

PLAIN = ("llama", "mistral", "qwen2", "qwen3")
"""Decoders that the embedded engine writes out, unless their config asks for more than that."""

PADDED = frozenset(
    "bamba bloom cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 exaone4 falcon falcon_h1 gemma gemma2 "
    "gemma3_text glm glm4 gpt2 gpt_neo gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid hunyuan_v1_dense "
    "jamba lfm2 llama mamba mamba2 mistral mixtral nemotron olmo olmo2 olmoe opt phi phi3 qwen2 qwen2_moe qwen3 "
    "qwen3_5_text qwen3_moe qwen3_next recurrent_gemma seed_oss smollm3 stablelm starcoder2".split()
)  # fmt: skip
"""Seen by test: tests/parity/test_families.py makes a tiny one of each, and trains it."""

UNBOUNDED = 1 << 20
"""Context of a model that has no table of positions and names no length."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_CHANGES_WITH_LENGTH = ("dynamic", "longrope")
"""Rotary frequencies that are others in a longer text, so that a token would depend on what comes after it."""


def beyond_plain(config: Any) -> tuple[str, ...]:
    """What the plain decoder does not compute, in words; empty where it is exact.

    Args:
        config: of transformers.
    """
    if config.model_type not in PLAIN:
        return (f"architecture {config.model_type!r}",)
    asked = {
        "hidden_act": getattr(config, "hidden_act", "silu") != "silu",
        "attention_bias": bool(getattr(config, "attention_bias", False)),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "sliding_window": _slides(config),
        "rope_parameters": _changes_with_length(config),
    }
    return tuple(f"{name} = {getattr(config, name)}" for name, is_so in asked.items() if is_so)


def _slides(config: Any) -> bool:
    """Whether any layer attends through a window shorter than the context."""
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return False
    return bool(window < config.max_position_embeddings)


def _changes_with_length(config: Any) -> bool:
    return any(each.get("rope_type", "default") in _CHANGES_WITH_LENGTH for each in _ropes(config))


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """Settings of rotary positions: one set of them, or one for each kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    nested = [each for each in found.values() if isinstance(each, Mapping)]
    return nested or [found]


def rows_together(config: Any) -> str:
    """How the learner puts rows of this model together: `SHARED`, `PADDED_ROWS` or `ALONE`."""
    if not beyond_plain(config):
        return SHARED
    return PADDED_ROWS if config.model_type in PADDED else ALONE


def context_of(config: Any) -> int:
    """Longest text, in tokens; as far as every token is what it would be in a shorter one."""
    named = [int(length) for name in _LENGTHS if isinstance(length := getattr(config, name, None), int)]
    if _changes_with_length(config):
        inside = [each.get("original_max_position_embeddings") for each in _ropes(config)]
        inside.append(getattr(config, "original_max_position_embeddings", None))
        named += [int(length) for length in inside if length]
    return min(named, default=UNBOUNDED)


def attention_of(config: Mapping[str, Any]) -> str | None:
    """Which of transformers' attentions computes this model; None is its own choice.

    torch's fused attention has no soft cap: it leaves it out without a word, and engine and learner would agree on it.

    Args:
        config: `config.json`, as a dictionary.
    """
    if config.get("attn_logit_softcapping"):
        return "eager"
    return "sdpa" if config.get("model_type") in PLAIN else None


def refuse_untrainable(config: Any) -> None:
    """Raise for what is no causal language model, or more than one."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"architecture {kind!r} has an encoder and a decoder", "rollouts are one row of tokens, prompt and answer",
            "use a causal language model",
        )  # fmt: skip
    if config.get_text_config() is not config:
        raise ModelError(
            f"architecture {kind!r} has parts beside its language model ({type(config).__name__})",
            "only text reaches a policy here: what sees or hears would be kept, stepped and never used",
            "save its language model alone, and point model at that",
        )


def refuse_cut(beyond: tuple[str, ...], ranks: int) -> None:
    """Raise for a model that is not plain on several ranks."""
    if beyond and ranks > 1:
        raise ModelError(
            f"runtime.learner_ranks = {ranks} with a model that has {', '.join(beyond)}",
            "its layers were never cut over ranks here and compared with one rank",
            "leave runtime.learner_ranks out, or use one of " + ", ".join(PLAIN),
        )


def refuse_beyond(beyond: tuple[str, ...]) -> None:
    """Raise for a model that the embedded engine does not compute."""
    if beyond:
        raise ModelError(
            f'engine.kind = "embedded" does not compute {", ".join(beyond)}',
            "the engine would compute something else than the learner",
            'leave engine.kind out, or set engine.kind = "transformers"',
        )


def lasting_buffers(net: Any) -> dict[str, Any]:
    """Tensors that no optimiser steps and a checkpoint keeps all the same, such as a router's bias, by name."""
    buffers = dict(net.named_buffers())
    return {name: buffers[name] for name in net.state_dict(keep_vars=True) if name in buffers} if buffers else {}


def told(model_type: str, beyond: tuple[str, ...]) -> str | None:
    """What a plan says of a model that is not plain; None for one that is."""
    if not beyond:
        return None
    how = (
        "rows padded side by side, no prompts shared" if model_type in PADDED
        else "rows scored one by one, for nobody has tested this architecture in company"
    )  # fmt: skip
    return f"{', '.join(beyond)}: scored by transformers' own modules, {how}"
