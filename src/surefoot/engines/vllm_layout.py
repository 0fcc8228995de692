"""Where each Hugging Face tensor lies inside vLLM's model, which fuses some and pads others.

Promises   the map is drawn from the live model, apart from the code of vLLM that loads weights: reading back through
           it is a second opinion, not an echo.

Read next: `vllm_core.py`, who loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from surefoot.errors import EngineError
from surefoot.protocols import Weights


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
