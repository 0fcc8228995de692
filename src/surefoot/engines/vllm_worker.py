"""Loads weights into a vLLM server from a file: mixed into its workers by `--worker-extension-cls`.

vLLM's own ways to take weights need a GPU on both sides (NCCL, CUDA IPC). On one machine a file is enough, and this is
how the server reads it:

    SUREFOOT_WEIGHTS_DIR=/some/private/folder VLLM_SERVER_DEV_MODE=1 \\
        vllm serve MODEL --worker-extension-cls surefoot.engines.vllm_worker.WeightsFromFile ...

Promises   only safetensors files right inside SUREFOOT_WEIGHTS_DIR are read; nothing is served before everything of
           the file was read and its names were found complete.
Never      imports vLLM: it is mixed into a class of vLLM's that brings everything along.

Read next: `openai.py`, the other side.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from surefoot.engines.vllm_layout import build_layout, read_back
from surefoot.errors import ConfigError, EngineError
from surefoot.maths.checksums import checksums

FOLDER_VARIABLE = "SUREFOOT_WEIGHTS_DIR"


class WeightsFromFile:
    """What `collective_rpc` can ask of each worker; arguments are strings, as the server passes them on."""

    model_runner: Any
    surefoot_staged: tuple[str, dict[str, Tensor]] | None = None
    surefoot_names: frozenset[str] | None = None

    def surefoot_ready(self) -> dict[str, str]:
        """Say that weights can be taken; refused when nobody said from where."""
        weights_folder()
        return {"ready": "1"}

    def surefoot_prepare(self, file: str, version: str) -> dict[str, str]:
        """Read the file whole; checksum per tensor of what was read."""
        weights = load_file(weights_path(file))
        known = self.surefoot_names
        if known is not None and known != weights.keys():
            raise EngineError(
                f"{file} holds {len(weights)} tensors, the first sync held {len(known)}",
                "a model that is filled in part still talks",
                "hand over the whole model every time",
            )
        self.surefoot_staged = (version, weights)
        return {name: str(value) for name, value in checksums(weights).items()}

    def surefoot_commit(self, version: str) -> dict[str, str]:
        """Put what was read in force; checksums of what can be read back of it."""
        staged, self.surefoot_staged = self.surefoot_staged, None
        if staged is None or staged[0] != version:
            raise EngineError(
                f"told to serve version {version}, prepared was {'nothing' if staged is None else staged[0]}",
                "weights that nobody checked would be served under a name",
                "call surefoot_prepare first",
            )
        weights = staged[1]
        self.model_runner.reload_weights(weights_iterator=iter(weights.items()))
        model = self.model_runner.model
        pack_again(model)
        found = checksums(read_back(model, build_layout(model)))
        handed = checksums(weights)
        wrong = sorted(name for name in handed.keys() & found.keys() if handed[name] != found[name])
        if wrong:
            raise EngineError(
                f"{len(wrong)} tensors of version {version} are not in vLLM's memory, first {wrong[0]}",
                "it would answer with other weights than it was handed",
                "use the vLLM version that constraints-vllm.txt names",
            )
        self.surefoot_names = frozenset(weights)
        return {name: str(value) for name, value in found.items()}


def pack_again(model: Any) -> None:
    """On a CPU a layer may compute from a packed copy of a weight that it keeps; vLLM forgets a tied head there."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)


def weights_path(file: str) -> Path:
    """The file of this name in the folder that the server was started with; anything else is refused."""
    path = weights_folder() / file
    if Path(file).name != file or path.suffix != ".safetensors" or path.is_symlink() or not path.is_file():
        raise EngineError(
            f"{file!r} is no safetensors file in {FOLDER_VARIABLE}", "nothing else is read", "see docs/engines.md"
        )
    return path


def weights_folder() -> Path:
    """Where this server reads weights from."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise ConfigError(
            f"{FOLDER_VARIABLE} is not set where the server runs",
            "a server that reads any file it is told to is a hole",
            "start it with the folder that surefoot writes weights to",
        )
    return Path(folder)
