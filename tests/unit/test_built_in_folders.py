"""Every built-in model: loadable by plain transformers, as its manifest says, with one vocabulary in all its files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pebble_kit import ASSETS, read_model, read_tokenizer
from transformers import AutoConfig, GenerationConfig

MOST_BYTES = {"pebble": 4_000_000, "pebble_tools": 3_000_000}


@pytest.fixture(scope="module", params=MOST_BYTES)
def folder(request: pytest.FixtureRequest) -> Path:
    return ASSETS / str(request.param)


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return read_tokenizer(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return read_model(folder)


def test_all_built_in_models_are_looked_at() -> None:
    assert {path.parent.name for path in ASSETS.glob("*/manifest.json")} == set(MOST_BYTES)


def test_every_file_is_the_one_the_manifest_describes(folder: Path, manifest: Any) -> None:
    shipped = {p.name for p in folder.iterdir() if p.is_file()} - {"manifest.json", f"make_{folder.name}.py"}
    assert shipped == set(manifest["files"])
    for name, told in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (told["bytes"], told["sha256"]), name


def test_the_folder_is_a_few_megabytes_of_bfloat16(folder: Path, manifest: Any) -> None:
    assert sum(told["bytes"] for told in manifest["files"].values()) <= MOST_BYTES[folder.name]
    assert AutoConfig.from_pretrained(folder).dtype == torch.bfloat16


def test_nothing_in_the_folder_names_a_machine(folder: Path, manifest: Any) -> None:
    for name in manifest["files"]:
        if not name.endswith(".safetensors"):
            text = (folder / name).read_text()
            assert not any(word in text for word in ("/home/", "/tmp/", "/root/", "/work/", "http")), name


def test_tokenizer_config_and_embedding_agree_on_the_vocabulary(tokenizer: Any, model: Any) -> None:
    assert len(tokenizer) == model.config.vocab_size == model.get_input_embeddings().weight.shape[0]


def test_all_three_configs_agree_on_two_different_special_tokens(folder: Path, tokenizer: Any, model: Any) -> None:
    generation = GenerationConfig.from_pretrained(folder)
    assert tokenizer.eos_token_id == model.config.eos_token_id == generation.eos_token_id
    assert tokenizer.pad_token_id == model.config.pad_token_id == generation.pad_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.bos_token_id is model.config.bos_token_id is None


def test_text_comes_back_character_by_character(tokenizer: Any) -> None:
    text = "".join(map(chr, range(32, 127))) + "\n  two  spaces , and 'quotes' n't .\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
