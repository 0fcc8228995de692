"""Weights inside vLLM: where each tensor lies, and how a server's workers load them from a file.

vLLM's own ways to take weights need a GPU on both sides (NCCL, CUDA IPC). On one machine a file is enough, and this is
how the server reads it; `WeightsFromFile` is mixed into its workers by `--worker-extension-cls`:

    SUREFOOT_WEIGHTS_DIR=/some/private/folder VLLM_SERVER_DEV_MODE=1 \\
        vllm serve MODEL --worker-extension-cls surefoot.engines.vllm_worker.WeightsFromFile ...

Promises   only safetensors files right inside SUREFOOT_WEIGHTS_DIR are read; nothing is served before everything of
           the file was read and its names were found complete.
Never      imports vLLM: it is mixed into a class of vLLM's that brings everything along.

Read next: `openai.py`, the other side.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from surefoot.errors import ConfigError, EngineError
from surefoot.maths.checksums import checksums
from surefoot.protocols import Weights

# -- Where each Hugging Face tensor lies inside vLLM's model, which fuses some and pads others -----


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Rows `start` to `start + shape[0]` of one of vLLM's parameters.

    Example:
        "model.layers.0.self_attn.k_proj.weight" -> Place("model.layers.0.self_attn.qkv_proj.weight", 128, (64, 128))
    """

    parameter: str
    start: int
    shape: tuple[int, ...]


Layout = Mapping[str, TensorPlace]

TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def build_layout(model: Any) -> Layout:
    """Hugging Face name -> place, for every parameter of a vLLM model."""
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    return {
        name: place
        for full, parameter in model.named_parameters()
        for name, place in _places(model, packed, full, tuple(parameter.shape))
    }


def _places(
    model: Any, packed: Mapping[str, list[str]], full: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, TensorPlace]]:
    path, _, leaf = full.rpartition(".")
    owner, _, last = path.rpartition(".")
    module = model.get_submodule(path)
    if last in packed:
        start = 0
        for part, rows in zip(packed[last], module.output_sizes, strict=True):
            yield f"{owner}.{part}.{leaf}", TensorPlace(full, start, (rows, *shape[1:]))
            start += rows
    else:  # embeddings are padded to a round number of rows; the padding is nobody's weight
        rows = getattr(module, "org_vocab_size", shape[0])
        yield full, TensorPlace(full, 0, (rows, *shape[1:]))


def check_weights(layout: Layout, weights: Weights, dtype: object) -> None:
    """Every tensor the model needs, no other, each of the right shape and dtype; all problems in one go."""
    head_is_tied = TIED_HEAD not in layout
    unknown = [name for name in weights if name not in layout and not (name == TIED_HEAD and head_is_tied)]
    adapters = [name for name in unknown if "lora_" in name]
    wrong = [f"{name} is missing" for name in layout if name not in weights]
    wrong += [f"{name} has no place in the model" for name in unknown]
    for name in layout.keys() & weights.keys():
        given, place = weights[name], layout[name]
        if tuple(given.shape) != place.shape or given.dtype != dtype:
            wrong.append(f"{name} is {given.dtype} {tuple(given.shape)}, the model has {dtype} {place.shape}")
    if wrong:
        raise EngineError(
            f"{len(wrong)} tensors do not fit vLLM's model, first: {'; '.join(sorted(wrong)[:3])}",
            "adapters are not served by this engine yet" if adapters else "a model that is filled in part still talks",
            "merge adapters into the weights first" if adapters else "hand over the whole model, in the engine's dtype",
        )


def read_back(model: Any, layout: Layout) -> dict[str, Tensor]:
    """What is in force, by Hugging Face name: views of vLLM's own memory.

    What a kernel has packed away is left out. A tied head is read where the head itself looks, under its own name.
    """
    parameters = dict(model.named_parameters())
    found = {}
    for name, place in layout.items():
        whole = parameters[place.parameter].detach()
        if whole.numel() > 0:
            found[name] = whole[place.start : place.start + place.shape[0]]
    head = getattr(getattr(model, "lm_head", None), "weight", None)
    if TIED_HEAD not in layout and head is not None:
        found[TIED_HEAD] = head.detach()[: layout[EMBEDDING].shape[0]]
    return found


# -- What a server's workers are asked -------------------------------------------------------------


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
