"""The losses beside the policy's: the right gradient, the right teacher, and never a channel that only looks alive."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.errors import ConfigError, InvariantError, NumericsError, TaskError
from surefoot.learner import auxiliary_losses
from surefoot.learner.auxiliary_losses import (
    AuxiliaryLosses,
    AuxiliaryLossSettings,
    SelfDistillation,
    WorkedExamples,
    make_auxiliary_losses,
)
from surefoot.learner.chat import ChatCodec
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.maths.losses import LossSettings
from surefoot.maths.preference import PreferencePair
from surefoot.records import TrainSample

REWARDS = [[1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0.5, 0.5], [0, 0, 0, 0]]
"""Two groups with something to show (one with two best; one with one, and with samples at the mean), two without."""
LIVE = 4 + 3
PAIRS = [
    PreferencePair((4, 10, 11), chosen_ids=(20, 21, 2), rejected_ids=(30, 2), source="a"),
    PreferencePair((4, 12), chosen_ids=(22, 2), rejected_ids=(31, 32, 33, 34, 2), source="b"),
]
Gradients = dict[str, Tensor]
Sample = Callable[..., list[TrainSample]]


def shown(attempt: TrainSample) -> tuple[int, ...]:
    """A hinted prompt without a tokenizer: the attempt, a mark, the question."""
    return (7, *attempt.completion_ids, 9, *attempt.prompt_ids)


def make(net: Any, *, pairs: Sequence[PreferencePair] = PAIRS, hinted: Any = shown, **keys: Any) -> GRPOLearner:
    """A learner in double precision; `alpha_sdpo`, `beta_replay` ... as in the config."""
    known = {field.name for field in dataclasses.fields(AuxiliaryLossSettings)}
    numbers = {name: value for name, value in keys.items() if name in known}
    net = copy.deepcopy(net).double()
    built = make_auxiliary_losses(AuxiliaryLossSettings(**numbers), net=net, hinted=hinted, pairs=pairs)
    both = {name: value for name, value in keys.items() if name not in known or name == "microbatch_size"}
    settings = LearnerSettings(
        loss=both.pop("loss", LossSettings()), learning_rate=1e-2, max_steps=100, max_completion_length=9,
        temperature=keys.get("temperature", 1.0), pad_token_id=0, max_grad_norm=0.0,
        mask_truncated=keys.get("mask_truncated", False),
    )  # fmt: skip
    return GRPOLearner(net, dataclasses.replace(settings, **both), built)


def gradient(learner: GRPOLearner, samples: Sequence[TrainSample]) -> Gradients:
    """What the optimiser is handed."""
    seen: Gradients = {}
    real = learner.optimiser.step

    def step(*args: Any) -> Any:
        seen.update({n: p.grad.clone() for n, p in learner.net.named_parameters() if p.grad is not None})
        return real(*args)

    learner.optimiser.step = step  # type: ignore[method-assign,assignment]
    assert learner.learn(samples).applied
    return seen


def differentiated(net: Any, loss: Callable[[Any], Tensor]) -> Gradients:
    """The gradient of one plain loss by itself."""
    net = copy.deepcopy(net).double()
    loss(net).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def logps(net: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """(T, V) by one plain forward over prompt and completion."""
    logits = net(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)


def taught(samples: Sequence[TrainSample]) -> list[tuple[TrainSample, TrainSample]]:
    """(student, the sibling it is shown), found the slow way."""
    pairs = []
    for sample in samples:
        siblings = [s for s in samples if s.group == sample.group]
        mean = sum(s.reward for s in siblings) / len(siblings)
        better = [s for s in siblings if s.index != sample.index and s.reward > mean and s.reward >= sample.reward]
        if better:
            pairs.append((sample, max(better, key=lambda s: (s.reward, -s.index))))
    return pairs


def plain_sdpo(samples: Sequence[TrainSample]) -> Callable[[Any], Tensor]:
    """Mean reverse KL over the tokens of all samples that have a teacher."""

    def loss(net: Any) -> Tensor:
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for sample, best in taught(samples):
            student = logps(net, sample.prompt_ids, sample.completion_ids)
            teacher = logps(net, shown(best), sample.completion_ids).detach()
            total = total + (student.exp() * (student - teacher)).sum()
            tokens += len(sample.completion_ids)
        return total / tokens

    return loss


def plain_replay(start: Any) -> Callable[[Any], Tensor]:
    """Mean preference loss of all pairs against the net at the start."""
    start = copy.deepcopy(start).double()

    def whole(net: Any, pair: PreferencePair, ids: Sequence[int]) -> Tensor:
        picked: Tensor = logps(net, pair.prompt_ids, ids).gather(1, torch.tensor(ids)[:, None])
        return picked.sum()

    def loss(net: Any) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for pair in PAIRS:
            chosen, rejected = (whole(net, pair, ids) for ids in (pair.chosen_ids, pair.rejected_ids))
            before = whole(start, pair, pair.chosen_ids) - whole(start, pair, pair.rejected_ids)
            margin = chosen - rejected - before.detach()
            total = total - torch.nn.functional.logsigmoid(0.1 * margin)
        return total / len(PAIRS)

    return loss


@pytest.fixture(scope="module")
def samples(net: Any, sampled_groups: Any) -> list[TrainSample]:
    drawn: list[TrainSample] = sampled_groups(net, REWARDS)
    return drawn


def expect_sum(net: Any, samples: list[TrainSample], alpha: float, beta: float, **keys: Any) -> None:
    """The claim: the learner's gradient is that of its parts, each taken by itself."""
    got = gradient(make(net, alpha_sdpo=alpha, beta_replay=beta, **keys), samples)
    parent = gradient(make(net), samples)
    parts = [(alpha, differentiated(net, plain_sdpo(samples))), (beta, differentiated(net, plain_replay(net)))]
    assert all(max(float(g.abs().max()) for g in part.values()) > 1e-3 for _, part in parts), "nothing to compare"
    assert got.keys() == parent.keys()
    for name, value in got.items():  # the nets' norms compute in float32, whatever the weights are
        expected = parent[name] + sum(weight * part[name] for weight, part in parts)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=3e-7, msg=lambda text, name=name: f"{name}: {text}")


# -- the gradient ---------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "beta"), [(0.7, 0.0), (0.0, 0.3), (0.7, 0.3)])
def test_the_gradient_is_that_of_the_parent_and_of_the_weighed_channels(
    net: Any, samples: list[TrainSample], alpha: float, beta: float
) -> None:
    expect_sum(net, samples, alpha, beta)


@pytest.mark.parametrize("size", [1, 3])
def test_no_cut_changes_the_gradient(
    net: Any, samples: list[TrainSample], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auxiliary_losses, "CHUNK_TOKENS", 2)
    expect_sum(net, samples, 0.7, 0.3, microbatch_size=size)


def test_a_later_pass_over_the_same_samples_has_both_channels_too(net: Any, samples: list[TrainSample]) -> None:
    learner = make(net, alpha_sdpo=0.5, beta_replay=0.5)
    first, second = (learner.learn(samples, iteration=i).metrics for i in (0, 1))
    assert {"sdpo/loss", "replay/loss"} <= first.keys() & second.keys()
    assert first["replay/loss"] == pytest.approx(math.log(2), abs=1e-9)
    assert second["replay/loss"] != first["replay/loss"]


def test_the_loss_that_is_logged_is_the_one_that_was_differentiated(net: Any, samples: list[TrainSample]) -> None:
    alone = make(net).learn(samples).metrics
    metrics = make(net, alpha_sdpo=0.7, beta_replay=0.3).learn(samples).metrics
    expected = alone["loss"] + 0.7 * metrics["sdpo/loss"] + 0.3 * metrics["replay/loss"]
    assert metrics["loss"] == pytest.approx(expected, rel=1e-9)
    assert metrics["policy_loss"] == alone["policy_loss"]
    assert metrics["sdpo/loss"] == pytest.approx(float(plain_sdpo(samples)(copy.deepcopy(net).double()).detach()))


def test_the_teacher_s_gain_is_measured_on_attempts_that_did_well(net: Any, samples: list[TrainSample]) -> None:
    wide, gains = copy.deepcopy(net).double(), []
    for sample, best in taught(samples):
        if sample.advantage > 0:
            ids = torch.tensor(sample.completion_ids)[:, None]
            told, own = (logps(wide, p, sample.completion_ids).gather(1, ids) for p in (shown(best), sample.prompt_ids))
            gains += (told - own).flatten().tolist()
    assert len(gains) > 2
    measured = make(net, alpha_sdpo=1.0, microbatch_size=3).learn(samples).metrics["sdpo/teacher_gain"]
    assert measured == pytest.approx(sum(gains) / len(gains), rel=1e-4)
    alone = [s for s in samples if s.group == samples[8].group]  # one success: it has no teacher
    assert "sdpo/teacher_gain" not in make(net, alpha_sdpo=1.0).learn(alone).metrics


# -- planted bugs: each turns the claim above red -------------------------------------------------


def leaking(student: Tensor, teacher: Tensor, mask: Tensor, *, tokens_in_step: int, **_: Any) -> Any:
    """The loss without its detach."""
    q, p = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    loss = (q.exp() * (q - p)).sum() / tokens_in_step
    sums = {"distill_loss": loss.detach(), "distill_divergence": loss.detach(), "distill_tokens": mask.sum()}
    return auxiliary_losses.LossTerms(loss, sums)


def test_planted_teacher_with_a_gradient_is_seen(
    net: Any, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auxiliary_losses, "distillation_loss", leaking)
    expect_sum(net, samples, 0.7, 0.3)  # the channel itself hands over a teacher without a gradient
    monkeypatch.setattr(auxiliary_losses, "_teacher_states", auxiliary_losses.completion_hidden)
    real = torch.no_grad
    monkeypatch.setattr(auxiliary_losses.torch, "no_grad", contextlib.nullcontext)
    with pytest.raises(AssertionError):
        expect_sum(net, samples, 0.7, 0.3)
    monkeypatch.setattr(auxiliary_losses.torch, "no_grad", real)


def test_planted_shift_by_one_token_is_seen(
    net: Any, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = auxiliary_losses._teacher_states
    monkeypatch.setattr(auxiliary_losses, "_teacher_states", lambda *args: real(*args).roll(1, dims=1))
    with pytest.raises(AssertionError):
        expect_sum(net, samples, 0.7, 0.3)


def test_planted_zero_filled_rows_are_seen(
    net: Any, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples without a teacher get their own prompt as one: their loss is 0, and they dilute the others."""
    real = SelfDistillation.teachers

    def filled(self: SelfDistillation, given: Sequence[TrainSample]) -> Any:
        prompts = {(s.group, s.index): s.prompt_ids for s in given} | real(self, given).prompts
        return auxiliary_losses.Teachers(prompts, 0)

    monkeypatch.setattr(SelfDistillation, "teachers", filled)
    with pytest.raises(AssertionError):
        expect_sum(net, samples, 0.7, 0.3)


def test_planted_foreign_completion_is_refused(
    net: Any, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = auxiliary_losses._pack

    def pack(net: Any, rows: Sequence[TrainSample], pad: int) -> Any:
        batch = real(net, rows, pad)
        hinted = rows[0].prompt_ids[0] == 7
        return dataclasses.replace(batch, completion_ids=batch.completion_ids.roll(1, dims=1)) if hinted else batch

    monkeypatch.setattr(auxiliary_losses, "_pack", pack)
    with pytest.raises(ConfigError, match="one token off"):
        make(net, alpha_sdpo=1.0).learn(samples)


# -- weight 0 ---------------------------------------------------------------------------------


def forwards(learner: GRPOLearner, samples: Sequence[TrainSample]) -> int:
    """Calls of the decoder in one step."""
    calls: list[int] = []
    hook = learner.net.get_decoder().register_forward_hook(lambda *_: calls.append(1))
    learner.learn(samples)
    hook.remove()
    return len(calls)


def test_weight_zero_costs_no_forward_and_changes_no_bit(net: Any, samples: list[TrainSample]) -> None:
    def read(*_: Any) -> Any:
        raise AssertionError("a channel of weight 0 asked for something")

    plain = make(net, pairs=(), hinted=None)
    off = make(net, alpha_sdpo=0.0, beta_replay=0.0, sdpo_mixing=0.3, seed=5, hinted=read)
    assert off.channels is None
    usual = forwards(plain, samples)
    assert forwards(off, samples) == usual
    assert all(torch.equal(a, b) for a, b in zip(off.net.parameters(), plain.net.parameters(), strict=True))
    assert forwards(make(net, alpha_sdpo=1.0), samples) == usual + 2  # student and teacher
    assert forwards(make(net, beta_replay=1.0), samples) == usual + 1


@pytest.mark.parametrize("key", ["alpha_sdpo", "beta_replay"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_negative_or_endless_weight_is_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        AuxiliaryLossSettings(**{key: value})


@pytest.mark.parametrize("keys", [{"sdpo_mixing": 1.1}, {"sdpo_mixing": -0.1}, {"dead_channel_steps": 0}])
def test_other_numbers_outside_their_range_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(keys))):
        AuxiliaryLossSettings(**keys)


@pytest.mark.parametrize("key", ["alpha_sdpo", "beta_replay"])
def test_a_channel_without_a_source_is_refused_at_once(net: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = 0.5 without"):
        make_auxiliary_losses(AuxiliaryLossSettings(**{key: 0.5}), net=net)


# -- who teaches whom ---------------------------------------------------------------------------


def row(reward: float, advantage: float, index: int, **changes: Any) -> TrainSample:
    values: dict[str, Any] = dict(
        item_id="t", trainer_version=0, group="g", index=index, prompt_ids=(4, 5), completion_ids=(40 + index, 2),
        sampled=(True, True), logprobs=(-1.0, -1.0), reward=reward, advantage=advantage, finish_reason="stop",
    )  # fmt: skip
    return TrainSample(**(values | changes))


def teacher_of(rewards: Sequence[float], **settings: Any) -> list[int | None]:
    """For each sibling the one it is shown."""
    mean = sum(rewards) / len(rewards)
    group = [row(r, r - mean, i) for i, r in enumerate(rewards)]
    channel = SelfDistillation(
        AuxiliaryLossSettings(alpha_sdpo=1.0, **settings), lambda attempt: attempt.completion_ids
    )
    prompts = channel.teachers(group).prompts
    return [prompts["g", i][0] - 40 if ("g", i) in prompts else None for i in range(len(rewards))]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0], [None, 0]),  # the only success has nobody to learn from
        ([0, 1, 0, 0], [1, None, 1, 1]),
        ([1, 0, 0, 1], [3, 0, 0, 0]),  # successes show each other; ties go to the first
        ([0, 0.5, 1], [2, 2, None]),  # a sample at the mean has no advantage, and a teacher
        ([0.9, 1, 0], [1, None, 1]),  # nobody is shown an attempt worse than its own
        ([1, 1, 1], [None, None, None]),
        ([0, 0], [None, None]),
    ],
)
def test_a_sample_is_shown_the_best_sibling_that_did_no_worse(rewards: list[float], expected: list[int | None]) -> None:
    assert teacher_of(rewards) == expected


def test_a_teacher_that_does_not_fit_is_left_out_and_counted(net: Any, samples: list[TrainSample]) -> None:
    free = make(net, alpha_sdpo=1.0).learn(samples).metrics
    longest = max(len(shown(best)) + len(s.completion_ids) for s, best in taught(samples))
    tight = make(net, alpha_sdpo=1.0, max_tokens=longest - 1).learn(samples).metrics
    assert (free["sdpo/live_fraction"], free["sdpo/too_long"]) == (LIVE / 16, 0)
    assert tight["sdpo/too_long"] > 0
    assert tight["sdpo/live_fraction"] == (LIVE - tight["sdpo/too_long"]) / 16


def test_truncated_samples_neither_learn_nor_teach_when_they_are_masked() -> None:
    group = [row(1, 1, 0, finish_reason="length"), row(0.5, 0.2, 1), row(0, -1.2, 2)]
    seen: list[int] = []

    def hinted(attempt: TrainSample) -> None:
        seen.append(attempt.index)

    for masked in (False, True):
        channel = SelfDistillation(AuxiliaryLossSettings(alpha_sdpo=1.0, mask_truncated=masked), hinted)
        rows = channel.backward(None, group, 0)["distill_rows"]
        assert (int(rows), seen[0]) == ((2, 1) if masked else (3, 0))
        seen.clear()


def test_the_teacher_reads_the_attempt_behind_the_question(make_tokenizer: Any) -> None:
    codec = ChatCodec(make_tokenizer(), frozenset({2}), 61, "be brief")
    asked = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "no"},
    ]
    attempt = row(1, 1, 0, completion_ids=(*make_tokenizer()("2").input_ids, 2))
    prompt = WorkedExamples(codec, {"t": asked})(attempt)
    assert prompt is not None
    text = codec.decode(prompt)
    assert prompt[: len(codec.encode_prompt(asked[:1])) - 1] == codec.encode_prompt(asked[:1])[:-1], "history is kept"
    assert text.count("be brief") == 1
    assert text.index("no") < text.index("2") == text.rindex("2")
    assert prompt[-1] == codec.encode_prompt(asked)[-1], "the assistant's turn is open"


def test_an_attempt_without_text_shows_nothing_and_a_question_without_text_is_refused(make_tokenizer: Any) -> None:
    codec = ChatCodec(make_tokenizer(), frozenset({2}), 61)
    hinted = WorkedExamples(codec, {"t": [{"role": "user", "content": "{x} {0}"}], "u": [{"role": "user"}]})
    assert hinted(row(1, 1, 0, completion_ids=(2, 2))) is None
    assert hinted(row(1, 1, 0, completion_ids=(10, 2))) is not None, "braces in a question are text"
    with pytest.raises(TaskError, match="task u"):
        hinted(row(1, 1, 0, item_id="u", completion_ids=(10, 2)))


# -- dead, or not finite ------------------------------------------------------------------------


def test_a_channel_that_gives_nothing_for_k_steps_in_a_row_ends_the_run(net: Any, sampled_groups: Sample) -> None:
    learner = make(net, alpha_sdpo=0.5, dead_channel_steps=3)
    for rewards in ([[1, 1]], [[0, 0]], [[0, 1]], [[0, 0]], [[1, 1]]):  # a live step in between starts the count anew
        metrics = learner.learn(sampled_groups(net, rewards, version=learner.version), iteration=0).metrics
        assert ("sdpo/loss" in metrics) is (rewards == [[0, 1]]), "a loss that is not there is not 0"
        assert metrics["sdpo/live_fraction"] == (0.5 if rewards == [[0, 1]] else 0)
        net = copy.deepcopy(learner.net).float()
    before = learner.version
    with pytest.raises(InvariantError, match=r"alpha_sdpo = 0\.5.*3 steps in a row"):
        learner.learn(sampled_groups(net, [[0, 0]], version=before))
    assert learner.version == before


def test_a_teacher_that_knows_no_more_than_its_student_is_a_dead_one(net: Any, samples: list[TrainSample]) -> None:
    learner = make(net, alpha_sdpo=0.5, dead_channel_steps=1, hinted=lambda attempt: attempt.prompt_ids)
    with pytest.raises(InvariantError, match="alpha_sdpo"):
        learner.learn(samples)


def test_planted_without_the_watch_a_dead_channel_goes_unnoticed(
    net: Any, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AuxiliaryLosses, "_watch", lambda *_: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_teacher_that_knows_no_more_than_its_student_is_a_dead_one(net, samples)


@pytest.mark.parametrize(("key", "function"), [("alpha_sdpo", "distillation_loss"), ("beta_replay", "preference_loss")])
def test_a_component_that_is_not_finite_is_named_and_nothing_is_applied(
    net: Any, samples: list[TrainSample], key: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(auxiliary_losses, function)

    def poisoned(*args: Any, **keys: Any) -> Any:
        terms = real(*args, **keys)
        return terms._replace(loss=terms.loss * math.nan)

    monkeypatch.setattr(auxiliary_losses, function, poisoned)
    learner = make(net, **{key: 0.5})
    before = [p.detach().clone() for p in learner.net.parameters()]
    with pytest.raises(NumericsError, match=f"the loss of {key} is nan"):
        learner.learn(samples)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.net.parameters(), strict=True))
    assert learner.version == 0


def test_a_step_that_is_not_finite_by_itself_is_refused_as_ever(
    net: Any, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    from surefoot.learner import grpo

    learner = make(net, alpha_sdpo=0.5, beta_replay=0.5)
    real = grpo.policy_loss
    poisoned = lambda *a, **k: (t := real(*a, **k))._replace(sums=t.sums | {"loss": t.loss.detach() * math.nan})  # noqa: E731
    monkeypatch.setattr(grpo, "policy_loss", poisoned)
    report = learner.learn(samples)
    assert not report.applied
    assert learner.version == 0


# -- recorded preferences -----------------------------------------------------------------------


def test_replay_lifts_the_chosen_answer_over_the_rejected_one(net: Any, samples: list[TrainSample]) -> None:
    learner = make(net, beta_replay=5.0, learning_rate=1e-3)
    first = learner.learn(samples).metrics
    assert (first["replay/loss"], first["replay/pairs"]) == (pytest.approx(math.log(2), abs=1e-9), 2)
    for iteration in range(1, 6):
        last = learner.learn(samples, iteration=iteration).metrics
    assert last["replay/loss"] < first["replay/loss"] - 0.01
    assert last["replay/accuracy"] == 1
    assert last["replay/margin"] > 0.1


def test_planted_swapped_sides_are_seen(net: Any, samples: list[TrainSample], monkeypatch: pytest.MonkeyPatch) -> None:
    real = auxiliary_losses.ReplayLoss._logps
    monkeypatch.setattr(auxiliary_losses.ReplayLoss, "_logps", lambda *args: real(*args).flip(1))
    with pytest.raises(AssertionError):
        expect_sum(net, samples, 0.7, 0.3)


def test_replay_works_on_a_step_whose_samples_teach_nothing_or_are_missing(net: Any, sampled_groups: Sample) -> None:
    for given in (sampled_groups(net, [[1, 1], [0, 0]]), []):
        learner = make(net, beta_replay=1.0)
        before = [p.detach().clone() for p in learner.net.parameters()]
        report = learner.learn(given)
        assert report.applied
        assert report.metrics["loss"] == report.metrics["replay/loss"]
        assert report.metrics["grad_norm"] > 0
        assert any(not torch.equal(a, b) for a, b in zip(before, learner.net.parameters(), strict=True))


def test_pairs_are_drawn_by_seed_and_version_alone(net: Any) -> None:
    stock = [PreferencePair((4, 5), chosen_ids=(10 + i, 2), rejected_ids=(40, 2), source=str(i)) for i in range(20)]

    def drawn(seed: int) -> list[list[str]]:
        channel = auxiliary_losses.ReplayLoss(AuxiliaryLossSettings(beta_replay=1.0, seed=seed), net, stock)
        return [[pair.source for pair in channel.deal(version)] for version in (0, 1, 2)]

    state = torch.get_rng_state()
    first = drawn(0)
    assert first == drawn(0) != drawn(1)
    assert len({tuple(step) for step in first}) == 3
    assert all(len(set(step)) == auxiliary_losses.PAIRS_PER_STEP for step in first)
    assert torch.equal(state, torch.get_rng_state()), "the training's own stream stays where it was"


def test_pairs_that_cannot_teach_are_dropped_under_their_reason(net: Any, samples: list[TrainSample]) -> None:
    same = PreferencePair((4, 5), chosen_ids=(10, 2), rejected_ids=(10, 2), source="same")
    long = PreferencePair((4,) * 50, chosen_ids=(10, 2), rejected_ids=(11, 2), source="long")
    empty = PreferencePair((4, 5), chosen_ids=(), rejected_ids=(11, 2), source="empty")
    metrics = (
        make(net, pairs=[same, long, empty, *PAIRS, PAIRS[0]], beta_replay=1.0, max_tokens=40).learn(samples).metrics
    )
    found = {name: value for name, value in metrics.items() if name.startswith("replay/dropped/")}
    assert found == {f"replay/dropped/{reason}": 1 for reason in ("identical", "too_long", "too_short", "repeated")}
    assert metrics["replay/pairs"] == 2
    for bad in ([same], []):
        with pytest.raises(ConfigError, match="no pair of replay_pairs"):
            make(net, pairs=bad, beta_replay=1.0)


def test_every_number_of_the_channels_is_registered(net: Any, samples: list[TrainSample]) -> None:
    from surefoot.tracking.metrics import lookup

    metrics = make(net, alpha_sdpo=1.0, beta_replay=1.0, pairs=[*PAIRS, PAIRS[0]]).learn(samples).metrics
    assert [name for name in metrics if lookup(name) is None] == []
    assert {n for n in metrics if n.startswith(("sdpo/", "replay/"))} == {
        "sdpo/loss", "sdpo/live_fraction", "sdpo/teacher_gain", "sdpo/too_long", "replay/loss", "replay/accuracy", "replay/margin",
        "replay/pairs", "replay/dropped/repeated",
    }  # fmt: skip
