"""Saved weights are the weights, for plain transformers too; a folder is complete or absent."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from surefoot.errors import StateError, StorageError
from surefoot.learner import checkpoint
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.maths.losses import LossSettings


def save(net: Any, tokenizer: Any, folder: Path) -> Path:
    """What a run saves after step 3."""
    learner = GRPOLearner(net, LearnerSettings(LossSettings(), 1e-2, 10, 9, 1.0, 0))
    return checkpoint.save_training_checkpoint(learner, tokenizer, folder, step=3)


def test_plain_transformers_reads_back_bit_equal_weights_and_the_tokenizer(
    architecture: str, tmp_path: Path, make_net: Any, make_tokenizer: Any
) -> None:
    net = make_net(architecture)
    folder = save(net, make_tokenizer(), tmp_path / "step_3")
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.dtype == torch.float32
    before, after = net.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()
    assert tokenizer.chat_template == make_tokenizer().chat_template


def test_the_manifest_lists_every_file_with_its_digest(tmp_path: Path, make_net: Any, make_tokenizer: Any) -> None:
    folder = save(make_net(), make_tokenizer(), tmp_path / "step_3")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["version"]) == (3, 0)
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert set(manifest["files"]) == found - {"manifest.json"}
    data = (folder / "model.safetensors").read_bytes()
    assert manifest["files"]["model.safetensors"] == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_an_existing_checkpoint_is_never_overwritten(tmp_path: Path, make_net: Any, make_tokenizer: Any) -> None:
    folder = save(make_net(), make_tokenizer(), tmp_path / "step_3")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(StateError, match="exists already"):
        save(make_net(seed=1), make_tokenizer(), folder)
    assert (folder / "model.safetensors").read_bytes() == before


class _Breaks:
    """Writes half of itself, then fails as the disk or a signal would."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def save_pretrained(self, folder: Path, **kwargs: Any) -> None:
        (Path(folder) / "half.bin").write_bytes(b"half")
        raise self.error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("broken", ["config", "weights", "tokenizer"])
def test_a_save_that_fails_midway_leaves_no_checkpoint(
    broken: str, error: BaseException, tmp_path: Path, make_net: Any, make_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    breaks, tokenizer = _Breaks(error), make_tokenizer()
    with monkeypatch.context() as patched:
        net = make_net()
        if broken == "config":
            patched.setattr(type(net), "save_pretrained", lambda self, folder, **_: breaks.save_pretrained(folder))
        if broken == "weights":
            patched.setattr(checkpoint, "write_tensors", lambda path, _: breaks.save_pretrained(path.parent))
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StorageError):
            save(net, breaks if broken == "tokenizer" else tokenizer, tmp_path / "step_3")
    assert not (tmp_path / "step_3").exists()
    folder = save(make_net(), tokenizer, tmp_path / "step_3")
    assert not (folder / "half.bin").exists(), "what the failed attempt left behind was taken over"
    assert [p.name for p in tmp_path.iterdir()] == ["step_3"]


def test_a_full_disk_is_a_storage_error(tmp_path: Path, make_net: Any) -> None:
    with pytest.raises(StorageError, match="No space left on device"):
        save(make_net(), _Breaks(OSError(errno.ENOSPC, "No space left on device")), tmp_path / "s")
