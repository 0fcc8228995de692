"""Tiny random models of many families, as transformers builds them, and the table of them in docs/models.md.

python tests/support/families.py            rewrite the table
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from surefoot.learner.architectures import PADDED_ROWS, SHARED, attention_of, beyond_plain, rows_together
from surefoot.learner.model import PEBBLE, save_object

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
VOCAB = 103
"""As many as the built-in tokenizer has."""
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
)  # fmt: skip
_IDS: dict[str, Any] = dict(eos_token_id=2, pad_token_id=0, bos_token_id=1)


class Family(NamedTuple):
    """How a tiny one is made."""

    model_type: str
    changes: dict[str, Any] = {}
    """Of `_SIZES`; a key that is None is left out."""


_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
_HYBRID = dict(
    head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
_MLA = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, first_k_dense_replace=1,
    n_group=1, topk_group=1,
)  # fmt: skip
_LONG = dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[4.0] * 4,
    original_max_position_embeddings=128,
)  # fmt: skip
_MAMBA2 = dict(
    mamba_chunk_size=16,
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_state=16,
    mamba_n_groups=1,
    mamba_d_conv=4,
    mamba_expand=2,
)

FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "mistral": Family("mistral", dict(sliding_window=None)),
    "mistral_window": Family("mistral", dict(sliding_window=6)),
    "qwen2": Family("qwen2"),
    "qwen2_window": Family("qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3": Family("qwen3", dict(head_dim=8)),
    "llama_bias": Family("llama", dict(attention_bias=True)),
    "gemma": Family("gemma", dict(head_dim=8)),
    "gemma2": Family("gemma2", dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=8)),
    "gemma3": Family("gemma3_text", dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=8)),
    "phi3": Family("phi3"),
    "phi3_long": Family("phi3", dict(rope_parameters=_LONG, original_max_position_embeddings=128)),
    "phi": Family("phi"),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2"),
    "gpt2": Family("gpt2", dict(n_embd=32, n_layer=2, n_head=4, n_positions=256, n_inner=48)),
    "gpt_neo": Family("gpt_neo", dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=6)),
    "gpt_neox": Family("gpt_neox"),
    "gptj": Family("gptj", dict(n_embd=32, n_layer=2, n_head=4, n_positions=256, n_inner=48, rotary_dim=8)),
    "opt": Family("opt", dict(ffn_dim=48, word_embed_proj_dim=32)),
    "bloom": Family("bloom", dict(n_layer=2, n_head=4)),
    "qwen2_moe": Family("qwen2_moe", dict(_MOE, shared_expert_intermediate_size=24)),
    "qwen3_moe": Family("qwen3_moe", dict(_MOE, head_dim=8)),
    "mixtral": Family("mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "olmoe": Family("olmoe", dict(num_experts=4, num_experts_per_tok=2)),
    "gpt_oss": Family("gpt_oss", dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)),
    "smollm3": Family("smollm3"),
    "granite": Family("granite", dict(logits_scaling=2.0, residual_multiplier=0.5, embedding_multiplier=3.0)),
    "granitemoe": Family("granitemoe", dict(num_local_experts=4, num_experts_per_tok=2)),
    "falcon": Family("falcon"),
    "falcon_alibi": Family("falcon", dict(alibi=True)),
    "stablelm": Family("stablelm"),
    "starcoder2": Family("starcoder2", dict(sliding_window=None)),
    "cohere": Family("cohere", dict(logit_scale=0.25)),
    "cohere2": Family("cohere2", dict(sliding_window=6)),
    "glm": Family("glm", dict(head_dim=8)),
    "glm4": Family("glm4", dict(head_dim=8)),
    "exaone4": Family("exaone4", dict(sliding_window=6)),
    "seed_oss": Family("seed_oss", dict(head_dim=8)),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense", dict(head_dim=8)),
    "nemotron": Family("nemotron"),
    "ernie4_5": Family("ernie4_5", dict(head_dim=8)),
    "deepseek_v2": Family("deepseek_v2", _MLA),
    "deepseek_v3": Family("deepseek_v3", _MLA),
    "qwen3_next": Family("qwen3_next", dict(_MOE, **_HYBRID, shared_expert_intermediate_size=24)),
    "qwen3_5": Family("qwen3_5_text", _HYBRID),
    "bamba": Family("bamba", dict(_MAMBA2, attn_layer_indices=[1])),
    "granitemoehybrid": Family(
        "granitemoehybrid", dict(_MAMBA2, num_local_experts=4, num_experts_per_tok=2, layer_types=["mamba", "attention"],
                                 shared_intermediate_size=24)
    ),
    "falcon_h1": Family("falcon_h1", dict(_MAMBA2, mamba_d_ssm=64, head_dim=8)),
    "jamba": Family("jamba", dict(num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1,
                                  expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False, mamba_d_state=8)),
    "lfm2": Family("lfm2", dict(layer_types=["conv", "full_attention"], block_multiple_of=8)),
    "mamba": Family("mamba", dict(state_size=8, num_attention_heads=None, num_key_value_heads=None)),
    "mamba2": Family("mamba2", dict(chunk_size=16, state_size=16, num_heads=8, head_dim=8, n_groups=1, num_attention_heads=None)),
    "recurrent_gemma": Family("recurrent_gemma", dict(attention_window_size=6, lru_width=32, num_hidden_layers=3, head_dim=8)),
}  # fmt: skip


UNTESTED: dict[str, Family] = {"arcee": Family("arcee"), "rwkv": Family("rwkv"), "bert": Family("bert")}
"""Some that are in no table: two that are scored row by row, and one that sees what comes after a token."""


def make_config(name: str) -> Any:
    """The config of that family's tiny model, with special tokens."""
    family = (FAMILIES | UNTESTED)[name]
    settings = {key: value for key, value in (_SIZES | _IDS | family.changes).items() if value is not None}
    settings |= {key: None for key, value in family.changes.items() if value is None and key == "sliding_window"}
    return AutoConfig.for_model(family.model_type, **settings)


def make_family(name: str, *, seed: int = 0) -> Any:
    """A tiny random model of that family, float32, in eval mode."""
    config = make_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attention = attention_of(config.to_dict())
        net = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
    net.generation_config.eos_token_id, net.generation_config.pad_token_id = 2, 0
    return net


def save_family(name: str, folder: Path, *, seed: int = 0) -> Path:
    """The same with the built-in tokenizer, as a model folder."""
    save_object(make_family(name, seed=seed), AutoTokenizer.from_pretrained(PEBBLE), folder)
    return folder


# -- The table in docs/models.md ---------------------------------------------------------------------

WITHOUT_CACHE = frozenset({"bamba", "recurrent_gemma"})
"""Whose cache does not give what the whole text gives, or is not there: found by the engine, held by its test."""
START, END = "<!-- families: written by tests/support/families.py -->", "<!-- end of families -->"
_ENGINE = {SHARED: "embedded", PADDED_ROWS: "transformers"}


def table() -> str:
    """One row for each way to be computed, all families in it by name."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for name, family in FAMILIES.items():
        config = make_config(name)
        together, attention = rows_together(config), attention_of(config.to_dict()) or "the library's choice"
        cache = "no: the whole text for every token" if name in WITHOUT_CACHE else "yes"
        how = (_ENGINE[together], together, attention, cache)
        beyond = [each for each in beyond_plain(config) if not each.startswith("architecture")]
        shown = f"`{family.model_type}`" + (f" with {', '.join(beyond)}" if beyond else "")
        if shown not in rows.setdefault(how, []):
            rows[how].append(shown)
    lines = [
        '| `engine.kind = "auto"` is | rows of the learner | attention | cache | families |',
        "|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(how)} | {', '.join(names)} |" for how, names in rows.items()]
    return "\n".join([START, *lines, END])


def written() -> str:
    """The table as it stands on the page."""
    text = PAGE.read_text(encoding="utf-8")
    return START + text.partition(START)[2].partition(END)[0] + END


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(written(), table()), encoding="utf-8")
