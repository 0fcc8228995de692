"""A checkpoint that is not what was saved is refused by name, before there is memory for it, and changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import Session, fingerprint, make_learner, make_tokenizer, resealed
from safetensors.torch import load_file, save_file

from surefoot.errors import StateError
from surefoot.learner import checkpoint, tensor_file
from surefoot.learner.checkpoint import (
    capture,
    load_training_checkpoint,
    load_weights,
    save_training_checkpoint,
    weights_of,
)
from surefoot.learner.grpo import GRPOLearner
from surefoot.learner.tensor_file import Spec, check_fits, read_header, read_tensors, write_tensors

pytestmark = pytest.mark.usefixtures("one_thread")
WEIGHTS, OPTIMISER, STATE = "model.safetensors", "training/optimiser.safetensors", "training/state.json"


@pytest.fixture(scope="module")
def original(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Session(make_learner()).train(3).save(tmp_path_factory.mktemp("saved") / "step_3")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(original, tmp_path / "step_3"))


@pytest.fixture(scope="module")
def learner(one_thread: None) -> GRPOLearner:
    return make_learner(seed=5)


def refused(folder: Path, word: str, learner: GRPOLearner) -> None:
    before = fingerprint(capture(learner))
    with pytest.raises(StateError, match=word):
        load_training_checkpoint(learner, folder)
    assert fingerprint(capture(learner)) == before, "a refusal changed the learner"


def edit_json(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change state.json and make the manifest agree, as somebody who knows the format would."""
    path = folder / STATE
    record = json.loads(path.read_text())
    record = change(record) or record
    path.write_text(json.dumps(record))
    return resealed(folder)


# -- another model ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": 48}, r"is F32\[.*\], this model has F32\["),
        ({"num_hidden_layers": 3}, "tensors are missing, first 'model.layers.2"),
        ({"num_hidden_layers": 1}, "stepped parameters are not in this model, first 'model.layers.1"),
        ({"vocab_size": 64}, r"embed_tokens.weight is F32\[61, 32\], this model has F32\[64, 32\]"),
        ({"tie_word_embeddings": False}, "missing, first 'lm_head.weight'"),
    ],
)
def test_another_shape_is_refused_with_both_shapes(
    changes: dict[str, int], word: str, original: Path, make_net: Any
) -> None:
    refused(original, word, GRPOLearner(make_net(**changes), make_learner().settings))


def test_another_dtype_is_refused(original: Path, make_net: Any) -> None:
    other = GRPOLearner(make_net().to(torch.bfloat16), make_learner().settings)
    refused(original, "saved without float32 masters, this run trains with: another dtype", other)


def test_a_run_without_the_reference_is_refused(original: Path) -> None:
    refused(original, "saved with a reference model, this run has beta = 0.0", make_learner(beta=0.0))


# -- schema and kinds, with a manifest that agrees ---------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda r: r.update(schema=3), "a newer surefoot wrote it: schema is 3, this one knows 2"),
        (lambda r: r.update(version=4), "version is 4, the manifest says 3"),
        (lambda r: r.update(step=4), "step is 4, the manifest says 3"),
        (lambda r: r.update(version=True), "'version' is 'True', not a count"),
        (lambda r: r.update(pushes=-1), "not a count"),
        (lambda r: r.update(checked_tokens=1.0), "not a count"),
        (lambda r: r.update(kl_seen=1), "kl_seen is not a bool"),
        (lambda r: r.update(extra=[]), "extra is not a dict"),
        (lambda r: r.update(idle={"a": "b"}), "not a count"),
        (lambda r: r.update(idle={"a": 1}), r"channels \['a'\]"),
        (lambda r: r.update(surprise=1), "keys are missing or unknown, first 'surprise'"),
        (lambda r: r.pop("census") and None, "first 'census'"),
        (lambda r: r.update(census={"total": 1}), "census is not what was counted"),
        (lambda r: r["census"].update(still=[1]), "census.still"),
        (lambda r: r.update(stepped=["model.norm.weight"] * 2), "stepped is not a list of names"),
        (lambda r: r.update(stepped=["\ud800"]), "not in this model"),
        (lambda r: r["stepped"].pop() and None, "have no place in this model"),
        (lambda r: r.update(old=[]), "old is not a dict"),
        (lambda r: r["old"].update(dtype="I8"), "old is not a dtype and rows"),
        (lambda r: r["old"]["rows"].append(["g", 0]), "row of old"),
        (lambda r: r["old"]["rows"].append(["g", 0, 1 << 39]), "this model has F32"),
        (lambda r: r["old"]["rows"].append(r["old"]["rows"][0]), "occurs twice"),
        (lambda r: r["old"].update(rows=[]), "which nothing asks for"),
        (lambda r: r.update(has_reference=False), "saved with no reference model"),
        (lambda r: ["a list"], "does not hold a JSON object"),
    ],
)
def test_a_state_of_the_wrong_form_is_refused(
    change: Callable[[dict[str, Any]], Any], word: str, folder: Path, learner: GRPOLearner
) -> None:
    refused(edit_json(folder, change), word, learner)


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", '{"schema": NaN}', '{"schema": 1, "schema": 1}', "[" * 100_000, "\xff\xfe", "9" * 5000]
)
def test_json_that_we_do_not_write_is_refused(text: str, folder: Path, learner: GRPOLearner) -> None:
    (folder / STATE).write_text(text, encoding="latin-1")
    refused(resealed(folder), r"state\.json", learner)


def test_a_checkpoint_of_weights_alone_is_no_state_to_resume_from(folder: Path, learner: GRPOLearner) -> None:
    shutil.rmtree(folder / "training")
    refused(resealed(folder), "holds weights, but no training state", learner)


# -- the folder -------------------------------------------------------------------------------


def damaged(folder: Path, how: str) -> str:
    """Damage it without touching the manifest; returns what the refusal has to name."""
    path = folder / OPTIMISER
    if how == "flipped bit":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "missing":
        path.unlink()
    elif how == "swapped":
        (folder / "training/reference.safetensors").write_bytes((folder / WEIGHTS).read_bytes())
        return "reference.safetensors"
    elif how == "extra":
        (folder / "more.safetensors").write_bytes(b"")
        return "more.safetensors"
    elif how == "link":
        path.rename(folder.parent / "elsewhere")
        path.symlink_to(folder.parent / "elsewhere")
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    return "optimiser.safetensors"


@pytest.mark.parametrize("how", ["flipped bit", "truncated", "missing", "swapped", "extra", "link", "pipe"])
def test_a_damaged_file_is_refused_by_name(how: str, folder: Path, learner: GRPOLearner) -> None:
    refused(folder, damaged(folder, how), learner)


def test_a_checkpoint_under_another_steps_name_is_refused(folder: Path, learner: GRPOLearner) -> None:
    folder.rename(folder.with_name("step_4"))
    refused(folder.with_name("step_4"), "its manifest says step 3", learner)


def test_a_file_too_large_for_the_model_is_not_even_hashed(
    folder: Path, learner: GRPOLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(folder / OPTIMISER, 1 << 40)  # sparse: a terabyte on paper
    manifest = json.loads((folder / "manifest.json").read_text())
    resealed(folder, sizes={OPTIMISER: 1 << 40}, digests=manifest["files"])
    monkeypatch.setattr(checkpoint, "verify_folder", None)  # where the hashing begins
    refused(folder, "this model can need", learner)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, learner: GRPOLearner) -> None:
    refused(tmp_path / "step_9", "step_9", learner)


def test_names_with_spaces_and_letters_from_anywhere_are_fine(tmp_path: Path) -> None:
    folder = save_training_checkpoint(make_learner(), make_tokenizer(), tmp_path / "my tüte" / "step_0", step=0)
    assert load_training_checkpoint(make_learner(seed=2), folder).step == 0


def test_planted_reader_that_skips_the_digests_is_seen(
    folder: Path, learner: GRPOLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teeth: without the SHA-256 a flipped bit in a moment is loaded without a word."""
    damaged(folder, "flipped bit")
    fresh = make_learner(seed=6)
    before = fingerprint(capture(fresh))
    monkeypatch.setattr(checkpoint, "verify_folder", checkpoint.read_manifest)
    load_training_checkpoint(fresh, folder)
    assert fingerprint(capture(fresh)) != before
    monkeypatch.undo()
    refused(folder, "SHA-256", learner)


# -- weights alone ----------------------------------------------------------------------------


def test_weights_alone_go_into_a_model_of_the_same_shape(original: Path, make_net: Any) -> None:
    net = make_net(seed=8)
    assert load_weights(net, original).facts["step"] == 3
    saved = load_file(original / WEIGHTS)
    assert all(torch.equal(value, saved[name]) for name, value in weights_of(net).items())
    with pytest.raises(StateError, match="this model has"):
        load_weights(make_net(hidden_size=48), original)


def test_weights_that_are_not_finite_are_refused(folder: Path, make_net: Any, learner: GRPOLearner) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][7] = float("nan")
    save_file(tensors, folder / WEIGHTS)
    resealed(folder)
    refused(folder, "model.norm.weight holds a number that is not finite", learner)
    net = make_net()
    before = {name: value.clone() for name, value in weights_of(net).items()}
    with pytest.raises(StateError, match="not finite"):
        load_weights(net, folder)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(net).items())


# -- one tensor file --------------------------------------------------------------------------

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3.5), "c": torch.zeros(0, 4),
    "d é": torch.ones(5, dtype=torch.bfloat16), "e": torch.arange(3), "f": torch.tensor([True, False]),
}  # fmt: skip


def test_a_file_of_ours_is_a_safetensors_file(tmp_path: Path) -> None:
    entry = write_tensors(tmp_path / "t", TENSORS)
    data = (tmp_path / "t").read_bytes()
    assert (entry.size, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    theirs = load_file(tmp_path / "t")
    ours = read_tensors(tmp_path / "t", {name: Spec.of(value) for name, value in TENSORS.items()})
    for name, value in TENSORS.items():
        assert torch.equal(theirs[name], value)
        assert torch.equal(ours[name], value)
    assert data[8 : 8 + struct.unpack("<Q", data[:8])[0]].isascii() is False, "names are written as they are"


def test_a_file_of_theirs_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "t")
    assert read_header(tmp_path / "t") == {name: Spec.of(value) for name, value in TENSORS.items()}


@pytest.mark.parametrize("block", [1, 3, 64])
def test_the_size_of_a_block_changes_nothing(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_tensors(tmp_path / "a", TENSORS)
    monkeypatch.setattr(tensor_file, "BLOCK", block)
    assert write_tensors(tmp_path / "b", TENSORS) == whole
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_strided_tensors_are_written_as_they_read(tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(3, 4).t()
    write_tensors(tmp_path / "t", {"v": value})
    assert torch.equal(load_file(tmp_path / "t")["v"], value)


def handmade(header: Any, data: bytes = b"\0" * 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "header of 0 bytes"),
        (b"\x08\0\0", "header of 0 bytes"),
        (handmade({"a": entry()}, length=1 << 63), "header of"),
        (handmade({"a": entry()}, length=1000), "header of 1000"),
        (handmade({"a": entry()}, length=0), "header of 0"),
        (handmade(b"{" * 50), "JSON"),
        (handmade(b'{"a":' * 50_000), "JSON"),
        (handmade([]), "JSON object"),
        (handmade(b'{"a": {}, "a": {}}'), "more than once"),
        (handmade({"a": 3}), "not a dtype, a shape and offsets"),
        (handmade({"a": entry() | {"code": "x"}}), "not a dtype"),
        (handmade({"a": entry("F32x")}), "dtype 'F32x'"),
        (handmade({"a": entry(["F32"])}), "dtype"),
        (handmade({"a": entry(shape=[-2])}), "shape"),
        (handmade({"a": entry(shape=[True, 2])}), "shape"),
        (handmade({"a": entry(shape="2")}), "shape"),
        (handmade({"a": entry(shape=[1] * 17 + [2])}), "shape"),
        (handmade({"a": entry(shape=[1 << 40, 1 << 40])}), "yet lies from byte 0 to 8"),
        (handmade({"a": entry(shape=[3])}), "yet lies"),
        (handmade({"a": entry(offsets=[8, 0])}), "yet lies"),
        (handmade({"a": entry(offsets=[0])}), "offsets"),
        (handmade({"a": entry(offsets=[0, 8.0])}), "offsets"),
        (handmade({"a": entry(offsets=[8, 16])}, b"\0" * 16), "begins at byte 8"),
        (handmade({"a": entry(), "b": entry()}), "begins at byte 0, the tensor before it ends at 8"),
        (handmade({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12), "begins at byte 4"),
        (handmade({"a": entry()}, b"\0" * 9), "take 8 bytes, the file holds 9"),
        (handmade({"a": entry()}, b"\0" * 7), "take 8 bytes, the file holds 7"),
        (handmade({"a": entry(), "__metadata__": {"k": 1}}), "metadata"),
        (handmade({"a": entry(), "__metadata__": "x"}), "metadata"),
        (handmade({f"t{i}": entry(shape=[0], offsets=[0, 0]) for i in range(300_000)}, b""), "header of"),
        (b"\x80\x04\x95" + b"c__builtin__\neval\n", "header of"),
    ],
)  # fmt: skip
def test_a_hostile_header_is_refused(data: bytes, word: str, tmp_path: Path) -> None:
    (tmp_path / "t.safetensors").write_bytes(data)
    with pytest.raises(StateError, match=word):
        read_header(tmp_path / "t.safetensors")


def test_a_sound_header_made_by_hand_passes(tmp_path: Path) -> None:
    """The cases above are refused for what they name, not for how they were made."""
    (tmp_path / "t").write_bytes(handmade({"a": entry(), "__metadata__": {"format": "pt"}}))
    assert read_header(tmp_path / "t") == {"a": Spec("F32", (2,))}


def test_missing_and_extra_tensors_are_named(tmp_path: Path) -> None:
    spec = Spec("F32", (2,))
    with pytest.raises(StateError, match=r"1 of 2 tensors are missing, first 'b'"):
        check_fits(tmp_path, {"a": spec}, {"a": spec, "b": spec})
    with pytest.raises(StateError, match=r"1 tensors have no place in this model, first 'z'"):
        check_fits(tmp_path, {"a": spec, "z": spec}, {"a": spec})
