"""`MultiVerifier`: one answer, one problem, the verifier that the problem names.

Owns       which kind of verifier judges what, and how long each may take.
Promises   a problem without a kind, of an unknown kind or without what its kind needs is refused with a ValueError,
           alone and in a batch, before anything is judged; a verifier that crashes, hangs or says something that is
           no score from 0 to 1 gives no verdict under a named reason, which is counted, and never a 0; answers keep
           their order; times are measured on one monotonic clock.
Never      runs a verifier in this process unless told to (`isolate=False`).

    verify_batch --> check all --> by kind --> one worker process per kind --> Judgement(score | reason, span)
                                                   | past the deadline, or dead: replaced, no verdict

Read next: `verifier_kinds.py`, the kinds themselves.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from surefoot.envs.rewards.marks import NOT_FINITE, RAISED, Mark, RewardFunction, judge
from surefoot.envs.rewards.reward_pool import RewardJob, RewardPool
from surefoot.envs.verify.final_answer import text_of
from surefoot.envs.verify.verifier_kinds import BUILT_IN, Kind, Verifier, known_kind, problem_of
from surefoot.envs.verify.verify_judge import Judge
from surefoot.errors import RewardError, SecurityError
from surefoot.records import Task

OUT_OF_RANGE = "out_of_range"
"""A verifier said a number that is no score: below 0 or above 1."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a verifier said of one answer. Either a score or a reason, never both.

    Example:
        >>> Judgement(1.0, None, duration_s=0.25, span=(10.0, 10.25)).score
        1.0
    """

    score: float | None
    """From 0 to 1; None is no verdict."""
    reason: str | None
    """Why there is no verdict: raised, timeout, died, nan, not_a_number, abstained, out_of_range."""
    duration_s: float
    span: tuple[float, float]
    """Start and end in seconds of `time.monotonic()`."""


class MultiVerifier:
    """Judges answers by `problem["verifier_type"]`: exact, math, format, code, choice, judge, or a kind of your own.

    Args:
        judge: `judge(problem, answer)` for problems of kind "judge".
        verifiers: more kinds, name -> `verify(problem, answer)`; a name of ours is replaced.
        timeout_s: how long one answer may take.
        isolate: run verifiers in worker processes that can be killed. Without it a verifier that hangs, hangs you.
        pass_env: names of variables that these processes may see besides the usual ones, such as a judge's key.

    Example:
        >>> with MultiVerifier() as verifier:
        ...     verifier.verify({"verifier_type": "math", "answer": "1/2"}, r"It is \\\\boxed{0.5}").score
        1.0
    """

    def __init__(
        self,
        *,
        judge: Judge | None = None,
        verifiers: Mapping[str, Verifier] | None = None,
        timeout_s: float = 10.0,
        isolate: bool = True,
        pass_env: Sequence[str] = (),
    ) -> None:
        added = dict(verifiers or {}) | ({} if judge is None else {"judge": judge})
        self.kinds: dict[str, Kind] = BUILT_IN | {name: Kind(verify) for name, verify in added.items()}
        self.timeout_s, self.isolate, self.pass_env = timeout_s, isolate, tuple(pass_env)
        self.no_verdicts: Counter[tuple[str, str]] = Counter()
        """(kind, reason) -> how many answers got no verdict."""
        self.last_words: dict[str, str] = {}
        """kind -> what its verifier last raised in this process."""
        self._pools: dict[str, RewardPool] = {}
        self._one_at_a_time = threading.Lock()

    def verify(self, problem: Mapping[str, Any], answer: Any) -> Judgement:
        """Judge one answer."""
        return self.verify_batch([problem], [answer])[0]

    def verify_batch(self, problems: Sequence[Mapping[str, Any]], answers: Sequence[Any]) -> list[Judgement]:
        """(N,) one judgement per answer, in order; kind after kind."""
        if len(problems) != len(answers):
            raise RewardError(
                f"{len(problems)} problems came with {len(answers)} answers",
                "an answer judged by another problem's gold is noise",
                "give one answer per problem",
            )
        kinds = [self.check(problem) for problem in problems]
        judged: dict[int, Judgement] = {}
        for kind in dict.fromkeys(kinds):
            for row in (row for row, each in enumerate(kinds) if each == kind):
                judged[row] = self._judge(kind, problems[row], text_of(answers[row]))
        return [judged[row] for row in range(len(answers))]

    def check(self, problem: Mapping[str, Any]) -> str:
        """The kind of a problem; raises RewardError, a ValueError, when it cannot be judged."""
        kind = known_kind(problem, self.kinds)
        self.kinds[kind].check(problem_of(problem))
        return kind

    def as_reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """(G,) scores in the form of a reward function, judged in this very process.

        It is meant to run in the reward pool, which kills what hangs; what raises is raised, so that the pool asks
        for each completion alone and only the guilty one stays without a verdict.
        """
        problems = [{name: column[row] for name, column in columns.items()} for row in range(len(completions))]
        return [
            self._score(self.check(each), each, text_of(said)) for each, said in zip(problems, completions, strict=True)
        ]

    def prepare(self, kinds: Sequence[str]) -> None:
        """Load what these kinds need, in the parent of worker processes, which then need not."""
        for kind in kinds:
            self.kinds[kind].prepare()

    def close(self) -> None:
        """End every worker. May be called twice."""
        while self._pools:
            self._pools.popitem()[1].close()

    def __enter__(self) -> MultiVerifier:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- one answer -----------------------------------------------------------------
    def _judge(self, kind: str, problem: Mapping[str, Any], text: str) -> Judgement:
        pool = self._pool(kind) if self.isolate else None
        start = time.monotonic()
        mark = self._here(kind, problem, text) if pool is None else _ask(pool, problem, text)
        end = time.monotonic()
        mark = in_range(mark)
        if mark.reason is not None:
            with self._one_at_a_time:
                self.no_verdicts[kind, mark.reason] += 1
        return Judgement(mark.value, mark.reason, end - start, (start, end))

    def _here(self, kind: str, problem: Mapping[str, Any], text: str) -> Mark:
        try:
            return judge(self.kinds[kind].verify(problem_of(problem), text))
        except SecurityError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a verifier raises means: no verdict, counted, remembered
            self.last_words[kind] = f"{type(error).__name__}: {error}"
            return Mark(None, RAISED)

    def _score(self, kind: str, problem: Mapping[str, Any], text: str) -> float | None:
        """A score in a reward worker; NaN and what is out of range are left to say so for themselves."""
        value = self.kinds[kind].verify(problem_of(problem), text)
        if in_range(judge(value)).reason == OUT_OF_RANGE:
            raise RewardError(
                f"the verifier of kind {kind!r} said {value!r}",
                "a score is a number from 0 to 1",
                "scale what it returns",
            )
        return value

    def _pool(self, kind: str) -> RewardPool:
        """The worker of one kind, started when it is first needed."""
        with self._one_at_a_time:
            if kind not in self._pools:
                self.kinds[kind].prepare()
                function = {kind: _rows(self.kinds[kind])}
                pool = RewardPool(function, workers=1, timeout_s=self.timeout_s, pass_env=self.pass_env)
                self._pools[kind] = pool.start()
            return self._pools[kind]


def in_range(mark: Mark) -> Mark:
    """The mark itself, or no verdict when its value is no score."""
    if mark.value is None:
        return mark
    if not math.isfinite(mark.value):
        return Mark(None, NOT_FINITE)
    return mark if 0.0 <= mark.value <= 1.0 else Mark(None, OUT_OF_RANGE)


def _rows(kind: Kind) -> RewardFunction:
    def verify_rows(completions: list[str], problem: list[dict[str, Any]], **_: Any) -> list[float | None]:
        return [kind.verify(problem_of(each), said) for each, said in zip(problem, completions, strict=True)]

    return verify_rows


def _ask(pool: RewardPool, problem: Mapping[str, Any], text: str) -> Mark:
    marks = pool.score([RewardJob([""], [text], {"problem": [dict(problem)]})])[0]
    return next(iter(marks.values()))


# -- the built-in scorer of task sets that name their verifiers ----------------------

_BUILT_IN_VERIFIER = MultiVerifier(isolate=False)


def verifier_reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """(G,) what the verifier named in the column `verifier_type` says of each completion."""
    return _BUILT_IN_VERIFIER.as_reward(prompts, completions, **columns)


def verifier_scorer(tasks: Sequence[Task] = ()) -> RewardFunction:
    """The built-in scorer "verifier", ready to be forked into workers.

    Args:
        tasks: every task of the run. Each is checked, so that one that cannot be judged is refused by its id before
            training, and what their kinds need is loaded here, not in every worker.
    """
    kinds = {_checked(task) for task in tasks}
    _BUILT_IN_VERIFIER.prepare(sorted(kinds))
    return verifier_reward


def _checked(task: Task) -> str:
    try:
        return _BUILT_IN_VERIFIER.check(task.columns)
    except RewardError as error:
        raise RewardError(f"task {task.id}: {error.what}", error.why, error.fix) from error
