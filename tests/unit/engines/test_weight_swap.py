"""Taking new weights moves pointers; what decoding needs beside them is made before the first token, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surefoot.engines.decoder import Decoder, FixedRowsLinear, MutationCheck, StackedLinear
from surefoot.errors import EngineError
from surefoot.protocols import Request


def ask(engine: Any) -> list[Any]:
    requests = [Request(f"r{i}", (1, 5, 6, 7), 6, 1.0, frozenset({2}), seed=i) for i in range(4)]
    return engine.generate(requests)  # type: ignore[no-any-return]


def step(net: Any) -> None:
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()


def test_a_load_reads_no_weight_but_a_few_entries_and_packs_nothing(
    make_net: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()
    engine = make_engine(net)
    monkeypatch.setattr(StackedLinear, "pack", lambda self: pytest.fail("packed while loading"))
    engine.load_weights(dict(net.named_parameters()), 1)
    assert (engine.version, engine.pack_seconds) == (1, 0.0)


def test_packing_happens_once_per_version_before_the_first_decoded_token(make_net: Any, make_engine: Any) -> None:
    net = make_net()
    engine = make_engine(net)
    ask(engine)
    cost = engine.pack_seconds
    assert cost > 0
    ask(engine)
    assert engine.pack_seconds == cost
    engine.load_weights(dict(net.named_parameters()), 1)
    assert engine.pack_seconds == 0.0


def test_the_same_memory_with_new_numbers_speaks_like_a_fresh_engine(make_net: Any, make_engine: Any) -> None:
    net = make_net()
    engine = make_engine(net)
    before = ask(engine)
    step(net)
    engine.load_weights(dict(net.named_parameters()), 1)
    after, fresh = ask(engine), ask(make_engine(net, version=1))
    assert after == fresh
    assert [c.logprobs for c in after] != [c.logprobs for c in before]


def test_other_memory_is_pointed_at(make_net: Any, make_engine: Any) -> None:
    engine, other = make_engine(make_net(seed=0)), make_net(seed=1)
    ask(engine)
    engine.load_weights({name: value.detach().clone() for name, value in other.named_parameters()}, 1)
    assert ask(engine) == ask(make_engine(other, version=1))


def test_a_parameter_whose_memory_was_exchanged_is_noticed(make_net: Any, make_engine: Any) -> None:
    """The tensor objects are the same; what they point at is not."""
    net = make_net()
    engine = make_engine(net)
    ask(engine)
    for parameter in net.parameters():
        parameter.data = parameter.data * 1.5
    engine.load_weights(dict(net.named_parameters()), 1)
    assert ask(engine) == ask(make_engine(net, version=1))


def test_a_change_between_loading_and_the_first_token_is_refused(make_net: Any, make_engine: Any) -> None:
    net = make_net()
    engine = make_engine(net)
    step(net)
    with pytest.raises(EngineError, match="changed in place"):
        ask(engine)
    with pytest.raises(EngineError, match="changed in place"):
        engine.decoder.pack()


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (1,), (2, 1)])
def test_a_change_is_seen_whatever_the_shape_and_the_strides(shape: tuple[int, ...]) -> None:
    plain, turned = torch.zeros(shape), torch.zeros(shape[::-1]).permute(*range(len(shape))[::-1])
    handed = MutationCheck(["plain", "turned"], [plain, turned])
    assert handed.changed() is None
    turned.fill_(1.0)
    assert handed.changed() == "turned"
    handed.remember()
    assert handed.changed() is None
    plain.fill_(float("nan"))
    handed.remember()
    assert handed.changed() is None, "NaN is what it was"


def test_stacked_weights_give_the_outputs_side_by_side(one_thread: None) -> None:
    g = torch.Generator().manual_seed(0)
    one, two, x = (torch.randn(n, 24, generator=g) for n in (8, 5, 16))
    bias = [torch.randn(8, generator=g), torch.randn(5, generator=g)]
    stacked = StackedLinear([one, two], bias, 16)
    assert stacked.packed is None
    wanted = FixedRowsLinear(torch.cat([one, two]), torch.cat(bias), 16)(x)
    assert torch.equal(stacked(x), wanted)
    one.zero_()
    assert torch.equal(stacked(x), wanted), "later changes are not seen"


def test_rows_are_wiped_once_after_a_load_and_only_when_somebody_sits_down(make_net: Any, make_engine: Any) -> None:
    net = make_net()
    engine = make_engine(net)
    decoder: Decoder = engine.decoder
    decoder.cache.fill_(float("nan"))
    engine.load_weights(dict(net.named_parameters()), 1)
    decoder.fill_rows([0], torch.zeros_like(decoder.cache[:, :, 0, :, :2]))
    assert bool(decoder.cache[:, :, 0].isfinite().all())
    assert bool(decoder.cache[:, :, 1:].isnan().all()), "a load must not wipe rollouts that go on"


def test_planted_load_that_keeps_the_packed_weights_is_seen(
    make_net: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()
    engine = make_engine(net)
    ask(engine)
    step(net)

    def keep(self: Decoder) -> None:
        self.pack_seconds = 0.0

    monkeypatch.setattr(Decoder, "_drop_packed", keep)
    engine.load_weights(dict(net.named_parameters()), 1)
    monkeypatch.undo()
    assert ask(engine) != ask(make_engine(net, version=1))
