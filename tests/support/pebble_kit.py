"""The built-in models' folders: where they are, the script that makes one, and what a conversation is in token ids."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import surefoot

ASSETS = Path(surefoot.__file__).parent / "assets"


def maker(name: str) -> Any:
    """The script in a model's folder, imported without running it."""
    spec = importlib.util.spec_from_file_location(f"make_{name}", ASSETS / name / f"make_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_tokenizer(folder: Path) -> Any:
    """As a stranger would."""
    return AutoTokenizer.from_pretrained(folder)


def read_model(folder: Path) -> Any:
    """As a stranger would, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def read_once(folder: Path) -> tuple[Any, Any]:
    """The fixtures `tokenizer` and `model` of a file of tests."""

    @pytest.fixture(scope="module")
    def tokenizer() -> Any:
        return read_tokenizer(folder)

    @pytest.fixture(scope="module")
    def model() -> Any:
        return read_model(folder)

    return tokenizer, model


def render(tokenizer: Any, messages: Sequence[dict[str, Any]], *, prompt: bool = False) -> list[int]:
    """The token ids of a conversation, as its chat template writes it."""
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
    return ids
