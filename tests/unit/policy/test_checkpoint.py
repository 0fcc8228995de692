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
from surefoot.policy.checkpoint import save_checkpoint


def test_plain_transformers_reads_back_bit_equal_weights_and_the_tokenizer(
    architecture: str, tmp_path: Path, make_net: Any, make_tokenizer: Any
) -> None:
    net = make_net(architecture)
    folder = save_checkpoint(net, make_tokenizer(), tmp_path / "step_3", step=3, version=2)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.dtype == torch.float32
    before, after = net.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()
    assert tokenizer.chat_template == make_tokenizer().chat_template


def test_the_manifest_lists_every_file_with_its_digest(tmp_path: Path, make_net: Any, make_tokenizer: Any) -> None:
    folder = save_checkpoint(make_net(), make_tokenizer(), tmp_path / "step_3", step=3, version=2)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["version"]) == (3, 2)
    assert set(manifest["files"]) == {p.name for p in folder.iterdir()} - {"manifest.json"}
    data = (folder / "model.safetensors").read_bytes()
    assert manifest["files"]["model.safetensors"] == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_an_existing_checkpoint_is_never_overwritten(tmp_path: Path, make_net: Any, make_tokenizer: Any) -> None:
    folder = save_checkpoint(make_net(), make_tokenizer(), tmp_path / "step_3", step=3, version=2)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(StateError, match="exists already"):
        save_checkpoint(make_net(seed=1), make_tokenizer(), folder, step=3, version=3)
    assert (folder / "model.safetensors").read_bytes() == before


class _Breaks:
    """Writes half of itself, then fails as the disk or a signal would."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def save_pretrained(self, folder: Path, **kwargs: Any) -> None:
        (Path(folder) / "half.bin").write_bytes(b"half")
        raise self.error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("broken", ["weights", "tokenizer"])
def test_a_save_that_fails_midway_leaves_no_checkpoint(
    broken: str, error: BaseException, tmp_path: Path, make_net: Any, make_tokenizer: Any
) -> None:
    net, tokenizer = make_net(), make_tokenizer()
    parts: tuple[Any, Any] = (_Breaks(error), tokenizer) if broken == "weights" else (net, _Breaks(error))
    with pytest.raises((OSError, KeyboardInterrupt, StorageError)):
        save_checkpoint(parts[0], parts[1], tmp_path / "step_3", step=3, version=2)
    assert not (tmp_path / "step_3").exists()
    folder = save_checkpoint(net, tokenizer, tmp_path / "step_3", step=3, version=2)
    assert not (folder / "half.bin").exists(), "what the failed attempt left behind was taken over"
    assert [p.name for p in tmp_path.iterdir()] == ["step_3"]


def test_a_full_disk_is_a_storage_error(tmp_path: Path, make_tokenizer: Any) -> None:
    with pytest.raises(StorageError, match="No space left on device"):
        save_checkpoint(
            _Breaks(OSError(errno.ENOSPC, "No space left on device")),
            make_tokenizer(),
            tmp_path / "s",
            step=1,
            version=1,
        )
