"""The embedded engine: who sits where changes nothing that anybody says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from surefoot.engines.embedded import EmbeddedEngine
from surefoot.errors import ConfigError, EngineError, NumericsError
from surefoot.learner.model import decoder_spec
from surefoot.protocols import Completion, Request
from surefoot.records import LENGTH, STOP

PROMPT = (3, 17, 9, 44, 5)
NEVER: frozenset[int] = frozenset()


def ask(name: str = "a", prompt: tuple[int, ...] = PROMPT, *, seed: int = 0, **changes: Any) -> Request:
    request = Request(name, prompt, max_new_tokens=12, temperature=1.0, stop_ids=frozenset({2}), seed=seed)
    return dataclasses.replace(request, **changes)


def strangers(n: int, *, longest: int = 70) -> list[Request]:
    """Other people's requests: prompts of 1 to `longest` tokens, other lengths, other temperatures."""
    return [
        ask(
            f"s{i}",
            tuple(3 + (11 * i + 5 * k) % 50 for k in range(1 + (i * 13) % longest)),
            seed=900 + i,
            max_new_tokens=1 + (i * 7) % 20,
            temperature=(1.0, 0.7, 1.3, 0.0)[i % 4],
        )
        for i in range(n)
    ]


def said(completions: Sequence[Completion], names: Sequence[str]) -> list[tuple[Any, ...]]:
    by_name = {c.request_id: c for c in completions}
    return [(by_name[n].token_ids, by_name[n].logprobs, by_name[n].finish_reason) for n in names]


def siblings(n: int = 6, **changes: Any) -> list[Request]:
    return [ask(f"mine{i}", seed=i, stop_ids=NEVER, **changes) for i in range(n)]


# -- independence -----------------------------------------------------------------------


def test_a_rollout_says_the_same_in_any_company(architecture: str, make_net: Any, make_engine: Any) -> None:
    """Bit for bit: each alone; together; among 15; among 40 others in another order, which enter in waves."""
    engine = make_engine(make_net(architecture))
    mine = siblings()
    names = [request.id for request in mine]
    alone = [said(engine.generate([request]), [request.id])[0] for request in mine]
    assert len({tokens for tokens, _, _ in alone}) == len(mine), "equal answers would show nothing"
    assert said(engine.generate(mine), names) == alone
    assert said(engine.generate([*strangers(9), *mine]), names) == alone
    others = strangers(40)
    assert said(engine.generate([*others[:23], *reversed(mine), *others[23:]]), names) == alone
    scattered = [
        r for i, other in enumerate(others) for r in ([mine[i // 6], other] if i % 6 == 0 and i < 36 else [other])
    ]
    assert said(engine.generate(scattered), names) == alone


def test_a_neighbour_with_a_very_long_prompt_changes_nothing(make_net: Any, make_engine: Any) -> None:
    """The KV width is everybody's: 32 alone, beyond 512 beside the long one."""
    engine = make_engine(make_net(), max_width=800)
    mine = siblings()
    names = [request.id for request in mine]
    long = ask("long", tuple(3 + (k * 7) % 50 for k in range(700)), seed=5, stop_ids=NEVER, max_new_tokens=20)
    assert said(engine.generate([long, *mine]), names) == said(engine.generate(mine), names)


def test_what_was_generated_before_changes_nothing(make_net: Any, make_engine: Any) -> None:
    net = make_net()
    used, fresh = make_engine(net), make_engine(net)
    used.generate(strangers(40))
    names = [request.id for request in siblings()]
    assert said(used.generate(siblings()), names) == said(fresh.generate(siblings()), names)


def test_weights_that_were_not_numbers_leave_nothing_behind(make_net: Any, make_engine: Any) -> None:
    """Rows are reused; masked keys and values of an earlier version must not reach the next one."""
    net, bad = make_net(), make_net()
    with torch.no_grad():
        bad.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    engine = make_engine(bad)
    with pytest.raises(NumericsError, match="not finite"):
        engine.generate([ask(f"x{i}", seed=i, max_new_tokens=40, stop_ids=NEVER) for i in range(16)])
    engine.decoder.cache.fill_(float("nan"))
    engine.load_weights(dict(net.named_parameters()), 1)
    names = [request.id for request in siblings()]
    assert said(engine.generate(siblings()), names) == said(make_engine(net).generate(siblings()), names)


def test_answers_come_back_in_the_order_of_the_questions(make_net: Any, make_engine: Any) -> None:
    requests = strangers(40)
    assert [c.request_id for c in make_engine(make_net()).generate(requests)] == [r.id for r in requests]


def test_the_seed_decides_and_nothing_else_does(make_net: Any, make_engine: Any) -> None:
    engine = make_engine(make_net())
    twins = engine.generate([ask("a", seed=4), ask("b", seed=4), ask("c", seed=5)])
    assert twins[0].token_ids == twins[1].token_ids != twins[2].token_ids
    torch.manual_seed(99)
    assert engine.generate([ask("a", seed=4)])[0].token_ids == twins[0].token_ids


def test_a_longer_limit_only_adds_tokens(make_net: Any, make_engine: Any) -> None:
    engine = make_engine(make_net())
    short, long = engine.generate(
        [ask("s", stop_ids=NEVER, max_new_tokens=5), ask("l", stop_ids=NEVER, max_new_tokens=30)]
    )
    assert long.token_ids[:5] == short.token_ids
    assert long.logprobs[:5] == short.logprobs


# -- probabilities ------------------------------------------------------------------------


@pytest.mark.config_key("temperature")
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_those_of_a_full_forward_at_the_sampling_temperature(
    temperature: float, architecture: str, make_net: Any, make_engine: Any, full_logits: Any
) -> None:
    net = make_net(architecture)
    for answer in make_engine(net).generate(siblings(3, temperature=temperature, max_new_tokens=40)):
        logits = full_logits(net, (*PROMPT, *answer.token_ids))[len(PROMPT) - 1 : -1]
        scores = torch.log_softmax(logits.double() / temperature, -1)
        expected = scores.gather(1, torch.tensor(answer.token_ids)[:, None]).squeeze(1)
        assert float((expected - torch.tensor(answer.logprobs)).abs().max()) < 2e-5
        assert min(answer.logprobs) < -0.5, "a certain model would show nothing"


def test_greedy_takes_the_most_likely_token_of_a_full_forward(
    make_net: Any, make_engine: Any, full_logits: Any
) -> None:
    net = make_net()
    answer, other = make_engine(net).generate(
        [ask("g", temperature=0.0, stop_ids=NEVER, seed=1), ask("h", temperature=0.0, stop_ids=NEVER, seed=2)]
    )
    assert answer.token_ids == other.token_ids
    logits = full_logits(net, (*PROMPT, *answer.token_ids))[len(PROMPT) - 1 : -1]
    assert tuple(logits.argmax(-1).tolist()) == answer.token_ids
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.token_ids)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=1e-5)


# -- how an answer ends -------------------------------------------------------------------


def test_any_stop_id_ends_the_answer_and_is_part_of_it(make_net: Any, make_engine: Any) -> None:
    engine = make_engine(make_net())
    free = engine.generate([ask("f", stop_ids=NEVER, max_new_tokens=30)])[0].token_ids
    for position in (3, 7):
        stops = frozenset({free[position], 60})
        expected = free[: free.index(free[position]) + 1]
        answer = engine.generate([ask("s", stop_ids=stops, max_new_tokens=30)])[0]
        assert (answer.token_ids, answer.finish_reason) == (expected, STOP)
    first = min(free.index(free[3]), free.index(free[7]))
    both = engine.generate([ask("b", stop_ids=frozenset({free[3], free[7]}), max_new_tokens=30)])[0]
    assert both.token_ids == free[: first + 1]


def test_the_limit_ends_the_answer_as_length(make_net: Any, make_engine: Any) -> None:
    answers = make_engine(make_net()).generate([ask(f"{n}", stop_ids=NEVER, max_new_tokens=n) for n in (1, 2, 9)])
    assert [len(a.token_ids) for a in answers] == [1, 2, 9]
    assert {a.finish_reason for a in answers} == {LENGTH}


def test_a_stop_token_on_the_last_allowed_place_is_a_stop(make_net: Any, make_engine: Any) -> None:
    engine = make_engine(make_net())
    free = engine.generate([ask("f", stop_ids=NEVER)])[0].token_ids
    place = next(i for i, token in enumerate(free) if i > 1 and token not in free[:i])
    answer = engine.generate([ask("s", stop_ids=frozenset({free[place]}), max_new_tokens=place + 1)])[0]
    assert answer.finish_reason == STOP


def test_an_answer_that_stops_at_once_takes_no_row_and_no_step(
    make_net: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(make_net())
    steps: list[int] = []
    monkeypatch.setattr(engine.decoder, "step", lambda *a: steps.append(1))
    answers = engine.generate([ask(f"{i}", stop_ids=frozenset(range(61)), seed=i) for i in range(40)])
    assert all(len(a.token_ids) == 1 and a.finish_reason == STOP for a in answers)
    assert steps == []


# -- the prompt once ------------------------------------------------------------------------


def counted(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    calls: list[tuple[int, ...]] = []
    real = engine.decoder.prefill

    def prefill(prompt: tuple[int, ...]) -> Any:
        calls.append(prompt)
        return real(prompt)

    monkeypatch.setattr(engine.decoder, "prefill", prefill)
    return calls


def test_a_prompt_is_prefilled_once_per_group_even_when_siblings_enter_in_waves(
    make_net: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(make_net(), rows=16)
    calls = counted(engine, monkeypatch)
    prompts = [(3, 4, 5), (3, 4, 6), (7,)]
    engine.generate([ask(f"{g}/{i}", prompt, seed=i) for g, prompt in enumerate(prompts) for i in range(25)])
    assert calls == prompts


def test_new_weights_drop_the_prefilled_prompt(
    make_net: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even under the same version number: what counts is that weights were handed over."""
    old, new = make_net(seed=0), make_net(seed=1)
    engine = make_engine(old)
    calls = counted(engine, monkeypatch)
    before = engine.generate(siblings())
    engine.load_weights(dict(new.named_parameters()), 0)
    after = engine.generate(siblings())
    assert calls == [PROMPT, PROMPT]
    names = [request.id for request in siblings()]
    assert said(after, names) == said(make_engine(new).generate(siblings()), names) != said(before, names)


# -- weights and versions ---------------------------------------------------------------------


def test_answers_carry_the_version_that_was_loaded(make_net: Any, make_engine: Any) -> None:
    engine = make_engine(make_net(), version=7)
    assert {(a.version, a.version_end) for a in engine.generate(strangers(20))} == {(7, 7)}


def test_an_engine_without_weights_has_no_version(make_net: Any) -> None:
    engine = EmbeddedEngine(decoder_spec(make_net()), rows=16, max_width=32)
    with pytest.raises(EngineError, match="no weights yet"):
        _ = engine.version
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate([ask()])


def test_a_failed_load_leaves_no_version_to_claim(make_net: Any, make_engine: Any) -> None:
    net = make_net()
    engine = make_engine(net, version=3)
    weights = dict(net.named_parameters())
    del weights["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises((EngineError, KeyError), match="down_proj"):
        engine.load_weights(weights, 4)
    with pytest.raises(EngineError, match="no weights yet"):
        _ = engine.version
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate([ask()])


def test_a_closed_engine_refuses_to_speak(make_net: Any, make_engine: Any) -> None:
    engine = make_engine(make_net())
    engine.close()
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate([ask()])


def test_weights_changed_after_they_were_handed_over_are_refused(make_net: Any, make_engine: Any) -> None:
    """A version names one set of weights; the learner steps in place on the tensors it handed out."""
    net = make_net()
    engine = make_engine(net, version=0)
    engine.generate(siblings())
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    with pytest.raises(EngineError, match="changed in place"):
        engine.generate(siblings())
    engine.load_weights(dict(net.named_parameters()), 1)
    assert {c.version for c in engine.generate(siblings())} == {1}


def test_an_interrupted_call_does_not_leak_into_the_next(
    make_net: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(make_net())
    names = [request.id for request in siblings()]
    expected = said(engine.generate(siblings()), names)
    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "step", _out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate([ask(f"cut{i}", (9, 8, 7), seed=i, stop_ids=NEVER, max_new_tokens=60) for i in range(6)])
    assert said(engine.generate(siblings()), names) == expected


def _out_of_memory(*args: Any) -> Any:
    raise RuntimeError("out of memory")


# -- limits ---------------------------------------------------------------------------------


@pytest.mark.config_key("engine.rows")
@pytest.mark.parametrize(("asked", "got"), [(1, 8), (8, 8), (9, 16), (40, 40)])
def test_rows_are_rounded_up_to_a_multiple_of_8(asked: int, got: int, make_net: Any, make_engine: Any) -> None:
    assert make_engine(make_net(), rows=asked).rows == got


def test_a_width_beyond_the_models_context_is_refused(make_net: Any) -> None:
    spec = decoder_spec(make_net(max_position_embeddings=64))
    with pytest.raises(ConfigError, match=r"reach 65 tokens.*context is 64"):
        EmbeddedEngine(spec, rows=16, max_width=65)


@pytest.mark.parametrize(
    "request_",
    [ask(prompt=(3,) * 90, max_new_tokens=7), ask(prompt=()), ask(max_new_tokens=0)],
    ids=["too long", "no prompt", "nothing asked"],
)
def test_a_request_that_does_not_fit_is_refused_before_anything_is_generated(
    request_: Request, make_net: Any, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(make_net(), max_width=96)
    calls = counted(engine, monkeypatch)
    with pytest.raises(EngineError, match=f"request {request_.id}"):
        engine.generate([ask("fine"), request_])
    assert calls == []


def test_the_last_position_of_the_context_can_be_used(
    make_net: Any, make_engine: Any, full_logits: Callable[..., Any]
) -> None:
    net = make_net(max_position_embeddings=64)
    answer = make_engine(net, max_width=64).generate([ask("e", (3,) * 60, max_new_tokens=4, stop_ids=NEVER)])[0]
    logits = full_logits(net, (*(3,) * 60, *answer.token_ids))[59:63]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer.token_ids)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=1e-5)


def test_no_questions_have_no_answers(make_net: Any, make_engine: Any) -> None:
    assert make_engine(make_net()).generate([]) == []
