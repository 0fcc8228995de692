"""Everything a learner knows, taken out and put back bit for bit.

Owns       the list of what a learner's state is; its form on disk: `training/*.safetensors` and `training/state.json`
           beside the Hugging Face weights, in one folder that is complete or absent.
Promises   restored into a fresh learner of the same model, training goes on as if it had never stopped: weights,
           their float32 masters, moments and step counts by parameter name, reference, version, census, old logprobs
           between two passes.
           The learning rate is a function of the version and is not stored.
Never      changes a learner before everything fits, and never unpickles.

Read next: `checkpoint_read.py`, the way back from disk; `store.durable`, how the folder becomes visible.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import StateError
from surefoot.policy.census import Census
from surefoot.policy.learner import GRPOLearner
from surefoot.policy.memory_split import MAX_SPLITS
from surefoot.policy.tensor_file import DTYPES, Spec, write_tensors
from surefoot.store.durable import commit_folder, storage_error, write_json
from surefoot.store.failpoints import failpoint
from surefoot.store.manifest import Entry

SCHEMA = 1
"""The form of what is written here; a reader refuses a larger number."""
FOLDER = "training"
STATE = f"{FOLDER}/state.json"
OPTIMISER, MASTERS, REFERENCE, OLD = (
    f"{FOLDER}/{name}.safetensors" for name in ("optimiser", "masters", "reference", "old")
)
WEIGHTS = "model.safetensors"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps for each parameter."""
CAPTURED = frozenset(
    "net masters optimiser reference census channels checked_tokens changed_entries splits _version _old _kl_seen "
    "_pushes".split()
)
DERIVED = frozenset({"settings", "_torn", "_packed"})
"""Fields of a learner that its config makes anew; a field in neither set would be lost at a resume."""

Named = dict[str, Tensor]


@dataclass(frozen=True)
class TrainingState:
    """A learner's state. Tensors are the learner's own until `clone`: write or clone them before the next step."""

    version: int
    pushes: int
    kl_seen: bool
    checked_tokens: int
    census: Census | None
    idle: dict[str, int]
    """By channel, for how many steps in a row it gave nothing."""
    weights: Named
    """By Hugging Face name, tied ones once."""
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
            self.version, self.pushes, self.kl_seen, self.checked_tokens, self.census, dict(self.idle),
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
            "add it to surefoot.policy.training_state: CAPTURED with its form on disk, or DERIVED",
        )
    if learner._torn:
        raise StateError(
            f"the learner was interrupted inside the optimiser's step at version {learner.version}",
            "some weights are stepped and some may not be; saved, they would pass for a version",
            "resume from the last checkpoint",
        )
    return TrainingState(
        version=learner.version, pushes=learner._pushes, kl_seen=learner._kl_seen,
        checked_tokens=learner.checked_tokens, census=learner.census, idle=_idle(learner),
        weights=weights_of(learner.net),
        moments={name: dict(learner.optimiser.state[p]) for name, p in _stepped(learner)},
        reference=None if learner.reference is None else weights_of(learner.reference), old=dict(learner._old),
        splits=learner.splits, changed_entries=learner.changed_entries,
        masters=None if learner.masters is None else dict(learner.masters.tensors),
    )  # fmt: skip


def restore(learner: GRPOLearner, state: TrainingState) -> None:
    """Put a state into a learner of the same model; what does not fit is refused by name, and nothing is changed."""
    check_state(learner, state)
    with torch.no_grad():
        _copy_into(weights_of(learner.net), state.weights)
        if learner.masters is not None and state.masters is not None:
            _copy_into(learner.masters.tensors, state.masters)
        if learner.reference is not None and state.reference is not None:
            _copy_into(weights_of(learner.reference), state.reference)
        learner.forget_gradients()
        learner.optimiser.state.clear()
        for name, parameter in learner.trained().items():
            if name in state.moments:
                learner.optimiser.state[parameter] = _on_device(state.moments[name], parameter.device)
    learner._old = {key: value.detach().to(learner.device, copy=True) for key, value in state.old.items()}
    learner._version, learner._pushes, learner._kl_seen = state.version, state.pushes, state.kl_seen
    learner.checked_tokens, learner.census = state.checked_tokens, state.census
    learner.splits, learner._torn = state.splits, False
    learner.changed_entries = state.changed_entries
    if learner.channels is not None:
        learner.channels._dead = dict(state.idle)


def check_state(learner: GRPOLearner, state: TrainingState) -> None:
    """Refuse a state that does not belong to this model, or holds a number that is not finite."""
    if state.idle.keys() != _idle(learner).keys():
        raise _misfit(f"it was saved with the channels {sorted(state.idle)}, this run has {sorted(_idle(learner))}")
    if not 0 <= state.splits <= MAX_SPLITS:
        raise _misfit(f"it halved its microbatches {state.splits} times, no run does so more than {MAX_SPLITS} times")
    _check_tensors("weights", state.weights, _specs(weights_of(learner.net)))
    _check_masters(learner, state)
    if (learner.reference is None) != (state.reference is None):
        has, has_not = ("the state", "this run") if learner.reference is None else ("this run", "the state")
        raise _misfit(f"{has} has a reference model (beta > 0), {has_not} has none")
    if learner.reference is not None and state.reference is not None:
        _check_tensors("reference", state.reference, _specs(weights_of(learner.reference)))
    parameters = learner.trained()
    if unknown := sorted(state.moments.keys() - parameters):
        raise _misfit(f"the optimiser state has {len(unknown)} parameters that the model has not, first {unknown[0]!r}")
    for name, kept in state.moments.items():
        _check_tensors(f"optimiser state of {name}", kept, moment_specs(parameters[name]))
        if float(kept["step"]) < 0 or float(kept["step"]) % 1:
            raise _misfit(f"the optimiser state of {name} counts {float(kept['step'])} steps")
    for (group, index), value in state.old.items():
        if value.dim() != 1 or not value.is_floating_point() or not bool(value.isfinite().all()):
            raise _misfit(f"the old logprobs of {group!r}/{index} are not a row of finite numbers")


def _check_masters(learner: GRPOLearner, state: TrainingState) -> None:
    """The masters are there where this run needs them, and the weights are the masters, rounded."""
    expected = {} if learner.masters is None else _specs(learner.masters.tensors)
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


def moment_specs(parameter: Tensor) -> dict[str, Spec]:
    """What AdamW keeps for this parameter."""
    own = Spec.of(parameter)
    return {"step": Spec("F32", ()), "exp_avg": own, "exp_avg_sq": own}


def save_training_checkpoint(
    learner: GRPOLearner, tokenizer: Any, folder: Path, *, step: int, extra: Mapping[str, Any] | None = None
) -> Path:
    """Save weights, tokenizer and training state as one folder, durably; plain `transformers` loads it too.

    Args:
        folder: the final name, such as `checkpoints/step_7`; it must not exist.
        extra: whatever else the run needs to go on (data position, guard ...), as JSON.

    Returns:
        `folder`, which exists only if everything in it was written.
    """
    state = capture(learner)
    temporary = folder.with_name(f".{folder.name}.partial")
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.mkdir(mode=0o700)
        (temporary / FOLDER).mkdir(mode=0o700)
        failpoint("checkpoint.before_files")
        _write_model_files(learner.net, tokenizer, temporary)
        known = write_state(state, temporary, step=step, extra=extra or {})
        facts = {"schema": SCHEMA, "step": step, "version": state.version}
        failpoint("checkpoint.before_commit")
        return commit_folder(temporary, folder, facts, known=known)
    except OSError as error:
        raise storage_error(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already when it was renamed


def write_state(state: TrainingState, folder: Path, *, step: int, extra: Mapping[str, Any]) -> dict[str, Entry]:
    """The files of a state below `folder`, which is not yet visible; returns size and SHA-256 of the large ones."""
    files: dict[str, Named] = {
        WEIGHTS: state.weights,
        OPTIMISER: {f"{key}/{name}": kept[key] for name, kept in state.moments.items() for key in MOMENTS},
    }
    if state.masters is not None:
        files[MASTERS] = state.masters
    if state.reference is not None:
        files[REFERENCE] = state.reference
    if state.old:
        files[OLD] = {"old": torch.cat(list(state.old.values()))}
    entries = {name: write_tensors(folder / name, tensors) for name, tensors in files.items()}
    failpoint("checkpoint.after_weights")
    write_json(folder / STATE, _as_json(state, step) | {"extra": dict(extra)})
    return entries


def _write_model_files(net: Any, tokenizer: Any, folder: Path) -> None:
    """Config and tokenizer; the weights we write ourselves, to hash them while they are written."""
    try:
        net.save_pretrained(folder, state_dict={})
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
        "checked_tokens": state.checked_tokens, "census": None if state.census is None else asdict(state.census),
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


def _stepped(learner: GRPOLearner) -> Iterator[tuple[str, Any]]:
    """Parameters that the optimiser has a memory of."""
    for name, parameter in learner.trained().items():
        if learner.optimiser.state.get(parameter):
            yield name, parameter


def _specs(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    return {name: Spec.of(value) for name, value in tensors.items()}


def _check_tensors(what: str, found: Mapping[str, Tensor], expected: Mapping[str, Spec]) -> None:
    if found.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        raise _misfit(f"{what}: {len(missing)} missing {missing[:1]}, {len(extra)} extra {extra[:1]}")
    for name, value in found.items():
        if Spec.of(value) != expected[name]:
            raise _misfit(f"{what}: {name} is {Spec.of(value)}, this model has {expected[name]}")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise _misfit(f"{what}: {name} holds a number that is not finite")


def _copy_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Keep the memory, change the numbers: tied weights stay tied, engines keep their views."""
    for name, target in targets.items():
        target.copy_(values[name])


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
