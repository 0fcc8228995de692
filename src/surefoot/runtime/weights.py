"""Moves one version of the weights to every engine, and proves that it arrived.

Owns       the published version: the last one of which every engine has given proof.
Promises   nobody commits before everybody has staged the right tensors; the version advances only after every engine
           has answered the canary with it; whoever fails is named; no wait is without an end.
Never      knows how weights travel, or where an engine runs.

    prepare on all --checksums equal--> commit on all --> canary on all --log-probabilities equal--> version n

Two proofs, because each is blind where the other sees. Checksums compare what an engine *holds* with what the learner
sent, tensor by tensor and bit by bit, however small the step was; but an engine computes them itself, of what it
staged, and they say nothing of a packed copy, a tied output layer or a cache that it really reads. The canary compares
what an engine *does*, through the path of every rollout; but a change that moves no log-probability by more than the
tolerance is invisible to it (`sync/probe_move` beside `sync/probe_gap` tells).

Read next: `probes.py`, the questions; `local.py`, the case of one process; `shared_weights.py`, how weights cross to
another one.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from surefoot.errors import EngineError, FleetError, InvariantError, StateError, SurefootError
from surefoot.protocols import Completion, Request, Scored
from surefoot.runtime.probes import AsyncScore, Score, WeightProbe, known_scores
from surefoot.system import heartbeat
from surefoot.tracking.timeline import span

T = TypeVar("T")
DEADLINE_S = 120.0
"""How long one engine may take for one phase."""
_ENOUGH = 0.5
"""Share of a late engine's answers that must be comparable when the learner has moved on."""


class Replica(Protocol):
    """One engine anywhere, as the publisher sees it."""

    @property
    def name(self) -> str:
        """What errors call it, such as `engine 3`."""

    async def prepare(self, weights: Any, version: int) -> Mapping[str, int]:
        """Stage these weights beside those in force; checksum per tensor of what it holds, computed by itself."""

    async def commit(self, version: int) -> Mapping[str, int]:
        """Serve what was staged from the next token on and drop every prefix cache.

        Returns:
            Checksums of what is now in force, where the engine can read its weights back; else an empty mapping.
        """

    async def ask(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer through the same path as rollouts: caches, queues and all."""


class Publisher:
    """Two-phase publish with proof.

    Args:
        probes: fixed questions, see `probes.make_probes`.
        score: the learner's log-probabilities of given tokens under the version that is published; may be awaitable.
        tolerance: largest difference in nats between an engine's log-probability and the learner's.
        deadline_s: how long one engine may take for one phase.
    """

    def __init__(
        self, probes: Sequence[Request], score: Score | AsyncScore, *, tolerance: float, deadline_s: float = DEADLINE_S
    ) -> None:
        self.canary, self.score, self.deadline_s = WeightProbe(probes, tolerance=tolerance), score, deadline_s
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The last version that every engine has proven; None before the first."""
        return self._version

    async def publish(
        self, replicas: Sequence[Replica], staged: Any, sums: Mapping[str, int], version: int
    ) -> dict[str, float]:
        """Bring all of them to `version`; returns metrics.

        Args:
            staged: handed to every replica as it is: tensors, or where they lie.
            sums: the learner's checksums of what it staged, by tensor.
        """
        metrics = await self._deliver(replicas, staged, sums, version)
        started = time.perf_counter()
        answers = await self._ask(replicas, version)
        texts = list(dict.fromkeys([*self.canary.texts(answers), *self.canary.fixed]))
        scored = dict(zip(texts, await self._scores(texts), strict=True))
        metrics |= self.canary.judge(answers, version, scored)
        metrics |= self.canary.accept(answers, version, scored)
        self._version = version
        return metrics | {"timing/proof": time.perf_counter() - started}

    async def admit(
        self, replica: Replica, staged: Any, sums: Mapping[str, int], *, moved_on: bool = False
    ) -> dict[str, float]:
        """Bring one replica that joins late to the published version, with the same proof.

        Args:
            moved_on: the learner has changed its weights since; its answers are then compared with those that the
                others gave, as far as they begin alike.
        """
        if self._version is None:
            raise StateError(
                f"{replica.name} cannot be admitted: nothing was published yet", "it has no version to be brought to",
                "publish first",
            )  # fmt: skip
        version = self._version
        metrics = await self._deliver([replica], staged, sums, version)
        started = time.perf_counter()
        answers = await self._ask([replica], version)
        texts = self.canary.texts(answers)
        scores = known_scores(texts, self.canary.proven)
        whole = all(len(score) == len(text[1]) for score, text in zip(scores, texts, strict=True))
        if not whole and not moved_on:
            scores = await self._scores(texts)
        _check_evidence(replica.name, texts, scores, self.canary.seems(answers[replica.name]))
        metrics |= self.canary.judge(answers, version, dict(zip(texts, scores, strict=True)))
        return metrics | {"timing/proof": time.perf_counter() - started}

    async def _deliver(
        self, replicas: Sequence[Replica], staged: Any, sums: Mapping[str, int], version: int
    ) -> dict[str, float]:
        """Both phases, with every checksum compared."""
        names = [replica.name for replica in replicas]
        if not replicas or len(set(names)) != len(names) or not sums:
            raise EngineError(
                f"version {version}: {len(sums)} tensors for the engines {names}",
                "a sync of nothing, or with nobody, is not a sync",
                "publish every tensor to engines that each have a name of their own",
            )
        started = time.perf_counter()
        held = await self._each(replicas, "prepare", lambda replica: replica.prepare(staged, version))
        for name, theirs in zip(names, held, strict=True):
            compare_checksums(name, theirs, sums, version)
        heartbeat.tick("publishing weights")
        in_force = await self._each(replicas, "commit", lambda replica: replica.commit(version))
        for name, theirs in zip(names, in_force, strict=True):
            if theirs != {}:  # which is to say: it cannot read its weights back
                compare_checksums(name, theirs, sums, version)
        heartbeat.tick("publishing weights")
        metrics = {"timing/publish": time.perf_counter() - started, "sync/replicas": float(len(replicas))}
        return metrics | _facts(staged)

    async def _ask(self, replicas: Sequence[Replica], version: int) -> dict[str, list[Completion]]:
        questions = self.canary.questions(version)
        said = await self._each(replicas, "canary", lambda replica: replica.ask(questions))
        answers = {replica.name: heard for replica, heard in zip(replicas, said, strict=True)}
        self.canary.check_form(answers, version)
        heartbeat.tick("proving the weights' arrival")
        return answers

    async def _scores(self, texts: Sequence[Scored]) -> list[tuple[float, ...]]:
        found = self.score(texts, temperature=self.canary.temperature)
        if inspect.isawaitable(found):
            found = await self._within("the learner", "scoring the probes", found)
        if [len(score) for score in found] != [len(text[1]) for text in texts]:
            raise InvariantError(
                f"the learner was asked for {sum(len(text[1]) for text in texts)} log-probabilities of {len(texts)} "
                f"texts and gave {sum(map(len, found))} of {len(found)}",
                "numbers that belong to other tokens would prove anything",
                "this is a bug of ours; please report it",
            )
        return found

    async def _each(self, replicas: Sequence[Replica], phase: str, call: Callable[[Replica], Awaitable[T]]) -> list[T]:
        """Call all of them at once; nobody is left running behind an error of somebody else."""
        calls = [self._within(replica.name, phase, call(replica)) for replica in replicas]
        with span(phase, track="sync"):
            results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def _within(self, name: str, phase: str, call: Awaitable[T]) -> T:
        """The answer, or an error of the same kind that says whose it is."""
        try:
            with span(phase, track=name):
                return await asyncio.wait_for(call, self.deadline_s)
        except TimeoutError as error:
            raise FleetError(
                f"{name} gave no answer to {phase} within {self.deadline_s:g} s",
                "an engine of which nobody knows what it serves must not sample",
                "see its log; replace it",
            ) from error
        except SurefootError as error:
            raise type(error)(f"{name}, {phase}: {error.what}", error.why, error.fix) from error
        except Exception as error:
            raise FleetError(
                f"{name} failed in {phase}: {type(error).__name__}: {error}",
                "an engine of which nobody knows what it serves must not sample",
                "see its log; replace it",
            ) from error


def compare_checksums(name: str, theirs: Mapping[str, int] | None, ours: Mapping[str, int], version: int) -> None:
    """Refuse an engine that holds other tensors than the learner sent, by the name of the first.

    Args:
        name: the engine's.
        theirs: as the engine computed them; nothing is no acknowledgement.
    """
    if not theirs:
        raise _unlike(name, version, f"it acknowledged nothing ({theirs!r}) of {len(ours)} tensors")
    missing, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    if missing or extra:
        raise _unlike(
            name, version,
            f"{len(missing)} of {len(ours)} tensors are missing, {len(extra)} unknown; first {(missing + extra)[0]}",
        )  # fmt: skip
    differing = [tensor for tensor in ours if theirs[tensor] != ours[tensor]]
    if differing:
        raise _unlike(
            name, version,
            f"{len(differing)} of {len(ours)} tensors differ, first {differing[0]} "
            f"(checksum {theirs[differing[0]]:016x}, the learner's {ours[differing[0]]:016x})",
        )  # fmt: skip


def _unlike(name: str, version: int, what: str) -> EngineError:
    return EngineError(
        f"{name} does not hold version {version}: {what}",
        "its rollouts would come from other weights under this version's name",
        "see the engine's log; the version was not published",
    )


def _check_evidence(name: str, texts: Sequence[Scored], scores: Sequence[Sequence[float]], seems: str) -> None:
    """Refuse to call a late replica proven when too few of its tokens can be compared."""
    known, asked = sum(map(len, scores)), sum(len(text[1]) for text in texts)
    if known < _ENOUGH * asked:
        raise EngineError(
            f"{name}: only {known} of {asked} probe tokens can be compared, since the learner has moved on. {seems}",
            "it answers otherwise than the others did with this version",
            "replace it, or admit it right after the next publish",
        )


def _facts(staged: Any) -> dict[str, float]:
    """What the staged weights say of themselves."""
    names = {"nbytes": "sync/bytes", "checksum_s": "timing/checksum"}
    return {metric: float(getattr(staged, field)) for field, metric in names.items() if hasattr(staged, field)}
