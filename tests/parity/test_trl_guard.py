"""The guard inside the installed TRL: the real trainer on a tiny model, not a stub.

The claims about TRL's own metrics can only be tested here: a stub has no `log()` that averages and clears.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="needs the trl extra")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from surefoot.errors import CollapseStopError, ConfigError
from surefoot.guards import HeldOutGuard
from surefoot.maths.preference import PreferencePair
from surefoot.trl_bridge import ChannelDeadError, GuardCallback, GuardedGRPOTrainer, HeldOutEvalError, score_pairs

pytestmark = [
    pytest.mark.filterwarnings("default"),  # their warnings are theirs
    pytest.mark.usefixtures("one_thread"),  # runs are compared bit for bit
]

VOCABULARY = 24
CLOCKS = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")


def tiny_model(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1,
        attention_dropout=dropout,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)  # initial weights are so small that all tokens look alike
    return model


def tiny_tokenizer() -> Any:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def share_of_low_ids(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between siblings, so that something is trained."""
    words = [[int(w[1:]) for w in text.split() if w.startswith("w")] for text in completions]
    return [sum(i < 10 for i in w) / max(len(w), 1) for w in words]


class Rising:
    """A reward that climbs by 0.03 per generation whatever is said: a proxy that is being gamed."""

    __name__ = "rising"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.calls += 1
        return [0.30 + 0.03 * (self.calls - 1)] * len(completions)


class Falling:
    """Held-out quality that loses 0.05 per evaluation; uses up random numbers and looks at the model's mode."""

    def __init__(self, model: Any = None, start: float = 0.28) -> None:
        self.model, self.start, self.calls, self.modes = model, start, 0, []

    def __call__(self) -> float:
        random.random(), np.random.rand(), torch.rand(3)
        if self.model is not None:
            self.modes.append(any(m.training for m in self.model.modules()) or torch.is_grad_enabled())
        self.calls += 1
        return self.start - 0.05 * (self.calls - 1)


def make(
    folder: Path, *, kind: Any = GuardedGRPOTrainer, model: Any = None, reward: Any = share_of_low_ids,
    steps: int = 4, settings: dict[str, Any] | None = None, rows: list[dict[str, Any]] | None = None, **guarding: Any,
) -> Any:  # fmt: skip
    chosen = {
        "per_device_train_batch_size": 4, "num_generations": 2, "logging_steps": 1, "max_steps": steps,
        "learning_rate": 1e-2, "max_completion_length": 5, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True, "seed": 3,
    } | (settings or {})  # fmt: skip
    config = GRPOConfig(output_dir=str(folder), **chosen)
    rows = rows or [{"prompt": f"w{2 + i % 5} w{3 + i % 7}"} for i in range(8)]
    return kind(
        model=model or tiny_model(), reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(), **guarding,
    )  # fmt: skip


def quick_guard(**changes: Any) -> HeldOutGuard:
    return HeldOutGuard(**({"min_steps": 3, "decline_patience": 3, "ema_alpha": 0.5} | changes))


def records(trainer: Any) -> list[dict[str, Any]]:
    """What was logged, without the clocks and without our own keys."""
    kept = [
        {k: v for k, v in r.items() if k not in CLOCKS and "killswitch/" not in k} for r in trainer.state.log_history
    ]
    return [r for r in kept if set(r) - {"step", "epoch"}]


def fires(trainer: Any) -> list[dict[str, Any]]:
    return [r for r in trainer.state.log_history if r.get("killswitch/fire") == 1.0]


# -- nothing else changes -------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"logging_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        {"num_iterations": 2, "beta": 0.0},
    ],
    ids=["accumulated", "two passes over a batch"],
)
def test_metrics_and_weights_with_the_guard_equal_those_without(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain = make(tmp_path / "plain", kind=GRPOTrainer, model=tiny_model(dropout=0.2), settings=settings)
    plain.train()
    model = tiny_model(dropout=0.2)
    heldout = Falling(model)
    guarded = make(
        tmp_path / "guarded", model=model, settings=settings, heldout_guard=HeldOutGuard(), heldout_eval_fn=heldout
    )
    guarded.train()
    assert records(guarded) == records(plain), "TRL's own numbers"
    assert len(records(plain)) >= 3, "there was something to compare"
    assert {n: p.sum().item() for n, p in guarded.model.named_parameters()} == {
        n: p.sum().item() for n, p in plain.model.named_parameters()
    }
    assert heldout.modes == [False] * len(heldout.modes), "eval mode, no gradient"
    assert heldout.calls == (2 if settings.get("logging_steps") else 4)
    logged = [r for r in guarded.state.log_history if "killswitch/heldout" in r]
    assert len(logged) == heldout.calls
    assert logged[0]["killswitch/heldout"] == pytest.approx(0.28)


def test_a_log_inside_the_fold_would_have_been_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: send ordinary folds through TRL's log(), as a first attempt would."""
    original = GuardedGRPOTrainer._maybe_update_killswitch

    def chatty(self: Any) -> None:
        original(self)
        self.log({"killswitch/fire": 0.0})

    plain = make(tmp_path / "plain", kind=GRPOTrainer, steps=2)
    plain.train()
    monkeypatch.setattr(GuardedGRPOTrainer, "_maybe_update_killswitch", chatty)
    guarded = make(tmp_path / "guarded", steps=2, heldout_guard=HeldOutGuard(), heldout_eval_fn=Falling())
    guarded.train()
    assert records(guarded) != records(plain)


# -- it stops -------------------------------------------------------------------------


def stopped_run(folder: Path, **changes: Any) -> tuple[Any, CollapseStopError]:
    trainer = make(
        folder, reward=Rising(), steps=8, settings={"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1},
        **({"heldout_guard": quick_guard(), "heldout_eval_fn": Falling()} | changes),
    )  # fmt: skip
    with pytest.raises(CollapseStopError) as caught:
        trainer.train()
    return trainer, caught.value


def test_a_strict_stop_logs_saves_and_raises(tmp_path: Path) -> None:
    trainer, error = stopped_run(tmp_path)
    assert error.status is not None
    assert error.status.fire
    assert error.status.step == 3, "four folds: steps 0, 1, 2, 3"
    assert "held-out" in str(error)
    (fire,) = fires(trainer)
    ordinary = records(trainer)[0]
    lost = set(ordinary) - set(fire) - {"loss", "grad_norm", "learning_rate"} - {"step", "epoch"}
    assert not lost, f"the step's own metrics go with the verdict, but for {lost}"
    assert fire["reward"] == pytest.approx(0.39), "not averaged with another step's"
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["status"] == "FAIL"
    assert verdict["exit_code"] == 79
    assert verdict["checkpoint"] == "checkpoint-3"
    assert (tmp_path / "checkpoint-3" / "model.safetensors").exists()
    assert trainer.args.save_total_limit == 1, "put back"
    assert trainer.model.training


def test_no_older_checkpoint_is_deleted_by_the_stop(tmp_path: Path) -> None:
    trainer = make(
        tmp_path, reward=Rising(), steps=8, settings={"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1},
        heldout_guard=quick_guard(), heldout_eval_fn=Falling(),
    )  # fmt: skip
    with pytest.raises(CollapseStopError):
        trainer.train()
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]


def test_a_soft_stop_ends_the_training_with_whole_records(tmp_path: Path) -> None:
    trainer = make(
        tmp_path, reward=Rising(), steps=8, settings={"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        heldout_guard=quick_guard(), heldout_eval_fn=Falling(), strict_killswitch=False,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step in (3, 4), "no step after the verdict but the one that was running"
    assert len(fires(trainer)) >= 1
    assert json.loads((tmp_path / "verdict.json").read_text())["exit_code"] is None
    assert (tmp_path / "checkpoint-3").is_dir()
    ordinary = [r for r in records(trainer) if "loss" in r]
    assert len({frozenset(r) for r in ordinary}) == 1, "every step's record has the same keys"


def test_a_run_whose_heldout_rises_with_the_reward_is_left_alone(tmp_path: Path) -> None:
    values = iter(range(9))
    trainer = make(
        tmp_path, reward=Rising(), steps=8, heldout_guard=quick_guard(),
        heldout_eval_fn=lambda: 0.3 + 0.02 * next(values),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 8
    assert not fires(trainer)
    assert not (tmp_path / "verdict.json").exists()


@pytest.mark.parametrize(
    "mutation",
    [
        ("the call site is deleted", lambda m: m.setattr(GuardedGRPOTrainer, "_fold_is_due", lambda self: False)),
        (
            "the fold does nothing",
            lambda m: m.setattr(GuardedGRPOTrainer, "_maybe_update_killswitch", lambda self: None),
        ),
        (
            "the proxy is fed as held-out",
            lambda m: m.setattr(GuardedGRPOTrainer, "_measure", lambda self: self._tail("reward")),
        ),
    ],
    ids=lambda m: m[0],
)
def test_planted_removal_of_the_wire_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutation: tuple[str, Callable[[Any], None]]
) -> None:
    mutation[1](monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        stopped_run(tmp_path)


# -- resuming -------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_the_guard_of_its_checkpoint(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    first = make(
        tmp_path, reward=Rising(), steps=2, settings=saving, heldout_guard=quick_guard(), heldout_eval_fn=Falling()
    )
    first.train()
    guard, reward = quick_guard(), Rising()
    reward.calls = 2
    again = make(
        tmp_path, reward=reward, steps=8, settings=saving, heldout_guard=guard, heldout_eval_fn=Falling(start=0.18)
    )
    with pytest.raises(CollapseStopError) as caught:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert caught.value.status is not None
    assert caught.value.status.step == 3, "as if the run had never been cut"
    assert caught.value.status.folds == 4
    heldout = Falling()
    third = make(tmp_path, reward=Rising(), steps=8, heldout_guard=quick_guard(), heldout_eval_fn=heldout)
    with pytest.raises(CollapseStopError):
        third.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert heldout.calls == 0, "what the guard has stopped stays stopped"


# -- evaluation that fails ------------------------------------------------------------


def test_a_failing_evaluation_ends_the_run_and_names_the_step(tmp_path: Path) -> None:
    def broken() -> float:
        raise OSError("the grader is gone")

    trainer = make(tmp_path, heldout_guard=HeldOutGuard(), heldout_eval_fn=broken)
    with pytest.raises(HeldOutEvalError, match=r"step 0.*grader is gone"):
        trainer.train()
    assert trainer.model.training


def test_a_guard_without_evaluation_is_refused_before_the_model_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="heldout_eval_fn"):
        GuardedGRPOTrainer(model="no/such-model", reward_funcs=share_of_low_ids, heldout_guard=HeldOutGuard())


# -- the callback ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["strict", "soft"])
def test_the_callback_stops_an_unmodified_trainer(tmp_path: Path, kind: str) -> None:
    trainer = make(tmp_path, kind=GRPOTrainer, reward=Rising(), steps=8)
    heldout = Falling(trainer.model)
    trainer.add_callback(GuardCallback(quick_guard(), heldout, strict_killswitch=kind == "strict"))
    if kind == "strict":
        with pytest.raises(CollapseStopError, match="held-out"):
            trainer.train()
    else:
        trainer.train()
    assert trainer.state.global_step == 4
    assert heldout.modes == [False] * 4
    assert fires(trainer), "in the history"
    assert (tmp_path / "checkpoint-4" / "heldout_guard.json").exists()
    assert json.loads((tmp_path / "verdict.json").read_text())["checkpoint"] == "checkpoint-4"


# -- the channels ---------------------------------------------------------------------

HINTED = [{"prompt": f"w{2 + i % 5} w{3 + i % 7}", "hint": "w9 w9 w9" if i % 2 else None} for i in range(8)]


def test_self_distillation_is_alive_and_logged(tmp_path: Path) -> None:
    trainer = make(tmp_path, rows=HINTED, steps=4, alpha_sdpo=0.5, sdpo_hints="hint")
    trainer.train()
    steps = [r for r in trainer.state.log_history if "sdpo/live_fraction" in r]
    assert len(steps) == 4
    assert {r["sdpo/live_fraction"] for r in steps} > {0.0}, "some steps had hints, some had none"
    for record in steps:
        assert record.get("sdpo/loss", 0.0) > 1e-4 or record["sdpo/live_fraction"] == 0.0
        assert ("sdpo/loss" in record) == (record["sdpo/live_fraction"] > 0), "no teacher, no number"


def test_a_channel_without_hints_for_k_steps_is_an_error(tmp_path: Path) -> None:
    trainer = make(
        tmp_path, rows=HINTED, steps=8, alpha_sdpo=0.5, sdpo_hints=lambda rows: [None for _ in rows],
        channel_dead_steps=2,
    )  # fmt: skip
    with pytest.raises(ChannelDeadError, match=r"sdpo.*2 steps"):
        trainer.train()
    with pytest.raises(ConfigError, match="no such column"):
        make(tmp_path, rows=HINTED, alpha_sdpo=0.5, sdpo_hints="hind")


def test_self_distillation_does_not_depend_on_the_cut_into_microbatches(tmp_path: Path) -> None:
    whole = {"per_device_train_batch_size": 4}
    cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    losses, grads = [], []
    for name, settings in {"whole": whole, "cut": cut}.items():
        trainer = make(
            tmp_path / name, rows=HINTED, alpha_sdpo=1.0, sdpo_hints="hint",
            settings=settings | {"generation_batch_size": 4},
        )  # fmt: skip
        torch.manual_seed(5)
        examples = [HINTED[i] for i in (1, 1, 2, 2)]
        trainer.model.train()
        batch = trainer._generate_and_score_completions(examples)
        parts = settings.get("gradient_accumulation_steps", 1)
        trainer.current_gradient_accumulation_steps = parts
        total = torch.zeros(())
        for i in range(parts):
            rows = slice(i * 4 // parts, (i + 1) * 4 // parts)
            piece = {k: v[rows] if v.dim() else v for k, v in batch.items() if isinstance(v, torch.Tensor)}
            total = total + trainer._compute_sdpo_loss(trainer.model, piece)
        total.backward()
        losses.append(total.item())
        grads.append(trainer.model.lm_head.weight.grad.clone())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] > 1e-3
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


def test_replay_raises_the_chosen_answer_above_the_rejected(tmp_path: Path) -> None:
    model = tiny_model()
    pairs = [PreferencePair((2, i), (5, i, 1), (6, 7, 1), source="trace") for i in range(3, 7)]
    scored = score_pairs(model, pairs)
    trainer = make(tmp_path, model=model, steps=6, reward=Rising(), beta_replay=1.0, replay_pairs=scored)
    trainer.train()
    losses = [r["replay/loss"] for r in trainer.state.log_history if "replay/loss" in r]
    assert losses[0] == pytest.approx(math.log(2.0), abs=1e-4), "at the reference every pair costs log 2"
    assert losses[-1] < losses[0]
    with pytest.raises(ConfigError, match="no_reference"):
        make(tmp_path, model=model, beta_replay=1.0, replay_pairs=pairs)
