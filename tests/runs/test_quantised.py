"""An adapter beside a base in four bits, through the command: it learns, and everybody computes what four bits give back.

The planted bugs differ from the first run in one thing each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import ROOT, Ran, surefoot
from transformers import AutoModelForCausalLM

pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
PEBBLE = ROOT / "src/surefoot/assets/pebble"
QLORA = ["lora.rank=16", "quantization=nf4", "learning_rate=1e-3", "device=cpu", "threads=1"]
QUICK = [*QLORA, "num_tasks=1000", "tasks_per_step=4", "eval_tasks=20", "preflight_tasks=0", "guard.mode=off"]
LEARNS = [
    *QLORA, "max_steps=24", "eval_steps=24", "eval_tasks=400", "lr_scheduler_type=constant",
    "target_metric=eval_accuracy", "target_value=0.4",
]  # fmt: skip
"""What `test_lora.py` asks of a base in full."""


def steps(ran: Ran) -> list[dict[str, float]]:
    return [m for m in ran.metrics if "reward" in m]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return surefoot("train", *QUICK, "max_steps=3", "save_steps=2", cwd=tmp_path_factory.mktemp("packed"))


@pytest.mark.config_key("quantization")
@pytest.mark.turns(2)
def test_engines_have_what_the_learner_has_beside_a_base_in_four_bits(quick: Ran) -> None:
    assert quick.code == 0, quick.err
    assert quick.verdict["status"] == "PASS"
    rows = steps(quick)
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4
    assert all(row["sync/probe_gap"] < 1e-4 for row in rows)
    assert max(row["sync/probe_move"] for row in rows) > 1e-3
    assert rows[0]["kl"] == 0.0 < rows[-1]["kl"], "the reference is what four bits give back, too"
    facts = json.loads((quick.run / "checkpoints/step_3/manifest.json").read_text())["adapter"]
    assert facts["quantization"] == "nf4"
    versions = json.loads((quick.run / "environment.json").read_text())["versions"]
    assert versions["bitsandbytes"], "the record says what packed it"


@pytest.mark.nightly
def test_an_adapter_beside_four_bits_learns_the_built_in_task(tmp_path: Path) -> None:
    ran = surefoot("train", *LEARNS, cwd=tmp_path)
    assert ran.code == 0, ran.err
    first, last = (m["eval_accuracy"] for m in ran.metrics if "eval_accuracy" in m)
    assert 0.1 <= first <= 0.35
    assert last >= 0.4
    assert ran.verdict["status"] == "PASS"
    again = surefoot("eval", "run", cwd=tmp_path)
    told = next(float(line.split()[1]) for line in again.out.splitlines() if line.startswith("eval_accuracy "))
    assert told == last


@pytest.mark.nightly
@pytest.mark.usefixtures("bfloat16_products")
def test_in_bfloat16_too(tmp_path: Path) -> None:
    ran = surefoot("train", *QUICK, "max_steps=3", "dtype=bfloat16", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps(ran)) < 0.2


@pytest.mark.nightly
def test_planted_engine_with_the_files_weights_is_refused_at_step_1(tmp_path: Path) -> None:
    ran = surefoot("train", *QUICK, "max_steps=3", cwd=tmp_path, planted="engines_get_the_file")
    assert ran.code == 78, ran.err
    assert "does not serve version 0" in ran.err or "sampler and learner disagree" in ran.err
    assert ran.verdict["executed_steps"] == 0


@pytest.mark.nightly
def test_planted_learner_that_takes_bytes_for_weights_is_refused_at_step_1(tmp_path: Path) -> None:
    ran = surefoot("train", *QUICK, "max_steps=3", cwd=tmp_path, planted="bytes_for_weights")
    assert ran.code == 78, ran.err
    assert "does not serve version 0" in ran.err or "sampler and learner disagree" in ran.err
    assert ran.verdict["executed_steps"] == 0


@pytest.mark.nightly
def test_planted_adapter_that_never_reaches_the_engine_is_caught_within_a_step(tmp_path: Path) -> None:
    ran = surefoot("train", *QUICK, "max_steps=5", cwd=tmp_path, planted="adapter_stays_home")
    assert ran.code not in (0, 2, 70), ran.err
    assert ran.verdict["executed_steps"] <= 1
    assert "probe" in ran.err or "disagree" in ran.err


@pytest.mark.nightly
def test_planted_bytes_that_come_back_as_their_neighbours_never_become_a_model(tmp_path: Path) -> None:
    ran = surefoot("train", *QUICK, "max_steps=3", cwd=tmp_path, planted="swapped_nibbles")
    assert ran.code == 1, ran.err
    assert "does not come back from four bits" in ran.err
    assert not (ran.run / "checkpoints").exists() or not list((ran.run / "checkpoints").iterdir())


SAYS = """
import sys
from pathlib import Path
import torch
from surefoot.learner.lora import LoraSettings, with_adapter
from surefoot.learner.model import load_policy
settings = LoraSettings(4, 8.0, ("all-linear",), quantization=sys.argv[1])
with_adapter(load_policy("pebble", base=Path(), device="cpu", dtype="float32", lora=settings), settings)
from peft.import_utils import is_bnb_available
print("bitsandbytes" in sys.modules, is_bnb_available())
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "said"), [("none", "False True"), ("nf4", "True True")])
def test_bitsandbytes_is_imported_for_four_bits_alone_and_never_looks_for_programs(
    kind: str, said: str, tmp_path: Path
) -> None:
    """A package `kernels` that is there would be asked for programs from a hub while bitsandbytes is imported."""
    (tmp_path / "kernels.py").write_text(
        "from pathlib import Path\n\ndef get_kernel(*_, **__):\n    Path(__file__).with_name('asked').touch()\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "harness/src"), str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-c", SAYS, kind], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == said
    assert "Failed to load" not in done.stderr
    assert not (tmp_path / "asked").exists()


# -- what is left -------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_merged_model_is_what_the_run_served_and_not_the_file_with_the_adapter(quick: Ran, tmp_path: Path) -> None:
    from peft import PeftModel

    done = surefoot("export", "run", "--merged", "--out", str(tmp_path / "merged"), cwd=quick.run.parent)
    assert done.code == 0, done.err
    assert "as four bits gave it back, which is not its file" in done.out
    assert json.loads((tmp_path / "merged/manifest.json").read_text())["quantization"] == "nf4"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    packed = AutoModelForCausalLM.from_pretrained(PEBBLE, dtype=torch.float32).eval()
    file = PeftModel.from_pretrained(packed, str(quick.run / "checkpoints/step_3")).eval()
    ids = torch.tensor([[5, 9, 11, 30, 2, 17]])
    with torch.no_grad():
        assert float((merged(ids).logits - file(ids).logits).abs().max()) > 0.05, "two models"
    from surefoot.learner.quantised import quantise

    base = AutoModelForCausalLM.from_pretrained(PEBBLE, dtype=torch.float32).eval()
    quantise(base, (), torch.float32)
    served = PeftModel.from_pretrained(base, str(quick.run / "checkpoints/step_3")).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, served(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.nightly
def test_a_killed_run_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    words = [*QUICK, "max_steps=4", "save_steps=2"]
    whole = surefoot("train", *words, cwd=tmp_path, run="whole")
    assert whole.code == 0, whole.err
    failpoint = {"SUREFOOT_FAILPOINTS": "learner.after_step=kill@4"}
    assert surefoot("train", *words, cwd=tmp_path, env=failpoint, fresh=True).code < 0
    again = surefoot("train", "--resume", "run", cwd=tmp_path, run="")
    assert again.code == 0, again.err
    files = [tmp_path / run / "checkpoints/step_4/adapter_model.safetensors" for run in ("whole", "run")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.nightly
def test_a_resume_with_a_base_in_full_is_refused(quick: Ran, tmp_path: Path) -> None:
    """What the checkpoint itself says of its base is tried in `test_quantised.py` of the unit tests."""
    shutil.copytree(quick.run, tmp_path / "run")
    ran = surefoot("train", "--resume", "run", "quantization=none", cwd=tmp_path, run="")
    assert ran.code == 2, "no key of a run changes under way"
    config = tmp_path / "run/config.toml"
    config.write_text(config.read_text().replace('quantization = "nf4"', 'quantization = "none"'))
    for words in (
        ["train", "--resume", "run", "max_steps=4"],
        ["eval", "run"],
        ["export", "run", "--out", "x", "--merged"],
    ):
        ran = surefoot(*words, cwd=tmp_path, run="")
        assert ran.code == 3, ran.err
        assert "config.toml changed since the run began" in ran.err


# -- refused before weights are read -------------------------------------------------------------------


def refused(*words: str, planted: str, cwd: Path) -> Ran:
    ran = surefoot("train", "device=cpu", *words, cwd=cwd, planted=planted)
    assert not ran.run.exists(), "a refused start takes its folder back"
    return ran


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["quantization=nf4"], "quantization = nf4 without lora.rank"),
        (["quantization=int8", "lora.rank=4"], "quantization"),
        (["load_in_4bit=true"], "lora.rank"),
        (["load_in_8bit=true", "lora.rank=4"], "not supported"),
    ],
)
def test_four_bits_that_cannot_be_are_refused(words: list[str], said: str, tmp_path: Path) -> None:
    ran = refused(*words, planted="no_weights", cwd=tmp_path)
    assert ran.code == 2, ran.err
    assert said in ran.err


@pytest.mark.parametrize(
    "more", [["lora.rank=4", "quantization=nf4"], pytest.param([], marks=pytest.mark.nightly)], ids=["beside", "whole"]
)
def test_a_model_whose_file_is_quantised_already_is_refused(more: list[str], tmp_path: Path) -> None:
    """With bitsandbytes installed transformers would load it, packed bytes in the place of weights."""
    shutil.copytree(PEBBLE, tmp_path / "packed")
    config = json.loads((PEBBLE / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "packed/config.json").write_text(json.dumps(config))
    ran = refused(*more, "model=packed", planted="no_weights", cwd=tmp_path)
    assert ran.code == 4, ran.err
    assert "says that its weights are quantised (bitsandbytes)" in ran.err


def test_without_bitsandbytes_four_bits_are_refused_and_everything_else_goes_on(tmp_path: Path) -> None:
    asked = ["lora.rank=4", "quantization=nf4"]
    ran = refused(*asked, planted="no_bitsandbytes", cwd=tmp_path)
    assert ran.code == 2, ran.err
    assert "needs the package bitsandbytes" in ran.err
    assert "surefoot[quantization]" in ran.err
    dry = surefoot("train", "--dry-run", *asked, "device=cpu", cwd=tmp_path, planted="no_bitsandbytes", run="")
    assert dry.code == 2, dry.err
    broken = refused(*asked, planted="broken_bitsandbytes", cwd=tmp_path)
    assert broken.code == 2, broken.err
    assert "does not work here: libbitsandbytes_cpu.so" in broken.err


@pytest.mark.nightly
def test_without_bitsandbytes_a_base_in_full_trains_as_ever(tmp_path: Path) -> None:
    words = [word for word in QUICK if not word.startswith("quantization=")]
    plain = surefoot("train", *words, "max_steps=1", cwd=tmp_path, planted="no_bitsandbytes")
    assert plain.code == 0, plain.err


@pytest.mark.nightly
def test_a_dry_run_says_what_four_bits_spare(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {}
    for kind in ("nf4", "none"):
        dry = surefoot("train", "--dry-run", "lora.rank=16", f"quantization={kind}", "device=cpu", cwd=tmp_path, run="")
        assert dry.code == 0, dry.err
        assert ("of them in four bits (nf4)" in dry.out) == (kind == "nf4")
        sizes[kind] = next(line.split()[1:] for line in dry.out.splitlines() if line.split()[:1] == ["weights"])
    assert sizes["nf4"][1] == "kB"
    assert sizes["none"][1] == "MB"
    assert float(sizes["nf4"][0]) < 700 < 1000 * float(sizes["none"][0])
