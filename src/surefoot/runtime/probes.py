"""The canary: fixed questions asked after every weight update, and what the answers prove.

Owns       the questions, and the memory of how earlier versions answered them.
Promises   an answer counts only if it bears the new version and the learner, given the same tokens, finds the same
           log-probabilities within `tolerance`; whoever fails is named, with what it seems to serve instead.
Never      moves weights, or draws from a random stream of training or evaluation.

What it can see: everything between the weights and the answer, such as weights that were acknowledged and never used,
an output layer of its own that nobody updated, keys and values kept from before. What it cannot see: a change that
moves no log-probability by more than `tolerance`. `sync/probe_move` says how far this update moved them; where it is
below the tolerance, old weights would answer as well as new ones, and checksums are the only proof.

The probes are drawn at a high temperature: a policy that is sure of itself gives its own words probability 1 before and
after any update, and proves nothing. The prompts are the same at every update, so that whatever is cached is asked for:
one is long enough to fill three cache blocks, where the context allows, and a second one shares its beginning.

Read next: `weights.py`, which asks every engine.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from typing import Protocol

from surefoot.errors import EngineError, NumericsError
from surefoot.protocols import Completion, Request, Scored
from surefoot.runtime.requests import derive_seed

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

    def prove(
        self, name: str, ask: Callable[[list[Request]], list[Completion]], score: Score, version: int
    ) -> dict[str, float]:
        """All of it for one engine in this process: ask, compare, remember."""
        answers = {name: ask(self.questions(version))}
        self.check_form(answers, version)
        texts = [*self.texts(answers), *self.fixed]
        scored = dict(zip(texts, score(texts, temperature=self.temperature), strict=True))
        return self.judge(answers, version, scored) | self.accept(answers, version, scored)

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
