"""Many callers on one engine: nobody hears what another would not have heard, and nobody waits for ever."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
import torch

from surefoot.engines.embedded import EmbeddedEngine
from surefoot.engines.serving import EngineLoop
from surefoot.errors import ConfigError, EngineError, NumericsError
from surefoot.maths.checksums import checksums
from surefoot.protocols import Completion, Request

NEVER: frozenset[int] = frozenset()
WAIT_S = 60.0


def ask(name: str, *, seed: int = 0, prompt: tuple[int, ...] = (3, 17, 9, 44, 5), **changes: Any) -> Request:
    return dataclasses.replace(Request(name, prompt, 12, 1.0, NEVER, seed), **changes)


def groups(n: int) -> list[list[Request]]:
    """Groups of four siblings, prompts and lengths all different."""
    return [
        [
            ask(f"{g}/{i}", seed=10 * g + i, prompt=tuple(3 + (7 * g + k) % 50 for k in range(2 + g % 9)),
                max_new_tokens=3 + (5 * g + i) % 14, temperature=(1.0, 0.7)[g % 2])
            for i in range(4)
        ]
        for g in range(n)
    ]  # fmt: skip


def said(completions: Sequence[Completion]) -> dict[str, Any]:
    return {c.request_id: (c.token_ids, c.logprobs, c.finish_reason) for c in completions}


def in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


class Stepped:
    """Stands in front of an engine; a test says when a token may be drawn."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.inner, self.tokens = engine, threading.Semaphore(0)
        self.drawn = 0
        self.entered = threading.Semaphore(0)
        self.fail: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def enter(self, requests: Sequence[Request]) -> list[int]:
        tickets = self.inner.enter(requests)
        self.entered.release()
        return tickets

    def advance(self) -> dict[int, Completion]:
        assert self.tokens.acquire(timeout=WAIT_S), "the test has forgotten to let it go on"
        if self.fail is not None:
            raise self.fail
        self.drawn += 1
        return self.inner.advance()

    def allow(self, n: int = 1) -> None:
        for _ in range(n):
            self.tokens.release()


@pytest.fixture
def serve(make_net: Any, make_engine: Any) -> Iterator[Callable[..., Any]]:
    """`serve(stepped=True)`: (loop, engine) with version 0 of a tiny net; closed at the end."""
    made: list[tuple[EngineLoop, Any]] = []

    def make(*, stepped: bool = False, rows: int = 16, **keys: Any) -> Any:
        engine = make_engine(make_net(), rows=rows)
        shown = Stepped(engine) if stepped else engine
        made.append((EngineLoop(shown, **keys), shown))
        return made[-1]

    yield make
    for loop, engine in made:
        if isinstance(engine, Stepped):
            engine.allow(10_000)
        loop.close()


def test_many_threads_in_any_order_hear_what_one_call_says_bit_for_bit(
    serve: Any, make_net: Any, make_engine: Any
) -> None:
    work = groups(9)
    alone = said(make_engine(make_net()).generate([r for group in work for r in group]))
    for seed in range(2):
        loop, _ = serve()
        order = random.Random(seed).sample(work, len(work))
        heard: dict[str, Any] = {}

        def caller(mine: list[list[Request]], loop: EngineLoop = loop, heard: dict[str, Any] = heard) -> None:
            for group in mine:
                completions = loop.generate(group)
                assert [c.request_id for c in completions] == [r.id for r in group]
                heard.update(said(completions))  # one atomic step under the interpreter's lock

        threads = [threading.Thread(target=caller, args=(order[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert heard == alone


def test_a_request_enters_while_others_are_being_answered(serve: Any) -> None:
    """Continuous batching: the short one, which came later, is finished before the long one."""
    loop, engine = serve(stepped=True)
    long = loop.submit([ask("long", max_new_tokens=30)])
    engine.entered.acquire()
    engine.allow(5)
    short = loop.submit([ask("short", seed=1, max_new_tokens=2)])
    engine.entered.acquire(timeout=WAIT_S)
    engine.allow(3)
    assert len(short.result(WAIT_S)[0].token_ids) == 2
    assert not long.done()
    engine.allow(40)
    assert len(long.result(WAIT_S)[0].token_ids) == 30


def test_an_urgent_request_is_answered_before_those_that_wait(make_net: Any, make_engine: Any) -> None:
    """Eight rows are taken and eight more wait: what a weight sync asks must not stand behind them."""
    engine = make_engine(make_net())
    crowd = engine.enter([ask(f"slow/{i}", seed=i) for i in range(2 * engine.rows)])
    engine.advance()
    (urgent,) = engine.enter([ask("probe", max_new_tokens=1, urgent=True)])
    finished: list[int] = []
    while engine.busy:
        finished += engine.advance()
    assert finished.index(urgent) <= engine.rows, "only who sat already was before it"
    assert set(finished) == {*crowd, urgent}


def test_siblings_of_every_group_share_one_prefill(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, engine = serve()
    seen: list[tuple[int, ...]] = []
    real = engine.decoder.prefill
    monkeypatch.setattr(engine.decoder, "prefill", lambda ids: (seen.append(ids), real(ids))[1])
    work = groups(6)
    for future in [loop.submit(group) for group in work]:
        future.result(WAIT_S)
    assert sorted(seen) == sorted({group[0].prompt_ids for group in work})


# -- weights ------------------------------------------------------------------------------


def test_weights_change_between_two_tokens_and_both_versions_are_on_the_record(
    serve: Any, make_net: Any, full_logits: Any
) -> None:
    """After the change every probability is that of the new weights on all that was said, also by the old ones."""
    loop, engine = serve(stepped=True)
    old, new = make_net(), make_net(seed=1)
    future = loop.submit([ask("a", max_new_tokens=12)])
    engine.entered.acquire()
    before: list[int] = []

    def change(inside: Any) -> None:
        before.append(inside.drawn)
        inside.load_weights(dict(new.named_parameters()), 5)

    held = in_thread(lambda: loop.between_tokens(change))
    engine.allow(5)
    held.join(WAIT_S)
    assert 1 <= before[0] <= 5
    engine.allow(20)
    (answer,) = future.result(WAIT_S)
    assert (answer.version, answer.version_end) == (0, 5)
    first = before[0] + 1  # the first advance draws two: with the prompt, and after it
    for net, part in ((old, slice(0, first)), (new, slice(first, 12))):
        logits = full_logits(net, (*ask("a").prompt_ids, *answer.token_ids))[4:-1]
        scores = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(answer.token_ids)[:, None]).squeeze(1)
        assert float((scores[part] - torch.tensor(answer.logprobs)[part]).abs().max()) < 2e-5


def test_planted_old_keys_and_values_under_new_weights_are_noticed(
    serve: Any, make_net: Any, full_logits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedEngine, "_prefill_again", lambda self: None)
    with pytest.raises(AssertionError, match="<"):
        test_weights_change_between_two_tokens_and_both_versions_are_on_the_record(serve, make_net, full_logits)


def test_weights_that_their_owner_changes_later_are_not_served(serve: Any, make_net: Any, make_engine: Any) -> None:
    loop, _ = serve()
    net = make_net(seed=1)
    expected = said(make_engine(make_net(seed=1)).generate([ask("a")]))
    loop.load_weights(dict(net.named_parameters()), 1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    assert said(loop.generate([ask("a")])) == expected


def test_without_a_copy_weights_that_are_changed_in_place_are_refused(serve: Any, make_net: Any) -> None:
    loop, _ = serve(copy_weights=False)
    net = make_net(seed=1)
    loop.load_weights(dict(net.named_parameters()), 1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    with pytest.raises(EngineError, match="changed in place"):
        loop.generate([ask("a")])


# -- pausing ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["keep", "abort"])
def test_no_token_is_drawn_while_it_is_paused_and_the_answer_is_the_same(
    how: Any, serve: Any, make_net: Any, make_engine: Any
) -> None:
    expected = said(make_engine(make_net()).generate([ask("a"), ask("b", seed=1, max_new_tokens=2)]))
    loop, engine = serve(stepped=True)
    future = loop.submit([ask("a"), ask("b", seed=1, max_new_tokens=2)])
    engine.entered.acquire()
    engine.allow(3)
    pausing = in_thread(lambda: loop.pause(how))
    engine.allow(1)  # the token that may be under way
    pausing.join(WAIT_S)
    engine.allow(5)
    drawn = engine.drawn
    assert drawn <= 4
    late = loop.submit([ask("c", seed=2)])
    assert loop.in_flight == 2, "one of the first two had finished, and keeps its answer"
    assert not future.done()
    assert not late.done()
    assert engine.drawn == drawn
    loop.resume()
    engine.allow(40)
    assert said(future.result(WAIT_S)) == expected
    assert len(late.result(WAIT_S)) == 1
    assert loop.in_flight == 0


def test_an_aborted_rollout_begins_again_under_the_new_weights(serve: Any, make_net: Any, make_engine: Any) -> None:
    new = make_net(seed=1)
    loop, engine = serve(stepped=True)
    future = loop.submit([ask("a")])
    engine.entered.acquire()
    engine.allow(3)
    pausing = in_thread(lambda: loop.pause("abort"))
    engine.allow(1)
    pausing.join(WAIT_S)
    loop.load_weights(dict(new.named_parameters()), 1)
    loop.resume()
    engine.allow(40)
    answer = future.result(WAIT_S)
    assert said(answer) == said(make_engine(new).generate([ask("a")]))
    assert (answer[0].version, answer[0].version_end) == (1, 1)


def test_a_pause_that_waits_returns_when_nothing_is_in_flight_and_newcomers_stay_outside(serve: Any) -> None:
    loop, engine = serve(stepped=True)
    future = loop.submit([ask("a", max_new_tokens=6)])
    engine.entered.acquire()
    engine.allow(2)
    pausing = in_thread(lambda: loop.pause("wait"))
    engine.allow(1)
    late = loop.submit([ask("b", seed=1)])
    assert pausing.is_alive()
    engine.allow(3)
    pausing.join(WAIT_S)
    assert future.done()
    engine.allow(9)
    assert loop.in_flight == 1
    assert not late.done()
    loop.resume()
    engine.allow(20)
    assert late.result(WAIT_S)


def test_a_pause_of_a_fourth_kind_is_refused(serve: Any) -> None:
    loop, _ = serve()
    with pytest.raises(ConfigError, match="pause"):
        loop.pause("maybe")


# -- failures -----------------------------------------------------------------------------


def test_a_request_that_does_not_fit_fails_alone(serve: Any) -> None:
    loop, _ = serve()
    good, bad = loop.submit([ask("a")]), loop.submit([ask("b"), ask("huge", max_new_tokens=9000)])
    with pytest.raises(EngineError, match="huge"):
        bad.result(WAIT_S)
    assert len(good.result(WAIT_S)) == 1
    assert loop.in_flight == 0


def test_an_exception_while_decoding_reaches_everybody_in_the_engine_and_nobody_later(serve: Any) -> None:
    loop, engine = serve(stepped=True)
    first, second = loop.submit([ask("a")]), loop.submit([ask("b", seed=1)])
    engine.entered.acquire()
    engine.entered.acquire()
    engine.fail = RuntimeError("the device is on fire")
    engine.allow(1)
    for future in (first, second):
        with pytest.raises(RuntimeError, match="on fire"):
            future.result(WAIT_S)
    engine.fail = None
    engine.allow(20)
    assert len(loop.generate([ask("c")])) == 1


def test_weights_that_are_not_numbers_fail_the_rollouts_by_name(serve: Any, make_net: Any) -> None:
    loop, _ = serve()
    bad = make_net()
    with torch.no_grad():
        bad.model.norm.weight.fill_(float("nan"))
    loop.load_weights(dict(bad.named_parameters()), 1)
    with pytest.raises(NumericsError, match=r"request a: .*version 1"):
        loop.generate([ask("a")])
    loop.load_weights(dict(make_net().named_parameters()), 2)
    assert loop.generate([ask("a")])[0].version == 2


def test_a_cancelled_future_frees_its_rows(serve: Any) -> None:
    loop, engine = serve(stepped=True, rows=8)
    hogs = loop.submit([ask(f"h{i}", seed=i, max_new_tokens=80) for i in range(8)])
    engine.entered.acquire()
    engine.allow(2)
    assert hogs.cancel()
    quick = loop.submit([ask("q", max_new_tokens=2)])
    engine.allow(3)
    assert len(quick.result(WAIT_S)) == 1
    assert loop.in_flight == 0
    with pytest.raises(CancelledError):
        hogs.result()


def test_close_leaves_no_thread_and_nobody_waiting(serve: Any) -> None:
    loop, engine = serve(stepped=True)
    inside = loop.submit([ask("a")])
    engine.entered.acquire()
    closing = in_thread(loop.close)
    engine.allow(1)
    closing.join(WAIT_S)
    assert not loop._thread.is_alive()
    with pytest.raises(EngineError, match="closed"):
        inside.result(WAIT_S)
    with pytest.raises(EngineError, match="closed"):
        loop.submit([ask("b")])
    loop.close()
    assert loop.in_flight == 0


def test_close_while_it_is_paused_tells_those_who_wait(serve: Any) -> None:
    loop, _ = serve()
    loop.pause("keep")
    waiting: Future[Any] = loop.submit([ask("a")])
    loop.close()
    with pytest.raises(EngineError, match="closed"):
        waiting.result(WAIT_S)


def test_the_thread_that_dies_says_of_what_to_everybody(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, engine = serve()

    def die() -> Any:
        raise SystemExit("no more")

    monkeypatch.setattr(engine, "advance", die)
    with pytest.raises(EngineError, match="SystemExit: no more"):
        loop.generate([ask("a")])
    with pytest.raises(EngineError, match="SystemExit: no more"):
        loop.generate([ask("b")])


def test_one_engine_has_one_caller_unless_it_has_a_loop(make_net: Any, make_engine: Any) -> None:
    engine = make_engine(make_net())
    engine.enter([ask("a")])
    with pytest.raises(EngineError, match="somebody else"):
        engine.generate([ask("b")])


# -- two phases ---------------------------------------------------------------------------


def test_prepared_weights_are_served_from_the_commit_on_and_not_before(
    serve: Any, make_net: Any, make_engine: Any
) -> None:
    loop, _ = serve()
    net = make_net(seed=1)
    before, after = (said(make_engine(make_net(seed=seed)).generate([ask("a")])) for seed in (0, 1))
    held = loop.prepare(dict(net.named_parameters()), 1)
    assert held == checksums(dict(net.named_parameters()))
    assert (said(loop.generate([ask("a")])), loop.version) == (before, 0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)  # what was prepared is a copy
    assert loop.commit(1) == {}
    assert (said(loop.generate([ask("a")])), loop.version) == (after, 1)


def test_what_was_not_prepared_is_not_served(serve: Any, make_net: Any) -> None:
    loop, _ = serve()
    with pytest.raises(EngineError, match="told to serve version 1, prepared was nothing"):
        loop.commit(1)
    loop.prepare(dict(make_net(seed=1).named_parameters()), 1)
    with pytest.raises(EngineError, match="told to serve version 2, prepared was 1"):
        loop.commit(2)
    with pytest.raises(EngineError, match="prepared was nothing"):
        loop.commit(1)
    assert loop.version == 0
