"""Moves one version of the weights to every engine, and proves that it arrived.

Owns       the published version: the last one of which every engine has given proof; for all runtimes, the one that is
           a single process included.
Promises   nobody commits before everybody has staged the right tensors; the version advances only after every engine
           has answered the canary with it; whoever fails is named; no wait for another process is without an end.
Never      knows how weights travel, or where an engine runs.

    prepare on all --checksums equal--> commit on all --> canary on all --log-probabilities equal--> version n

Two proofs, because each is blind where the other sees. Checksums compare what an engine *holds* with what the learner
sent, tensor by tensor and bit by bit, however small the step was; but an engine computes them itself, of what it
staged, and they say nothing of a packed copy, a tied output layer or a cache that it really reads. The canary compares
what an engine *does*, through the path of every rollout; but a change that moves no log-probability by more than the
tolerance is invisible to it (`sync/probe_move` beside `sync/probe_gap` tells).

Read next: `local.py`, the replica of one process; `shared_weights.py`, how weights cross to another one.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from typing import Any, Protocol, TypeVar

from surefoot.errors import EngineError, FleetError, InvariantError, NumericsError, StateError, SurefootError
from surefoot.protocols import Completion, Request, Scored
from surefoot.runtime.requests import derive_seed
from surefoot.system.signals import tick
from surefoot.tracking.live import span

# -- The canary: fixed questions asked after every weight update, and what the answers prove -------
# Owns       the questions, and the memory of how earlier versions answered them.
# Promises   an answer counts only if it bears the new version and the learner, given the same tokens, finds the same
#            log-probabilities within `tolerance`; whoever fails is named, with what it seems to serve instead.
# Never      moves weights, or draws from a random stream of training or evaluation.
#
# What it can see: everything between the weights and the answer, such as weights that were acknowledged and never used,
# an output layer of its own that nobody updated, keys and values kept from before. What it cannot see: a change that
# moves no log-probability by more than `tolerance`. `sync/probe_move` says how far this update moved them; where it is
# below the tolerance, old weights would answer as well as new ones, and checksums are the only proof.
#
# The probes are drawn at a high temperature: a policy that is sure of itself gives its own words probability 1 before
# and after any update, and proves nothing. The prompts are the same at every update, so that whatever is cached is
# asked for: one is long enough to fill three cache blocks, where the context allows, and a second shares its beginning.


TOKENS = 8
"""Most new tokens of an answer: the first comes from the prompt's keys and values, the others from decoding."""
_FEWEST = 2
_TEMPERATURE = 2.0
"""At least; what a sure policy would never say shows what it thinks. vLLM takes no higher one."""
LONG = 3 * 32 + 1
"""Prompt tokens that fill three cache blocks, 16 or 32 tokens each."""
_REMEMBERED = 4
"""Versions whose answers are kept beside those of the first one."""

_WHY_AND_FIX = (
    "its rollouts would come from other weights under this version's name: weights that never arrived, or not all",
    "see the engine's log; the version was not published",
)

Scores = list[tuple[float, ...]]
Answers = Mapping[str, Sequence[Completion]]
"""What each engine said, by its name."""


class Score(Protocol):
    """The learner's opinion, at once."""

    def __call__(self, texts: Sequence[Scored], *, temperature: float) -> Scores:
        """Log-probabilities of given completions, one tuple per text, in order."""


class AsyncScore(Protocol):
    """The learner's opinion, from another process."""

    def __call__(self, texts: Sequence[Scored], *, temperature: float) -> Awaitable[Scores]:
        """Log-probabilities of given completions, one tuple per text, in order."""


def make_probes(
    prompts: Iterable[Sequence[int]], *, temperature: float, max_width: int, max_completion_length: int = 64
) -> tuple[Request, ...]:
    """Two questions made from the tokens of real prompts.

    Args:
        prompts: those of the run; the same ones give the same questions.
        temperature: of the run; the probes' is not lower.
        max_width: longest prompt plus completion that the engines take.
        max_completion_length: of the run; an answer is an eighth as long, but 2 to 8 tokens, so that the canary's share
            of a step stays small where completions are short.
    """
    distinct = sorted({tuple(prompt) for prompt in prompts if prompt}, key=lambda prompt: (len(prompt), prompt))
    tokens = min(TOKENS, max(_FEWEST, max_completion_length // 8), max_width - 1)
    room = min(LONG, max_width - tokens)
    if not distinct or tokens < 1 or room < 1:
        raise EngineError(
            f"no probe can be made of {len(distinct)} prompts in {max_width} tokens",
            "engines are asked fixed questions after every weight update",
            "raise max_completion_length or use longer prompts",
        )
    long = tuple(islice(cycle(chain.from_iterable(reversed(distinct))), room))
    shared = long[: 2 * room // 3]
    other = (*shared, *islice(cycle(reversed(long)), room - len(shared)))
    return tuple(
        Request(
            id=f"probe/{i}", prompt_ids=prompt, max_new_tokens=tokens, temperature=max(_TEMPERATURE, temperature),
            stop_ids=frozenset(), seed=derive_seed(0, "probe", i), urgent=True,
        )
        for i, prompt in enumerate(dict.fromkeys([long, other]))
    )  # fmt: skip


class WeightProbe:
    """Asks the same questions of every engine after every update.

    Args:
        probes: what is asked; all at one temperature.
        tolerance: largest difference of two log-probabilities of one token, in nats, that counts as equal.
    """

    def __init__(self, probes: Sequence[Request], *, tolerance: float) -> None:
        if not probes or not tolerance > 0 or len({probe.temperature for probe in probes}) != 1:
            raise EngineError(
                f"{len(probes)} probes with tolerance {tolerance}",
                "a canary without questions, or one that forgives nothing or everything, proves nothing",
                "give probes of one temperature, and a tolerance above 0",
            )
        self.probes, self.tolerance, self.temperature = tuple(probes), tolerance, probes[0].temperature
        # Tokens that never change: the end of a prompt, given its beginning. How far they move is the canary's power.
        self.fixed: list[Scored] = [_halved(probes[0].prompt_ids)] if len(probes[0].prompt_ids) > 1 else []
        self.probe_baseline: list[list[float]] | None = None
        """The learner's log-probabilities of them at the last publish; the next one reports how far they moved."""
        self._restored: list[list[float]] | None = None
        self._known: dict[int, list[Completion]] = {}
        self.proven: dict[Scored, tuple[float, ...]] = {}
        """What the learner of the published version thinks of the answers to it."""

    def questions(self, version: int) -> list[Request]:
        """The probes, named for this update."""
        return [replace(probe, id=f"{probe.id}/{version}") for probe in self.probes]

    def check_form(self, answers: Answers, version: int) -> None:
        """Refuse what is no answer at all, or bears another version."""
        for name, completions in answers.items():
            asked = [question.id for question in self.questions(version)]
            answered = [completion.request_id for completion in completions or ()]
            if asked != answered:
                raise _refusal(name, version, f"asked {asked}, it answered {answered}")
            for probe, said in zip(self.probes, completions, strict=True):
                if (said.version, said.version_end) != (version, version):
                    stamps = f"{said.version} at its first token and {said.version_end} at its last"
                    raise _refusal(name, version, f"{said.request_id} bears version {stamps}")
                if not 1 <= len(said.token_ids) == len(said.logprobs) <= probe.max_new_tokens:
                    raise _refusal(
                        name, version,
                        f"{said.request_id}: {len(said.token_ids)} tokens with {len(said.logprobs)} log-probabilities",
                    )  # fmt: skip
                if not all(math.isfinite(value) for value in said.logprobs):
                    raise _refusal(name, version, f"{said.request_id}: log-probabilities {list(said.logprobs)}")

    def texts(self, answers: Answers) -> list[Scored]:
        """What was said, each distinct answer once, for the learner to score."""
        return list(dict.fromkeys(text for completions in answers.values() for text in self._said(completions)))

    def _said(self, completions: Sequence[Completion]) -> list[Scored]:
        return [(probe.prompt_ids, c.token_ids) for probe, c in zip(self.probes, completions, strict=True)]

    def judge(self, answers: Answers, version: int, scored: Mapping[Scored, tuple[float, ...]]) -> dict[str, float]:
        """Refuse an engine that finds other log-probabilities than the learner; else how far apart they were.

        Args:
            scored: by text, what the learner says. Fewer numbers than tokens compare the tokens they are there for.
        """
        worst = 0.0
        for name, completions in answers.items():
            for said, text in zip(completions, self._said(completions), strict=True):
                ours = scored[text]
                if not all(math.isfinite(value) for value in ours):
                    raise NumericsError(
                        f"the learner's log-probabilities of {said.request_id} are {list(ours)} at version {version}",
                        "no engine can be compared with numbers that are none",
                        "lower learning_rate; evaluate the last checkpoint that worked",
                    )
                gaps = [abs(theirs - mine) for theirs, mine in zip(said.logprobs, ours, strict=False)]
                gap = max(gaps, default=0.0)
                if gap > self.tolerance:
                    at = gaps.index(gap)
                    raise _disagreement(
                        name, version,
                        f"{said.request_id}, token {at + 1}: log-probability {said.logprobs[at]:.6f}, the learner's "
                        f"{ours[at]:.6f}; tolerance {self.tolerance:g}. {self.seems(completions)}",
                    )  # fmt: skip
                worst = max(worst, gap)
        return {"sync/probe_gap": worst}

    def accept(self, answers: Answers, version: int, scored: Mapping[Scored, tuple[float, ...]]) -> dict[str, float]:
        """Every engine passed: remember how this version answers; how far the learner moved since the last one."""
        now = [list(scored[text]) for text in self.fixed]
        before, self.probe_baseline, self._restored = self.probe_baseline, self._restored or now, None
        self.proven = dict(scored)
        self._known[version] = list(next(iter(answers.values())))
        for old in list(self._known)[1:-_REMEMBERED]:  # the first stays: restarts begin there
            del self._known[old]
        if not before:
            return {}
        pairs = zip(chain.from_iterable(now), chain.from_iterable(before), strict=True)
        return {"sync/probe_move": max(abs(new - old) for new, old in pairs)}

    def restore_baseline(self, found: list[list[float]] | None) -> None:
        """Go on from the baseline of a checkpoint: the next publish only brings the engines back, and leaves it."""
        self._restored = found

    def seems(self, completions: Sequence[Completion]) -> str:
        """Whose answers these are, if they were ever heard."""
        for version, known in reversed(self._known.items()):
            same = [new.request_id for new, old in zip(completions, known, strict=True) if self._equal(new, old)]
            if len(same) == len(known):
                return f"It answers as version {version} did"
            if same:
                return f"Its answer to {', '.join(same)} is that of version {version}"
        return f"It answers as none of the versions {', '.join(map(str, self._known)) or '(none yet)'} did"

    def _equal(self, new: Completion, old: Completion) -> bool:
        gaps = (abs(a - b) for a, b in zip(new.logprobs, old.logprobs, strict=False))
        return new.token_ids == old.token_ids and max(gaps) <= self.tolerance


def known_scores(texts: Sequence[Scored], scored: Mapping[Scored, tuple[float, ...]]) -> Scores:
    """Per text, the log-probabilities that are known for its beginning, from a text that began alike.

    A token's probability depends on what stands before it alone, so an answer that departs from a scored one at its
    k-th token has k - 1 tokens that are known.
    """
    return [max((_begun_alike(text, other, scored[other]) for other in scored), key=len, default=()) for text in texts]


def _begun_alike(text: Scored, other: Scored, scores: tuple[float, ...]) -> tuple[float, ...]:
    if text[0] != other[0]:
        return ()
    pairs = zip(text[1], other[1], strict=False)
    alike = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text[1]), len(other[1])))
    return scores[:alike]


def _halved(prompt: tuple[int, ...]) -> Scored:
    """A prompt as a text: its last tokens, given those before them."""
    cut = max(1, len(prompt) - TOKENS)
    return prompt[:cut], prompt[cut:]


def _refusal(name: str, version: int, what: str) -> EngineError:
    return EngineError(f"{name} does not serve version {version}: {what}", *_WHY_AND_FIX)


def _disagreement(name: str, version: int, what: str) -> NumericsError:
    return NumericsError(f"{name} does not serve version {version}: {what}", *_WHY_AND_FIX)


# -- Both phases, and who is believed ----------------------------------------------------------


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


class TwoPhase:
    """Two-phase publish that takes the engines' own word: for engines that no learner can be asked about.

    Args:
        deadline_s: how long one engine may take for one phase; None where all of them are in this process, whose calls
            nothing could cut short: they are made one after the other, and what they raise is raised as it is.
    """

    def __init__(self, *, deadline_s: float | None = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The last version that counts; None before the first."""
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
        self._version = version
        return metrics

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
        tick("publishing weights")
        in_force = await self._each(replicas, "commit", lambda replica: replica.commit(version))
        for name, theirs in zip(names, in_force, strict=True):
            if theirs != {}:  # which is to say: it cannot read its weights back
                compare_checksums(name, theirs, sums, version)
        tick("publishing weights")
        metrics = {"timing/publish": time.perf_counter() - started, "sync/replicas": float(len(replicas))}
        return metrics | _facts(staged)

    async def _each(self, replicas: Sequence[Replica], phase: str, call: Callable[[Replica], Awaitable[T]]) -> list[T]:
        """Call all of them at once; nobody is left running behind an error of somebody else."""
        if self.deadline_s is None:
            with span(phase, track="sync"):
                return [await call(replica) for replica in replicas]
        calls = [self._within(replica.name, phase, call(replica)) for replica in replicas]
        with span(phase, track="sync"):
            results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def _within(self, name: str, phase: str, call: Awaitable[T]) -> T:
        """The answer, or an error of the same kind that says whose it is."""
        if self.deadline_s is None:
            return await call
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


class Publisher(TwoPhase):
    """Two-phase publish with proof: what every run uses.

    Args:
        probes: fixed questions, see `make_probes`.
        score: the learner's log-probabilities of given tokens under the version that is published; may be awaitable.
        tolerance: largest difference in nats between an engine's log-probability and the learner's.
        deadline_s: how long one engine may take for one phase; None where all of them are in this process.
    """

    def __init__(
        self, probes: Sequence[Request], score: Score | AsyncScore, *, tolerance: float,
        deadline_s: float | None = DEADLINE_S,
    ) -> None:  # fmt: skip
        super().__init__(deadline_s=deadline_s)
        self.canary, self.score = WeightProbe(probes, tolerance=tolerance), score

    async def publish(
        self, replicas: Sequence[Replica], staged: Any, sums: Mapping[str, int], version: int
    ) -> dict[str, float]:
        """Bring all of them to `version`, of which each gives proof; returns metrics."""
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

    async def _ask(self, replicas: Sequence[Replica], version: int) -> dict[str, list[Completion]]:
        questions = self.canary.questions(version)
        said = await self._each(replicas, "canary", lambda replica: replica.ask(questions))
        answers = {replica.name: heard for replica, heard in zip(replicas, said, strict=True)}
        self.canary.check_form(answers, version)
        tick("proving the weights' arrival")
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


def run_here(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nobody: every replica that it calls answers in this thread.

    Needs no event loop, and so does not mind one that runs here already, as in a notebook.
    """
    try:
        work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    work.close()
    raise InvariantError(
        "a sync in one process waited for something", "nobody in this thread could ever wake it",
        "give a publisher of other processes an event loop",
    )  # fmt: skip


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
