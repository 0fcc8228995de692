"""Each optimiser: its own numbers, what it remembers, and what a checkpoint of another one is told."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import Session
from checkpoint_kit import make_learner as make_small
from learner_kit import make
from torch import Tensor

from surefoot.config.load import config_from_values
from surefoot.errors import ConfigError, NumericsError, StateError
from surefoot.learner import low_bit
from surefoot.learner.grpo import GRPOLearner
from surefoot.learner.optimizer import allocate_moments, make_optimizer, moments_of
from surefoot.learner.tensor_file import Spec, read_header
from surefoot.learner.updates import CountedStep
from surefoot.run.model import learner_settings

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.config_key("optim")]
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the torchao extra")
KINDS = ["adamw", pytest.param("adamw_8bit", marks=needs_torchao), "sgd"]
NUMBERS: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.999), "epsilon": 1e-8}
SHAPES = [(64, 256), (48, 512), (100, 100), (50,)]
"""Two that are coded, one that is not made of whole blocks, one that is small."""


def parameters(seed: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(shape).requires_grad_() for shape in SHAPES]


def give_gradients(*sides: list[Tensor], seed: int) -> None:
    """The same on all sides, of very unequal sizes: equal ones would hide a wrong scale."""
    torch.manual_seed(seed)
    for parts in zip(*sides, strict=True):
        gradient = torch.randn(parts[0].shape) * 10 ** torch.randn(parts[0].shape).clamp(-3, 1)
        for part in parts:
            part.grad = gradient.clone()


@needs_torchao
@pytest.mark.parametrize("entries", [low_bit.SLICE, 8192], ids=["one slice", "many slices"])
def test_eight_bit_adamw_steps_as_torchaos_own_does(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    low_bit._torchao()
    from torchao.optim import AdamW8bit

    monkeypatch.setattr(low_bit, "SLICE", entries)
    ours, theirs = parameters(), parameters()
    own = make_optimizer(ours, kind="adamw_8bit", **NUMBERS)
    peer = AdamW8bit(
        [{"params": theirs[:3], "weight_decay": 0.1}, {"params": theirs[3:], "weight_decay": 0.0}], lr=1e-2
    )
    torch.compiler.set_stance("force_eager")  # compiled, it would be the same formulas and other last bits
    try:
        for step in range(4):
            give_gradients(ours, theirs, seed=step)
            own.step()
            peer.step()
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), step
    finally:
        torch.compiler.set_stance("default")


@needs_torchao
def test_eight_bit_adamw_stays_near_adamw_and_remembers_a_quarter_of_it() -> None:
    ours, plain, before = parameters(), parameters(), parameters()
    sides = [make_optimizer(each, kind=kind, **NUMBERS) for each, kind in ((ours, "adamw_8bit"), (plain, "adamw"))]
    for step in range(10):
        give_gradients(ours, plain, seed=step)
        for side in sides:
            side.step()
    for a, b, start in zip(*([p.detach() for p in each] for each in (ours, plain, before)), strict=True):
        assert float((a - b).norm()) < 0.25 * float((b - start).norm())
    coded, full = (
        sum(v.numel() * v.element_size() for p in each[:2] for v in side.state[p].values())
        for each, side in zip((ours, plain), sides, strict=True)
    )
    assert coded / full == pytest.approx(0.25 + 1 / 256, rel=0.01), "one byte of four, and a scale for 256 entries"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_before_a_step_is_what_the_checkpoint_expects_and_what_the_step_uses(kind: str) -> None:
    ours, plain = parameters(), parameters()
    made, own = (make_optimizer(each, kind=kind, **NUMBERS) for each in (ours, plain))
    give_gradients(ours, plain, seed=0)
    allocate_moments(made)
    for p in ours:
        kept = dict(made.state.get(p, {}))
        assert {name: Spec.of(value) for name, value in kept.items()} == moments_of(made).specs(p)
        assert (kept == {}) == (kind == "sgd")
    for side in (made, own):
        CountedStep(side).take()
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True)), "moments made early change no step"


@pytest.mark.parametrize("kind", KINDS)
def test_updates_that_are_too_small_for_their_weights_are_counted_as_swallowed(kind: str) -> None:
    for rate, swallowed in ((1e-2, False), (1e-13, True)):
        ours = parameters()
        optimiser = make_optimizer(ours, kind=kind, **(NUMBERS | {"learning_rate": rate, "weight_decay": 0.0}))
        give_gradients(ours, seed=0)
        found = CountedStep(optimiser).take()
        assert found.due > 0.5 * found.entries, "an optimiser that asks for nothing could swallow nothing"
        assert found.swallowed is swallowed


@pytest.mark.parametrize("kind", KINDS)
def test_all_tensors_at_once_are_counted_as_one_by_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a piece is stepped with a few launches."""
    counted = []
    for kinds in (frozenset[str](), frozenset({"cpu"})):
        monkeypatch.setattr("surefoot.learner.updates.AT_ONCE", kinds)
        ours = parameters()
        optimiser = make_optimizer(ours, kind=kind, **NUMBERS)
        give_gradients(ours, seed=0)
        counted.append((CountedStep(optimiser).take(), [p.detach().clone() for p in ours]))
    (one, first), (other, second) = counted
    assert one == other
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_the_learner_goes_on_to_the_last_bit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_bit, "SMALLEST", low_bit.BLOCK)  # the model is tiny
    whole = Session(make_small(optim=kind)).train(4)
    folder = Session(make_small(optim=kind)).train(2).save(tmp_path / "step_2")
    again = Session.load(folder, make_small(seed=99, optim=kind)).train(2)
    assert again.metrics == whole.metrics[2:]
    ends = [dict(side.learner.net.named_parameters()) for side in (whole, again)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    kinds = {spec.dtype for spec in read_header(folder / "training/optimiser.safetensors").values()}
    assert kinds == {"adamw": {"F32"}, "adamw_8bit": {"F32", "U8"}, "sgd": set()}[kind]
    other = "adamw" if kind != "adamw" else "sgd"
    with pytest.raises(StateError, match=f"its optimiser is '{kind}', this run has '{other}'"):
        Session.load(folder, make_small(optim=other))


@pytest.mark.parametrize("kind", ["sgd", pytest.param("adamw_8bit", marks=needs_torchao)])
def test_the_key_reaches_the_learner_and_leads_to_other_weights(
    kind: str, net: Any, sampled_groups: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_bit, "SMALLEST", low_bit.BLOCK)  # the model is tiny
    samples = sampled_groups(net, [[1, 0, 0, 1], [0, 1, 0.5, 0]])
    ends = []
    for optim in ("adamw", kind):
        words = {"optim": optim, "learning_rate": 1e-2, "max_steps": 2, "max_completion_length": 9}
        config = config_from_values(
            {"model": "pebble", "tasks": "builtin:sums", **words}, source="t", base=tmp_path
        ).config
        learner = GRPOLearner(copy.deepcopy(net), learner_settings(config, pad_token_id=0))
        for iteration in range(2):
            assert learner.learn(samples, iteration=iteration).applied
        ends.append({name: p.detach().clone() for name, p in learner.net.named_parameters()})
    assert max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0]) > 1e-5


def test_sgd_at_a_rate_that_float32_swallows_is_refused(net: Any, sampled_groups: Callable[..., Any]) -> None:
    learner = make(net, optim="sgd", learning_rate=1e-12)
    with pytest.raises(NumericsError, match="raise learning_rate"):
        learner.learn(sampled_groups(net, [[1, 0, 0, 1]]))


def test_without_torchao_the_package_is_named_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import surefoot

    monkeypatch.setattr(importlib.util, "find_spec", _without("torchao"))
    monkeypatch.setattr("surefoot.run.model.load_policy", lambda *a, **k: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match="needs the package torchao"):
        surefoot.train(
            model="pebble", tasks="builtin:sums", optim="adamw_8bit", output_dir=str(tmp_path / "run"), preflight_tasks=0,
            num_tasks=200, eval_tasks=8, guard={"mode": "off"},
        )  # fmt: skip


def _without(package: str) -> Callable[..., Any]:
    real = importlib.util.find_spec
    return lambda name, *rest: None if name == package else real(name, *rest)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"optim": "paged_adamw_8bit"}, "nothing of the optimiser is paged"),
        ({"optim": "lion_8bit"}, "transformers has this optimiser, surefoot does not"),
        ({"optim": "adamw_torch_4bit"}, "or \"adamw_8bit\" with its moments in 8 bits"),
        ({"optim": "adamv"}, "optim"),
        ({"optim": "sgd", "adam_beta1": 0.5}, 'adam_beta1 = 0.5 with optim = "sgd": it has no moments'),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(keys: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_values({"model": "pebble", "tasks": "builtin:sums", **keys}, source="test", base=tmp_path)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("adamw_torch", "adamw"), ("adamw_torch_fused", "adamw"), ("adamw_bnb_8bit", "adamw_8bit"), ("sgd", "sgd")],
)
def test_what_transformers_calls_it_is_read_and_said(theirs: str, ours: str, tmp_path: Path) -> None:
    values = {"model": "pebble", "tasks": "builtin:sums", "optim": theirs}
    loaded = config_from_values(values, source="test", base=tmp_path)
    assert loaded.config.optim == ours
    assert any("is read as" in note for note in loaded.notes) == (theirs != ours)
