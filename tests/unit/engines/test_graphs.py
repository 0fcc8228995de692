"""The engine for GPUs, run step by step on a CPU: the same code without graphs says what the slow engine says.

Bound: same tokens; logprobs within 2e-5 in float32 (measured: 3e-6), a fifth of what step 1 of a run allows.
The last tests need a GPU: kernels against the plain operations, graphs against the slow engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from surefoot.engines import graphs
from surefoot.engines.embedded import EmbeddedEngine
from surefoot.engines.graphs import BURST, GraphedEngine, embedded_engine, not_implemented, rows_of_step
from surefoot.errors import EngineError, NumericsError
from surefoot.learner.architectures import PLAIN
from surefoot.learner.model import decoder_spec
from surefoot.maths.fused import PlainOps, ops_for
from surefoot.protocols import Completion, DecoderSpec, Request

BOUND = 2e-5
ARCHITECTURES = ["llama", "untied", "llama3", "yarn", "wide_heads", "qwen2", "qwen3", "mistral"]


def make(kind: type[EmbeddedEngine], net: Any, *, rows: int = 16, max_width: int = 128, version: int = 0) -> Any:
    parameter = next(net.parameters())
    engine = kind(
        decoder_spec(net), rows=rows, max_width=max_width, device=str(parameter.device), dtype=parameter.dtype
    )
    engine.load_weights(dict(net.named_parameters()), version)
    return engine


def asked(n: int) -> list[Request]:
    """Groups of three siblings: prompts of 1 to 70 tokens, 1 to 40 new ones, four temperatures, two stop sets."""
    return [
        Request(
            f"r{i}", tuple(3 + (11 * (i // 3) + 5 * k) % 50 for k in range(1 + (i // 3 * 13) % 70)), 1 + (i * 7) % 40,
            (1.0, 0.7, 1.3, 0.0)[i % 4], frozenset({2}) if i % 2 else frozenset({7, 11, 30}), 900 + i,
        )
        for i in range(n)
    ]  # fmt: skip


def compare(fast: Sequence[Completion], slow: Sequence[Completion], bound: float = BOUND) -> None:
    assert [c.request_id for c in fast] == [c.request_id for c in slow]
    for one, two in zip(fast, slow, strict=True):
        assert (one.token_ids, one.finish_reason) == (two.token_ids, two.finish_reason), one.request_id
        assert (one.version, one.version_end) == (two.version, two.version_end)
        gaps = [abs(a - b) for a, b in zip(one.logprobs, two.logprobs, strict=True)]
        assert max(gaps) < bound, (one.request_id, max(gaps))


# -- the same answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_says_what_the_slow_engine_says(name: str, make_net: Any) -> None:
    """60 rollouts over 16 slots: they enter in waves, end at different tokens, and leave rows that others take."""
    net = make_net(name)
    fast = make(GraphedEngine, net).generate(asked(60))
    compare(fast, make(EmbeddedEngine, net).generate(asked(60)))
    assert {c.finish_reason for c in fast} == {"stop", "length"}
    assert max(len(c.token_ids) for c in fast) > BURST + 1, "nobody outlived a burst"


def test_who_enters_while_others_are_under_way_changes_nothing(make_net: Any) -> None:
    net = make_net()
    alone = make(EmbeddedEngine, net).generate(asked(30))
    engine = make(GraphedEngine, net, rows=48)
    tickets, done = engine.enter(asked(30)[:11]), engine.advance()
    tickets += engine.enter([dataclasses.replace(request, urgent=True) for request in asked(30)[11:]])
    while engine.busy:
        done |= engine.advance()
    compare([done[ticket] for ticket in tickets], alone)


def test_a_rollout_that_left_leaves_no_tokens_to_who_takes_its_row(make_net: Any) -> None:
    net = make_net()
    engine = make(GraphedEngine, net)
    gone = engine.enter([dataclasses.replace(r, stop_ids=frozenset(), max_new_tokens=40) for r in asked(16)])
    engine.advance()
    engine.leave(gone[:9])
    tickets, done = engine.enter(asked(9)), {}
    while engine.busy:
        done |= engine.advance()
    compare([done[ticket] for ticket in tickets], make(EmbeddedEngine, net).generate(asked(9)))


def test_the_step_shrinks_with_those_who_are_left(make_net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [rows_of_step(n, 1024) for n in (1, 64, 65, 129, 1000)] == [64, 64, 128, 256, 1024]
    assert [rows_of_step(n, 48) for n in (1, 48)] == [48, 48]
    monkeypatch.setattr(graphs, "SMALLEST_STEP", 4)
    net = make_net()
    engine = make(GraphedEngine, net)
    taken: list[int] = []
    real = engine.decoder._step
    monkeypatch.setattr(engine.decoder, "_step", lambda rows, width: (taken.append(rows), real(rows, width)))
    compare(engine.generate(asked(16)), make(EmbeddedEngine, net).generate(asked(16)))
    assert taken == sorted(taken, reverse=True)
    assert {4, 16} <= set(taken)


def test_prompts_are_computed_together_and_once_each(make_net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net()
    monkeypatch.setattr(graphs, "PREFILL_TOKENS", 100)  # so that they come in several pieces
    engine = make(GraphedEngine, net)
    seen: list[list[tuple[int, ...]]] = []
    real = engine.decoder._prefill
    monkeypatch.setattr(
        engine.decoder, "_prefill", lambda prompts, slots: (seen.append(prompts), real(prompts, slots))[1]
    )
    compare(engine.generate(asked(16)), make(EmbeddedEngine, net).generate(asked(16)))
    prompts = [prompt for piece in seen for prompt in piece]
    assert sorted(prompts) == sorted({request.prompt_ids for request in asked(16)})
    assert 1 < len(seen) < len(prompts)


# -- weights ------------------------------------------------------------------------------------


def test_new_weights_go_into_the_same_buffers(make_net: Any) -> None:
    """So that what was captured reads them; and the owner of the old ones may do with his what he likes."""
    old, new = make_net(seed=0), make_net(seed=1)
    engine = make(GraphedEngine, old)
    before = engine.generate(asked(12))
    places = {name: buffer.data_ptr() for name, buffer in engine.decoder._buffers.items()}
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.fill_(float("nan"))
    compare(engine.generate(asked(12)), before, 1e-9)
    engine.load_weights(dict(new.named_parameters()), 1)
    assert {name: buffer.data_ptr() for name, buffer in engine.decoder._buffers.items()} == places
    compare(engine.generate(asked(12)), make(EmbeddedEngine, new, version=1).generate(asked(12)))


def test_weights_that_change_under_rollouts_in_flight_speak_from_the_next_token(make_net: Any) -> None:
    """Keys and values of all of them are computed anew; a planted engine that keeps the old ones is told apart."""
    old, new = make_net(seed=0), make_net(seed=1)
    long = [dataclasses.replace(r, stop_ids=frozenset(), max_new_tokens=40) for r in asked(9)]

    def run(*, forget: bool) -> list[Completion]:
        engine = make(GraphedEngine, old)
        tickets, done = engine.enter(long), engine.advance()
        engine.load_weights(dict(new.named_parameters()), 1)
        if forget:
            engine._prefilled_with = engine.decoder.head
        while engine.busy:
            done |= engine.advance()
        return [done[ticket] for ticket in tickets]

    def gaps(answers: Sequence[Completion]) -> float:
        slow, worst = make(EmbeddedEngine, new, version=1), 0.0
        for request, answer in zip(long, answers, strict=True):
            assert (answer.version, answer.version_end) == (0, 1)
            kept, rest = answer.token_ids[: 1 + BURST], answer.token_ids[1 + BURST :]
            slow.enter([dataclasses.replace(request, id="x")])
            _, logits = slow.decoder.prefill((*request.prompt_ids, *kept))
            slow.leave()
            heat = request.temperature or 1.0
            logprob = torch.log_softmax(logits.double() / heat, -1)[rest[0]]
            worst = max(worst, abs(float(logprob) - answer.logprobs[1 + BURST]))
        return worst

    assert gaps(run(forget=False)) < BOUND
    assert gaps(run(forget=True)) > 100 * BOUND


def test_a_missing_weight_is_refused_and_leaves_no_version(make_net: Any) -> None:
    net = make_net()
    engine = make(GraphedEngine, net)
    weights = dict(net.named_parameters())
    del weights["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(EngineError, match="down_proj"):
        engine.load_weights(weights, 4)
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate(asked(1))
    engine.load_weights(dict(net.named_parameters()), 5)
    assert engine.generate(asked(1))[0].version == 5


def test_a_closed_engine_refuses_to_speak(make_net: Any) -> None:
    engine = make(GraphedEngine, make_net())
    engine.close()
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate(asked(1))


def test_weights_that_are_not_numbers_are_refused_and_leave_nothing_behind(make_net: Any) -> None:
    net, bad = make_net(), make_net()
    with torch.no_grad():
        bad.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    engine = make(GraphedEngine, bad)
    with pytest.raises(NumericsError, match="not finite"):
        engine.generate(asked(20))
    engine.decoder.cache.fill_(float("nan"))
    engine.load_weights(dict(net.named_parameters()), 1)
    compare(engine.generate(asked(40)), make(EmbeddedEngine, net, version=1).generate(asked(40)))


# -- who gets it --------------------------------------------------------------------------------


def test_every_field_and_every_architecture_is_known_to_the_fast_path_or_sends_to_the_slow_one(
    make_net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every entry of the three registries by name: a new one is not implemented until somebody says that it is."""
    spec = decoder_spec(make_net())
    for model_type in PLAIN:
        assert not_implemented(dataclasses.replace(spec, model_type=model_type)) == []
    made: list[str] = []
    monkeypatch.setattr("surefoot.engines.graphs.EmbeddedEngine", lambda *_, **__: made.append("slow"))
    monkeypatch.setattr("surefoot.engines.graphs.GraphedEngine", lambda *_, **__: made.append("fast"))

    def chosen(**words: Any) -> str:
        device = words.pop("device", "cuda")
        embedded_engine(words.pop("spec", spec), rows=16, max_width=64, device=device, dtype=torch.float32, **words)
        return made[-1]

    assert (chosen(), chosen(graphs=False), chosen(device="cpu")) == ("fast", "slow", "slow")
    assert chosen(spec=dataclasses.replace(spec, model_type="gemma")) == "slow"
    for registry, record in (("IMPLEMENTED", DecoderSpec), ("REQUEST_FIELDS", Request)):
        for field in dataclasses.fields(record):
            with monkeypatch.context() as patch:
                known = __import__("surefoot.engines.graphs", fromlist=[registry]).__dict__[registry]
                patch.setattr(f"surefoot.engines.graphs.{registry}", known - {field.name})
                assert not_implemented(spec) == [f"{record.__name__}.{field.name}"]
                assert chosen() == "slow", field.name


# -- on a GPU -----------------------------------------------------------------------------------


def tokens_for(kv_heads: int, size: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Inputs of every operation, drawn anew for each call."""
    heads, slots, width, n = 3 * kv_heads, 9, 96, 7

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    return {
        "x": noise(n, 72), "added": noise(n, 72), "weight": noise(72), "qkv": noise(n, (heads + 2 * kv_heads) * size),
        "tables": (noise(width, size), noise(width, size)), "q": noise(n, heads, size),
        "positions": torch.tensor([0, 1, 31, 63, 64, 65, 95], device=device),
        "slots": torch.tensor([8, 0, 3, 7, 1, 5, 2], device=device), "cache": noise(2, slots, kv_heads, width, size),
        "heads": heads, "norms": (noise(size), noise(size)), "gate_up": noise(n, 2 * 1100),
    }  # fmt: skip


@pytest.mark.gpu("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "size"), [(3, 64), (1, 24), (2, 128)])
def test_every_kernel_says_what_the_plain_operations_say(kv_heads: int, size: int, dtype: torch.dtype) -> None:
    check_kernels(ops_for(torch.device("cuda")), kv_heads, size, dtype, "cuda")


def check_kernels(ops: Any, kv_heads: int, size: int, dtype: torch.dtype, device: str) -> None:
    """Relative error against the plain operations in float64 inputs of the same numbers."""
    given, plain = tokens_for(kv_heads, size, dtype, device), PlainOps()
    assert type(ops) is not PlainOps
    limit = 1e-5 if dtype == torch.float32 else 2e-2

    def near(one: torch.Tensor, two: torch.Tensor) -> None:
        error = float((one.double() - two.double()).norm() / two.double().norm())
        assert error < limit, error

    near(ops.rms_norm(given["x"], given["weight"], 1e-5), plain.rms_norm(given["x"], given["weight"], 1e-5))
    pairs = [each.add_rms_norm(given["x"], given["added"], given["weight"], 1e-5) for each in (ops, plain)]
    near(pairs[0][0], pairs[1][0])
    near(pairs[0][1], pairs[1][1])
    near(ops.gate(given["gate_up"]), plain.gate(given["gate_up"]))
    for norms in (None, given["norms"]):
        caches = [given["cache"].clone() for _ in range(2)]
        words = (given["qkv"], given["tables"], given["positions"], given["slots"])
        said = [
            each.place(*words, cache, given["heads"], norms, 1e-5)
            for each, cache in zip((ops, plain), caches, strict=True)
        ]
        near(said[0], said[1])
        near(caches[0], caches[1])
    reads = (given["q"], given["cache"], given["slots"], given["positions"], 96)
    near(ops.attend(*reads), plain.attend(*reads))


@pytest.mark.gpu("kernels")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_graphs_say_what_the_slow_engine_says_on_a_gpu(name: str, make_net: Any) -> None:
    """Float32, across two versions, so that the second comes out of graphs captured with the first."""
    net, new = make_net(name).cuda(), make_net(name, seed=1).cuda()
    fast, slow = make(GraphedEngine, net, rows=96), make(EmbeddedEngine, net, rows=96)
    compare(fast.generate(asked(200)), slow.generate(asked(200)), 1e-4)
    graphs = dict(fast.decoder._graphs)
    assert graphs, "nothing was captured"
    for engine in (fast, slow):
        engine.load_weights(dict(new.named_parameters()), 1)
    compare(fast.generate(asked(200)), slow.generate(asked(200)), 1e-4)
    assert fast.decoder._graphs == graphs, "the second version was captured anew"
