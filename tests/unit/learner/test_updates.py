"""Entries that a step changed: counted one by one, and without changing the step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import Tensor, nn

from surefoot.errors import InvariantError, NumericsError
from surefoot.learner import updates
from surefoot.learner.optimizer import make_optimizer
from surefoot.learner.updates import CountedStep, StepUpdates, check_rate, check_taken_in


def net_with_gradients(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 2)).to(dtype)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    return net


def optimiser_of(net: nn.Module, rate: float = 1e-2) -> torch.optim.AdamW:
    return make_optimizer(net.parameters(), learning_rate=rate, weight_decay=0.1, betas=(0.9, 0.999), epsilon=1e-8)


def entries(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.fixture(autouse=True, params=["one by one", "at once"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor by tensor, and as on a GPU: the same numbers."""
    if request.param == "at once":
        monkeypatch.setattr(updates, "AT_ONCE", {"cpu"})
        monkeypatch.setattr(updates, "GPU_PIECE_ENTRIES", 16)


@pytest.mark.parametrize("piece", [1, 16, 1 << 20])
def test_a_counted_step_is_the_optimisers_own_step(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "PIECE_ENTRIES", piece)
    counted = net_with_gradients()
    plain = copy.deepcopy(counted)
    for mine, theirs in zip(counted.parameters(), plain.parameters(), strict=True):
        theirs.grad = mine.grad.clone() if mine.grad is not None else None
    ours, theirs_too = optimiser_of(counted), optimiser_of(plain)
    for _ in range(3):
        found = CountedStep(ours).take()
        theirs_too.step()
        assert torch.equal(entries(counted), entries(plain))
        assert found.entries == found.changed == len(entries(counted))
    assert [len(g["params"]) for g in ours.param_groups] == [len(g["params"]) for g in theirs_too.param_groups]


def test_only_entries_that_are_another_number_count() -> None:
    net = net_with_gradients()
    first = next(net.parameters())
    assert first.grad is not None
    for p in net.parameters():
        p.grad = None
    first.grad = torch.zeros_like(first)
    first.grad[0, 0], first.grad[1, 1] = 1.0, -1.0
    optimiser = make_optimizer(net.parameters(), learning_rate=1e-2, weight_decay=0.0, betas=(0.9, 0.999), epsilon=1e-8)
    found = CountedStep(optimiser).take()
    assert found.changed == 2
    assert found.changed_share == pytest.approx(2 / found.entries)


def test_planted_coarse_weights_take_almost_nothing_in() -> None:
    """Teeth: every tensor moves, and nearly no entry does."""
    torch.manual_seed(0)
    net = nn.Linear(200, 200).to(torch.bfloat16)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    found = CountedStep(optimiser_of(net, rate=1e-6)).take()
    assert 0 < found.changed_share < 0.1


def test_a_rate_of_zero_changes_nothing() -> None:
    assert CountedStep(optimiser_of(net_with_gradients(), rate=0.0)).take().changed == 0


# -- what had to move, and did ------------------------------------------------------------------


def one_matrix(weights: Tensor, gradients: Tensor, rate: float, decay: float = 0.0) -> tuple[nn.Module, CountedStep]:
    net = nn.Linear(1, len(weights), bias=False)
    net.weight.data = weights[:, None].clone()
    net.weight.grad = gradients[:, None].clone()
    optimiser = make_optimizer(
        net.parameters(), learning_rate=rate, weight_decay=decay, betas=(0.9, 0.999), epsilon=1e-8
    )
    return net, CountedStep(optimiser)


def test_an_entry_is_due_when_adam_asks_for_a_hundredth_of_the_rate() -> None:
    """Against the formula in float64, over sizes of gradients on both sides of the border, at a later step too."""
    gradients = 10.0 ** torch.arange(-14.0, 3.0) * torch.tensor([1.0, -1.0]).repeat(9)[:17]
    net, step = one_matrix(torch.full((17,), 0.02), gradients, rate=1e-3)
    for steps in (1, 2, 3):
        found = step.take()
        state = step.optimiser.state[net.weight]
        m, v = (state[name].double().flatten() for name in ("exp_avg", "exp_avg_sq"))
        asked = (m / (1 - 0.9**steps)) / ((v / (1 - 0.999**steps)).sqrt() + 1e-8)
        assert found.due == int((asked.abs() >= 0.01).sum()) == 12, "from 1e-9 on; 1e-10 asks for 0.0099"
        step = CountedStep(step.optimiser)
        assert [piece.steps for piece in step.pieces] == [steps]


def test_no_gradient_is_not_due_even_where_the_weight_decays() -> None:
    _, step = one_matrix(torch.full((6,), 0.02), torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, -1.0]), rate=1e-6, decay=0.1)
    found = step.take()
    assert (found.due, found.taken) == (2, 2)
    assert not found.swallowed


def test_what_is_due_and_rounded_away_is_not_taken() -> None:
    """An update of 1e-6: a weight of 1 keeps 1.2e-7 apart, one of 100 keeps 7.6e-6."""
    _, step = one_matrix(torch.tensor([1.0, 1.0, 100.0, 100.0, 100.0]), torch.ones(5), rate=1e-6)
    found = step.take()
    assert (found.changed, found.due, found.taken, found.swallowed) == (2, 5, 2, True)


def test_half_is_enough() -> None:
    assert not StepUpdates(10, 2, 2, due=4, taken=2).swallowed
    assert StepUpdates(10, 1, 1, due=4, taken=1).swallowed
    assert not StepUpdates(10, 0).swallowed, "a step in which nothing was due"


def test_parameters_that_were_stepped_otherwise_often_are_pieces_of_their_own() -> None:
    net = net_with_gradients()
    optimiser = optimiser_of(net)
    late = list(net.parameters())[2]
    late.grad, kept = None, late.grad
    CountedStep(optimiser).take()
    late.grad = kept
    assert [(piece.group, piece.steps, len(piece.params)) for piece in CountedStep(optimiser).pieces] == [
        (0, 1, 1), (0, 0, 1), (0, 1, 1), (1, 1, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("rate", [5e-4, 1e-3])
def test_a_step_that_is_rounded_away_is_refused_at_half_of_the_peak_and_above(rate: float) -> None:
    with pytest.raises(NumericsError, match=r"had to move 8 parameter entries and moved 3 of them \(37.5%\)"):
        check_taken_in(StepUpdates(10, 5, 5, due=8, taken=3), rate, 1e-3, 4, [torch.bfloat16])


def test_the_ends_of_a_schedule_are_not_judged() -> None:
    """A cosine over 1,000 steps ends at 2.5e-6 of its peak; a run must not end with 78 for it."""
    check_taken_in(StepUpdates(10, 0, 0, due=8, taken=0), 4.9e-4, 1e-3, 999, [torch.float32])


def test_a_rate_that_is_not_the_schedules_is_refused() -> None:
    optimiser = optimiser_of(net_with_gradients(), rate=1e-2)
    check_rate(optimiser, 1e-2, 3)
    optimiser.param_groups[1]["lr"] = 2e-2
    with pytest.raises(InvariantError, match=r"version 3 is scheduled at learning rate 0.01.*\[0.01, 0.02\]"):
        check_rate(optimiser, 1e-2, 3)


@pytest.mark.parametrize("coarse", [False, True])
def test_the_memory_of_a_step_is_taken_before_it(coarse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first weight on only counts are made: nothing that grows with the parameters."""
    net = net_with_gradients()
    copies = {p: p.detach().to(torch.bfloat16) for p in net.parameters()} if coarse else {}
    optimiser = optimiser_of(net)
    CountedStep(optimiser, copies).take()  # AdamW's own memory
    step = CountedStep(optimiser, copies)
    made: list[tuple[str, int]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            known = {x.untyped_storage().data_ptr() for x in leaves((args, kwargs))}
            out = func(*args, **(kwargs or {}))
            made.extend(
                (str(func), x.numel()) for x in leaves(out) if x.untyped_storage().data_ptr() not in known
            )  # fmt: skip
            return out

    with Watch():
        step.take()
    assert made, "the counts are made"
    assert max(size for _, size in made) == 1, made


def leaves(tree: Any) -> list[Tensor]:
    found, _ = torch.utils._pytree.tree_flatten(tree)
    return [x for x in found if isinstance(x, Tensor)]


def test_copies_become_the_rounded_masters_and_are_counted() -> None:
    net = net_with_gradients()
    optimiser = optimiser_of(net, rate=1e-4)
    copies = {p: p.detach().to(torch.bfloat16) for p in net.parameters()}
    before = {p: copy.clone() for p, copy in copies.items()}
    found = CountedStep(optimiser, copies).take()
    assert all(torch.equal(copy, p.detach().to(torch.bfloat16)) for p, copy in copies.items())
    assert found.published == sum(int((copies[p] != before[p]).sum()) for p in copies)
    assert 0 < found.published < found.changed == found.entries
