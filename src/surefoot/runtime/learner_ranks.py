"""A learner over several processes of this machine: rank 0 is in the driver, the others follow it call by call.

    driver, rank 0    learn(samples) ──line of JSON──▶ rank 1, rank 2, ...    the same call there
                      its own part of the work  ◀── collectives ──▶  theirs
                      compares ◀──line of JSON── what each of them made of it

Owns       the processes of the other ranks, from start to end; the default process group of this process meanwhile.
Promises   ranks that made different things of one call are an `InvariantError` that names one; a rank that died, hangs
           or raised ends the call within the collectives' deadline, with all ranks ended and an error that names it:
           a lost rank is a `LearnerLostError`, so the run goes back to its last checkpoint with new ranks; the group
           meets through a file in a folder of our own and talks over loopback.
Never      pickles, waits without a deadline, or goes on with fewer ranks.

Read next: `learner/sharding.py`, what is cut and who scores what; `run/learner_rank.py`, the other side.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from surefoot import errors
from surefoot.errors import ConfigError, InvariantError, LearnerLostError, LearnerStartError, SurefootError
from surefoot.protocols import LearnerFacts, Scored, StepReport, WeightSource
from surefoot.records import TrainSample
from surefoot.system.environment import inherited
from surefoot.system.files import APPEND, plain_descriptor
from surefoot.system.frames import LinePipe, PipeFloodedError
from surefoot.system.process import Child
from surefoot.system.signals import tick

if TYPE_CHECKING:
    from surefoot.learner.grpo import GRPOLearner
    from surefoot.learner.lora import Adapter

T = TypeVar("T")
ANSWER_CAP = 1 << 24
LAST_WORDS_S = 5.0
"""How long the other ranks may take to say why they ended, once it is known that one has."""
DYING_S = 2.0
"""How long one whose pipe has ended may take to have an exit code."""
SAID = 20
"""Lines of a rank's log in an error."""


@dataclass(frozen=True)
class RankStart:
    """What a rank is told first; the rest of it is the run's config."""

    index: int
    size: int
    store: str
    """A file where the ranks find each other."""
    deadline_s: float
    """For one collective."""
    parent: int
    config: str
    """The whole of it, as JSON."""
    base: str


def join(index: int, size: int, store: str, deadline_s: float, device: str) -> None:
    """Make this process a rank of the default group; every rank has to come."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend = "gloo"
    if device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(index)
    meeting = dist.FileStore(store, size)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=meeting, rank=index, world_size=size,
        timeout=timedelta(seconds=deadline_s),
    )  # fmt: skip


def refuse_too_few_gpus(size: int, device: str) -> None:
    """Every rank has a GPU of its own."""
    if device == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"runtime.learner_ranks = {size}, and this machine has {torch.cuda.device_count()} CUDA devices",
            "two ranks on one GPU would hold the same memory twice, and NCCL refuses it",
            f"set runtime.learner_ranks = {max(1, torch.cuda.device_count())}",
        )


class FollowerRanks:
    """The processes of ranks 1 to N - 1.

    Args:
        logs: where each writes what it prints.
        start_timeout_s: how long they may take to load the model.
    """

    def __init__(
        self, size: int, config: str, base: Path, *, logs: Path, deadline_s: float, start_timeout_s: float
    ) -> None:
        self.size, self.deadline_s, self.start_timeout_s = size, deadline_s, start_timeout_s
        self.folder = Path(tempfile.mkdtemp(prefix="surefoot-ranks-"))
        self.store = str(self.folder / "store")
        self.logs = {index: logs / f"learner-rank-{index}.log" for index in range(1, size)}
        self.children: dict[int, Child] = {}
        self._pool = ThreadPoolExecutor(size - 1, thread_name_prefix="surefoot-ranks")
        self._answers: dict[int, Future[Any]] = {}
        self.failed: LearnerLostError | None = None
        """Why there is no group any more."""
        try:
            for index in self.logs:
                self.children[index] = self._start(index)
            self._pipes = {
                index: LinePipe(child.stdout.fileno(), child.stdin.fileno(), ANSWER_CAP)
                for index, child in self.children.items()
            }
            for index in self.logs:
                told = RankStart(index, size, self.store, deadline_s, os.getpid(), config, str(base))
                self._answers[index] = self._ask(index, asdict(told), start_timeout_s)
        except BaseException:
            self.close()
            raise

    def _start(self, index: int) -> Child:
        words = [sys.executable, "-m", "surefoot.run.learner_rank"]
        log = plain_descriptor(self.logs[index], APPEND)
        try:
            return Child.start(words, stdin=PIPE, stdout=PIPE, stderr=log, env=inherited())
        finally:
            os.close(log)

    def _ask(self, index: int, question: Any, seconds: float) -> Future[Any]:
        def exchange() -> Any:
            line = json.dumps(question).encode() + b"\n"
            return json.loads(self._pipes[index].exchange(line, seconds))

        return self._pool.submit(exchange)

    def join(self, device: str) -> None:
        """Wait until all have loaded the model, then meet them in the process group."""
        self._all_came()
        for index in self.children:
            self._answers[index] = self._ask(index, ["join"], self.deadline_s + LAST_WORDS_S)
        try:
            join(0, self.size, self.store, self.deadline_s, device)
        except RuntimeError as error:
            raise self._blame(error, LearnerStartError) from error

    def joined(self) -> None:
        """All have cut their model as rank 0 did."""
        self._all_came()

    def _all_came(self) -> None:
        """Wait for every answer, each of which has its deadline; the watchdog is told that somebody works."""
        while wait(self._answers.values(), 1.0).not_done:
            tick("waiting for the other ranks of the learner, which load the model")
        for index, answer in self._answers.items():
            self._take(index, answer, None, LearnerStartError)

    def together(self, call: str, args: Sequence[Any], own: Callable[[], T], digest: Callable[[T], Any]) -> T:
        """The same call on every rank; what rank 0 made of it.

        Args:
            digest: of what a rank made of it, the part that has to be the same on all.
        """
        if self.failed is not None:
            raise self.failed
        limit = self.deadline_s + LAST_WORDS_S
        for index in self.children:
            # A step has many collectives, each with its deadline: how long they all take nobody knows beforehand.
            self._answers[index] = self._ask(index, [call, *args], 1e6)
        try:
            found = own()
        except BaseException as error:
            lost = self._blame(error, LearnerLostError)
            if lost is error:
                raise
            raise lost from error
        expected = json.loads(json.dumps(digest(found)))
        for index, answer in self._answers.items():
            told = self._take(index, answer, limit, LearnerLostError)
            if told != expected:
                self.end()
                raise InvariantError(
                    f"rank {index} of the learner made something else of {call}: {str(told)[:300]}, "
                    f"rank 0 {str(expected)[:300]}",
                    "the shards of the weights would be of different versions",
                    "nothing of it is saved; go on from the last checkpoint, and report it with the run folder",
                )
        return found

    def _take(self, index: int, answer: Future[Any], seconds: float | None, kind: type[LearnerLostError]) -> Any:
        """What a rank answered; raises for what it could not do."""
        try:
            told = answer.result(seconds)
        except (OSError, TimeoutError, PipeFloodedError, ValueError) as error:
            raise self._blame(error, kind) from error
        if "error" in told:
            raise self._blame(None, kind)
        return told["made"]

    # -- when it went wrong -----------------------------------------------------

    def _blame(self, own: BaseException | None, kind: type[LearnerLostError]) -> BaseException:
        """Who is to blame, and every rank ended: they are somewhere in a call that will not be finished.

        An error of rank 0 that is one of ours goes first, then a rank that died, then an error of ours on a rank; that
        a connection was closed is what all the others say.
        """
        wait(self._answers.values(), LAST_WORDS_S if own is None or isinstance(own, Exception) else 0.0)
        told = {index: _answer(each) for index, each in self._answers.items()}
        # Whose pipe has ended is about to be gone: its connections close before the system has its exit code.
        ending = {index for index, answer in told.items() if isinstance(answer, BaseException)}
        killed = {i: child.wait(DYING_S) if i in ending else child.poll() for i, child in self.children.items()}
        words = {index: self._last_lines(index) for index in self.children}
        self.end()
        failure = self._typed(own, told, killed, words, kind)
        self.failed = failure if isinstance(failure, LearnerLostError) else _gone(f"it ended with {failure}", kind)
        return failure

    def _typed(
        self, own: BaseException | None, told: Mapping[int, Any], killed: Mapping[int, int | None],
        words: Mapping[int, str], kind: type[LearnerLostError],
    ) -> BaseException:  # fmt: skip
        if own is not None and (isinstance(own, SurefootError) or not isinstance(own, Exception)):
            return own
        for index, code in killed.items():
            if code is not None and code < 0:
                return _gone(f"rank {index} was ended by {signal.Signals(-code).name}{words[index]}", kind)
        for index, answer in told.items():
            if isinstance(answer, dict) and answer.get("error", [None])[0]:
                name, what, why, fix = answer["error"]
                return getattr(errors, name)(f"rank {index} of the learner: {what}", why, fix)  # type: ignore[no-any-return]
        silent = [index for index, answer in told.items() if answer is None and killed[index] is None]
        if silent:
            return _gone(f"rank {silent[0]} gave no sign for {self.deadline_s:g} s: it hangs, or was stopped", kind)
        for index, answer in told.items():
            if not isinstance(answer, dict) or "error" in answer:
                return _gone(f"rank {index} failed{words[index]}", kind)
        return own if own is not None else _gone("a rank failed", kind)

    def _last_lines(self, index: int) -> str:
        try:
            lines = self.logs[index].read_text(errors="replace").splitlines()[-SAID:]
        except OSError:
            return ""
        return "\n  its last lines:" + "".join(f"\n    | {line}" for line in lines) if lines else ""

    def end(self) -> None:
        """End every process, now."""
        for child in self.children.values():
            child.end()

    def close(self) -> None:
        """Let them go, and this process leave the group. May be called twice."""
        for child in self.children.values():
            child.end()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(self.folder, ignore_errors=True)


def _answer(asked: Future[Any]) -> Any:
    """What a rank said; None while it has said nothing, the error when it ended without a word."""
    if not asked.done():
        return None
    error = asked.exception()
    return error if error is not None else asked.result()


def _gone(cause: str, kind: type[LearnerLostError]) -> LearnerLostError:
    if kind is LearnerStartError:
        return LearnerStartError(
            f"the learner did not start: {cause}",
            "every rank has a part of the weights, so all of them have to come", "mend what its last lines say",
        )  # fmt: skip
    return LearnerLostError(
        f"the learner was lost: {cause}",
        "every rank has a part of the weights and of the optimiser; what was not saved is in the journal",
        "resume the run: it goes on from the last checkpoint and repeats the journaled steps",
    )


class LedLearner:
    """`protocols.Learner` on several ranks: every call is one of all of them."""

    adapter: Adapter | None = None
    """None: the config refuses one on several ranks."""

    def __init__(self, own: GRPOLearner, ranks: FollowerRanks) -> None:
        self.own, self.ranks = own, ranks
        self._one = threading.Lock()

    @property
    def facts(self) -> LearnerFacts:
        """Those of rank 0: they are made of numbers of all ranks."""
        return self.own.facts

    def learn(self, samples: Sequence[TrainSample], *, iteration: int = 0) -> StepReport:
        """One optimiser step on these samples."""
        told = [[plain_sample(s) for s in samples], iteration]
        return self._all("learn", told, lambda: self.own.learn(samples, iteration=iteration), digest_of)

    def published(self) -> WeightSource:
        """Whole weights in memory of their own, gathered one tensor at a time."""
        return self._all("published", [], self.own.published, lambda found: found[1])

    def score(self, texts: Sequence[Scored], *, temperature: float) -> list[tuple[float, ...]]:
        """Every rank scores all of them: they are few."""
        told = [[list(map(list, text)) for text in texts], temperature]
        return self._all("score", told, lambda: self.own.score(texts, temperature=temperature), len)

    def save(self, folder: Path, *, step: int, extra: Mapping[str, Any]) -> None:
        """Rank 0 writes, tensor by tensor; the others give their shards."""
        told = [str(folder.absolute()), step]
        self._all("save", told, lambda: self.own.save(folder, step=step, extra=extra), lambda _: self.own.version)

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Every rank reads the folder and keeps its part."""
        told = [str(folder.absolute())]
        return self._all("load", told, lambda: self.own.load(folder), lambda _: self.own.version)

    def _all(self, call: str, args: Sequence[Any], own: Callable[[], T], digest: Callable[[T], Any]) -> T:
        with self._one:
            return self.ranks.together(call, args, own, digest)


def digest_of(report: StepReport) -> list[Any]:
    """What of a step has to be the same on every rank: all but times."""
    metrics = {name: repr(value) for name, value in report.metrics.items() if not name.startswith("timing/")}
    return [report.version, report.applied, metrics]


def plain_sample(sample: TrainSample) -> list[Any]:
    """As JSON holds it; numbers come back as they are, to the last bit."""
    return [getattr(sample, field.name) for field in fields(sample)]


def follow(learner: GRPOLearner, questions: IO[bytes], say: Callable[[Any], None]) -> None:
    """On the other ranks: do what rank 0 does, until it leaves."""
    while line := questions.readline():
        call, *args = json.loads(line)
        say({"made": _CALLS[call](learner, *args)})


def _learn(learner: GRPOLearner, samples: Sequence[Sequence[Any]], iteration: int) -> Any:
    return digest_of(learner.learn([_sample(each) for each in samples], iteration=iteration))


def _published(learner: GRPOLearner) -> Any:
    return learner.published()[1]


def _score(learner: GRPOLearner, texts: Sequence[Sequence[Sequence[int]]], temperature: float) -> Any:
    return len(learner.score([(tuple(prompt), tuple(said)) for prompt, said in texts], temperature=temperature))


def _save(learner: GRPOLearner, folder: str, step: int) -> Any:
    learner.save(Path(folder), step=step, extra={})
    return learner.version


def _load(learner: GRPOLearner, folder: str) -> Any:
    learner.load(Path(folder))
    return learner.version


_CALLS: dict[str, Callable[..., Any]] = {
    "learn": _learn, "published": _published, "score": _score, "save": _save, "load": _load,
}  # fmt: skip


def _sample(values: Sequence[Any]) -> TrainSample:
    told: list[Any] = [tuple(each) if isinstance(each, list) else each for each in values]
    return TrainSample(*told)
