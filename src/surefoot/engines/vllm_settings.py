"""What vLLM is told: how it starts, and every sampling field of every request. Nothing here imports vLLM.

Promises   no field of a request is left to a default of vLLM or of a model's `generation_config.json`; a model is
           described by its numbers alone, so that no other file of a model folder can have a say.

Read next: `vllm_core.py`, where these become vLLM's own objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.errors import ConfigError, EngineError
from surefoot.protocols import Request

BLOCK = 32
"""Tokens per cached block, the smallest that vLLM has on a CPU; only whole blocks of a prompt are ever cached."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip

_DESCRIBED = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "rope_parameters", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types",
)  # fmt: skip
"""The keys of a config that say what the model computes; what else a config holds (sampling hints, marks) stays out."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How one vLLM is started.

    Example:
        VllmSettings(config={"model_type": "llama", ...}, max_width=512, rows=64)
    """

    config: Mapping[str, Any]
    """The model's Hugging Face config as a dictionary: `json.loads(net.config.to_json_string(use_diff=False))`."""
    max_width: int
    """Longest prompt plus completion, in tokens."""
    rows: int
    """Completions decoded side by side."""
    dtype: str = "float32"
    device: str = "cpu"
    gpu_memory_utilization: float = 0.4
    seed: int = 0
    threads: int | None = None
    """Torch threads of the engine's own thread; left as they are when None."""
    sleep_mode: bool = False
    """Let `sleep()` give the GPU memory back; GPUs only."""

    @property
    def vocab(self) -> int:
        """Token ids are below this."""
        return int(self.config["vocab_size"])

    @property
    def cache_bytes(self) -> int:
        """Room for every row at full width, twice, so that finished prompts stay cached; at least 16 MiB."""
        config = self.config
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        size = {"float32": 4, "bfloat16": 2}[self.dtype]
        per_block = 2 * int(config["num_hidden_layers"]) * heads * head_dim * BLOCK * size
        blocks = 2 * self.rows * -(-self.max_width // BLOCK)
        return max(16 << 20, blocks * per_block)


def check_settings(settings: VllmSettings) -> None:
    """Refuse what vLLM would silently do otherwise, or only notice after a minute."""
    if settings.device not in ("cpu", "cuda") or settings.dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            f"vLLM was asked to serve {settings.dtype} on {settings.device}",
            "it is used in float32 or bfloat16, on cpu or cuda",
            'set device = "cpu" or "cuda"; on a Mac keep engine.kind = "embedded"',
        )
    context = int(settings.config.get("max_position_embeddings") or 0)
    if settings.rows < 1 or not 1 < settings.max_width <= context:
        raise ConfigError(
            f"vLLM was asked for {settings.rows} rows of {settings.max_width} tokens; the model's context is {context}",
            "positions beyond the context were never trained",
            "lower max_completion_length or max_prompt_length",
        )
    if settings.config.get("model_type") not in ARCHITECTURES:
        raise ConfigError(
            f"model_type = {settings.config.get('model_type')!r} has no known place in vLLM",
            "its weights could not be handed over and read back by name",
            f'use one of {", ".join(ARCHITECTURES)}, or engine.kind = "embedded"',
        )


def described_model(settings: VllmSettings) -> str:
    """The config.json that vLLM builds the model from: the numbers, and nothing that could steer sampling."""
    kept = {key: settings.config[key] for key in _DESCRIBED if settings.config.get(key) is not None}
    kept["architectures"] = [ARCHITECTURES[settings.config["model_type"]]]
    kept["dtype"] = settings.dtype
    return json.dumps(kept, indent=1, sort_keys=True)


def engine_fields(settings: VllmSettings, folder: str) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs."""
    on_gpu = settings.device == "cuda"
    return {
        "model": folder, "skip_tokenizer_init": True, "generation_config": "vllm", "trust_remote_code": False,
        "load_format": "dummy", "dtype": settings.dtype, "seed": settings.seed, "max_model_len": settings.max_width,
        "max_num_seqs": settings.rows, "max_num_batched_tokens": max(2048, settings.rows, settings.max_width),
        "block_size": BLOCK, "enable_prefix_caching": True,
        # A prompt that is cut has its draw taken back, which seeded generators of the CPU cannot do: vLLM dies of it.
        "enable_chunked_prefill": on_gpu,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature; raw ones are those of temperature 1
        "async_scheduling": False,  # a token is handed out in the step that drew it: its version is then known
        "enforce_eager": not on_gpu, "disable_log_stats": True, "enable_sleep_mode": settings.sleep_mode and on_gpu,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if on_gpu else settings.cache_bytes,
    }  # fmt: skip


def sampling_fields(request: Request) -> dict[str, Any]:
    """Every public field of vLLM's SamplingParams but `output_kind`, which is an enumeration of its own."""
    return {
        "n": 1, "temperature": request.temperature, "seed": request.seed, "max_tokens": request.max_new_tokens,
        "min_tokens": 0, "stop_token_ids": sorted(request.stop_ids), "ignore_eos": True, "stop": None,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "logprobs": 0, "prompt_logprobs": None, "prompt_logprob_token_ids": None, "prompt_logprob_start": None,
        "logprob_token_ids": None, "flat_logprobs": False,
        "detokenize": False, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "include_stop_str_in_output": False, "stream_interval": 1, "skip_clone": False,
        "structured_outputs": None, "logit_bias": None, "allowed_token_ids": None, "extra_args": None,
        "bad_words": None, "watermarking": False, "skip_reading_prefix_cache": False, "thinking_token_budget": None,
        "repetition_detection": None, "routed_experts_prompt_start": 0, "trace_decode_token_ids": None,
    }  # fmt: skip


def check_request(request: Request, *, vocab: int, max_width: int) -> None:
    """Refuse what vLLM would cut, clamp or answer differently from what was asked."""
    length = len(request.prompt_ids) + request.max_new_tokens
    if not request.prompt_ids or request.max_new_tokens < 1 or length > max_width:
        raise EngineError(
            f"request {request.id}: {len(request.prompt_ids)} prompt + {request.max_new_tokens} new tokens, "
            f"room for {max_width}",
            "cutting a prompt would answer another question",
            "leave the task out, or raise the context",
        )
    if not all(0 <= token < vocab for token in (*request.prompt_ids, *request.stop_ids)):
        raise EngineError(
            f"request {request.id} holds token ids outside the model's {vocab}",
            "tokenizer and model do not belong together",
            "use the tokenizer that came with the model",
        )
    if request.temperature != 0 and not 0.01 <= request.temperature <= 2:
        raise EngineError(
            f"request {request.id}: temperature {request.temperature}",
            "vLLM samples between 0.01 and 2, and would change anything below without a word",
            "choose a temperature in that range, or 0 for greedy evaluation",
        )
    if not 0 <= request.seed < 2**63:
        raise EngineError(
            f"request {request.id}: seed {request.seed}",
            "vLLM takes -1 for no seed at all, and no more than 63 bits",
            "derive seeds with runtime.seeds.derive_seed",
        )
