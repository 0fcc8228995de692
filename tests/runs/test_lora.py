"""LoRA through the command: it learns, engines have what was learned, and its checkpoints are what they are said to be.

The null controls and planted bugs differ from the first run in one thing each.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command import ROOT, Ran, surefoot
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

import surefoot as api
from surefoot.config.load import config_from_values
from surefoot.errors import ConfigError
from surefoot.records import Verdict
from surefoot.run.arguments import DEFAULT_TARGETS, peft_table
from surefoot.run.model import lora_settings

PEBBLE = ROOT / "src/surefoot/assets/pebble"
LORA = ["lora.rank=16", "learning_rate=1e-3", "device=cpu", "threads=1"]
LEARNS = [
    *LORA, "max_steps=24", "eval_steps=24", "eval_tasks=400", "lr_scheduler_type=constant",
    "target_metric=eval_accuracy", "target_value=0.4",
]  # fmt: skip
"""The warm start solves 0.26 of 400 tasks, with a standard error of 0.02: what reaches 0.4 has learned."""
QUICK = [*LORA, "num_tasks=1000", "tasks_per_step=4", "eval_tasks=20", "preflight_tasks=0", "guard.mode=off"]

PLAIN = [word for word in QUICK if not word.startswith(("lora.", "learning_rate="))]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return surefoot("train", *LEARNS, cwd=tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def checkpoint(learned: Ran) -> Path:
    assert learned.code == 0, learned.err
    return learned.run / "checkpoints/step_24"


def steps(ran: Ran) -> list[dict[str, float]]:
    return [m for m in ran.metrics if "reward" in m]


def accuracy(ran: Ran) -> float:
    assert ran.code == 0, ran.err
    return float(next(line.split()[1] for line in ran.out.splitlines() if line.startswith("eval_accuracy ")))


def logits(net: Any) -> torch.Tensor:
    with torch.no_grad():
        return net(input_ids=torch.tensor([[5, 9, 11, 30, 2, 17]]), use_cache=False).logits  # type: ignore[no-any-return]


# -- it learns, and everybody has what was learned -----------------------------------------------------


@pytest.mark.config_key("lora.rank")
@pytest.mark.every_day
def test_an_adapter_learns_the_built_in_task(learned: Ran) -> None:
    assert learned.code == 0, learned.err
    first, last = (m["eval_accuracy"] for m in learned.metrics if "eval_accuracy" in m)
    assert 0.1 <= first <= 0.35
    assert last >= 0.4
    assert learned.verdict["status"] == "PASS"
    assert "(an adapter in PEFT's form)" in learned.out + learned.err


def test_sampler_and_learner_agree_on_every_version_and_every_sync_was_proved(learned: Ran) -> None:
    rows = steps(learned)
    assert len(rows) == 24
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-4
    assert all(row["sync/replicas"] == 1.0 and 0 <= row["sync/probe_gap"] < 1e-4 for row in rows)
    assert max(row["sync/probe_move"] for row in rows) > 1e-3
    assert all(row["timing/merge"] > 0 for row in rows)
    assert all(row["updates/published_share"] > 0.5 for row in rows), "all but the embeddings and norms"
    assert rows[0]["kl"] == 0.0 < rows[-1]["kl"], "to the base, which has no copy"
    assert rows[0]["census/moved"] == rows[0]["census/parameters"] == 28, "7 layers in each of 4 blocks"
    assert "did not move" not in learned.out + learned.err


def test_answering_again_from_a_checkpoint_gives_the_same_accuracy(learned: Ran, checkpoint: Path) -> None:
    assert checkpoint.is_dir()
    last = [m for m in learned.metrics if "eval_accuracy" in m][-1]["eval_accuracy"]
    for words in ((), ("--checkpoint", "best"), ("--checkpoint", "step_24")):
        assert accuracy(surefoot("eval", "run", *words, cwd=learned.run.parent)) == last


@pytest.mark.turns(2)
def test_a_null_control_does_not_reach_the_target(tmp_path: Path) -> None:
    words = ["learning_rate=0" if word.startswith("learning_rate=") else word for word in LEARNS]
    ran = surefoot("train", *words, cwd=tmp_path)
    assert ran.code == 1, ran.err
    assert ran.verdict["status"] == "FAIL"
    assert ran.verdict["executed_steps"] == 24
    assert [m for m in ran.metrics if "eval_accuracy" in m][-1]["eval_accuracy"] < 0.35


def test_planted_adapter_that_never_reaches_the_engine_is_caught_within_a_step(tmp_path: Path) -> None:
    ran = surefoot("train", *QUICK, "max_steps=5", cwd=tmp_path, planted="adapter_stays_home")
    assert ran.code not in (0, 2, 70), ran.err
    assert ran.verdict["executed_steps"] <= 1
    assert "probe" in ran.err or "disagree" in ran.err


def test_planted_optimiser_that_trains_the_base_too_is_caught_before_its_first_step(tmp_path: Path) -> None:
    ran = surefoot("train", *QUICK, "max_steps=5", cwd=tmp_path, planted="adapter_steps_the_base")
    assert ran.code == 1, ran.err
    assert "the optimiser of an adapter would step" in ran.err
    assert ran.verdict["executed_steps"] == 0


@pytest.mark.usefixtures("bfloat16_products")
def test_in_bfloat16_engine_and_learner_agree_from_the_first_step_on(tmp_path: Path) -> None:
    ran = surefoot("train", *QUICK, "max_steps=4", "dtype=bfloat16", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps(ran)) < 0.2
    assert steps(ran)[-1]["updates/changed_share"] > 0.9
    again = surefoot("eval", "run", cwd=tmp_path)
    assert accuracy(again) == [m for m in ran.metrics if "eval_accuracy" in m][-1]["eval_accuracy"]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2))
def test_the_whole_built_in_run_reaches_its_target_with_an_adapter(tmp_path: Path, seed: int) -> None:
    ran = surefoot("train", *LORA, f"seed={seed}", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert [m for m in ran.metrics if "eval_accuracy" in m][-1]["eval_accuracy"] >= 0.85
    assert ran.verdict["executed_steps"] == 200
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps(ran)) < 1e-3


AHEAD = ["max_staleness=2", "importance_sampling_correction=true"]


@pytest.mark.nightly
@pytest.mark.parametrize("more", [[], ["weight_sync_steps=2"], ["quantization=nf4"]], ids=["", "seldom synced", "nf4"])
def test_sampling_ahead_learns_with_an_adapter_too(more: list[str], tmp_path: Path) -> None:
    """Engines hold copies then: the merged weights of the next version are made while they sample from the last."""
    if more == ["quantization=nf4"]:
        pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    words = [word for word in LEARNS if not word.startswith("target_value=")]
    ran = surefoot("train", *words, *AHEAD, *more, "target_value=0.36", cwd=tmp_path)
    assert ran.code == 0, ran.out[-2000:] + ran.err
    rows = steps(ran)
    assert max(row["async/staleness_max"] for row in rows) >= 1, "sampling went on while the learner learned"
    assert all(0 <= row["sync/probe_gap"] < 1e-4 for row in rows if "sync/probe_gap" in row)
    last = [m for m in ran.metrics if "eval_accuracy" in m][-1]["eval_accuracy"]
    assert last >= 0.36
    assert accuracy(surefoot("eval", "run", cwd=tmp_path)) == last


@pytest.mark.nightly
@pytest.mark.parametrize("planted", ["adapter_stays_home", "torn_copy"])
def test_planted_sync_that_lies_is_caught_while_sampling_goes_ahead(planted: str, tmp_path: Path) -> None:
    ran = surefoot("train", *QUICK, *AHEAD, "max_steps=6", cwd=tmp_path, planted=planted)
    assert ran.code not in (0, 2, 70), ran.err
    assert ran.verdict["executed_steps"] <= 2
    assert "probe" in ran.err or "disagree" in ran.err or "does not hold version" in ran.err


# -- what is left: an adapter, and a model on request ---------------------------------------------------


def test_a_checkpoint_is_small_and_loads_with_peft_alone(checkpoint: Path) -> None:
    assert (checkpoint / "adapter_model.safetensors").stat().st_size < (PEBBLE / "model.safetensors").stat().st_size
    assert not (checkpoint / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(PEBBLE, dtype=torch.float32).eval()
    before = logits(base)
    assert float((logits(PeftModel.from_pretrained(base, str(checkpoint)).eval()) - before).abs().max()) > 0.1


def test_the_merged_model_is_a_plain_folder_that_computes_what_the_adapter_does(
    learned: Ran, checkpoint: Path, tmp_path: Path
) -> None:
    done = surefoot("export", "run", "--merged", "--best", "--out", str(tmp_path / "merged"), cwd=learned.run.parent)
    assert done.code == 0, done.err
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not [name for name in names if "adapter" in name or "training" in name]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(PEBBLE, dtype=torch.float32).eval()
    adapted = PeftModel.from_pretrained(base, str(checkpoint)).eval()
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=0, atol=1e-4)
    (tmp_path / "tasks.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a in range(12, 52) for b in (47, 9)
        )
    )
    asked = ("--tasks", str(tmp_path / "tasks.jsonl"), "--metric", "exact", "max_completion_length=8")
    found = [
        surefoot("eval", who, *asked, "--json", cwd=learned.run.parent) for who in ("run", str(tmp_path / "merged"))
    ]
    of_run, of_merged = (json.loads(ran.out)["metrics"]["eval_accuracy"] for ran in found)
    assert of_run == of_merged > 0.2


def test_an_exported_adapter_is_the_checkpoints_own(learned: Ran, checkpoint: Path, tmp_path: Path) -> None:
    done = surefoot("export", "run", "--step", "24", "--out", str(tmp_path / "adapter"), cwd=learned.run.parent)
    assert done.code == 0, done.err
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json"):
        assert (tmp_path / "adapter" / name).read_bytes() == (checkpoint / name).read_bytes()
    assert not (tmp_path / "adapter/training").exists()
    again = surefoot("export", "run", "--out", str(tmp_path / "adapter"), cwd=learned.run.parent)
    assert (again.code, "exists already" in again.err) == (3, True), again.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--step", "7"], 3, "no checkpoint step_7"),
        (["--step", "24", "--best"], 2, "--step and --best are both given"),
    ],
)
def test_an_export_that_cannot_be_leaves_nothing(
    words: list[str], code: int, said: str, learned: Ran, tmp_path: Path
) -> None:
    done = surefoot("export", "run", *words, "--merged", "--out", str(tmp_path / "x"), cwd=learned.run.parent)
    assert done.code == code, done.err
    assert said in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_trained_every_weight_has_nothing_to_export(tmp_path: Path) -> None:
    assert surefoot("train", *PLAIN, "max_steps=1", "learning_rate=1e-5", cwd=tmp_path).code == 0
    done = surefoot("export", "run", "--merged", "--out", "x", cwd=tmp_path)
    assert done.code == 2
    assert "it has no adapter" in done.err
    assert "checkpoints/step_1 as it is" in done.err
    assert not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def on_a_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a model folder of its own, which tests replace."""
    folder = tmp_path_factory.mktemp("folder")
    shutil.copytree(PEBBLE, folder / "model")
    ran = surefoot("train", *QUICK, "max_steps=2", "save_steps=1", f"model={folder / 'model'}", cwd=folder)
    assert ran.code == 0, ran.err
    return folder


def other_weights(model: Path) -> None:
    """The same shapes, one number of another model."""
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] += 0.5
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def other_shapes(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 512}))


@pytest.mark.parametrize(
    ("change", "planted"), [(other_weights, None), (other_shapes, "no_weights")], ids=["weights", "shapes, unread"]
)
def test_a_base_that_was_replaced_is_refused_by_eval_and_export(
    change: Any, planted: str | None, on_a_folder: Path
) -> None:
    kept = on_a_folder / "kept"
    shutil.copytree(on_a_folder / "model", kept)
    try:
        change(on_a_folder / "model")
        for words in (["eval", "run"], ["export", "run", "--merged", "--out", "x"]):
            ran = surefoot(*words, cwd=on_a_folder, planted=planted)
            assert ran.code == 3, ran.err
            assert "is an adapter of another model" in ran.err
            assert not list(on_a_folder.glob("*x*")), "nothing half written"
    finally:
        shutil.rmtree(on_a_folder / "model")
        kept.rename(on_a_folder / "model")


def test_a_resume_on_other_weights_is_refused(on_a_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(on_a_folder / "run", tmp_path / "run")
    shutil.copytree(on_a_folder / "model", tmp_path / "kept")
    try:
        other_weights(on_a_folder / "model")
        ran = surefoot("train", "--resume", "run", "max_steps=3", cwd=tmp_path, run="")
    finally:
        shutil.rmtree(on_a_folder / "model")
        shutil.copytree(tmp_path / "kept", on_a_folder / "model")
    assert ran.code == 3, ran.err
    assert "weights" in ran.err


def test_a_checkpoint_of_an_adapter_is_no_model_and_the_way_to_one_is_said(on_a_folder: Path) -> None:
    ran = surefoot("train", *QUICK, "max_steps=1", "model=run/checkpoints/step_2", cwd=on_a_folder, run="next")
    assert ran.code == 4, ran.err
    assert "surefoot export RUN --merged" in ran.err


# -- keys, and what is refused before weights are read ---------------------------------------------------


def refused(*words: str, planted: str = "no_weights", cwd: Path) -> Ran:
    """A run that must be over before anybody looks at weights."""
    ran = surefoot("train", "device=cpu", *words, cwd=cwd, planted=planted)
    assert not ran.run.exists(), "a refused start takes its folder back"
    return ran


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["lora.rank=0"], 2, "lora.rank = 0: must be above 0"),
        (["lora.rank=-4"], 2, "lora.rank = -4: must be above 0"),
        (["lora.rank=4", "lora.alpha=0"], 2, "lora.alpha = 0.0: must be above 0"),
        (["lora.alpha=8"], 2, "lora.alpha without lora.rank"),
        (["lora.rank=4", "lora.target_modules=[]"], 2, "an adapter beside nothing"),
        (["lora.rank=4", "lora.target_modules=q_proj"], 2, '"all-linear" or a list of text'),
        (["lora.rank=4", 'lora.modules_to_save=["norm"]', "dtype=bfloat16"], 2, "has no float32 master"),
        (["lora.rank=4", "beta=0.1", "reference_sync_steps=2"], 2, "cannot follow"),
        (["lora.rank=4", 'lora.target_modules=["q_proj", "c_attn"]'], 4, "names 'c_attn'"),
        (["lora.rank=4", 'lora.modules_to_save=["lm_head"]'], 4, "whose weight is shared"),
    ],
)
def test_a_table_that_cannot_be_is_refused_before_weights_are_read(
    words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    ran = refused(*words, cwd=tmp_path)
    assert ran.code == code, ran.err
    assert said in ran.err


@pytest.mark.config_key("lora.dropout")
def test_dropout_is_refused_with_the_reason(tmp_path: Path) -> None:
    ran = refused("lora.rank=4", "lora.dropout=0.1", cwd=tmp_path)
    assert ran.code == 2, ran.err
    assert "engines sample from the model without dropout" in ran.err


def test_without_peft_a_run_with_lora_is_refused_and_one_without_starts(tmp_path: Path) -> None:
    ran = refused("lora.rank=4", planted="no_peft", cwd=tmp_path)
    assert ran.code == 2, ran.err
    assert "needs the package peft" in ran.err
    dry = surefoot("train", "--dry-run", "lora.rank=4", "device=cpu", cwd=tmp_path, planted="no_peft", run="")
    assert dry.code == 2, dry.err
    plain = surefoot("train", *PLAIN, "max_steps=1", "learning_rate=1e-5", cwd=tmp_path, planted="no_peft")
    assert plain.code == 0, plain.err


@pytest.mark.config_key("lora.alpha", "lora.target_modules", "lora.modules_to_save")
def test_every_number_of_the_table_reaches_the_adapter(tmp_path: Path) -> None:
    model = tmp_path / "model"
    base = AutoModelForCausalLM.from_pretrained(PEBBLE, dtype=torch.float32)
    base.config.tie_word_embeddings = False
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
    base.save_pretrained(model)
    for path in (*PEBBLE.glob("*token*"), *PEBBLE.glob("*.jinja")):
        shutil.copy(path, model)
    words = [
        "lora.rank=16",
        "learning_rate=1e-4",
        "lora.alpha=5",
        'lora.target_modules=["v_proj"]',
        'lora.modules_to_save=["lm_head"]',
        f"model={model}",
    ]
    ran = surefoot("train", *PLAIN, *words, "max_steps=2", cwd=tmp_path)
    assert ran.code == 0, ran.out + ran.err
    saved = ran.run / "checkpoints/step_2"
    config = json.loads((saved / "adapter_config.json").read_text())
    numbers = {name: config[name] for name in ("r", "lora_alpha", "target_modules", "modules_to_save")}
    assert numbers == {"r": 16, "lora_alpha": 5, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}
    from safetensors import safe_open

    with safe_open(saved / "adapter_model.safetensors", "pt") as file:
        ends = {re.sub(r".*\.layers\.\d+\.", "", name) for name in file.keys()}  # noqa: SIM118
        head = file.get_tensor("base_model.model.lm_head.weight")
    assert ends == {
        "self_attn.v_proj.lora_A.weight",
        "self_attn.v_proj.lora_B.weight",
        "base_model.model.lm_head.weight",
    }
    assert not torch.equal(head, base.lm_head.weight), "a module that is trained whole"
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps(ran)) < 1e-4


def test_a_dry_run_says_what_is_trained_and_what_it_takes(tmp_path: Path) -> None:
    dry = surefoot("train", "--dry-run", "lora.rank=16", "device=cpu", "beta=0.1", cwd=tmp_path, run="")
    assert dry.code == 0, dry.err
    assert "trains    LoRA of rank 16, alpha 32, on 28 linear layers: " in dry.out
    entries = int(dry.out.partition("linear layers: ")[2].partition(" parameters")[0].replace(",", ""))
    assert entries == 4 * 16 * (2 * 256 + 2 * 192 + 3 * 704), "two matrices beside each of seven layers in four blocks"
    assert "merged for engines" in dry.out
    assert "reference policy" not in dry.out
    plain = surefoot("train", "--dry-run", "device=cpu", "beta=0.1", cwd=tmp_path, run="")
    assert "reference policy" in plain.out
    assert "LoRA" not in plain.out


# -- from Python, in PEFT's words ----------------------------------------------------------------------


def test_a_peft_config_from_python_is_the_table(tmp_path: Path) -> None:
    def score(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text.strip() == gold) + len(text) / 100 for text, gold in zip(completions, answer, strict=True)]

    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(5)]
    outcome = api.train(
        "pebble", score, tasks=rows, peft_config=LoraConfig(r=4, lora_alpha=12, task_type="CAUSAL_LM"),
        output_dir=str(tmp_path / "run"), max_steps=1, tasks_per_step=2, num_generations=4, max_completion_length=4,
        threads=1, device="cpu", preflight_tasks=0, probe_reward_tasks=0, reward_workers=1, learning_rate=1e-3,
        guard={"mode": "off"}, heldout_fraction=0.0,
    )  # fmt: skip
    assert outcome.verdict is Verdict.PASS
    assert outcome.checkpoint is not None
    config = json.loads((outcome.checkpoint / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 12, sorted(DEFAULT_TARGETS))


def test_what_a_peft_config_leaves_open_is_what_peft_takes_for_every_model_that_is_trained_here() -> None:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as THEIRS

    from surefoot.learner.architectures import PLAIN

    assert {tuple(THEIRS[kind]) for kind in PLAIN} == {DEFAULT_TARGETS}


def test_every_field_that_is_taken_arrives() -> None:
    given = LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", modules_to_save=["norm"])
    config = config_from_values(
        {"model": "pebble", "tasks": "builtin:sums", **peft_table(given, {})}, source="test", base=Path.cwd()
    ).config
    found = lora_settings(config)
    assert found is not None
    assert (found.rank, found.alpha, found.target_modules, found.modules_to_save) == (
        3,
        7.0,
        ("all-linear",),
        ("norm",),
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (LoraConfig(use_dora=True), "use_dora = True"),
        (LoraConfig(use_rslora=True), "use_rslora = True"),
        (LoraConfig(bias="all"), "bias = all"),
        (LoraConfig(init_lora_weights="gaussian"), "init_lora_weights = gaussian"),
        (LoraConfig(rank_pattern={"q_proj": 2}), "rank_pattern"),
        (LoraConfig(task_type="SEQ_CLS"), "task_type"),
        (LoraConfig(lora_dropout=0.05), "lora.dropout = 0.05"),
        ({"r": 8}, "peft_config is a dict"),
        (object(), "peft_config is an object"),
    ],
)
def test_a_peft_config_that_is_not_plain_lora_is_refused_by_name(given: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        api.train("pebble", tasks="builtin:sums", peft_config=given, output_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_peft_config_and_the_table_are_two_names_for_one_thing() -> None:
    with pytest.raises(ConfigError, match="both given"):
        api.train("pebble", tasks="builtin:sums", peft_config=LoraConfig(), lora={"rank": 4})
