"""Publishing: nobody commits before all have staged, nothing counts before all have proven it, whoever fails is named."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from surefoot.errors import EngineError, FleetError, InvariantError, NumericsError, StateError, SurefootError
from surefoot.protocols import Completion, Request, Scored
from surefoot.runtime.weights import LONG, Publisher, Replica, WeightProbe, compare_checksums, known_scores, make_probes

PROMPTS = [(1, 5, 6, 7), (1, 8, 9), (1, 5, 6, 10, 11)]
SUMS = {"embed": 11, "head": 22, "layer.0": 33}
TOLERANCE = 1e-3


def truth(text: Scored, version: int) -> tuple[float, ...]:
    """What a model of this version thinks of these tokens: any function of what stands before them will do."""
    prompt, said = text
    return tuple(
        -1.0 - 0.1 * version - 0.001 * (sum(prompt) + sum(said[:i]) + said[i] * version) for i in range(len(said))
    )


def answer(request: Request, version: int, stamp: int | None = None) -> Completion:
    tokens = tuple((len(request.prompt_ids) + i) % 7 + 3 for i in range(request.max_new_tokens))
    stamp = version if stamp is None else stamp
    return Completion(request.id, tokens, truth((request.prompt_ids, tokens), version), "length", stamp, stamp)


class Engine:
    """An honest replica; liars override one thing."""

    def __init__(self, name: str = "engine 0", diary: list[str] | None = None) -> None:
        self.name, self.diary = name, [] if diary is None else diary
        self.staged: int | None = None
        self.serves: int | None = None

    async def prepare(self, weights: Any, version: int) -> Mapping[str, int]:
        self.diary.append(f"prepare {self.name}")
        await asyncio.sleep(0)
        self.staged = version
        return dict(weights)

    async def commit(self, version: int) -> Mapping[str, int]:
        self.diary.append(f"commit {self.name}")
        self.serves = self.staged
        return {}

    async def ask(self, requests: Sequence[Request]) -> list[Completion]:
        self.diary.append(f"ask {self.name}")
        assert self.serves is not None
        return [answer(request, self.serves) for request in requests]


class Learner:
    """Scores with whatever version it has."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.asked: list[list[Scored]] = []

    def score(self, texts: Sequence[Scored], *, temperature: float) -> list[tuple[float, ...]]:
        assert temperature == 2.0
        self.asked.append(list(texts))
        return [truth(text, self.version) for text in texts]


def make_publisher(learner: Learner, **keys: Any) -> Publisher:
    probes = make_probes(PROMPTS, temperature=0.7, max_width=200)
    return Publisher(probes, learner.score, tolerance=TOLERANCE, **keys)


def publish(publisher: Publisher, replicas: Sequence[Any], version: int, sums: Mapping[str, int] = SUMS) -> Any:
    return asyncio.run(publisher.publish(replicas, dict(sums), sums, version))


def fails(replicas: Sequence[Replica], said: str, kind: type[SurefootError] = EngineError, **keys: Any) -> Publisher:
    """Version 0 arrives honestly, version 1 does not; the published version stays."""
    learner = Learner()
    publisher = make_publisher(learner, **keys)
    publish(publisher, [Engine(r.name) for r in replicas], 0)
    learner.version = 1
    with pytest.raises(kind, match=said):
        publish(publisher, replicas, 1)
    assert publisher.version == 0
    return publisher


# -- the two phases -------------------------------------------------------------------------------


def test_all_stage_before_one_commits_and_all_commit_before_one_is_asked() -> None:
    diary: list[str] = []
    publish(make_publisher(Learner()), [Engine(f"engine {i}", diary) for i in range(3)], 0)
    assert [entry.split()[0] for entry in diary] == ["prepare"] * 3 + ["commit"] * 3 + ["ask"] * 3


def test_the_version_advances_with_the_proof_and_the_numbers_are_reported() -> None:
    learner = Learner()
    publisher, engines = make_publisher(learner), [Engine(f"engine {i}") for i in range(2)]
    assert publisher.version is None
    first = publish(publisher, engines, 0)
    assert publisher.version == 0
    assert set(first) == {"timing/publish", "timing/proof", "sync/replicas", "sync/probe_gap"}
    learner.version = 1
    second = publish(publisher, engines, 1)
    assert (publisher.version, second["sync/replicas"], second["sync/probe_gap"]) == (1, 2.0, 0.0)
    assert second["sync/probe_move"] > 0.1, "how far the learner's own log-probabilities moved"


def test_one_that_refuses_to_stage_keeps_all_from_committing() -> None:
    class Refusing(Engine):
        async def prepare(self, weights: Any, version: int) -> Mapping[str, int]:
            raise EngineError("2 weights are missing, first norm", "why", "fix")

    diary: list[str] = []
    honest = [Engine(f"engine {i}", diary) for i in (0, 2)]
    fails([honest[0], Refusing("engine 1"), honest[1]], "engine 1, prepare: 2 weights are missing, first norm")
    assert not [entry for entry in diary if entry.startswith("commit")]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, r"acknowledged nothing \(None\)"),
        ({}, r"acknowledged nothing \(\{\}\) of 3 tensors"),
        ({"embed": 11, "head": 22}, r"1 of 3 tensors are missing, 0 unknown; first layer\.0"),
        (SUMS | {"extra": 1}, "0 of 3 tensors are missing, 1 unknown; first extra"),
        (SUMS | {"head": 23}, "1 of 3 tensors differ, first head"),
        (SUMS | {"head": -22}, "first head"),
        (dict.fromkeys(SUMS, 0), "3 of 3 tensors differ, first embed"),
    ],
    ids=["none", "empty", "missing", "unknown", "one differs", "negative", "zeros"],
)
@pytest.mark.parametrize("phase", ["prepare", "commit"])
def test_an_acknowledgement_counts_tensor_by_tensor(answer: Any, said: str, phase: str) -> None:
    class Liar(Engine):
        async def prepare(self, weights: Any, version: int) -> Mapping[str, int]:
            await super().prepare(weights, version)
            return answer if phase == "prepare" else dict(weights)

        async def commit(self, version: int) -> Mapping[str, int]:
            await super().commit(version)
            return answer if phase == "commit" else {}

    if phase == "commit" and answer == {}:
        publish(make_publisher(Learner()), [Liar()], 0)  # an engine that cannot read its weights back
        return
    fails([Engine("engine 0"), Liar("engine 7")], rf"engine 7 does not hold version 1: .*{said}")


@pytest.mark.parametrize(("replicas", "sums"), [([], SUMS), ([Engine()], {}), ([Engine(), Engine()], SUMS)])
def test_a_sync_of_nothing_or_with_nobody_is_a_failure(replicas: Any, sums: Any) -> None:
    with pytest.raises(EngineError, match="version 4: "):
        publish(make_publisher(Learner()), replicas, 4, sums)


@pytest.mark.parametrize("phase", ["prepare", "commit", "ask"])
def test_who_does_not_answer_is_given_up_and_named(phase: str) -> None:
    class Mute(Engine):
        async def _hang(self, *_: Any) -> Any:
            await asyncio.Event().wait()

    mute = Mute("engine 5")
    setattr(mute, phase, mute._hang)
    fails([Engine("engine 0"), mute], "engine 5 gave no answer to .* within 0.01 s", FleetError, deadline_s=0.01)


@pytest.mark.parametrize("phase", ["prepare", "commit", "ask"])
def test_whatever_a_transport_raises_becomes_an_error_that_names_the_engine(phase: str) -> None:
    class Gone(Engine):
        async def _fail(self, *_: Any) -> Any:
            raise ConnectionResetError("peer is gone")

    gone = Gone("engine 1")
    setattr(gone, phase, gone._fail)
    fails([Engine("engine 0"), gone], "engine 1 failed in .*: ConnectionResetError: peer is gone", FleetError)


# -- the canary -----------------------------------------------------------------------------------


class Old(Engine):
    """Acknowledges everything and goes on with the weights it had."""

    async def ask(self, requests: Sequence[Request]) -> list[Completion]:
        return [answer(request, 0, stamp=1) for request in requests]


def test_old_weights_under_a_new_number_are_caught_and_recognised() -> None:
    fails([Engine("engine 0"), Old("engine 3")], r"engine 3 .*It answers as version 0 did", NumericsError)


def test_one_stale_answer_is_caught_and_recognised() -> None:
    class Cached(Engine):
        async def ask(self, requests: Sequence[Request]) -> list[Completion]:
            return [answer(requests[0], 0, stamp=1), *(answer(request, 1) for request in requests[1:])]

    fails([Cached("engine 0")], r"Its answer to probe/0/1 is that of version 0", NumericsError)


def test_weights_that_nobody_knows_are_called_so() -> None:
    class Odd(Engine):
        async def ask(self, requests: Sequence[Request]) -> list[Completion]:
            return [answer(request, 9, stamp=1) for request in requests]

    fails([Odd("engine 0")], r"as none of the versions 0 did", NumericsError)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda said: said[:1], r"asked \['probe/0/1', 'probe/1/1'\], it answered \['probe/0/1'\]"),
        (lambda said: [], "it answered \\[\\]"),
        (lambda said: None, "it answered \\[\\]"),
        (lambda said: said[::-1], "it answered"),
        (lambda said: [replace(said[0], version=0), *said[1:]], "bears version 0 at its first token and 1"),
        (lambda said: [*said[:1], replace(said[1], version_end=0)], "bears version 1 at its first token and 0"),
        (lambda said: [replace(said[0], token_ids=(), logprobs=()), *said[1:]], "0 tokens"),
        (lambda said: [replace(said[0], logprobs=said[0].logprobs[:-1]), *said[1:]], "8 tokens with 7"),
        (lambda said: [replace(said[0], logprobs=(math.nan,) * 8), *said[1:]], "nan"),
    ],
    ids=["one less", "none", "nothing", "other order", "old", "mixed", "empty", "short", "nan"],
)
def test_what_is_no_answer_is_no_proof(spoil: Any, said: str) -> None:
    class Liar(Engine):
        async def ask(self, requests: Sequence[Request]) -> list[Completion]:
            return spoil([answer(request, 1) for request in requests])  # type: ignore[no-any-return]

    fails([Engine("engine 0"), Liar("engine 1")], f"engine 1 does not serve version 1: .*{said}")


@pytest.mark.parametrize(("gap", "caught"), [(0.9 * TOLERANCE, False), (1.1 * TOLERANCE, True)])
@pytest.mark.parametrize("place", [0, 7])
def test_the_tolerance_is_the_border_for_every_single_token(gap: float, caught: bool, place: int) -> None:
    class Near(Engine):
        async def ask(self, requests: Sequence[Request]) -> list[Completion]:
            said = await super().ask(requests)
            moved = list(said[1].logprobs)
            moved[place] += gap
            return [said[0], replace(said[1], logprobs=tuple(moved))]

    publisher = make_publisher(Learner())
    if caught:
        with pytest.raises(NumericsError, match=f"token {place + 1}"):
            publish(publisher, [Near()], 0)
    else:
        assert publish(publisher, [Near()], 0)["sync/probe_gap"] == pytest.approx(gap)


def test_a_learner_that_has_no_numbers_accuses_nobody() -> None:
    publisher = make_publisher(Learner())
    publisher.score = lambda texts, *, temperature: [(math.nan,) * len(text[1]) for text in texts]
    with pytest.raises(NumericsError, match="the learner's log-probabilities"):
        publish(publisher, [Engine()], 0)
    publisher.score = lambda texts, *, temperature: []
    with pytest.raises(InvariantError, match="the learner was asked"):
        publish(publisher, [Engine()], 0)


def test_a_learner_elsewhere_is_awaited() -> None:
    learner = Learner()

    def later(texts: Sequence[Scored], *, temperature: float) -> Awaitable[list[tuple[float, ...]]]:
        async def answer() -> list[tuple[float, ...]]:
            return learner.score(texts, temperature=temperature)

        return answer()

    publisher = Publisher(make_probes(PROMPTS, temperature=0.7, max_width=99), later, tolerance=TOLERANCE)
    publish(publisher, [Engine()], 0)
    assert publisher.version == 0


def test_equal_answers_are_scored_once() -> None:
    learner = Learner()
    publish(make_publisher(learner), [Engine(f"engine {i}") for i in range(5)], 0)
    assert len(learner.asked[0]) == 3, "two probes and the tokens that never change"


# -- the probes -----------------------------------------------------------------------------------


def test_the_probes_fill_a_cache_share_a_beginning_and_never_change() -> None:
    one, two = make_probes(PROMPTS, temperature=0.7, max_width=200)
    assert len(one.prompt_ids) == len(two.prompt_ids) == LONG >= 3 * 16 + 1
    assert one.prompt_ids[:64] == two.prompt_ids[:64]
    assert one.prompt_ids != two.prompt_ids
    assert (one, two) == make_probes(reversed(PROMPTS), temperature=0.7, max_width=200)
    canary = WeightProbe([one, two], tolerance=1.0)
    first, second = canary.questions(1), canary.questions(2)
    assert [r.prompt_ids for r in first] == [r.prompt_ids for r in second]
    assert [r.seed for r in first] == [r.seed for r in second]


@pytest.mark.parametrize("width", range(2, 130))
def test_the_probes_fit_whatever_room_there_is(width: int) -> None:
    for probe in make_probes([(1,), (1, 5)], temperature=1.0, max_width=width):
        assert 1 <= len(probe.prompt_ids) <= width - probe.max_new_tokens
        assert probe.max_new_tokens >= 1


def test_answers_are_short_where_completions_are() -> None:
    lengths = {n: make_probes(PROMPTS, temperature=1.0, max_width=99, max_completion_length=n)[0].max_new_tokens
               for n in (1, 8, 40, 64, 4096)}  # fmt: skip
    assert lengths == {1: 2, 8: 2, 40: 5, 64: 8, 4096: 8}


@pytest.mark.parametrize(("prompts", "width"), [([], 50), ([()], 50), ([(1,)], 1)])
def test_no_probe_is_an_error_and_not_a_proof(prompts: Any, width: int) -> None:
    with pytest.raises(EngineError, match="no probe can be made"):
        make_probes(prompts, temperature=1.0, max_width=width)


@pytest.mark.parametrize("tolerance", [0.0, -1.0, math.nan])
def test_a_tolerance_that_proves_nothing_is_refused(tolerance: float) -> None:
    with pytest.raises(EngineError):
        WeightProbe(make_probes(PROMPTS, temperature=1.0, max_width=50), tolerance=tolerance)
    with pytest.raises(EngineError):
        WeightProbe([], tolerance=1.0)


# -- joining late ---------------------------------------------------------------------------------


def admitted(replica: Any, *, learner_at: int, moved_on: bool) -> tuple[Publisher, Learner]:
    learner = Learner()
    publisher = make_publisher(learner)
    for learner.version in (0, 1):
        publish(publisher, [Engine()], learner.version)
    learner.version = learner_at
    learner.asked.clear()
    asyncio.run(publisher.admit(replica, SUMS, SUMS, moved_on=moved_on))
    assert publisher.version == 1
    return publisher, learner


@pytest.mark.parametrize(("learner_at", "moved_on"), [(1, False), (5, True)])
def test_a_late_replica_is_brought_to_the_current_version_with_the_same_proof(learner_at: int, moved_on: bool) -> None:
    late = Engine("engine 9")
    admitted(late, learner_at=learner_at, moved_on=moved_on)
    assert (late.serves, late.diary) == (1, ["prepare engine 9", "commit engine 9", "ask engine 9"])


@pytest.mark.parametrize("moved_on", [False, True])
def test_a_late_replica_that_serves_the_first_weights_is_caught(moved_on: bool) -> None:
    with pytest.raises(NumericsError, match=r"engine 9 .*as version 0 did"):
        admitted(Old("engine 9"), learner_at=5 if moved_on else 1, moved_on=moved_on)


def other_words(request: Request, same: int) -> Completion:
    """The published version, but with other dice after `same` tokens."""
    said = answer(request, 1)
    tokens = said.token_ids[:same] + tuple(token + 1 for token in said.token_ids[same:])
    return replace(said, token_ids=tokens, logprobs=truth((request.prompt_ids, tokens), 1))


@pytest.mark.parametrize(("same", "enough"), [(6, True), (4, True), (3, False), (0, False)])
def test_other_words_are_compared_as_far_as_they_begin_alike(same: int, enough: bool) -> None:
    class Wordy(Engine):
        async def ask(self, requests: Sequence[Request]) -> list[Completion]:
            return [other_words(request, same) for request in requests]

    if enough:
        _, learner = admitted(Wordy("engine 9"), learner_at=5, moved_on=True)
        assert learner.asked == [], "its weights are those of another version"
    else:
        with pytest.raises(EngineError, match=f"only {2 * same} of 16 probe tokens can be compared"):
            admitted(Wordy("engine 9"), learner_at=5, moved_on=True)
    admitted(Wordy("engine 9"), learner_at=1, moved_on=False)  # while the learner is still there, it is asked


def test_nobody_is_admitted_to_nothing() -> None:
    with pytest.raises(StateError, match="engine 0 cannot be admitted"):
        asyncio.run(make_publisher(Learner()).admit(Engine(), SUMS, SUMS))


def test_known_beginnings_are_found() -> None:
    scored: dict[Scored, tuple[float, ...]] = {((1,), (5, 6, 7)): (-1.0, -2.0, -3.0), ((2,), (5,)): (-9.0,)}
    texts: list[Scored] = [((1,), (5, 6, 7)), ((1,), (5, 9)), ((1,), (4,)), ((3,), (5,)), ((1,), (5, 6, 7, 8))]
    assert known_scores(texts, scored) == [(-1.0, -2.0, -3.0), (-1.0,), (), (), (-1.0, -2.0, -3.0)]


# -- teeth ----------------------------------------------------------------------------------------


def test_planted_publisher_without_a_canary_believes_the_liar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightProbe, "judge", lambda *_: {})
    learner = Learner()
    publisher = make_publisher(learner)
    publish(publisher, [Engine()], 0)
    learner.version = 1
    publish(publisher, [Old()], 1)
    assert publisher.version == 1


def test_planted_all_of_an_empty_answer_would_pass_as_equal() -> None:
    """The comparison that others have: nothing differs where nothing was said."""
    theirs: dict[str, int] = {}
    assert all(SUMS[name] == value for name, value in theirs.items())
    with pytest.raises(EngineError, match="acknowledged nothing"):
        compare_checksums("engine 0", theirs, SUMS, 1)
