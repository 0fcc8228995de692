"""A step that does not fit is done again in smaller pieces: the same gradient, said aloud, at most three times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from learner_kit import SampleGroups, counted_rows, make, parameters, same
from torch import Tensor

from surefoot.errors import MemoryLimitError, StateError
from surefoot.learner import grpo, optimizer
from surefoot.learner.auxiliary_losses import AuxiliaryLossSettings, make_auxiliary_losses
from surefoot.learner.checkpoint import capture
from surefoot.learner.grpo import GRPOLearner
from surefoot.learner.memory import MAX_SPLITS, is_out_of_memory, memory_in_use
from surefoot.maths.losses import LossSettings
from surefoot.maths.preference import PreferencePair
from surefoot.records import TrainSample
from surefoot.storage.files import VARIABLE, read_environment

REWARDS = [[1, 0, 0, 1, 0], [0, 1, 0.5, 0], [0, 0, 1]]
"""Twelve rows in uneven groups: no halving falls between two of them by luck."""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """`failing("learner.before_forward=raise:torch.OutOfMemoryError@2")`, until the end of the test."""

    def switch_on(words: str) -> None:
        monkeypatch.setenv(VARIABLE, words)
        read_environment()

    yield switch_on
    monkeypatch.delenv(VARIABLE, raising=False)
    read_environment()


# -- the gradient -----------------------------------------------------------------------------------


def gradient(learner: GRPOLearner, samples: Sequence[TrainSample]) -> Tensor:
    """Every gradient in one row, as the optimiser got it."""
    seen: list[Tensor] = []
    real = learner.optimiser.step

    def step(*args: Any) -> Any:
        seen.append(torch.cat([p.grad.flatten() for p in learner.net.parameters() if p.grad is not None]))
        return real(*args)

    learner.optimiser.step = step  # type: ignore[method-assign,assignment]
    assert learner.learn(samples).applied
    return seen[0]


@pytest.mark.parametrize("size", [0, 6])
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_the_gradient_is_the_same_after_any_number_of_halvings(
    splits: int, loss: Any, size: int, make_net: Any, sampled_groups: SampleGroups
) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    settings = LossSettings(loss_type=loss, beta=0.1)
    whole = gradient(make(net, settings, max_grad_norm=0.0, microbatch_size=size), samples)
    halved = make(net, settings, max_grad_norm=0.0, microbatch_size=size)
    halved.splits = splits
    rows = counted_rows(halved)
    pieces = gradient(halved, samples)
    assert max(rows) == -(-(size or 12) // 2**splits)
    assert sum(rows) == 12
    assert float((pieces - whole).norm() / whole.norm()) < 1e-6


def test_the_losses_beside_the_policys_are_halved_too_and_give_the_same_gradient(
    make_net: Any, sampled_groups: SampleGroups
) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    pairs = [
        PreferencePair((4, 10, 11 + i), chosen_ids=(20, 21, 2), rejected_ids=(30 + i, 2), source=str(i))
        for i in range(3)
    ]

    def learner(splits: int) -> GRPOLearner:
        made = make(net, max_grad_norm=0.0)
        numbers = AuxiliaryLossSettings(alpha_sdpo=0.7, beta_replay=0.3)
        made.channels = make_auxiliary_losses(numbers, net=net, hinted=lambda s: (7, *s.completion_ids, 9), pairs=pairs)
        made.splits = splits
        return made

    whole = gradient(learner(0), samples)
    for splits in (1, 2, 3):
        assert float((gradient(learner(splits), samples) - whole).norm() / whole.norm()) < 1e-6


# -- what happens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch.OutOfMemoryError", "MemoryError"])
@pytest.mark.parametrize("where", ["learner.before_forward", "learner.after_backward", "learner.before_step"])
@pytest.mark.parametrize("hit", [1, 2])
def test_a_step_that_ran_out_of_memory_is_done_again_and_equals_one_that_was_cut_so_from_the_start(
    where: str, kind: str, hit: int, make_net: Any, sampled_groups: SampleGroups, failing: Callable[[str], None]
) -> None:
    if where == "learner.before_step" and hit == 2:
        hit = 1
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    learner, fine = make(net, microbatch_size=6), make(net, microbatch_size=6)
    fine.splits = 1
    failing(f"{where}=raise:{kind}@{hit}")
    report = learner.learn(samples)
    expected = fine.learn(samples)
    assert report.applied
    assert (report.metrics, report.version) == (expected.metrics, expected.version)
    assert report.metrics["memory/splits"] == 1.0
    assert same(parameters(learner), parameters(fine))
    assert learner.checked_tokens == fine.checked_tokens, "the failed attempt counts for nothing"
    assert same({str(k): v for k, v in learner._old.items()}, {str(k): v for k, v in fine._old.items()})
    ((what, remedy),) = report.notes
    assert "microbatches of 6 rows; the step was done again with 3 (halving 1 of 3)" in what
    assert "microbatch_size = 3" in remedy
    assert learner.learn(samples, iteration=1).notes == (), "said once"


def test_a_second_pass_that_runs_out_of_memory_keeps_the_old_logprobs_of_the_first(
    make_net: Any, sampled_groups: SampleGroups, failing: Callable[[str], None]
) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    learner = make(net)
    learner.learn(samples)
    old = {str(k): v.clone() for k, v in learner._old.items()}
    failing("learner.after_backward=raise:torch.OutOfMemoryError@1")
    report = learner.learn(samples, iteration=1)
    assert report.applied
    assert report.metrics["probs_ratio"] != 1.0
    assert same(old, {str(k): v for k, v in learner._old.items()})


def test_three_halvings_are_the_limit_of_a_run_not_of_a_step(
    make_net: Any, sampled_groups: SampleGroups, failing: Callable[[str], None]
) -> None:
    net = make_net()
    learner = make(net)
    for taken in range(1, MAX_SPLITS + 1):
        failing("learner.before_forward=raise:torch.OutOfMemoryError@1")
        report = learner.learn(sampled_groups(learner.net, REWARDS, version=learner.version))
        assert report.metrics["memory/splits"] == taken
    samples = sampled_groups(learner.net, REWARDS, version=learner.version)
    before = parameters(learner)
    failing("learner.before_forward=raise:torch.OutOfMemoryError@1")
    with pytest.raises(MemoryLimitError, match="after 3 of 3 halvings"):
        learner.learn(samples)
    assert same(before, parameters(learner))
    assert capture(learner).version == MAX_SPLITS, "what was done before can still be saved"
    assert all(p.grad is None for p in learner.net.parameters())


def test_the_end_says_rows_tokens_parameters_and_bytes(
    make_net: Any, sampled_groups: SampleGroups, failing: Callable[[str], None]
) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    failing("learner.before_forward=raise:torch.OutOfMemoryError")
    with pytest.raises(MemoryLimitError) as caught:
        make(net).learn(samples)
    count = sum(p.numel() for p in net.parameters())
    first = caught.value.what
    assert f"memory ran out at version 0 with microbatches of 2 rows ({tokens(samples[:2])} tokens)" in first
    assert f"the model has {count} parameters on cpu, " in first
    assert first.endswith((" MiB in use", "unknown memory in use"))
    assert "no row may be left out" in caught.value.why
    assert caught.value.exit_code == 74


def tokens(samples: Sequence[TrainSample]) -> int:
    return sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)


def test_one_row_that_does_not_fit_is_the_end_at_once(
    make_net: Any, sampled_groups: SampleGroups, failing: Callable[[str], None]
) -> None:
    learner = make(make_net(), microbatch_size=1)
    rows = counted_rows(learner)
    failing("learner.after_backward=raise:torch.OutOfMemoryError@1")
    with pytest.raises(MemoryLimitError, match=r"microbatches of 1 rows .* after 0 of 3 halvings"):
        learner.learn(sampled_groups(make_net(), REWARDS))
    assert rows == [1], "nobody tried again what cannot become smaller"


def test_an_error_that_is_not_about_memory_passes_unchanged(
    make_net: Any, sampled_groups: SampleGroups, failing: Callable[[str], None]
) -> None:
    learner = make(make_net())
    failing("learner.after_backward=raise:RuntimeError@1")
    with pytest.raises(RuntimeError, match=r"failpoint learner\.after_backward"):
        learner.learn(sampled_groups(make_net(), REWARDS))
    assert learner.splits == 0


def test_a_channels_watch_counts_a_repeated_step_once(
    make_net: Any, sampled_groups: SampleGroups, failing: Callable[[str], None]
) -> None:
    """Nobody has a better sibling: the channel is idle for one step, though the step was done twice."""
    net = make_net()
    learner = make(net)
    learner.channels = make_auxiliary_losses(AuxiliaryLossSettings(alpha_sdpo=1.0), net=net, hinted=lambda s: None)
    assert learner.channels is not None
    failing("learner.before_step=raise:torch.OutOfMemoryError@1")
    assert learner.learn(sampled_groups(net, REWARDS)).metrics["memory/splits"] == 1.0
    assert learner.channels._dead == {"alpha_sdpo": 1}


def test_every_microbatch_is_a_beat(
    make_net: Any, sampled_groups: SampleGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[str] = []
    monkeypatch.setattr(grpo, "tick", beats.append)
    make(make_net(), microbatch_size=3).learn(sampled_groups(make_net(), REWARDS))
    assert beats == ["learning from the step's samples"] * 4


# -- the optimiser's own memory ---------------------------------------------------------------------


def test_memory_that_runs_out_inside_the_optimisers_step_is_the_end_and_is_never_saved(
    make_net: Any, sampled_groups: SampleGroups, failing: Callable[[str], None]
) -> None:
    """Some weights are stepped and some are not: no checkpoint may hold them, no second attempt may follow."""
    net = make_net()
    learner = make(net)
    rows = counted_rows(learner)
    failing("learner.after_step=raise:torch.OutOfMemoryError")
    with pytest.raises(MemoryLimitError, match="inside the optimiser's step") as caught:
        learner.learn(sampled_groups(net, REWARDS))
    assert "half stepped" in caught.value.why
    assert rows == [12]
    del learner._pack  # the counter, which no checkpoint holds
    with pytest.raises(StateError, match="interrupted inside the optimiser's step at version 0"):
        capture(learner)


def test_moments_are_made_before_the_first_weight_is_touched(
    make_net: Any, sampled_groups: SampleGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out at each of AdamW's own allocations in turn; the weights are untouched and the step done again."""
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    fine = make(net)
    fine.splits = 1
    fine.learn(samples)
    real, count = optimizer.ADAM.zeros, len(list(net.parameters()))
    for at in range(count):
        learner = make(net)
        made: list[int] = []

        def zeros(
            parameter: Tensor, learner: GRPOLearner = learner, at: int = at, made: list[int] = made
        ) -> dict[str, Tensor]:
            made.append(1)
            if len(made) == at + 1:
                assert learner.optimiser.state == {}, "all or nothing"
                assert same(parameters(learner), dict(net.named_parameters()))
                raise torch.OutOfMemoryError("planted")
            return real(parameter)

        monkeypatch.setattr(optimizer.ADAM, "zeros", zeros)
        assert learner.learn(samples).metrics["memory/splits"] == 1.0
        assert same(parameters(learner), parameters(fine))


def test_moments_made_beforehand_are_those_that_adamw_makes(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    ours, theirs = make(net), make(net)
    ours.learn(samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "allocate_moments", lambda optimiser: None)
        theirs.learn(samples)
    assert same(parameters(ours), parameters(theirs))
    for mine, other in zip(ours.net.parameters(), theirs.net.parameters(), strict=True):
        assert same(ours.optimiser.state[mine], theirs.optimiser.state[other])


def test_a_parameter_without_a_gradient_gets_no_moments(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    learner = make(net)
    learner.net.model.norm.weight.requires_grad_(False)
    learner.learn(sampled_groups(net, REWARDS))
    assert "model.norm.weight" not in capture(learner).moments


# -- what counts as memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.06 GB)"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (RuntimeError(""), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_counts_as_memory_that_ran_out(error: BaseException, memory: bool) -> None:
    assert is_out_of_memory(error) is memory


def test_a_request_beyond_every_machine_is_recognised() -> None:
    """Not a remembered sentence: torch itself says it."""
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_memory_in_use_is_a_size_or_says_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_in_use(torch.device("cpu")).endswith((" MiB", "unknown memory"))

    def unreadable(*args: Any, **kwargs: Any) -> str:
        raise OSError

    monkeypatch.setattr("surefoot.system.memory.open", unreadable, raising=False)
    assert memory_in_use(torch.device("cpu")) == "unknown memory"


# -- teeth --------------------------------------------------------------------------------------------


def test_planted_repeat_on_top_of_the_old_gradient_is_seen(
    make_net: Any, sampled_groups: SampleGroups, failing: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the failed attempt is not thrown away: rows that were done count twice."""
    monkeypatch.setattr(torch.optim.AdamW, "zero_grad", lambda self, set_to_none=True: None)
    with pytest.raises(AssertionError):
        test_a_step_that_ran_out_of_memory_is_done_again_and_equals_one_that_was_cut_so_from_the_start(
            "learner.after_backward", "MemoryError", 1, make_net, sampled_groups, failing
        )


def test_planted_repeat_without_the_last_rows_is_seen(
    make_net: Any, sampled_groups: SampleGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent batch change: what does not fit is left out."""
    real = grpo.split_microbatches
    monkeypatch.setattr(
        grpo, "split_microbatches", lambda rows, size, n, **room: list(real(rows, size, n, **room))[: -1 if n else None]
    )
    with pytest.raises(AssertionError):
        test_the_gradient_is_the_same_after_any_number_of_halvings(2, "dapo", 0, make_net, sampled_groups)
