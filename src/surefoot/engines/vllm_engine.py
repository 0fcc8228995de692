"""vLLM as the engine: token ids in, token ids out, with weights it is handed.

Owns       one vLLM in this process, and the thread that steps it.
Promises   nothing is served before weights were handed over; these are read back from vLLM's own memory before their
           version counts; while they change, completions in flight go on under the new ones, finish first, or begin
           again, as the caller wishes.
Never      loads a model, re-tokenises, or takes a sampling default from anybody.

Read next: `serving.py`, the thread; `vllm_requests.py`, the requests inside; `vllm_core.py`, vLLM itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch

from surefoot.engines.embedded import EmbeddedEngine
from surefoot.engines.serving import EngineLoop
from surefoot.engines.vllm_core import BLOCK, VllmCore, VllmSettings, check_request
from surefoot.engines.vllm_requests import Core, VllmRequests
from surefoot.errors import EngineError
from surefoot.protocols import Weights


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
