"""LoRA through PEFT: small matrices are trained beside frozen weights, and engines get the sum of both.

    learner      base(x) + alpha / rank * B(A(x))      the optimiser has A, B and `modules_to_save`, nothing else
    reference    base(x)                               the same network with its adapter off; there is no second copy
    engines      base + alpha / rank * B @ A           merged into memory of its own, under plain Hugging Face names
    ranks        base, A and B in shards               each rank merges its rows; rank 0 gathers them, tensor by tensor

Owns       the adapter in a network, the merged copy of what it changes, and the adapter's files.
Promises   the base is never written: its checksums are those of the start, looked at after the first step and before
           every save; a version is merged once; merged before the first step, it is the base bit for bit, or nothing
           is published; what is saved loads with `PeftModel.from_pretrained`; an adapter of another base, or of one
           that was held otherwise, is refused by name.
Never      imports PEFT before an adapter is asked for, or merges into the weights that are trained beside.

Read next: `grpo.py`, who steps it; `checkpoint.py`, its state beside the optimiser's.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from surefoot.errors import ConfigError, InvariantError, ModelError, StateError
from surefoot.learner.quantised import (
    NONE,
    QuantisedBase,
    QuantisedLinear,
    absent,
    chosen,
    weights_sha256,
)
from surefoot.learner.sharding import OneRank
from surefoot.learner.tensor_file import Spec, check_fits, read_header, read_tensors, whole
from surefoot.maths.checksums import checksum, checksums
from surefoot.protocols import Weights
from surefoot.storage.files import Manifest, parse_json, refusal, verify_folder
from surefoot.system.files import open_plain

if TYPE_CHECKING:
    from surefoot.learner.model import Policy

NAME = "default"
"""What PEFT calls an adapter that nobody named."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ALL_LINEAR = "all-linear"
FACTS, QUANTIZATION = "adapter", "quantization"
"""Where a checkpoint's manifest says what the adapter belongs to, and there, what the base was held in."""
CONFIG_BYTES = 1 << 20

Named = dict[str, Tensor]


@dataclass(frozen=True)
class LoraSettings:
    """The adapter's numbers; see the config keys of the same names below `lora`."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    """Ends of the names of linear layers, or `("all-linear",)`."""
    modules_to_save: tuple[str, ...] = ()
    seed: int = 0
    """Of the first half of every pair; the other begins as 0."""
    quantization: str = NONE
    """What the base is held in: `none` as it is, or `nf4`."""


@dataclass(frozen=True)
class AdapterPlan:
    """What an adapter would be on a model, known before there are weights."""

    parameters: int
    """Entries that are trained."""
    merged: int
    """Entries of the base that have a merged copy."""
    total: int
    """Entries of the base."""
    layers: int
    """Linear layers with a pair of matrices."""
    packed: int
    """Entries of the base that are held in four bits."""
    specs: Mapping[str, Spec]
    """The tensors of its file."""
    settings: LoraSettings

    def line(self) -> str:
        """For a person."""
        numbers = self.settings
        beside = f" and {', '.join(numbers.modules_to_save)} whole" if numbers.modules_to_save else ""
        held = f", {self.packed:,} of them in four bits ({numbers.quantization})" if self.packed else ""
        return (
            f"LoRA of rank {numbers.rank}, alpha {numbers.alpha:g}, on {self.layers} linear layers{beside}: "
            f"{self.parameters:,} parameters beside {self.total:,} frozen ones{held}"
        )


class Merged(NamedTuple):
    """What merging a version did."""

    changed: int
    """Entries of what engines get that are another number than in the version before."""
    entries: int
    """Of all that engines get."""
    seconds: float


def require_peft() -> None:
    """Raise unless PEFT is installed: without it there would be no adapter, and every weight would be trained."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "[lora] needs the package peft", "the adapter is PEFT's own, so that whoever has PEFT can load it",
            "pip install 'surefoot[peft]', or leave [lora] out to train every weight",
        )  # fmt: skip


def plan_adapter(settings: LoraSettings, empty: Any) -> AdapterPlan:
    """What the adapter would be on this network, which may be without memory (`model.empty_net`)."""
    total = sum(p.numel() for p in empty.parameters())
    packed = 0 if settings.quantization == NONE else _packed_entries(empty, settings)
    model = _inject(empty, settings)
    layers = [module for _, module in _layers(empty)]
    trained = {name: p for name, p in empty.named_parameters() if p.requires_grad}
    merged = packed or sum(layer.base_layer.weight.numel() for layer in layers)
    saved = sum(p.numel() for name, p in trained.items() if _SAVED in name)
    specs = {name: Spec("F32", tuple(value.shape)) for name, value in _file_tensors(model).items()}
    entries = sum(p.numel() for p in trained.values())
    return AdapterPlan(entries, merged + saved, total, len(layers), packed, specs, settings)


def _packed_entries(empty: Any, settings: LoraSettings) -> int:
    return sum(empty.get_submodule(name).weight.numel() for name in chosen(empty, settings.modules_to_save))


_SAVED = f".modules_to_save.{NAME}."


class Adapter:
    """A pair of matrices beside each chosen layer of a network, which is frozen from here on.

    Args:
        net: a Hugging Face causal language model; its modules are replaced in place.
        base: the model's weights in the precision of its file, by name, where `net` computes in a coarser one.
        quantised: what of `net` is held in four bits.
    """

    def __init__(
        self, net: Any, settings: LoraSettings, base: Mapping[str, Tensor] | None = None,
        quantised: QuantisedBase | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        _check_held(settings, quantised)
        plain = dict(net.named_parameters())
        self.base_model = str(getattr(net, "name_or_path", "") or "")
        self.quantised = quantised
        self.base_sha256 = weights_sha256(plain | dict(base or {})) if quantised is None else quantised.file_sha256
        self._packed: dict[str, QuantisedLinear] = {} if quantised is None else dict(quantised.layers)
        self._model, self._net = _inject(net, settings), net
        self._layers = dict(_layers(net))
        self._order = list(plain if quantised is None else quantised.names)
        self._take(OneRank())
        self._base_sums = {_plain_name(name): value for name, value in self._sums.items()}
        """Of whole tensors, by plain name."""
        self._copies: Named = {}
        """Merged weights and copies of whole modules: what engines get in place of `_live`. Of shards, every weight, on
        rank 0 alone."""
        self._dtypes: dict[str, torch.dtype] = {}
        self._scratch: Tensor | None = None
        self._version: int | None = None
        self._untouched = True
        """Whether the adapter still is what it was made as: a difference of 0."""
        self._check_names(plain)

    def _take(self, ranks: OneRank) -> None:
        """Look up what is trained and what is frozen in the network as it is now: whole, or this rank's part of it."""
        self.ranks = ranks
        own, found = ranks.own(self._net), dict(self._net.named_parameters())
        self.trained: Named = {name: own[name] for name, p in found.items() if p.requires_grad}
        """What the optimiser steps, by the names of the network: float32, whatever the base computes in."""
        self._frozen: Named = {name: own[name] for name, p in found.items() if not p.requires_grad}
        self._frozen |= {} if self.quantised is None else self.quantised.held
        self._sums = checksums(self._frozen)
        self._live = {_plain_name(name): p for name, p in found.items() if _plain_name(name) in self._order}

    def share(self, ranks: OneRank) -> None:
        """The network was cut over these ranks, base and adapter alike: from here on this one has its part of both."""
        told = ranks.exchange(self.base_sha256)
        if others := [rank for rank, sha256 in enumerate(told) if sha256 != told[0]]:
            raise ModelError(
                f"rank {others[0]} of the learner has read another base than rank 0",
                "the adapter would be trained beside a patchwork of two models",
                "bring the model's file back, and leave it alone while a run begins",
            )
        self._take(ranks)

    def _check_names(self, plain: Mapping[str, Tensor]) -> None:
        low = [name for name, p in self.trained.items() if p.dtype != torch.float32]
        lost = [name for name, p in plain.items() if name not in self._live or self._live[name].shape != p.shape]
        if low or lost:
            name = (low or lost)[0]
            raise InvariantError(
                f"the adapter and its network do not fit: {name}",
                "it would be trained in a coarser precision" if low else "engines would never get that tensor",
                "report this with the model's config.json and the [lora] table; leave [lora] out to train every weight",
            )

    # -- engines ----------------------------------------------------------------

    def published(self, version: int) -> Weights:
        """Every weight of the model under its plain name, the adapter merged in; merged once per version.

        The memory of a version is that of the next one, as it is for weights that are trained themselves.
        """
        if self._version != version:
            self.merge(version)
        if self.ranks.index > 0:
            return {}  # it gave its part; rank 0 has the whole
        return {name: self._copies[name] if name in self._copies else self._live[name] for name in self._order}

    @torch.no_grad()
    def merge(self, version: int) -> Merged:
        """Bring the merged copies to the adapter's present numbers, layer by layer."""
        began = time.perf_counter()
        self.allocate()
        changed = [self._renew(name, value) for name, value in self._merged()]
        # The device is waited for here, so the time is its own. Of several ranks one has copies, and counts.
        [count] = self.ranks.total_each([sum(int(each) for each in changed)])
        if version == 0 and self._untouched and count:
            raise InvariantError(
                f"merged with an adapter that is 0 yet, {count} entries of the base are other numbers",
                "engines would serve another model than the one that is trained beside",
                "nothing was published; report this with the [lora] table and quantization",
            )
        self._version = version
        entries = sum((self._copies if name in self._copies else self._live)[name].numel() for name in self._order)
        return Merged(count, entries, time.perf_counter() - began)

    def allocate(self) -> None:
        """Take the memory that merging needs, so that running out of it cannot tear a step."""
        if self._scratch is not None:
            return
        merged = {f"{name}.weight" for name in (*self._layers, *self._packed)}
        saved = {_plain_name(name) for name in self.trained if _SAVED in name}
        copies, room = Named(), 0
        for name in self._order:
            if self.ranks.size > 1 or name in merged | saved:
                value = self._gathered(name)
                self._dtypes[name] = value.dtype
                copies |= {name: value.clone()} if self.ranks.index == 0 else {}
                room = max(room, value[self.ranks.rows(len(value))].numel() if name in merged else 0)
        device = next(iter(self.trained.values())).device
        self._scratch = torch.empty(room, dtype=torch.float32, device=device)
        self._copies = copies

    def _gathered(self, name: str) -> Tensor:
        """A weight of the base, whole; one that comes from several ranks is the one that was cut, bit for bit."""
        found = whole(self.base(name))
        if self.ranks.size > 1 and name in self._base_sums and checksum(found) != self._base_sums[name]:
            raise InvariantError(
                f"{name} of the frozen base, put together from {self.ranks.size} ranks, is not what was cut",
                "engines would serve another model than the one that is trained beside",
                "nothing was published; report this with the model's config.json, and set runtime.learner_ranks = 1",
            )
        return found

    def base(self, name: str) -> Tensor:
        """A weight of the base by its plain name, as the network computes with it."""
        layer = self._packed.get(name.removesuffix(".weight"))
        return self._live[name].detach() if layer is None else layer.weight

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor that engines get a copy of, as it is now; the merged ones in memory that the next one takes."""
        assert self._scratch is not None, "allocate comes first"
        here = self.ranks.here
        for name, layer in self._layers.items():
            base = layer.base_layer.weight
            weight, low, high = here(base), whole(layer.lora_A[NAME].weight), here(layer.lora_B[NAME].weight)
            room = self._scratch[: weight.numel()].view(weight.shape)
            torch.addmm(weight.float(), high, low, alpha=layer.scaling[NAME], out=room)  # of a shard, its rows
            yield f"{name}.weight", self.ranks.as_whole(room.to(self._dtypes[f"{name}.weight"]), base)
        for name in self.trained:
            if _SAVED in name:
                yield _plain_name(name), self._live[_plain_name(name)]

    def _renew(self, name: str, value: Tensor) -> Tensor:
        """Put a tensor into its copy, rounded; returns in how many entries that changed it."""
        rounded = whole(value)
        if self.ranks.index > 0:
            return torch.zeros(())
        copy = self._copies[name]
        changed = torch.count_nonzero(copy != rounded)
        copy.copy_(rounded)
        return changed

    # -- learning ---------------------------------------------------------------

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside this the network is its base: the reference."""
        with self._model.disable_adapter():
            yield

    def awake(self) -> Named:
        """What can have a gradient: not the first half of a pair whose second half is still 0 throughout."""
        highs = [self.ranks.here(layer.lora_B[NAME].weight) for layer in self._layers.values()]
        moved = self.ranks.any_each([bool(high.any()) for high in highs])
        asleep = {
            f"{name}.lora_A.{NAME}.weight" for name, has_moved in zip(self._layers, moved, strict=True) if not has_moved
        }
        return {name: p for name, p in self.trained.items() if name not in asleep}

    def check_step(self, optimiser: torch.optim.Optimizer) -> None:
        """Before a step: the optimiser has the adapter and nothing of the base, and the base has no gradient."""
        frozen = {p.data_ptr(): name for name, p in self._frozen.items() if p.numel()}  # a shard may be empty
        stepped = [p for group in optimiser.param_groups for p in group["params"]]
        found = [frozen[p.data_ptr()] for p in stepped if p.data_ptr() in frozen]
        found += [name for name, p in self._frozen.items() if p.grad is not None or p.requires_grad]
        if found or len(stepped) != len(self.trained):
            told = f"{found[0]} of the base" if found else f"{len(stepped)} tensors of {len(self.trained)}"
            raise InvariantError(
                f"the optimiser of an adapter would step {told}",
                "the base would move with it: the reference too, and the adapter would fit nobody else's base",
                "nothing was stepped; only what [lora] names may have a gradient",
            )

    def check_base(self) -> None:
        """The base is what it was at the start, to the last bit."""
        now = checksums(self._frozen)
        own = [name for name, value in self._sums.items() if now[name] != value]
        if moved := list(dict.fromkeys(name for told in self.ranks.exchange(own) for name in told)):
            raise InvariantError(
                f"{len(moved)} tensors of the frozen base have changed, first {moved[0]}",
                "the reference is the base, and the saved adapter would belong to a model that nobody has",
                "nothing of this version is saved; go on from the last checkpoint",
            )

    # -- files ------------------------------------------------------------------

    def tensors(self) -> Named:
        """The adapter by the names of its file."""
        return _file_tensors(self._model)

    def restored(self) -> None:
        """The adapter's numbers were put back from elsewhere: what was merged before is of another version."""
        self._version, self._untouched = None, False

    def config(self) -> dict[str, Any]:
        """`adapter_config.json`, as PEFT reads it, the same in every process."""
        found = dict(self._model.peft_config[NAME].to_dict())
        lists = {name: sorted(value) for name, value in found.items() if isinstance(value, set)}
        return found | lists | {"inference_mode": True, "peft_type": "LORA", "base_model_name_or_path": self.base_model}

    def facts(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says of it."""
        held = {} if self.quantised is None else {"quantised_sha256": self.quantised.sha256}
        base = {"base_model": self.base_model, "base_sha256": self.base_sha256}
        return {FACTS: base | {QUANTIZATION: self.settings.quantization} | held}

    def refuse_other_base(self, manifest: Manifest) -> None:
        """Raise unless the checkpoint is of an adapter on these very weights."""
        base = manifest.facts.get(FACTS)
        told = base if isinstance(base, dict) else {}
        if told.get("base_sha256") != self.base_sha256:
            raise _another_base(manifest.folder, str(told.get("base_model")), self.base_model)
        if (held := told.get(QUANTIZATION, NONE)) != self.settings.quantization:
            raise _otherwise_held(manifest.folder, f"quantization = {held}, this is {self.settings.quantization}")
        if self.quantised is not None and told.get("quantised_sha256") != self.quantised.sha256:
            raise _otherwise_held(manifest.folder, f"{held} of other bits than are made of that file here")

    def load(self, folder: Path) -> None:
        """The adapter of a checkpoint, its training state unread; what does not fit is refused, and nothing changes."""
        manifest = verify_folder(folder, unread="training/")
        self.refuse_other_base(manifest)
        own = self.tensors()
        rows = None if self.ranks.size == 1 else self.ranks.rows
        values = read_tensors(manifest.path(WEIGHTS), {name: Spec.of(value) for name, value in own.items()}, rows)
        _refuse_other_scale(manifest, self.config())
        for name, value in values.items():
            if not bool(value.isfinite().all()):
                raise refusal(manifest.path(WEIGHTS), f"{name} holds a number that is not finite")
        with torch.no_grad():
            for name, target in own.items():
                self.ranks.put(target, values[name])
        self.restored()


def with_adapter(policy: Policy, settings: LoraSettings | None) -> tuple[Policy, Adapter | None]:
    """The policy with an adapter in its network; without settings as it is. The base needs no masters."""
    if settings is None:
        return policy, None
    adapter = Adapter(policy.model, settings, policy.masters, policy.quantised)
    return replace(policy, masters=None), adapter


def refuse_other_shapes(folder: Path, plan: AdapterPlan, base_model: str) -> None:
    """Raise if a checkpoint's adapter cannot be of this model: by names and shapes alone, before weights are read."""
    path = folder / WEIGHTS
    try:
        check_fits(path, read_header(path), plan.specs)
    except StateError as error:
        raise StateError(
            f"{folder} is an adapter of another model than {base_model}: {error.what}",
            "beside other weights it means nothing", "use the model that it was trained on",
        ) from error  # fmt: skip


def _another_base(folder: Path, told: str, own: str) -> StateError:
    return StateError(
        f"{folder} is an adapter of another model: it was trained on {told}, this is {own}, whose weights differ",
        "an adapter is a difference to the very weights that it was trained beside; beside others it means nothing",
        "bring back those weights, or start a new run",
    )


def _check_held(settings: LoraSettings, quantised: QuantisedBase | None) -> None:
    if (settings.quantization == NONE) != (quantised is None):
        held = "in full" if quantised is None else "packed"
        raise InvariantError(
            f"quantization = {settings.quantization}, and the base is held {held}",
            "a checkpoint would say of its base what it was not", "nothing was trained; report this with the config",
        )  # fmt: skip


def _otherwise_held(folder: Path, how: str) -> StateError:
    return StateError(
        f"{folder} is an adapter of the same model, held otherwise: it was trained beside {how}",
        "four bits are other weights than the file's: beside those, the adapter is another policy",
        "set quantization to what the run had, with the same bitsandbytes; or start a new run",
    )


def _refuse_other_scale(manifest: Manifest, own: Mapping[str, Any]) -> None:
    """Rank and alpha are what the shapes do not say: another alpha is another policy."""
    path = manifest.path(CONFIG)
    with open_plain(path) as file:
        found = parse_json(path, file.read(CONFIG_BYTES))
    for key in ("r", "lora_alpha", "target_modules", "modules_to_save"):
        if found.get(key) != own[key]:
            raise refusal(path, f"{key} is {str(found.get(key))[:80]}, this run has {own[key]}")


# -- PEFT: the only place that knows it -------------------------------------------------------------


def _inject(net: Any, settings: LoraSettings) -> Any:
    """The network with an adapter, in PEFT's wrapper; the modules of `net` itself are replaced."""
    require_peft()
    # PEFT would import it wherever it is installed: a second, for layers that nobody has.
    with nullcontext() if "bitsandbytes" in sys.modules else absent("bitsandbytes"):
        model = _injected(net, settings)
    from peft import import_utils

    for remembers in (import_utils.is_bnb_available, import_utils.is_bnb_4bit_available):
        remembers.cache_clear()  # whoever uses PEFT after us in this process finds what is there
    return model


def _injected(net: Any, settings: LoraSettings) -> Any:
    from peft import LoraConfig, get_peft_model

    _refuse_unreachable(net, settings)
    targets = _targets(net, settings)
    _check_saved(net, settings.modules_to_save)
    alpha = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha  # as others write it
    config = LoraConfig(
        r=settings.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0,
        modules_to_save=list(settings.modules_to_save) or None, task_type="CAUSAL_LM",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = get_peft_model(net, config)
    model.eval()
    return model


def _refuse_unreachable(net: Any, settings: LoraSettings) -> None:
    """Matrices that are no linear layers: an adapter would pass them by, or train what PEFT cannot merge by name."""
    kind = net.config.model_type
    if any(type(module).__name__ == "Conv1D" for module in net.modules()):
        raise ModelError(
            f"[lora] with architecture {kind!r}: its layers are transposed (Conv1D)",
            "merged the way linear layers are, the weights would be other ones",
            "leave [lora] out to train every weight, or use an architecture with linear layers",
        )
    owners = {name.rpartition(".")[0] for name, p in net.named_parameters() if p.dim() == 3}
    experts = [name for name in owners if not isinstance(net.get_submodule(name), torch.nn.Conv1d)]
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if experts and not {name.rpartition(".")[2] for name in settings.target_modules} <= attention:
        raise ModelError(
            f"[lora] with architecture {kind!r} and target_modules = {', '.join(settings.target_modules)}: its experts "
            f"are no linear layers (first {min(experts)})",
            "most of the model would have no adapter while the plan says every layer, or a wrong one",
            'set lora.target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"], or leave [lora] out',
        )


def _targets(net: Any, settings: LoraSettings) -> list[str]:
    """The ends of the names of the layers that get a pair, or whole names where an end would match others too."""
    linear = {name for name, module in net.named_modules() if isinstance(module, torch.nn.Linear)}
    head = {name for name, module in net.named_modules() if module is net.get_output_embeddings()}
    linear -= head
    found = linear if settings.target_modules == (ALL_LINEAR,) else set[str]()
    for wanted in () if found else settings.target_modules:
        named = {name for name in linear if _ends_in(name, wanted)}
        if not named:
            ends = sorted({name.rpartition(".")[2] for name in linear})
            is_head = any(_ends_in(name, wanted) for name in head)
            raise ModelError(
                f"lora.target_modules names {wanted!r}, and the model has no such linear layer"
                + (" but its output layer" if is_head else ""),
                "the loss reads the output layer's weight itself and would go around the adapter" if is_head
                else "an adapter beside nothing would train nothing, without a word",
                f"name some of {', '.join(ends)}, or write \"{ALL_LINEAR}\"",
            )  # fmt: skip
        found |= named
    short = {name.rpartition(".")[2] for name in found}
    others = {name.rpartition(".")[2] for name, _ in net.named_modules() if name not in found}
    return sorted(found if short & others else short)


def _check_saved(net: Any, wanted: Sequence[str]) -> None:
    """Modules that are trained whole exist, and share their weights with no other."""
    modules = dict(net.named_modules())
    homes: dict[int, list[str]] = {}
    for name, p in net.named_parameters(remove_duplicate=False):
        homes.setdefault(id(p), []).append(name)
    for each in wanted:
        found = [name for name in modules if name.endswith(each)]  # as PEFT matches them
        if not found:
            raise ModelError(
                f"lora.modules_to_save names {each!r}, and the model has no such module",
                "nothing would be trained in its place, without a word",
                "name a module such as norm or embed_tokens, or leave it out",
            )
        for name in found:
            tied = [own for p in modules[name].parameters() for own in homes[id(p)] if len(homes[id(p)]) > 1]
            if tied:
                raise ModelError(
                    f"lora.modules_to_save names {each!r}, whose weight is shared: {' and '.join(sorted(set(tied)))}",
                    "trained in one place it would stay as it was in the other",
                    "leave it out, or use a model with tie_word_embeddings = false",
                )


def _ends_in(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _layers(net: Any) -> Iterator[tuple[str, Any]]:
    """The layers with a pair of matrices, by their names in the network."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in net.named_modules() if isinstance(module, LoraLayer))


def _plain_name(name: str) -> str:
    """A parameter's name in the model without an adapter."""
    return name.replace(".base_layer.", ".").replace(_SAVED, ".")


def _file_tensors(model: Any) -> Named:
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    return {str(name): value for name, value in found.items()}
