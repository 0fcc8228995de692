"""The learner's forward pass for GPUs, with plain operations in place of its kernels, against the network's own modules.

Bound: logprobs within 1e-5, gradients within 1e-4 relative, in float32: sums in another order. On a GPU, where the
kernels are, they are compared with the same plain operations.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any, get_args

import pytest
import torch
from forward_kit import PlainKernels, compare, packed, sample
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the community's name

from surefoot.config import MICROBATCH_TOKENS, Config
from surefoot.config.choices import ENGINES, ESTIMATORS
from surefoot.config.choices import LOSSES as LOSS_FACTS
from surefoot.engines import graphs
from surefoot.errors import NumericsError
from surefoot.guards import invariants
from surefoot.learner import fused_forward, fused_options, grpo, model
from surefoot.learner.architectures import PLAIN
from surefoot.learner.footprint import Work, bytes_of_token, microbatch_budget
from surefoot.learner.forward import score_batch
from surefoot.learner.fused_forward import score_batch_fused, why_not_fused
from surefoot.learner.fused_options import ENTRIES, unlisted
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.learner.memory import shape_of
from surefoot.learner.samples import split_microbatches
from surefoot.maths import advantages, fused_training, losses
from surefoot.maths.fused_training import Kernels, kernels
from surefoot.maths.logprobs import TokenScores, score_tokens, score_tokens_chunked
from surefoot.maths.losses import LOSSES, LossKind, LossSettings
from surefoot.maths.packing import make_batch
from surefoot.protocols import EngineInputs
from surefoot.run.build import auto_engine, embedded_engine
from surefoot.runtime.specs import EmbeddedEngineSpec

ARCHITECTURES = ["llama", "untied", "llama3", "yarn", "wide_heads", "qwen2", "qwen3", "mistral"]


# -- the same numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fused_scores_and_gradients_are_those_of_the_networks_own_modules(
    name: str, temperature: float, make_net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several prompts, tokens nobody sampled, a completion of one token; chunks of 4 tokens."""
    net, batch = make_net(name), packed()
    monkeypatch.setattr(fused_training, "chunk_tokens", lambda weight: 4)
    assert why_not_fused(net, on_cpu=True) == []
    fused = score_batch_fused(net, batch, temperature=temperature, use=PlainKernels())
    compare(net, fused, score_batch(net, batch, temperature=temperature, with_entropy=True), batch)


@pytest.mark.parametrize("lengths", [[5, 5, 5], [1, 1], [7]])
def test_one_prompt_and_rows_of_any_length(lengths: list[int], make_net: Any) -> None:
    net = make_net()
    batch = make_batch([sample("short", i, n) for i, n in enumerate(lengths)], pad_token_id=0)[0]
    fused = score_batch_fused(net, batch, temperature=1.0, use=PlainKernels())
    compare(net, fused, score_batch(net, batch, temperature=1.0, with_entropy=True), batch)


def test_a_token_without_a_gradient_may_hold_anything(make_net: Any) -> None:
    """Selection, not multiplication: rows that are masked out leave no NaN in a weight."""
    net, batch = make_net(), packed()
    scores = score_batch_fused(net, batch, temperature=1.0, use=PlainKernels())
    (scores.logprobs[0] * 1.0).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters())


# -- who gets it ----------------------------------------------------------------------------------


def test_what_it_does_not_know_is_named(make_net: Any) -> None:
    """Every field that decides, and every parameter by name: a new one is refused until somebody adds it."""
    net = make_net()
    assert why_not_fused(net) == ["device cpu"]
    assert why_not_fused(net.train(), on_cpu=True) == ["train mode"]
    net.eval()
    net.model.layers[1].mlp.extra = torch.nn.Parameter(torch.ones(3))
    assert why_not_fused(net, on_cpu=True) == ["model.layers.1.mlp.extra"]
    del net.model.layers[1].mlp.extra
    net.model.norm.to(torch.bfloat16)
    assert why_not_fused(net, on_cpu=True) == ["parameters of several dtypes"]
    net.model.norm.float()
    net.config.hidden_act = "gelu"
    assert why_not_fused(net, on_cpu=True) == ["hidden_act = gelu"]
    net.config.hidden_act, net.config.model_type = "silu", "gemma"
    assert why_not_fused(net, on_cpu=True) == ["architecture 'gemma'"]
    net.config.model_type, net.config.sliding_window = "mistral", 8
    assert why_not_fused(net, on_cpu=True) == ["sliding_window = 8"], "its kernels look at the whole row"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_of_every_architecture_is_read(name: str, make_net: Any) -> None:
    net = make_net(name)
    names = set(dict(net.named_parameters()))
    batch = packed()
    score_batch_fused(net, batch, temperature=1.0, use=PlainKernels()).logprobs.sum().backward()
    assert {n for n, p in net.named_parameters() if p.grad is not None and bool((p.grad != 0).any())} == names


# -- the learner ----------------------------------------------------------------------------------


def settings(**changes: Any) -> LearnerSettings:
    plain = LearnerSettings(
        loss=LossSettings(), learning_rate=1e-3, max_steps=20, max_completion_length=12, temperature=1.0, pad_token_id=0,
        parity_tolerance=1e9,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner on this CPU takes the fused forward pass, with plain operations."""
    monkeypatch.setattr(grpo, "why_not_fused", lambda net: why_not_fused(net, on_cpu=True))
    monkeypatch.setattr(fused_forward, "kernels", PlainKernels)


def rows() -> list[Any]:
    names = ["long", "short", "long", "other", "long", "short"]
    return [
        dataclasses.replace(sample(name, i, 3 + 2 * i), advantage=0.5 - i % 2, logprobs=(-4.0,) * (3 + 2 * i))
        for i, name in enumerate(names)
    ]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.config_key("cuda_kernels")
def test_the_key_decides_which_forward_pass_trains(make_net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = grpo.score_batch_fused
    monkeypatch.setattr(grpo, "score_batch_fused", lambda *a, **k: (calls.append(1), real(*a, **k))[1])
    reports, weights = [], []
    for key in (True, False):
        net = make_net()
        learner = GRPOLearner(net, settings(cuda_kernels=key))
        reports.append(learner.learn(rows()))
        weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        assert len(calls) == 1
        assert learner.fused == key
    for name, value in reports[1].metrics.items():
        assert reports[0].metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    torch.testing.assert_close(weights[0], weights[1], atol=2e-4, rtol=1e-4)


@pytest.mark.usefixtures("on_cpu")
def test_planted_kernel_that_rounds_otherwise_is_refused_before_the_first_step(
    make_net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaky(PlainKernels):
        def gate(self, gate: Tensor, up: Tensor) -> Tensor:
            return F.silu(gate) * up * 1.01

    monkeypatch.setattr(fused_forward, "kernels", Leaky)
    net = make_net()
    before = [p.detach().clone() for p in net.parameters()]
    learner = GRPOLearner(net, settings(parity_tolerance=1e-3))
    with pytest.raises(NumericsError, match=r"fused kernels and the network's own modules disagree"):
        learner.learn(rows())
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    monkeypatch.setattr(invariants, "check_fused", lambda gap, limit: None)
    with pytest.raises(NumericsError, match="sampler and learner disagree"):
        GRPOLearner(net, settings(parity_tolerance=1e-3)).learn(rows())  # the sampler's numbers here are made up


@pytest.mark.usefixtures("on_cpu")
def test_a_step_that_is_not_finite_is_refused_by_the_fused_path_too(
    make_net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, real = make_net(), grpo.score_batch_fused

    def broken(net: Any, batch: Any, **how: Any) -> TokenScores:
        scores = real(net, batch, **how)
        bad = torch.tensor([name == "other" for name in batch.item_ids])[:, None]
        return TokenScores(scores.logprobs + torch.where(bad, torch.nan, 0.0), scores.entropy)

    monkeypatch.setattr(grpo, "score_batch_fused", broken)
    learner = GRPOLearner(net, settings())
    before = [p.detach().clone() for p in net.parameters()]
    report = learner.learn(rows())
    assert not report.applied
    assert len(report.suspects) == 1
    assert "rollout=3" in report.suspects[0]
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_large_pieces_are_made_alike_and_never_above_the_budget() -> None:
    groups = [dataclasses.replace(sample("long", i, 9), group=f"g{g}", index=i) for g in range(40) for i in range(20)]
    cost = 33 + 20 * 9
    for tokens in (MICROBATCH_TOKENS, MICROBATCH_TOKENS + 1, 5000, 6000, 100_000):
        sizes = [len(piece) // 20 * cost for piece in split_microbatches(groups, 0, tokens=tokens)]
        assert sum(sizes) == 40 * cost
        assert max(sizes) <= tokens
        if tokens > MICROBATCH_TOKENS:
            assert max(sizes) - min(sizes) <= 2 * cost, (tokens, sizes)


def test_microbatches_follow_the_models_size(make_net: Any) -> None:
    small, large = make_net(), make_net(num_hidden_layers=4)
    work = Work(groups=1, siblings=1, prompt=1, completion=1, fused=True)
    one, two = (bytes_of_token(shape_of(net), work) for net in (small, large))
    assert two == 2 * one
    assert microbatch_budget(shape_of(small), work, None) // 2 == pytest.approx(
        microbatch_budget(shape_of(large), work, None), rel=0.01
    )


# -- every option: on its list and compared, or slow by name ---------------------------------------
# `fused_options` has the learner's list; the engine's, and its fields, are held by tests/unit/engines/test_graphs.py.

SLOW_ON_PURPOSE: frozenset[str] = frozenset()
"""Fields that are not on the list, by decision: with them the network's own modules compute on a GPU too. A new field is
red until it is here, or in `fused_options` with a comparison below."""
EXTRA = {"cispo": {"epsilon_high": 5.0}}
"""What an entry cannot be built without."""


def loss(**changes: Any) -> LossSettings:
    return LossSettings(**(EXTRA.get(changes.get("loss_type", ""), {}) | changes))


REGISTRIES: dict[str, tuple[Any, ...]] = {
    "loss_type": tuple(LOSSES), **{name: tuple(values) for name, values in losses._CHOICES.items()}
}  # fmt: skip
CASES = [
    *({"loss_type": name} for name in LOSSES),
    *({"kl_estimator": name, "beta": 0.1} for name in REGISTRIES["kl_estimator"]),
    *({"correction": name} for name in REGISTRIES["correction"] if name),
    {"level": "sequence"}, {"delta": 2.0}, {"kl_bias_correction": False, "beta": 0.1}, {"positive_nll": 0.1},
    {"kl_input_clamp": 0.5, "kl_output_clamp": 0.5, "beta": 0.1}, {"force_on_policy_ratio": True},
    {"correction": "token_mask", "correction_floor": 0.5, "correction_clip": 1.5},
]  # fmt: skip


def two_groups() -> list[Any]:
    lengths = [("long", 3), ("long", 7), ("short", 5), ("short", 4)]
    return [
        dataclasses.replace(sample(name, i, n), advantage=0.5 - i % 2, logprobs=(-4.0 - 0.2 * i,) * n)
        for i, (name, n) in enumerate(lengths)
    ]


# -- the lists are whole ----------------------------------------------------------------------------


def test_every_field_of_the_learner_and_of_the_loss_is_listed_or_slow_on_purpose() -> None:
    assert set(unlisted(settings())) == SLOW_ON_PURPOSE
    assert {field.name for field in dataclasses.fields(LearnerSettings)} >= fused_options.LEARNER, (
        "no such field any more"
    )
    assert {field.name for field in dataclasses.fields(LossSettings)} >= fused_options.LOSS, "no such field any more"


@pytest.mark.parametrize("registry", REGISTRIES)
def test_every_entry_of_a_registry_is_listed_or_named(registry: str) -> None:
    assert ENTRIES[registry] <= set(REGISTRIES[registry]), "no such entry any more"
    for entry in REGISTRIES[registry]:
        found = unlisted(settings(loss=loss(**{registry: entry})))
        assert found == ([] if entry in ENTRIES[registry] else [f"{registry} {entry}"])


def test_what_the_config_offers_is_what_the_registries_have() -> None:
    """So that nothing of it comes to the learner by another way."""
    fields = Config.model_fields
    assert set(get_args(fields["kl_estimator"].annotation)) == set(REGISTRIES["kl_estimator"])
    assert {None, *get_args(fields["importance_sampling_mode"].annotation)} == set(REGISTRIES["correction"])
    assert set(get_args(fields["importance_sampling_level"].annotation)) - {"auto"} == set(REGISTRIES["level"]) - {None}
    assert set(LOSS_FACTS) == set(REGISTRIES["loss_type"])


def test_the_two_fast_paths_know_the_same_models_and_every_one_that_is_trained() -> None:
    """Both ask `beyond_plain` first, so what is not plain takes the slow path in both by the same names."""
    assert set(PLAIN) == graphs.MODEL_TYPES
    assert not hasattr(fused_forward, "MODEL_TYPES"), "a second list"


def test_advantages_are_numbers_before_a_fast_path_begins() -> None:
    """No estimator is an option of one: it is gone from the settings by then."""
    assert set(ESTIMATORS) == set(advantages.ESTIMATORS)
    named = {field.name for each in (LearnerSettings, LossSettings) for field in dataclasses.fields(each)}
    assert not named & {"scale_rewards", "estimator", "advantage"}


@pytest.mark.parametrize("kind", ENGINES)
def test_only_the_embedded_engine_is_told_of_graphs(kind: str, make_net: Any) -> None:
    """The others decode by themselves; ours is asked which of its two paths by every field of the spec."""
    module, _, name = ENGINES[kind].makes.partition(":")
    make = getattr(importlib.import_module(module), name)
    inputs = EngineInputs(
        model.decoder_spec(make_net()), {}, rows=4, max_width=64, device="cpu", dtype="float32", seed=0, threads=1,
        url="http://127.0.0.1:9", kind=kind, cuda_kernels=False,
    )  # fmt: skip
    made = make(inputs)
    ours = kind in ("embedded", "auto")  # this model is one that ours is exact for
    assert (type(made) is EmbeddedEngineSpec) == (make in (embedded_engine, auto_engine)) == ours
    if ours:
        assert made.cuda_kernels is False


def test_the_chunked_loss_and_the_fused_one_take_the_options_of_the_plain_one() -> None:
    """Scores have three options; the fused path gives entropy always, and refuses a network with a bias by name."""
    plain = set(inspect.signature(score_tokens).parameters) - {"logits", "ids"}
    assert plain == {"temperature", "with_entropy"}
    assert plain <= set(inspect.signature(score_tokens_chunked).parameters)
    assert plain - set(inspect.signature(fused_training.score_tokens_fused).parameters) == {"with_entropy"}
    assert not fused_forward._known("lm_head.bias")


# -- what is listed is so ---------------------------------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_the_same_on_both_paths_under_every_listed_option(case: dict[str, Any], make_net: Any) -> None:
    reports, weights = [], []
    for key in (True, False):
        learner = GRPOLearner(net := make_net(), settings(loss=loss(**case), cuda_kernels=key))
        assert learner.fused == key
        reports.append(learner.learn(two_groups()))
        reports.append(learner.learn(two_groups(), iteration=1))  # off its own policy: ratios are not 1
        weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    fast, slow = reports[:2], reports[2:]
    for one, two in zip(fast, slow, strict=True):
        assert one.metrics.keys() == two.metrics.keys()
        for name, value in two.metrics.items():
            assert one.metrics[name] == pytest.approx(value, rel=2e-3, abs=1e-5), name
    torch.testing.assert_close(weights[0], weights[1], atol=4e-4, rtol=1e-4)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("optim", sorted(fused_options.OPTIMISERS))
def test_a_step_is_the_same_on_both_paths_with_every_listed_optimiser(optim: str, make_net: Any) -> None:
    if optim == "adamw_8bit":
        pytest.importorskip("torchao", reason="needs the torchao extra")
    weights = []
    for key in (True, False):
        learner = GRPOLearner(net := make_net(), settings(optim=optim, cuda_kernels=key))
        assert learner.fused == key
        learner.learn(two_groups())
        weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], atol=4e-4, rtol=1e-4)


def test_the_optimisers_of_the_config_are_those_that_were_compared() -> None:
    assert set(get_args(Config.model_fields["optim"].annotation)) == fused_options.OPTIMISERS
    assert unlisted(settings(optim="lion")) == ["optim lion"]


# -- planted ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
def test_planted_new_entry_takes_the_slow_path_by_name(make_net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "brand_new", LOSSES["dapo"])
    wanted = settings(loss=loss(loss_type="brand_new"))
    assert unlisted(wanted) == ["loss_type brand_new"]
    assert not GRPOLearner(make_net(), wanted).fused
    for name, entry in (("kl_estimator", "k9"), ("correction", "token_fold"), ("level", "turn")):
        monkeypatch.setitem(losses._CHOICES, name, (*losses._CHOICES[name], entry))
        planted = settings(loss=loss(**{name: entry}))
        assert unlisted(planted) == [f"{name} {entry}"]
        assert not GRPOLearner(make_net(), planted).fused


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("record", ["LEARNER", "LOSS"])
def test_planted_field_that_nobody_listed_takes_the_slow_path_by_name(
    record: str, make_net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = {"LEARNER": "LearnerSettings", "LOSS": "LossSettings"}[record]
    known = getattr(fused_options, record)
    for name in sorted(known):
        monkeypatch.setattr(fused_options, record, known - {name})
        assert unlisted(settings()) == [f"{owner}.{name}"]
        with pytest.raises(AssertionError):
            test_every_field_of_the_learner_and_of_the_loss_is_listed_or_slow_on_purpose()
    assert not GRPOLearner(make_net(), settings()).fused


@pytest.mark.usefixtures("on_cpu")
def test_a_loss_of_the_users_own_is_handed_finished_log_probabilities(make_net: Any) -> None:
    own = loss(loss_type="mine.py:soft", own=LossKind(objective=losses._clipped))
    assert unlisted(settings(loss=own)) == []
    assert GRPOLearner(make_net(), settings(loss=own)).fused


# -- on a GPU -------------------------------------------------------------------------------------


def check_kernels(use: Kernels, dtype: torch.dtype, device: str, size: int = 64) -> None:
    """Each kernel, both ways, against plain operations on the same numbers in float64."""
    plain, n, heads, kv_heads, words = PlainKernels(), 13, 6, 2, 5000
    assert type(use) is not PlainKernels
    limit = 2e-5 if dtype == torch.float32 else 2e-2

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def near(one: Tensor, two: Tensor, what: str) -> None:
        error = float((one.double() - two.double()).norm() / two.double().norm())
        assert error < limit, (what, error)

    x, added, weight, grad, grad_sum = noise(n, 96), noise(n, 96), noise(96), noise(n, 96), noise(n, 96)
    wide = [each.double() for each in (x, added, weight, grad, grad_sum)]
    for with_sum in (True, False):
        said = use.norm(x, added if with_sum else None, weight, 1e-5)
        meant = plain.norm(wide[0], wide[1] if with_sum else None, wide[2], 1e-5)
        for i in range(2):
            near(said[i], meant[i], f"norm {i}")
        back_said = use.norm_back(grad, grad_sum if with_sum else None, said[0], weight, 1e-5)
        back_meant = plain.norm_back(wide[3], wide[4] if with_sum else None, said[0].double(), wide[2], 1e-5)
        for i in range(2):
            near(back_said[i], back_meant[i], f"norm back {i}")
    q, k, v, cos, sin = noise(n, heads * size), noise(n, kv_heads * size), noise(n, kv_heads * size), *rotary(n, size)
    cos, sin = cos.to(device, dtype), sin.to(device, dtype)
    near(use.turn(q, k, v, cos, sin, size), plain.turn(*(t.double() for t in (q, k, v, cos, sin)), size), "turn")
    pull = noise(n, heads + 2 * kv_heads, size)
    turned = plain.turn_back(pull.double(), cos.double(), sin.double(), heads, kv_heads)
    for one, two in zip(use.turn_back(pull, cos, sin, heads, kv_heads), turned, strict=True):
        near(one, two, "turn back")
    gate, up, d = noise(n, 3000), noise(n, 3000), noise(n, 3000)
    near(use.gate(gate, up), plain.gate(gate.double(), up.double()), "gate")
    for one, two in zip(
        use.gate_back(d, gate, up), plain.gate_back(d.double(), gate.double(), up.double()), strict=True
    ):
        near(one, two, "gate back")
    logits, ids, g = 3 * noise(n, words), torch.randint(0, words, (n,), device=device), torch.randn(n, device=device)
    g[3] = 0.0
    said, meant = use.score(logits, ids, 0.7), plain.score(logits, ids, 0.7)
    for i, name in enumerate(("logprob", "entropy", "top", "log total")):
        near(said[i], meant[i], name)
    one, two = logits.clone(), logits.double()
    one[3] = float("nan")  # a token without a gradient
    use.score_back(one, ids, g, said[2], said[3], 0.7)
    plain.score_back(two, ids, g, meant[2], meant[3], 0.7)
    near(one, two, "score back")


def rotary(n: int, size: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(n, size // 2) * 6
    doubled = torch.cat([angles, angles], dim=1)
    return doubled.cos(), doubled.sin()


@pytest.mark.gpu("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 24, 128])
def test_every_training_kernel_says_what_the_plain_operations_say(size: int, dtype: torch.dtype) -> None:
    check_kernels(kernels(), dtype, "cuda", size)


@pytest.mark.gpu("kernels")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fused_scores_and_gradients_are_those_of_the_networks_own_modules_on_a_gpu(name: str, make_net: Any) -> None:
    net, batch = make_net(name).cuda(), packed().to("cuda")
    assert why_not_fused(net) == []
    both = []
    for fused in (True, False):
        net.zero_grad(set_to_none=True)
        scores = (
            score_batch_fused(net, batch, temperature=0.7)
            if fused
            else score_batch(net, batch, temperature=0.7, with_entropy=True)
        )
        weights = torch.linspace(0.5, 2.0, batch.mask.numel(), device="cuda").view(batch.mask.shape)
        (scores.logprobs * weights).sum().backward()
        both.append((scores, {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(both[0][0].logprobs, both[1][0].logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both[0][0].entropy, both[1][0].entropy, atol=1e-5, rtol=1e-5)
    for n, value in both[0][1].items():
        torch.testing.assert_close(value, both[1][1][n], atol=1e-4, rtol=1e-3, msg=n)
