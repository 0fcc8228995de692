"""Generates with transformers' own module, for every causal language model that the library can build.

Owns       a module without weights of its own, and the cache of every row.
Promises   rows are never padded: those that are computed together are siblings, whose prompts are one, so that nothing
           (positions, windows, recurrent state) can see a neighbour; weights are read where they lie, tied ones once;
           a cache is used when it was seen to give what the whole text gives, with the first weights; else the whole
           text is computed for every token, and `cached` says so.
Never      reads a model's files, or runs code that came with a model.

The queue, the dice and what becomes of rows when weights change are `embedded.BatchedEngine`'s: one prompt is computed
once for its siblings, each rollout has its own random stream.

On a CPU rows are computed in eights, so that products have one shape whoever sits beside whom.

Read next: `embedded.py`, the queue; `learner/architectures.py`, what is proved of a model before it is trained.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from surefoot.engines.decoder import MutationCheck
from surefoot.engines.embedded import BatchedEngine
from surefoot.errors import EngineError
from surefoot.protocols import Weights

TOGETHER = 8
"""Rows of one product on a CPU, always."""
CACHES = ("past_key_values", "cache_params")
"""What transformers calls the cache, in models of attention and of state."""
PLAIN_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})
"""Caches of attention that are known to be copied to siblings by repeating rows; others are computed for each."""
CACHE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Nats by which a cached token's log-probability may differ from the whole text's; a wrong cache is far beyond."""
_BUILDING = threading.Lock()


class TransformersEngine(BatchedEngine):
    """Batched, cached decoding of any architecture that transformers knows.

    Args:
        model_config: `config.json` of the model, as a dictionary.
        rows: rollouts decoded side by side.
        max_width: longest prompt plus completion, in tokens.
        device: where the weights it will be handed live.
    """

    decoder: ModuleDecoder

    def __init__(
        self, model_config: Mapping[str, Any], *, rows: int, max_width: int, device: str = "cpu",
        attention: str | None = None,
    ) -> None:  # fmt: skip
        decoder = ModuleDecoder(empty_module(model_config, device=device, attention=attention), rows=rows)
        super().__init__(decoder, rows=rows, max_width=max_width)

    @property
    def cached(self) -> bool | None:
        """Whether tokens are computed with a cache; None before there are weights."""
        return self.decoder.cached


@dataclass(eq=False)
class _Siblings:
    """Rows that were given one prompt, and are computed together until the last of them has ended."""

    rows: list[int]
    width: int
    """Rows that are computed, those that nobody sits in included."""
    ids: Tensor  # (width, L) everything that was said
    cache: Any
    """None where there is none."""


class ModuleDecoder:
    """`embedded.RowDecoder` on a module of transformers.

    Args:
        net: a causal language model whose parameters are on no device.
        rows: how many sequences `step` advances at once.
    """

    pack_seconds = 0.0

    def __init__(self, net: Any, *, rows: int) -> None:
        self.net, self.rows = net, rows
        self.device = torch.device("cpu")
        self.cached: bool | None = None
        self.head: object = None
        self._places = places_of(net)
        self._takes_one = "logits_to_keep" in inspect.signature(net.forward).parameters
        self._handed: MutationCheck | None = None
        self._siblings: list[_Siblings] = []
        self._sits_with: dict[int, _Siblings] = {}

    def load(self, weights: Weights) -> None:
        """Take these weights, where they are."""
        missing = [name for name in self._places if name not in weights]
        if missing:
            raise EngineError(
                f"{len(missing)} weights are missing, first {missing[0]}",
                "a layer that keeps its old weights answers without complaint",
                "hand over every parameter and every lasting buffer of the model",
            )
        names = list(self._places)
        tensors = [weights[name] for name in names]
        if self._handed is not None and self._handed.are(tensors):
            self._handed.remember()
        else:
            for name, tensor in zip(names, tensors, strict=True):
                self._point_at(name, tensor.detach())
            self._handed = MutationCheck(names, tensors)
        self.device = tensors[0].device
        self.head = object()
        if self.cached is None:
            self.cached = self._cache_holds()

    def _point_at(self, name: str, tensor: Tensor) -> None:
        for module, leaf, is_parameter in self._places[name]:
            if is_parameter:
                module._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
            else:
                module._buffers[leaf] = tensor

    def unload(self) -> None:
        """Let go of the weights and every cache."""
        self._siblings, self._sits_with, self._handed, self.head = [], {}, None, None
        for name, places in self._places.items():
            module, leaf, is_parameter = places[0]
            held = (module._parameters if is_parameter else module._buffers)[leaf]
            assert held is not None, f"{name} is a tensor"
            self._point_at(name, torch.empty_like(held, device="meta"))

    def check_untouched(self) -> None:
        """Refuse weights that were changed in place after they were handed over: cached tokens are of the old ones."""
        changed = None if self._handed is None else self._handed.changed()
        if changed is not None:
            raise EngineError(
                f"{changed} was changed in place after it was handed to the engine",
                "cached tokens would be of the old weights, new ones of others",
                "publish the weights before generating",
            )

    @torch.inference_mode()
    def prefill(self, prompt_ids: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], Any], Tensor]:
        """Run one prompt alone: what is kept of it, and (V,) logits for the first completion token."""
        logits, cache = self._forward(torch.tensor([prompt_ids], device=self.device), None)
        return (prompt_ids, cache), logits[0]

    @torch.inference_mode()
    def fill_rows(self, rows: list[int], kv: tuple[tuple[int, ...], Any]) -> None:
        """Put one prompt into these rows."""
        prompt, cache = kv
        step = TOGETHER if self.device.type == "cpu" else len(rows)
        for begin in range(0, len(rows), step):
            self._seat(rows[begin : begin + step], step, prompt, cache)

    def _seat(self, rows: list[int], width: int, prompt: tuple[int, ...], cache: Any) -> None:
        ids = torch.tensor([prompt], device=self.device).expand(width, -1)
        own = None
        if cache is not None and _is_plain(cache):
            name, held = copy.deepcopy(cache)
            held.batch_repeat_interleave(width)
            own = name, held
        elif cache is not None:
            _, own = self._forward(ids, None)
        siblings = _Siblings(list(rows), width, ids, own)
        self._siblings.append(siblings)
        self._sits_with |= dict.fromkeys(rows, siblings)

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """(R,) a token of each row, at (R,) positions, 0 in an idle row -> (R, V) logits for the next ones."""
        where = positions.tolist()
        self._siblings = [each for each in self._siblings if self._live(each, where)]
        logits: Tensor | None = None
        for siblings in self._siblings:
            live = self._live(siblings, where)
            said = torch.zeros(siblings.width, dtype=torch.long, device=self.device)
            places = [siblings.rows.index(row) for row in live]
            said[places] = tokens[live]
            siblings.ids = torch.cat([siblings.ids, said[:, None]], dim=1)
            fresh, siblings.cache = self._forward(siblings.ids, siblings.cache)
            if logits is None:
                logits = fresh.new_zeros(self.rows, fresh.shape[-1])
            logits[live] = fresh[places]
        assert logits is not None, "somebody is decoded"
        return logits

    def _live(self, siblings: _Siblings, positions: Sequence[int]) -> list[int]:
        """Rows that still go on with it; an idle row stands at 0."""
        return [row for row in siblings.rows if positions[row] and self._sits_with.get(row) is siblings]

    def _forward(self, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """(B, L) ids of which the cache holds all but the last -> (B, V) float logits of the next, and the cache."""
        asked: dict[str, Any] = {"logits_to_keep": 1} if self._takes_one else {}
        if self.cached is False:
            return self.net(input_ids=ids, use_cache=False, **asked).logits[:, -1], None
        if cache is not None:
            name, held = cache
            said = self.net(input_ids=ids[:, -1:], use_cache=True, **{name: held}, **asked)
            return said.logits[:, -1], cache
        said = self.net(input_ids=ids, use_cache=True, **asked)
        found = [(name, said.get(name)) for name in CACHES if said.get(name) is not None]
        return said.logits[:, -1], found[0] if found else None

    @torch.inference_mode()
    def _cache_holds(self) -> bool:
        """Whether two more tokens by the cache have the probabilities that they have in the whole text."""
        vocab = self.net.get_input_embeddings().weight.shape[0]
        ids = torch.tensor([[(3 + 7 * place) % vocab for place in range(9)]], device=self.device)
        try:
            _, cache = self._forward(ids[:, :7], None)
            if cache is None:
                return False
            by_cache = []
            for length in (8, 9):
                logits, cache = self._forward(ids[:, :length], cache)
                by_cache.append(logits)
        except (ValueError, TypeError, AttributeError, NotImplementedError, IndexError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return False
        whole = [self.net(input_ids=ids[:, :length], use_cache=False).logits[:, -1] for length in (8, 9)]
        pairs = zip(by_cache, whole, strict=True)
        gap = max(float((a.float().log_softmax(-1) - b.float().log_softmax(-1)).abs().max()) for a, b in pairs)
        return gap <= CACHE_TOLERANCE.get(whole[0].dtype, 0.5)


def _is_plain(cache: Any) -> bool:
    _, held = cache
    return type(held) is DynamicCache and {type(layer).__name__ for layer in held.layers} <= PLAIN_LAYERS


# -- A module whose parameters are nowhere, and where each of them is to be put --------------------


def empty_module(model_config: Mapping[str, Any], *, device: str, attention: str | None = None) -> Any:
    """The network that a config describes, in eval mode: no memory for parameters, buffers as they are computed.

    Args:
        attention: as the learner's network attends; what the library takes by itself when left out.
    """
    numbers = {name: _decoded(value) for name, value in model_config.items() if name != "model_type"}
    config = AutoConfig.for_model(str(model_config["model_type"]), **numbers)
    asked = {} if attention is None else {"attn_implementation": attention}
    with _BUILDING, torch.random.fork_rng(devices=[]), _parameters_nowhere():
        # float32 whatever computes: buffers such as rotary frequencies are made in it, as the learner's are.
        net = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False, **asked)
    for module in net.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return net.eval()


def _decoded(value: Any) -> Any:
    """What JSON has no word for, as transformers writes it: {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(each) for key, each in value.items()}
    return [_decoded(each) for each in value] if isinstance(value, list) else value


@contextmanager
def _parameters_nowhere() -> Iterator[None]:
    """Inside this a parameter goes to no device as soon as its module has it; one at a time needs memory."""
    plain = torch.nn.Module.register_parameter

    def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        plain(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":  # one that is there already is tied to another
            module._parameters[name] = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = plain  # type: ignore[method-assign]


Place = tuple[torch.nn.Module, str, bool]
"""A module, the name of a tensor in it, and whether that is a parameter."""


def places_of(net: torch.nn.Module) -> dict[str, list[Place]]:
    """Every tensor that is handed over, by its first name, and all the places where it is read: tied ones have two."""
    found: dict[str, list[Place]] = {}
    first: dict[int, str] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        found.setdefault(first.setdefault(id(parameter), name), []).append((*_leaf(net, name), True))
    kept = net.state_dict(keep_vars=True).keys()
    for name, _ in net.named_buffers():
        if name in kept:
            found[name] = [(*_leaf(net, name), False)]
    return found


def _leaf(net: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return net.get_submodule(path), leaf
