"""The learner as the loop sees it, when it lives in a process of its own.

Owns       the wait for the learner's process, and what is remembered of it between two calls.
Promises   errors of the learner arrive as themselves; a lost or hung learner is a `LearnerLostError` with the cause
           and its last lines: what it held in memory is gone, and a resume from the journal repeats it; while it
           works the watchdog hears its pulse.
Never      holds a tensor: weights cross by name (shared memory) or by reference.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from surefoot.errors import LearnerLostError, LearnerStartError, SurefootError
from surefoot.protocols import Scored, StepReport
from surefoot.pulse import beat
from surefoot.records import TrainSample
from surefoot.runtime.fleet_members import Limits, MemberLostError
from surefoot.runtime.fleet_thread import FleetThread
from surefoot.runtime.parcels import Facts, PolicyFacts

if TYPE_CHECKING:
    from surefoot.policy.census import Census
    from surefoot.policy.checkpoint_read import Loaded
    from surefoot.runtime.ray_transport import RayMember

T = TypeVar("T")
_CLOSE_S = 5.0


@dataclass(frozen=True)
class RemoteWeights:
    """The weights of a learner elsewhere, at one version; nothing has moved yet."""

    learner: RemoteLearner
    version: int


class RemoteLearner:
    """`protocols.Learner`, and what a run asks of `GRPOLearner` beside it."""

    def __init__(self, member: RayMember, thread: FleetThread, limits: Limits) -> None:
        self.member, self.thread, self.limits = member, thread, limits
        self._facts = Facts(0, None, 0, 0, 0)
        self._progress: object = None
        self._open_calls = 0
        self.policy: PolicyFacts

    def start(self) -> PolicyFacts:
        """Have it load the model."""
        self.policy = self.thread.wait(self._start())
        return self.policy

    async def _start(self) -> PolicyFacts:
        from surefoot.runtime.ray_transport import begin

        try:
            async with asyncio.timeout(self.limits.start_timeout_s):
                _, facts = await begin(self.member)
        except TimeoutError:
            limit_s = self.limits.start_timeout_s
            raise LearnerStartError(
                f"the learner did not start: it was not ready within runtime.start_timeout_s = {limit_s:g} s"
                f"{self._last_lines()}",
                "its process has to come up, load the model and make the optimiser in that time",
                "raise runtime.start_timeout_s if that takes longer here; if not, its last lines say what it waits for",
            ) from None
        except MemberLostError as loss:
            raise LearnerStartError(
                f"the learner did not start: {loss}{self._last_lines()}",
                "without its process nothing can be trained", "mend what its last lines say, then start again",
            ) from None  # fmt: skip
        return facts  # type: ignore[no-any-return]

    # -- what the loop asks -------------------------------------------------------------

    @property
    def version(self) -> int:
        """How many optimiser steps were applied."""
        return self._facts.version

    @property
    def census(self) -> Census | None:
        """Which parameters moved in the first step."""
        return self._facts.census

    @property
    def checked_tokens(self) -> int:
        """Tokens whose masks were checked."""
        return self._facts.checked_tokens

    @property
    def splits(self) -> int:
        """How often microbatches were halved because memory ran out."""
        return self._facts.splits

    @property
    def changed_entries(self) -> int:
        """Parameter entries that optimiser steps changed, summed over the steps of the run."""
        return self._facts.changed_entries

    def learn(self, samples: Sequence[TrainSample], *, iteration: int = 0) -> StepReport:
        """One optimiser step on these samples."""
        report, self._facts = self._wait(self.call("learn", list(samples), iteration))
        return report  # type: ignore[no-any-return]

    def weights(self) -> Any:
        """A name for the current weights; `RayRuntime.publish` has them moved."""
        return RemoteWeights(self, self.version)

    def score(self, texts: Sequence[Scored], *, temperature: float) -> list[tuple[float, ...]]:
        """Log-probabilities of given completions under the current weights."""
        return self._wait(self.ascore(texts, temperature))

    async def ascore(self, texts: Sequence[Scored], temperature: float) -> list[tuple[float, ...]]:
        """The same, inside the event loop."""
        return list(await self.call("score", list(texts), temperature))

    @property
    def is_busy(self) -> bool:
        """Whether it works on something, so that its weights may be changing."""
        return self._open_calls > 0

    # -- checkpoints --------------------------------------------------------------------

    def save_checkpoint(self, folder: Path, *, step: int, extra: Mapping[str, Any] | None = None) -> Path:
        """`save_training_checkpoint`, in the learner's process, into a folder that both can see."""
        self._facts = self._wait(self.call("save", folder.absolute(), step, dict(extra or {})))
        return folder

    def load_checkpoint(self, folder: Path) -> Loaded:
        """`load_training_checkpoint`, in the learner's process."""
        loaded, self._facts = self._wait(self.call("load", folder.absolute()))
        return loaded  # type: ignore[no-any-return]

    def inspect(self, look: Callable[[Any, Any], T]) -> T:
        """What `look(policy, learner)` returns there; a function that can be pickled."""
        return self._wait(self.call("inspect", look))  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let it unlink its shared memory, then end it. Never raises: it may be gone."""
        with contextlib.suppress(SurefootError, TimeoutError):
            self.thread.wait(asyncio.wait_for(self.call("close"), _CLOSE_S))
        self.member.kill()

    # -- how ----------------------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.thread.wait(work)

    async def call(self, method: str, *args: Any) -> Any:
        """One answer; raises `LearnerLostError` when there will be none."""
        answer = asyncio.ensure_future(self.member.call(method, *args))
        self._open_calls += 1
        try:
            while not (await asyncio.wait({answer}, timeout=1.0))[0]:
                await self._listen(answer)
            return answer.result()
        except MemberLostError as loss:
            raise self._lost(str(loss)) from None
        finally:
            self._open_calls -= 1
            answer.cancel()

    async def _listen(self, answer: asyncio.Future[Any]) -> None:
        """A learner at work gives signs of life; what it works on is not for us to limit, the watchdog does."""
        ping = asyncio.ensure_future(self.member.ping())
        both: set[asyncio.Future[Any]] = {ping, answer}
        await asyncio.wait(both, timeout=self.limits.silence_s, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            ping.cancel()
        elif not ping.done():
            ping.cancel()
            self.member.kill()
            raise MemberLostError(f"no sign of life for {self.limits.silence_s:g} s: it hangs, or was stopped")
        elif (progress := ping.result().get("progress")) != self._progress:
            self._progress = progress
            beat("waiting for the learner, which works")

    def _last_lines(self) -> str:
        lines = "\n".join(f"    | {line}" for line in self.member.last_lines().splitlines())
        return f"\n  its last lines:\n{lines}"

    def _lost(self, cause: str) -> LearnerLostError:
        return LearnerLostError(
            f"the learner was lost: {cause}{self._last_lines()}",
            "weights and optimiser live in its memory; what was not saved is in the journal",
            "resume the run: it goes on from the last checkpoint and repeats the journaled steps",
        )
