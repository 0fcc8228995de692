"""A model that asks for an account: its own template and tokenizer, through our codec.

Run it by `scripts/run_unit.sh --hf-gated` with HF_TOKEN set. Tests never download: fetch the tokenizer first.
SUREFOOT_GATED_MODEL names another model, or a folder.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

MODEL = os.environ.get("SUREFOOT_GATED_MODEL", "meta-llama/Llama-3.2-1B-Instruct")
TALK = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    except OSError:
        pytest.skip(f"no asset: {MODEL} is not in the cache: hf download {MODEL} --include '*.json'")


@pytest.mark.hf_gated
def test_a_gated_models_prompt_is_what_its_own_tokenizer_makes_of_it(tokenizer: Any) -> None:
    from surefoot.learner.chat import ChatCodec

    codec = ChatCodec(tokenizer, frozenset({tokenizer.eos_token_id}), len(tokenizer))
    ids = codec.encode_prompt(TALK)
    text = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    assert list(ids) == tokenizer(text, add_special_tokens=False).input_ids
    assert "12 + 30" in codec.decode(ids)
