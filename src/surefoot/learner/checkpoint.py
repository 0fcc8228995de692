"""Everything a learner knows, taken out and put back bit for bit.

Owns       the list of what a learner's state is; its form on disk: `training/*.safetensors` and `training/state.json`
           beside the Hugging Face weights, in one folder that is complete or absent.
Promises   restored into a fresh learner of the same model, training goes on as if it had never stopped: weights,
           their float32 masters, moments and step counts by parameter name, reference, version, parameter updates, old
           logprobs between two passes.
           The learning rate is a function of the version and is not stored.
Never      changes a learner before everything fits, and never unpickles.

Read next: `checkpoint.py`, the way back from disk; `storage.files`, how the folder becomes visible.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surefoot.errors import StateError
from surefoot.learner import lora
from surefoot.learner.memory import MAX_SPLITS
from surefoot.learner.optimizer import moments_of
from surefoot.learner.sharding import OneRank
from surefoot.learner.tensor_file import DTYPES, Spec, check_fits, read_header, read_tensors, take_part, write_tensors
from surefoot.protocols import ParameterUpdates
from surefoot.storage.checkpoints import SCHEMA, older_format
from surefoot.storage.files import (
    Manifest,
    ManifestEntry,
    commit_folder,
    failpoint,
    parse_json,
    read_manifest,
    refusal,
    verify_folder,
    write_json,
)
from surefoot.system.files import open_plain, storage_error

if TYPE_CHECKING:
    from surefoot.learner.grpo import GRPOLearner
    from surefoot.learner.model import Policy

"""The form of what is written here; a reader refuses a larger number."""
FOLDER = "training"
STATE = f"{FOLDER}/state.json"
OPTIMISER, MASTERS, REFERENCE, OLD = (
    f"{FOLDER}/{name}.safetensors" for name in ("optimiser", "masters", "reference", "old")
)
WEIGHTS = "model.safetensors"
USUAL = "adamw"
OPTIM = "optim"
"""Where a checkpoint's manifest names the optimiser that its state is of; AdamW where it says nothing."""
CAPTURED = frozenset(
    "net adapter masters optimiser reference parameter_updates channels checked_tokens changed_entries splits _version "
    "_old _kl_seen _pushes".split()
)
DERIVED = frozenset(
    "settings tokenizer ranks _buffers _torn _packed _rows _copies _copied fused _fused_proven _tokens "
    "recomputes".split()
)
"""Fields of a learner that its config makes anew; a field in neither set would be lost at a resume."""

Named = dict[str, Tensor]


@dataclass(frozen=True)
class TrainingState:
    """A learner's state. Tensors are the learner's own until `clone`: write or clone them before the next step."""

    version: int
    pushes: int
    kl_seen: bool
    checked_tokens: int
    parameter_updates: ParameterUpdates | None
    idle: dict[str, int]
    """By channel, for how many steps in a row it gave nothing."""
    weights: Named
    """By Hugging Face name, tied ones once; of an adapter, by the names of PEFT."""
    moments: dict[str, Named]
    """By parameter name; a parameter that never got a gradient has none."""
    reference: Named | None
    old: dict[tuple[str, int], Tensor]
    """Logprobs at the first pass, by group and index, while further passes over the same samples may come."""
    splits: int = 0
    """How often microbatches were halved because memory ran out: another cut would be other last bits."""
    changed_entries: int = 0
    """Parameter entries that the steps so far changed."""
    masters: Named | None = None
    """What is trained, in float32, where `weights` are a rounded copy of it; by parameter name."""

    def clone(self) -> TrainingState:
        """The same with tensors of its own, which later steps do not change."""
        return TrainingState(
            self.version, self.pushes, self.kl_seen, self.checked_tokens, self.parameter_updates, dict(self.idle),
            _clone(self.weights), {name: _clone(kept) for name, kept in self.moments.items()},
            None if self.reference is None else _clone(self.reference),
            {key: value.detach().clone() for key, value in self.old.items()}, self.splits,
            self.changed_entries, None if self.masters is None else _clone(self.masters),
        )  # fmt: skip


def capture(learner: GRPOLearner) -> TrainingState:
    """The state of a learner between two steps."""
    lost = vars(learner).keys() - CAPTURED - DERIVED
    if lost:
        raise StateError(
            f"the learner has {', '.join(sorted(lost))}, which no checkpoint holds",
            "a resumed run would go on without it",
            "add it to surefoot.learner.checkpoint: CAPTURED with its form on disk, or DERIVED",
        )
    if learner._torn:
        raise StateError(
            f"the learner was interrupted inside the optimiser's step at version {learner.version}",
            "some weights are stepped and some may not be; saved, they would pass for a version",
            "resume from the last checkpoint",
        )
    return TrainingState(
        version=learner.version, pushes=learner._pushes, kl_seen=learner._kl_seen,
        checked_tokens=learner.checked_tokens, parameter_updates=learner.parameter_updates, idle=_idle(learner),
        weights=_saved(learner),
        moments=_moments(learner),
        reference=None if learner.reference is None else weights_of(learner.reference), old=dict(learner._old),
        splits=learner.splits, changed_entries=learner.changed_entries,
        masters=None if learner.masters is None else dict(learner.masters.tensors),
    )  # fmt: skip


def restore(learner: GRPOLearner, state: TrainingState) -> None:
    """Put a state into a learner of the same model; what does not fit is refused by name, and nothing is changed."""
    check_state(learner, state)
    with torch.no_grad():
        _copy_into(_saved(learner), state.weights, learner.ranks.put)  # of masters in shards, nothing but copies
        if learner.adapter is not None:
            learner.adapter.restored()
        if learner.masters is not None and state.masters is not None:
            _copy_into(learner.masters.tensors, state.masters, learner.ranks.put)
        if learner.reference is not None and state.reference is not None:
            _copy_into(weights_of(learner.reference), state.reference, learner.ranks.put)
        learner.forget_gradients()
        learner.optimiser.state.clear()
        for name, parameter in learner.trained().items():
            if name in state.moments:
                learner.optimiser.state[parameter] = _on_device(state.moments[name], parameter.device)
    learner._old = {key: value.detach().to(learner.device, copy=True) for key, value in state.old.items()}
    learner._version, learner._pushes, learner._kl_seen = state.version, state.pushes, state.kl_seen
    learner.checked_tokens, learner.parameter_updates = state.checked_tokens, state.parameter_updates
    learner.splits, learner._torn = state.splits, False
    learner.changed_entries, learner._copied = state.changed_entries, None
    if learner.channels is not None:
        learner.channels._dead = dict(state.idle)


def check_state(learner: GRPOLearner, state: TrainingState) -> None:
    """Refuse a state that does not belong to this model, or holds a number that is not finite."""
    if state.idle.keys() != _idle(learner).keys():
        raise _misfit(f"it was saved with the channels {sorted(state.idle)}, this run has {sorted(_idle(learner))}")
    if not 0 <= state.splits <= MAX_SPLITS:
        raise _misfit(f"it halved its microbatches {state.splits} times, no run does so more than {MAX_SPLITS} times")
    cut = learner.ranks.rows
    _check_tensors("weights", state.weights, _specs(_saved(learner), cut))
    _check_masters(learner, state)
    if (learner.reference is None) != (state.reference is None):
        has, has_not = ("the state", "this run") if learner.reference is None else ("this run", "the state")
        raise _misfit(f"{has} has a reference model (beta > 0), {has_not} has none")
    if learner.reference is not None and state.reference is not None:
        _check_tensors("reference", state.reference, _specs(weights_of(learner.reference), cut))
    parameters = learner.wholes()
    if unknown := sorted(state.moments.keys() - parameters):
        raise _misfit(f"the optimiser state has {len(unknown)} parameters that the model has not, first {unknown[0]!r}")
    for name, kept in state.moments.items():
        specs = {key: _of_rows(spec, cut) for key, spec in moment_specs(learner.optimiser, parameters[name]).items()}
        _check_tensors(f"optimiser state of {name}", kept, specs)
        if (steps := float(kept.get("step", 0.0))) < 0 or steps % 1:
            raise _misfit(f"the optimiser state of {name} counts {steps} steps")
    for (group, index), value in state.old.items():
        if value.dim() != 1 or not value.is_floating_point() or not bool(value.isfinite().all()):
            raise _misfit(f"the old logprobs of {group!r}/{index} are not a row of finite numbers")


def _check_masters(learner: GRPOLearner, state: TrainingState) -> None:
    """The masters are there where this run needs them, and the weights are the masters, rounded."""
    expected = {} if learner.masters is None else _specs(learner.masters.tensors, learner.ranks.rows)
    _check_tensors("masters", state.masters or {}, expected)
    for name, master in (state.masters or {}).items():
        if not torch.equal(master.to(state.weights[name].dtype), state.weights[name]):
            raise _misfit(f"the weights of {name} are not its master, rounded")


def weights_of(net: Any) -> Named:
    """What has to be saved of a model: parameters and lasting buffers by name, tied ones under their first name."""
    seen: dict[int, str] = {}
    for name, value in net.state_dict(keep_vars=True).items():
        seen.setdefault(id(value), name)
    return {name: value for name, value in net.state_dict(keep_vars=True).items() if seen[id(value)] == name}


def weights_at_start(policy: Policy) -> Named:
    """All the numbers of a policy that was just loaded, before an adapter is put into it: what it is known by."""
    held = {} if policy.quantised is None else policy.quantised.held
    return weights_of(policy.model) | dict(policy.masters or {}) | dict(held)


def _saved(learner: GRPOLearner) -> Named:
    """What has to be saved of a learner's model: all of it as it computes, or its adapter."""
    if learner.adapter is not None:
        return learner.adapter.tensors()
    own = weights_of(learner.net)
    return own if learner.masters is None else learner.masters.rounded(own)


def _weights_file(learner: GRPOLearner) -> str:
    return WEIGHTS if learner.adapter is None else lora.WEIGHTS


def moment_specs(optimiser: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Spec]:
    """What this optimiser keeps for this parameter."""
    return moments_of(optimiser).specs(parameter)


def save_training_checkpoint(
    learner: GRPOLearner, tokenizer: Any, folder: Path, *, step: int, extra: Mapping[str, Any] | None = None
) -> Path:
    """Save weights, tokenizer and training state as one folder, durably; plain `transformers` loads it too.

    Of an adapter, the adapter: PEFT loads that, beside the model it belongs to.

    Args:
        folder: the final name, such as `checkpoints/step_7`; it must not exist.
        extra: whatever else the run needs to go on (data position, guard ...), as JSON.

    Returns:
        `folder`, which exists only if everything in it was written.
    """
    state = capture(learner)
    if learner.adapter is not None:
        learner.adapter.check_base()
    if learner.ranks.index > 0:
        _take_part(learner, state)
        return folder
    temporary = folder.with_name(f".{folder.name}.partial")
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.mkdir(mode=0o700)
        (temporary / FOLDER).mkdir(mode=0o700)
        failpoint("checkpoint.before_files")
        _write_model_files(learner, tokenizer, temporary)
        known = write_state(state, temporary, step=step, extra=extra or {}, weights=_weights_file(learner))
        facts: dict[str, Any] = {"schema": SCHEMA, "step": step, "version": state.version}
        facts |= {} if learner.adapter is None else learner.adapter.facts()
        facts |= {} if learner.settings.optim == USUAL else {OPTIM: learner.settings.optim}
        failpoint("checkpoint.before_commit")
        return commit_folder(temporary, folder, facts, known=known)
    except OSError as error:
        raise storage_error(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already when it was renamed


def write_state(
    state: TrainingState, folder: Path, *, step: int, extra: Mapping[str, Any], weights: str = WEIGHTS
) -> dict[str, ManifestEntry]:
    """The files of a state below `folder`, which is not yet visible; returns size and SHA-256 of the large ones."""
    files = _files(state, weights)
    entries = {name: write_tensors(folder / name, tensors) for name, tensors in files.items()}
    failpoint("checkpoint.after_weights")
    write_json(folder / STATE, _as_json(state, step) | {"extra": dict(extra)})
    return entries


def _files(state: TrainingState, weights: str) -> dict[str, Named]:
    """The tensor files of a state, in the order in which they are written."""
    files: dict[str, Named] = {
        weights: state.weights,
        OPTIMISER: {f"{key}/{name}": value for name, kept in state.moments.items() for key, value in kept.items()},
    }
    if state.masters is not None:
        files[MASTERS] = state.masters
    if state.reference is not None:
        files[REFERENCE] = state.reference
    if state.old:
        files[OLD] = {"old": torch.cat(list(state.old.values()))}
    return files


def _take_part(learner: GRPOLearner, state: TrainingState) -> None:
    """The other ranks' side of `write_state`, which one of them does: the same tensors in the same order."""
    for tensors in _files(state, _weights_file(learner)).values():
        take_part(tensors)


def _write_model_files(learner: GRPOLearner, tokenizer: Any, folder: Path) -> None:
    """Config and tokenizer; the weights we write ourselves, to hash them while they are written."""
    try:
        if learner.adapter is None:
            learner.net.save_pretrained(folder, state_dict={})
            if learner.masters is not None and learner.masters.rounds is not None:
                learner.net.config.dtype = learner.masters.rounds  # what was just written is the dtype of the shards
                learner.net.config.save_pretrained(folder)
        else:
            write_json(folder / lora.CONFIG, learner.adapter.config())
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the tokenizer's own writer says "disk full" in an exception of no particular kind
        raise OSError(f"model files: {error}") from error


def _as_json(state: TrainingState, step: int) -> dict[str, Any]:
    kinds = {DTYPES[value.dtype] for value in state.old.values()}
    assert len(kinds) <= 1, "old logprobs come from one forward and have one dtype"
    return {
        "schema": SCHEMA, "step": step, "version": state.version, "pushes": state.pushes, "kl_seen": state.kl_seen,
        "checked_tokens": state.checked_tokens,
        "census": None if state.parameter_updates is None else asdict(state.parameter_updates),
        "splits": state.splits, "changed_entries": state.changed_entries, "idle": state.idle,
        "stepped": sorted(state.moments),
        "has_reference": state.reference is not None,
        "old": {
            "dtype": next(iter(kinds), "F32"),
            "rows": [[group, index, len(value)] for (group, index), value in state.old.items()],
        },
    }  # fmt: skip


def _idle(learner: GRPOLearner) -> dict[str, int]:
    return {} if learner.channels is None else dict(learner.channels._dead)


def _moments(learner: GRPOLearner) -> dict[str, Named]:
    """What the optimiser remembers of each parameter, whole."""
    wholes, ranks = learner.wholes(), learner.ranks
    return {
        name: {key: ranks.as_whole(value, wholes[name]) for key, value in learner.optimiser.state[p].items()}
        for name, p in _stepped(learner)
    }


def _stepped(learner: GRPOLearner) -> Iterator[tuple[str, Any]]:
    """Parameters that the optimiser has a memory of."""
    for name, parameter in learner.trained().items():
        if learner.optimiser.state.get(parameter):
            yield name, parameter


def _specs(tensors: Mapping[str, Tensor], rows: Callable[[int], slice] | None = None) -> dict[str, Spec]:
    """Of whole tensors; of those rows of each, where only they were read."""
    whole = {name: Spec.of(value) for name, value in tensors.items()}
    return whole if rows is None else {name: _of_rows(spec, rows) for name, spec in whole.items()}


def _of_rows(spec: Spec, rows: Callable[[int], slice]) -> Spec:
    if not spec.shape:
        return spec
    length, *others = spec.shape
    return Spec(spec.dtype, (len(range(length)[rows(length)]), *others))


def _check_tensors(what: str, found: Mapping[str, Tensor], expected: Mapping[str, Spec]) -> None:
    if found.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        raise _misfit(f"{what}: {len(missing)} missing {missing[:1]}, {len(extra)} extra {extra[:1]}")
    for name, value in found.items():
        if Spec.of(value) != expected[name]:
            raise _misfit(f"{what}: {name} is {Spec.of(value)}, this model has {expected[name]}")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise _misfit(f"{what}: {name} holds a number that is not finite")


def _copy_into(
    targets: Mapping[str, Tensor], values: Mapping[str, Tensor], put: Callable[[Tensor, Tensor], Any] = Tensor.copy_
) -> None:
    """Keep the memory, change the numbers: tied weights stay tied, engines keep their views."""
    for name, target in targets.items():
        put(target, values[name])


def _on_device(kept: Mapping[str, Tensor], device: torch.device) -> Named:
    return {key: value.detach().to(device, copy=True) for key, value in kept.items()}


def _clone(tensors: Mapping[str, Tensor]) -> Named:
    return {name: value.detach().clone() for name, value in tensors.items()}


def _misfit(reason: str) -> StateError:
    return StateError(
        f"training state does not fit: {reason}",
        "training on from it would not be the run that was saved",
        "resume with the model and the settings of the run, or start a new one",
    )


# -- A checkpoint back into a learner, after everything about it was found to be right ------------
# Promises   in this order: no file larger than this model can need; names, count, sizes and SHA-256 as the manifest
# says; schema; every tensor file's header, names, shapes and dtypes against the live model; only then memory.
# A changed shape, a missing or extra tensor, a newer schema is a `StateError` with the file and the reason,
# and the learner is as it was before.
# Never      treats a state that it cannot read as no state.


STATE_BYTES = 64 << 20
SLACK = 256 << 20
"""What a checkpoint may hold beside tensors in one file: a tokenizer, a header."""
KEYS = frozenset(
    "schema step version pushes kl_seen checked_tokens changed_entries splits census idle stepped has_reference old "
    "extra".split()
)

Expected = dict[str, dict[str, Spec]]
"""Tensor files by name, each with the tensors it must hold."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What a checkpoint says beside the learner's own state."""

    step: int
    version: int
    extra: Mapping[str, Any]


def load_training_checkpoint(learner: GRPOLearner, folder: Path) -> LoadedCheckpoint:
    """Restore a learner from a folder that `save_training_checkpoint` wrote."""
    manifest = _verified(learner.net, folder)
    record = _read_record(manifest)
    expected = _expected(learner, manifest, record)
    state = _read_state(manifest, record, expected, learner.ranks)
    restore(learner, state)
    return LoadedCheckpoint(record["step"], state.version, record["extra"])


def load_weights(net: Any, folder: Path) -> Manifest:
    """Only the weights, into a model that exists; the same checks, by name and shape, before anything is read."""
    manifest = _verified(net, folder)
    targets = weights_of(net)
    specs = {name: Spec.of(value) for name, value in targets.items()}
    _require_files(manifest, {WEIGHTS: specs})
    values = read_tensors(manifest.path(WEIGHTS), specs)
    for name, value in values.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise refusal(manifest.path(WEIGHTS), f"{name} holds a number that is not finite")
    for name, target in targets.items():
        target.data.copy_(values[name])
    return manifest


def _verified(net: Any, folder: Path) -> Manifest:
    """A folder that is as it was saved; hashing begins only when the sizes can be true for this model."""
    widths = ((value.numel(), max(value.dtype.itemsize, 4)) for value in weights_of(net).values())
    limit = 2 * sum(entries * width for entries, width in widths) + SLACK  # AdamW's two moments, in float32 at least
    listed = read_manifest(folder)
    for name, entry in listed.files.items():
        if entry.size > limit:
            raise refusal(folder, f"{name!r} has {entry.size} bytes, this model can need {limit} at most")
    manifest = verify_folder(folder)
    named = re.fullmatch(r"step_(\d+)", folder.name)
    if named and named[1] != str(manifest.facts.get("step")):
        raise refusal(folder, f"its manifest says step {manifest.facts.get('step')!r}")
    return manifest


def _read_record(manifest: Manifest) -> dict[str, Any]:
    """`state.json`, with every value of the kind it must be."""
    if STATE not in manifest.files:
        raise refusal(manifest.folder, f"it holds weights, but no training state ({STATE})")
    path = manifest.path(STATE)
    if manifest.files[STATE].size > STATE_BYTES:
        raise refusal(path, f"it has more than {STATE_BYTES} bytes")
    record = parse_json(path, _read(path))
    if (schema := _count(path, record, "schema")) > SCHEMA:
        raise refusal(path, f"a newer surefoot wrote it: schema is {schema}, this one knows {SCHEMA}")
    if schema < SCHEMA:
        raise older_format(manifest.folder, schema)
    if record.keys() != KEYS:
        odd = sorted(record.keys() ^ KEYS)
        raise refusal(path, f"{len(odd)} keys are missing or unknown, first {odd[0][:80]!r}")
    for key in ("step", "version", "pushes", "checked_tokens", "changed_entries", "splits"):
        _count(path, record, key)
    for key in ("schema", "step", "version"):
        if record[key] != manifest.facts.get(key):
            raise refusal(path, f"{key} is {record[key]}, the manifest says {manifest.facts.get(key)!r}")
    for key, kind in (("kl_seen", bool), ("has_reference", bool), ("extra", dict), ("old", dict), ("idle", dict)):
        if not isinstance(record[key], kind):
            raise refusal(path, f"{key} is not a {kind.__name__}")
    if not _are_words(record["stepped"]) or len(set(record["stepped"])) != len(record["stepped"]):
        raise refusal(path, "stepped is not a list of names")
    for channel in record["idle"]:
        _count(path, record["idle"], channel)
    return record


def _expected(learner: GRPOLearner, manifest: Manifest, record: Mapping[str, Any]) -> Expected:
    """Every tensor file the checkpoint must hold, from the live model."""
    path = manifest.path(STATE)
    if (lora.FACTS in manifest.facts) != (learner.adapter is not None):
        holds = (
            "an adapter, and this run trains every weight"
            if learner.adapter is None
            else "every weight, and no adapter"
        )
        raise refusal(manifest.folder, f"it holds {holds}")
    if learner.adapter is not None:
        learner.adapter.refuse_other_base(manifest)
    parameters = learner.wholes()
    if unknown := sorted(set(record["stepped"]) - parameters.keys()):
        raise refusal(path, f"{len(unknown)} stepped parameters are not in this model, first {unknown[0][:200]!r}")
    if record["has_reference"] != (learner.reference is not None):
        has = "a reference model" if record["has_reference"] else "no reference model"
        raise refusal(path, f"it was saved with {has}, this run has beta = {learner.settings.loss.beta}")
    weights = _specs(_saved(learner))
    if (optim := manifest.facts.get(OPTIM, USUAL)) != learner.settings.optim:
        raise refusal(manifest.folder, f"its optimiser is {str(optim)[:40]!r}, this run has {learner.settings.optim!r}")
    moments = {
        f"{key}/{name}": spec
        for name in record["stepped"]
        for key, spec in moment_specs(learner.optimiser, parameters[name]).items()
    }
    expected = {_weights_file(learner): weights, OPTIMISER: moments}
    if (MASTERS in manifest.files) != (learner.masters is not None):
        had, has = ("with", "without") if learner.masters is None else ("without", "with")
        raise refusal(manifest.folder, f"it was saved {had} float32 masters, this run trains {has}: another dtype")
    if learner.masters is not None:
        expected[MASTERS] = {name: Spec.of(value) for name, value in learner.masters.tensors.items()}
    if record["has_reference"]:
        expected[REFERENCE] = weights
    if old := _old_rows(path, record):
        expected[OLD] = {"old": Spec(record["old"]["dtype"], (sum(length for _, _, length in old),))}
    _require_files(manifest, expected)
    if extra := sorted({n for n in manifest.files if n.endswith(".safetensors")} - expected.keys()):
        raise refusal(manifest.folder, f"it holds {extra[0]!r}, which nothing asks for")
    return expected


def _require_files(manifest: Manifest, expected: Expected) -> None:
    if missing := sorted(expected.keys() - manifest.files.keys()):
        raise refusal(manifest.folder, f"it holds no {missing[0]}")


def _old_rows(path: Path, record: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    old = record["old"]
    rows = old.get("rows")
    if (
        old.keys() != {"dtype", "rows"}
        or old["dtype"] not in ("F64", "F32", "F16", "BF16")
        or not isinstance(rows, list)
    ):
        raise refusal(path, "old is not a dtype and rows")
    for row in rows:
        sound = isinstance(row, list) and len(row) == 3 and isinstance(row[0], str)
        if not sound or any(type(number) is not int or not 0 <= number < 1 << 40 for number in row[1:]):
            raise refusal(path, "a row of old is not a group, an index and a length")
    if len({(row[0], row[1]) for row in rows}) != len(rows):
        raise refusal(path, "a row of old occurs twice")
    return [(row[0], row[1], row[2]) for row in rows]


def _read_state(manifest: Manifest, record: Mapping[str, Any], expected: Expected, ranks: OneRank) -> TrainingState:
    """Of several ranks, each reads its own rows: no machine has to hold as many checkpoints as it has ranks."""
    for name, specs in expected.items():  # all headers before the first tensor
        check_fits(manifest.path(name), read_header(manifest.path(name)), specs)
    tensors = {
        name: read_tensors(manifest.path(name), specs, None if name == OLD or ranks.size == 1 else ranks.rows)
        for name, specs in expected.items()
    }
    return TrainingState(
        version=record["version"], pushes=record["pushes"], kl_seen=record["kl_seen"],
        checked_tokens=record["checked_tokens"],
        parameter_updates=_parameter_updates(manifest.path(STATE), record["census"]),
        splits=record["splits"], changed_entries=record["changed_entries"], idle=record["idle"],
        weights=next(tensors[name] for name in (WEIGHTS, lora.WEIGHTS) if name in tensors),
        moments=_by_parameter(tensors[OPTIMISER], record["stepped"]),
        masters=tensors.get(MASTERS), reference=tensors.get(REFERENCE),
        old=_old(manifest.path(STATE), record, tensors.get(OLD)),
    )  # fmt: skip


def _by_parameter(tensors: Named, stepped: Sequence[str]) -> dict[str, Named]:
    """`exp_avg/model.norm.weight` and its like, under the parameter's name."""
    found: dict[str, Named] = {name: {} for name in stepped}
    for path, value in tensors.items():
        key, _, name = path.partition("/")
        found[name][key] = value
    return found


def _old(path: Path, record: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> dict[tuple[str, int], Tensor]:
    rows = _old_rows(path, record)
    if tensors is None:
        return {}
    pieces = tensors["old"].split([length for _, _, length in rows])
    return {(group, index): piece for (group, index, _), piece in zip(rows, pieces, strict=True)}


def _parameter_updates(path: Path, value: Any) -> ParameterUpdates | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.keys() != {"total", "with_gradient", "moved", "still"}:
        raise refusal(path, "census is not what was counted")
    if not _are_words(value["still"]):
        raise refusal(path, "census.still is not a list of names")
    total, with_gradient, moved = (_count(path, value, key) for key in ("total", "with_gradient", "moved"))
    return ParameterUpdates(total, with_gradient, moved, tuple(value["still"]))


def _read(path: Path) -> bytes:
    try:
        with open_plain(path) as file:
            return file.read(STATE_BYTES)
    except OSError as error:
        raise refusal(path, f"it cannot be read ({error.strerror or error})") from error


def _count(path: Path, record: Mapping[str, Any], key: str) -> int:
    """A whole number of at least 0; True is none."""
    value = record.get(key)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise refusal(path, f"{key[:80]!r} is {str(value)[:40]!r}, not a count")
    return value


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)
