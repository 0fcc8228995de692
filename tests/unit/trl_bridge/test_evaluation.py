"""A foreign function runs in the middle of a training step, and the step does not notice."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from surefoot.trl_bridge import HeldOutEvalError, evaluation
from surefoot.trl_bridge.evaluation import heldout_value, undisturbed


def next_numbers() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(1)), float(torch.randn(1, dtype=torch.float64))


def greedy() -> float:
    """Uses up every stream and seeds them anew."""
    next_numbers()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    return 0.5


def raising() -> float:
    greedy()
    raise OSError("gone")


def numbers_after(evaluate: Callable[[], Any] | None) -> tuple[float, ...]:
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    if evaluate is not None:
        evaluate()
    return next_numbers()


def undisturbed_streams() -> None:
    def failing() -> None:
        with pytest.raises(HeldOutEvalError):
            heldout_value(raising, 3)

    assert numbers_after(lambda: heldout_value(greedy, 3)) == numbers_after(None)
    assert numbers_after(failing) == numbers_after(None)
    assert numbers_after(lambda: heldout_value(greedy, 3, timeout=30)) == numbers_after(None)


def test_random_streams_go_on_as_if_nothing_had_been_drawn() -> None:
    undisturbed_streams()


def test_planted_evaluation_that_draws_from_the_training_streams_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_restore", lambda streams: None)
    with pytest.raises(AssertionError):
        undisturbed_streams()


def modes_come_back(evaluate: Callable[[], float]) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)), nn.Linear(2, 2))
    model[1].eval()  # frozen on purpose
    before = [m.training for m in model.modules()]
    seen: list[bool] = []

    def look() -> float:
        seen.extend([*(m.training for m in model.modules()), torch.is_grad_enabled()])
        return evaluate()

    try:
        heldout_value(look, 0, (model, None, "no module"))
    except HeldOutEvalError:
        assert evaluate is raising
    assert seen == [False] * 6
    assert [m.training for m in model.modules()] == before
    assert len(set(before)) == 2
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("evaluate", [greedy, raising])
def test_every_module_gets_its_own_mode_back(evaluate: Callable[[], float]) -> None:
    modes_come_back(evaluate)


def test_planted_return_by_train_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: `model.train()` afterwards, which wakes up what was frozen."""

    @contextmanager
    def careless(*models: Any) -> Iterator[None]:
        models[0].eval()
        yield
        models[0].train()

    monkeypatch.setattr(evaluation, "eval_mode", careless)
    for evaluate in (greedy, raising):
        with pytest.raises(AssertionError):
            modes_come_back(evaluate)


@pytest.mark.parametrize("value", [1, 0.25, np.float32(0.25), torch.tensor(0.25), torch.tensor([0.25])], ids=repr)
def test_numbers_of_all_kinds_are_taken(value: Any) -> None:
    assert heldout_value(lambda: value, 0) in (1.0, 0.25)


@pytest.mark.parametrize("value", [np.bool_(True), torch.tensor(True), np.nan, 1j, torch.ones(2), {}], ids=repr)
def test_what_is_no_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        heldout_value(lambda: value, 0)


def test_an_evaluation_that_never_ends_is_left_behind() -> None:
    released = threading.Event()
    model = nn.Dropout(0.5)

    def stuck() -> float:
        released.wait()
        return 1.0

    with pytest.raises(HeldOutEvalError, match=r"step 9.*longer than 0\.05 s"):
        heldout_value(stuck, 9, (model,), timeout=0.05)
    released.set()
    assert model.training


def test_under_a_timeout_the_value_its_error_and_its_own_timeout_come_through() -> None:
    grads: list[bool] = []

    def fine() -> float:
        grads.append(torch.is_grad_enabled())
        return 0.5

    def slow_server() -> float:
        raise TimeoutError("no answer from the grader")

    assert heldout_value(fine, 0, timeout=60) == 0.5
    assert grads == [False]
    with pytest.raises(HeldOutEvalError, match="no answer from the grader"):
        heldout_value(slow_server, 0, timeout=60)


def test_an_interrupt_is_not_an_evaluation_error() -> None:
    def interrupted() -> float:
        raise KeyboardInterrupt

    for timeout in (None, 60.0):
        with pytest.raises(KeyboardInterrupt):
            heldout_value(interrupted, 0, timeout=timeout)


@pytest.mark.gpu("kernels")
def test_the_cuda_stream_goes_on_too() -> None:
    torch.cuda.manual_seed_all(7)
    wanted = torch.rand(3, device="cuda")
    torch.cuda.manual_seed_all(7)
    with undisturbed():
        torch.rand(100, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), wanted)
