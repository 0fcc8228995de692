"""The built-in run on a GPU: the same command, one key changed. Skipped, and counted, where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import SHORT, surefoot


@pytest.mark.gpu("learn")
def test_the_built_in_run_learns_on_a_gpu(tmp_path: Path) -> None:
    ran = surefoot("train", *SHORT, "device=cuda", cwd=tmp_path, fresh=True)
    assert ran.code == 0, ran.err
    step_1 = next(m for m in ran.metrics if m["step"] == 1 and "reward" in m)
    assert 0 < step_1["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.gpu("learn")
@pytest.mark.config_key("dtype", "device")
def test_bfloat16_runs_within_its_own_parity_bound(tmp_path: Path) -> None:
    ran = surefoot("train", "max_steps=3", "device=cuda", "dtype=bfloat16", cwd=tmp_path, fresh=True)
    assert ran.code == 0, ran.err
    gaps = [m["sampling/sampling_logp_difference/max"] for m in ran.metrics if "reward" in m]
    assert gaps[0] < 0.2, "the bound at step 1"
    assert max(gaps) < 2.0, "ten times that later: single tokens of a model that moves"
    assert max(gaps) > 1e-4, "bfloat16 was really used"


@pytest.mark.gpu("learn")
@pytest.mark.config_key("dtype")
def test_the_built_in_run_reaches_its_target_in_bfloat16_on_a_gpu(tmp_path: Path) -> None:
    """All 200 steps, with the target of the built-in config, which is judged because nothing of the run is set."""
    ran = surefoot("train", "device=cuda", "dtype=bfloat16", cwd=tmp_path, fresh=True)
    assert ran.code == 0, ran.out[-3000:] + ran.err
    assert ran.verdict["status"] == "PASS"
    assert ran.verdict["target"] == ["eval_accuracy", 0.85]
    assert ran.verdict["executed_steps"] == 200
    looked = surefoot("eval", "run", cwd=tmp_path, fresh=True)
    assert looked.code == 0, looked.err


@pytest.mark.gpu("learn")
def test_bfloat16_changes_as_many_master_entries_as_float32_on_a_gpu(tmp_path: Path) -> None:
    words = ["max_steps=4", "learning_rate=1e-6", "device=cuda"]
    shares: dict[str, list[float]] = {}
    for dtype in ("bfloat16", "float32"):
        ran = surefoot("train", *words, f"dtype={dtype}", cwd=tmp_path, run=dtype, fresh=True)
        assert ran.code == 0, ran.err
        for name in ("changed", "published"):
            shares[f"{dtype}/{name}"] = [m[f"updates/{name}_share"] for m in ran.metrics if "reward" in m]
    assert len(shares["float32/changed"]) == 4
    assert min(shares["float32/changed"]) > 0.9
    assert shares["bfloat16/changed"] == pytest.approx(shares["float32/changed"], abs=0.01)
    assert shares["float32/published"] == shares["float32/changed"]
    assert all(0 < share < 0.1 for share in shares["bfloat16/published"])


@pytest.mark.gpu("learn")
def test_planted_bf16_optimiser_stops_the_run_on_a_gpu(tmp_path: Path) -> None:
    words = ["max_steps=4", "learning_rate=1e-6", "device=cuda", "dtype=bfloat16"]
    ran = surefoot("train", *words, cwd=tmp_path, planted="pure_bfloat16", fresh=True)
    assert ran.code == 78, ran.err
    assert "raise learning_rate" in ran.err


@pytest.mark.gpu("resume")
def test_a_bfloat16_run_on_a_gpu_is_resumed_with_its_masters(tmp_path: Path) -> None:
    words = ["max_steps=6", "save_steps=3", "device=cuda", "dtype=bfloat16"]
    killed = surefoot(
        "train", *words, cwd=tmp_path, env={"SUREFOOT_FAILPOINTS": "learner.after_step=kill@5"}, fresh=True
    )  # fmt: skip
    assert killed.code < 0, killed.err
    assert (tmp_path / "run/checkpoints/step_3/training/masters.safetensors").exists()
    resumed = surefoot("train", "--resume", "run", cwd=tmp_path, run="", fresh=True)
    assert resumed.code == 0, resumed.err
    assert (tmp_path / "run/checkpoints/step_6/training/masters.safetensors").exists()


@pytest.mark.gpu("learn")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_beside_four_bits_learns_on_a_gpu_as_on_a_cpu(dtype: str, tmp_path: Path) -> None:
    """What is packed is packed on the CPU, so the base is the same to the last bit, and a look at it there is allowed."""
    pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    words = [
        "lora.rank=16",
        "quantization=nf4",
        "learning_rate=1e-3",
        f"dtype={dtype}",
        "eval_tasks=400",
        "eval_steps=24",
    ]
    ran = surefoot("train", *words, "max_steps=24", "device=cuda", cwd=tmp_path, fresh=True)
    assert ran.code == 0, ran.err
    first, last = (m["eval_accuracy"] for m in ran.metrics if "eval_accuracy" in m)
    assert last > first + 0.1
    bound = {"float32": 1e-4, "bfloat16": 0.2}[dtype]
    assert next(m for m in ran.metrics if "reward" in m)["sampling/sampling_logp_difference/max"] < bound
    merged = surefoot("export", "run", "--merged", "--out", "merged", cwd=tmp_path, fresh=True)
    assert merged.code == 0, merged.err
    planted = surefoot(
        "train", *words, "max_steps=2", "device=cuda", cwd=tmp_path, run="planted", planted="engines_get_the_file",
        fresh=True,
    )  # fmt: skip
    assert planted.code == 78, planted.err


@pytest.mark.gpu("learn")
def test_a_base_in_four_bits_takes_the_gpu_memory_that_is_promised(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from surefoot.learner.quantised import BYTES_PER_WEIGHT, quantise

    pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    net = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8)
    )
    base = quantise(net, (), torch.bfloat16)
    before = torch.cuda.memory_allocated()
    base.move("cuda")
    entries = sum(each.entries for each in base.layers.values())
    assert torch.cuda.memory_allocated() - before == pytest.approx(entries * BYTES_PER_WEIGHT, rel=0.01)
    for layer in base.layers.values():
        assert torch.equal(layer.weight.cpu(), quantise_again(layer)), "as a CPU has it"


def quantise_again(layer: Any) -> Any:
    """What the same bytes come back as on a CPU."""
    from surefoot.learner.quantised import _unpack

    flat = _unpack(layer.packed.cpu(), layer.scales.cpu())[: layer.entries]
    return flat.view(layer.out_features, layer.in_features).to(layer.dtype)
