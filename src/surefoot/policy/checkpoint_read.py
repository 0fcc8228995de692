"""A checkpoint back into a learner, after everything about it was found to be right.

Promises   in this order: no file larger than this model can need; names, count, sizes and SHA-256 as the manifest
           says; schema; every tensor file's header, names, shapes and dtypes against the live model; only then memory.
           A changed shape, a missing or extra tensor, a newer schema is a `StateError` with the file and the reason,
           and the learner is as it was before.
Never      treats a state that it cannot read as no state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from surefoot.plain_file import open_plain
from surefoot.policy.census import Census
from surefoot.policy.learner import GRPOLearner
from surefoot.policy.tensor_file import Spec, check_fits, read_header, read_tensors
from surefoot.policy.training_state import (
    MASTERS,
    MOMENTS,
    OLD,
    OPTIMISER,
    REFERENCE,
    SCHEMA,
    STATE,
    WEIGHTS,
    TrainingState,
    moment_specs,
    restore,
    weights_of,
)
from surefoot.store.manifest import Manifest, parse_json, read_manifest, refusal, verify_folder

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
class Loaded:
    """What a checkpoint says beside the learner's own state."""

    step: int
    version: int
    extra: Mapping[str, Any]


def load_training_checkpoint(learner: GRPOLearner, folder: Path) -> Loaded:
    """Restore a learner from a folder that `save_training_checkpoint` wrote."""
    manifest = _verified(learner.net, folder)
    record = _read_record(manifest)
    expected = _expected(learner, manifest, record)
    state = _read_state(manifest, record, expected)
    restore(learner, state)
    return Loaded(record["step"], state.version, record["extra"])


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
    parameters = learner.trained()
    if unknown := sorted(set(record["stepped"]) - parameters.keys()):
        raise refusal(path, f"{len(unknown)} stepped parameters are not in this model, first {unknown[0][:200]!r}")
    if record["has_reference"] != (learner.reference is not None):
        has = "a reference model" if record["has_reference"] else "no reference model"
        raise refusal(path, f"it was saved with {has}, this run has beta = {learner.settings.loss.beta}")
    weights = {name: Spec.of(value) for name, value in weights_of(learner.net).items()}
    moments = {f"{key}/{name}": moment_specs(parameters[name])[key] for name in record["stepped"] for key in MOMENTS}
    expected = {WEIGHTS: weights, OPTIMISER: moments}
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


def _read_state(manifest: Manifest, record: Mapping[str, Any], expected: Expected) -> TrainingState:
    for name, specs in expected.items():  # all headers before the first tensor
        check_fits(manifest.path(name), read_header(manifest.path(name)), specs)
    tensors = {name: read_tensors(manifest.path(name), specs) for name, specs in expected.items()}
    moments = tensors[OPTIMISER]
    return TrainingState(
        version=record["version"], pushes=record["pushes"], kl_seen=record["kl_seen"],
        checked_tokens=record["checked_tokens"], census=_census(manifest.path(STATE), record["census"]),
        splits=record["splits"], changed_entries=record["changed_entries"], idle=record["idle"],
        weights=tensors[WEIGHTS],
        moments={name: {key: moments[f"{key}/{name}"] for key in MOMENTS} for name in record["stepped"]},
        masters=tensors.get(MASTERS), reference=tensors.get(REFERENCE),
        old=_old(manifest.path(STATE), record, tensors.get(OLD)),
    )  # fmt: skip


def _old(path: Path, record: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> dict[tuple[str, int], Tensor]:
    rows = _old_rows(path, record)
    if tensors is None:
        return {}
    pieces = tensors["old"].split([length for _, _, length in rows])
    return {(group, index): piece for (group, index, _), piece in zip(rows, pieces, strict=True)}


def _census(path: Path, value: Any) -> Census | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.keys() != {"total", "with_gradient", "moved", "still"}:
        raise refusal(path, "census is not what was counted")
    if not _are_words(value["still"]):
        raise refusal(path, "census.still is not a list of names")
    total, with_gradient, moved = (_count(path, value, key) for key in ("total", "with_gradient", "moved"))
    return Census(total, with_gradient, moved, tuple(value["still"]))


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
