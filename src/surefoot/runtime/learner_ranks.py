"""A learner over several processes: rank 0 leads the others call by call, wherever they run.

    driver, rank 0    learn(samples) ──line of JSON──▶ rank 1, rank 2, ...    the same call there
                      its own part of the work  ◀── collectives ──▶  theirs
                      compares ◀──line of JSON── what each of them made of it

How a line reaches a rank is its `Follower`'s business: a pipe to a process that was started here, a socket to one that
a launcher started, an actor on Ray.

Owns       the other ranks, from start to end; the default process group of this process meanwhile.
Promises   ranks that begin with different weights, or made different things of one call, are an error that names one; a
           rank that died, hangs or raised ends the call within the collectives' deadline, with all ranks ended and an
           error that names it: a lost rank is a `LearnerLostError`, so the run goes back to its last checkpoint with
           new ranks; on one machine the group meets through a file in a folder of our own and talks over loopback.
Never      waits without a deadline, or goes on with fewer ranks.

Read next: `learner/sharding.py`, what is cut and who scores what; `run/learner_rank.py`, the other side.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from surefoot import errors
from surefoot.errors import ConfigError, InvariantError, LearnerLostError, LearnerStartError, ModelError, SurefootError
from surefoot.learner.checkpoint import weights_at_start
from surefoot.maths.checksums import checksums
from surefoot.protocols import LearnerFacts, Scored, StepReport, WeightSource
from surefoot.records import TrainSample
from surefoot.system.environment import inherited
from surefoot.system.files import APPEND, plain_descriptor, sha256_of_sized
from surefoot.system.frames import LinePipe, PipeFloodedError
from surefoot.system.process import Child, is_alive, temporary_folder
from surefoot.system.signals import Deadline, tick

if TYPE_CHECKING:
    from surefoot.learner.grpo import GRPOLearner
    from surefoot.learner.lora import Adapter
    from surefoot.learner.model import Policy
    from surefoot.learner.sharding import RankGroup
    from surefoot.runtime.specs import LearnerSpec

T = TypeVar("T")
ANSWER_CAP = 1 << 24
LAST_WORDS_S = 5.0
"""How long the other ranks may take to say why they ended, once it is known that one has."""
DYING_S = 2.0
"""How long one whose pipe has ended may take to have an exit code."""
PAUSE_S = 0.05
"""Between two looks at a process that is nobody's child here."""
SAID = 20
"""Lines of a rank's log in an error."""


class Follower(Protocol):
    """One further rank, as rank 0 reaches it."""

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Its answer; an OSError, a TimeoutError or a ValueError when there is none."""

    def killed(self, wait_s: float) -> str | None:
        """How somebody else ended it; None while it runs, or when it ended by itself."""

    @property
    def is_running(self) -> bool:
        """As far as anybody knows."""

    def last_lines(self, count: int) -> list[str]:
        """The end of what it printed."""

    def end(self) -> None:
        """End it, now. May be called twice."""


# -- Where the ranks meet ---------------------------------------------------------------------------


class MeetingPlace:
    """Where the ranks of one group find each other: a file of this machine, or a port on rank 0's.

    Args:
        host: this machine's address, where ranks are on others too; nobody else's address is listened on.
    """

    def __init__(self, size: int, host: str | None = None) -> None:
        self._folder: Path | None = None
        self._server: Any = None
        if host is None:
            self._folder = temporary_folder("surefoot-ranks-")
            self.name = f"file:{self._folder / 'store'}"
            return
        # Told an address alone, the store would listen on all of them.
        listening = socket.create_server((host, 0))
        port = listening.getsockname()[1]
        self._server = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self.name = f"tcp:{host}:{port}"

    def close(self) -> None:
        """Nobody can meet there any more."""
        self._server = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def join(index: int, size: int, meeting: str, deadline_s: float, device: str, gpu: int) -> None:
    """Make this process a rank of the default group; every rank has to come."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend = "gloo"
    if device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(gpu)
    limit = timedelta(seconds=deadline_s)
    kind, _, place = meeting.partition(":")
    if kind == "file":
        store: Any = dist.FileStore(place, size)  # type: ignore[attr-defined]
    else:
        host, _, port = place.rpartition(":")
        store = dist.TCPStore(host, int(port), size, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=index, world_size=size, timeout=limit)


def group_on(policy: Policy) -> RankGroup:
    """This rank in the group that it has joined, on the device of its model."""
    from surefoot.learner.sharding import RankGroup

    return RankGroup(next(policy.model.parameters()).device)


def digest_of_weights(policy: Policy) -> str:
    """Of all that a rank begins with; other weights under the same name would become shards of one model."""
    told = (f"{name}={value:x}".encode() for name, value in sorted(checksums(weights_at_start(policy)).items()))
    return sha256_of_sized(told)


def refuse_too_few_gpus(size: int, device: str) -> None:
    """Every rank has a GPU of its own."""
    if device == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"runtime.learner_ranks = {size}, and this machine has {torch.cuda.device_count()} CUDA devices",
            "two ranks on one GPU would hold the same memory twice, and NCCL refuses it",
            f"set runtime.learner_ranks = {max(1, torch.cuda.device_count())}",
        )


class PipedFollower:
    """A rank behind two descriptors: a process of this machine that reads questions and writes answers."""

    def __init__(self, reading: int, writing: int, log: Path) -> None:
        self.pipe, self.log = LinePipe(reading, writing, ANSWER_CAP), log

    def ask(self, line: bytes, seconds: float) -> bytes:
        """One line there, one back."""
        return self.pipe.exchange(line + b"\n", seconds)

    def last_lines(self, count: int) -> list[str]:
        """The end of its log."""
        try:
            return self.log.read_text(errors="replace").splitlines()[-count:]
        except OSError:
            return []


class ChildFollower(PipedFollower):
    """A rank that this process starts."""

    def __init__(self, log: Path) -> None:
        words = [sys.executable, "-m", "surefoot.run.learner_rank"]
        descriptor = plain_descriptor(log, APPEND)
        try:
            self.child = Child.start(words, stdin=PIPE, stdout=PIPE, stderr=descriptor, env=inherited())
        finally:
            os.close(descriptor)
        super().__init__(self.child.stdout.fileno(), self.child.stdin.fileno(), log)

    def killed(self, wait_s: float) -> str | None:
        """The signal that ended it."""
        code = self.child.wait(wait_s) if wait_s else self.child.poll()
        return None if code is None or code >= 0 else f"was ended by {signal.Signals(-code).name}"

    @property
    def is_running(self) -> bool:
        """Until it has an exit code."""
        return self.child.alive

    def end(self) -> None:
        """With everything that it started."""
        self.child.end()


class SocketFollower(PipedFollower):
    """A rank that a launcher has started, and that has connected to this process.

    Args:
        connection: its end closes that process; somebody else closes it.
    """

    def __init__(self, connection: socket.socket, pid: int, log: Path) -> None:
        super().__init__(connection.fileno(), connection.fileno(), log)
        self.connection, self.pid = connection, pid

    def killed(self, wait_s: float) -> str | None:
        """Nobody but the launcher knows the signal."""
        deadline = Deadline(wait_s)
        while self.is_running and not deadline.expired:
            time.sleep(PAUSE_S)
        return None if self.is_running else f"(process {self.pid}) ended without a word, as after SIGKILL"

    @property
    def is_running(self) -> bool:
        """By the table of processes."""
        return is_alive(self.pid)

    def end(self) -> None:
        """It ends with the connection, which is not closed here: a thread may be reading from it."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def start_followers(size: int, logs: Path) -> dict[int, Follower]:
    """Ranks 1 to N - 1 as processes of this one; each writes what it prints to a log of its own."""
    found: dict[int, Follower] = {}
    try:
        for index in range(1, size):
            found[index] = ChildFollower(log_of(logs, index))
    except BaseException:
        for each in found.values():
            each.end()
        raise
    return found


def log_of(logs: Path, index: int) -> Path:
    """Where a rank writes what it prints."""
    return logs / f"learner-rank-{index}.log"


class FollowerRanks:
    """Ranks 1 to N - 1, led from here.

    Args:
        followers: by rank; they are ended with this object, or when it cannot be made.
        told: what a rank needs to load its model, beside its place in the group.
        host: this machine's address, where ranks are on others too.
        start_timeout_s: how long they may take to load the model.
    """

    def __init__(
        self, followers: Mapping[int, Follower], told: Sequence[Any] = (), *, host: str | None = None,
        deadline_s: float, start_timeout_s: float,
    ) -> None:  # fmt: skip
        self.followers, self.size = dict(followers), 1 + len(followers)
        self.deadline_s, self.start_timeout_s = deadline_s, start_timeout_s
        self._pool = ThreadPoolExecutor(len(followers), thread_name_prefix="surefoot-ranks")
        self._answers: dict[int, Future[Any]] = {}
        self._meeting: MeetingPlace | None = None
        self.failed: LearnerLostError | None = None
        """Why there is no group any more."""
        try:
            self._meeting = MeetingPlace(self.size, host)
            for index in self.followers:
                place = ["begin", index, self.size, deadline_s]
                self._answers[index] = self._ask(index, [*place, *told], start_timeout_s)
        except BaseException:
            self.close()
            raise

    def _ask(self, index: int, question: Any, seconds: float) -> Future[Any]:
        def exchange() -> Any:
            return json.loads(self.followers[index].ask(json.dumps(question).encode(), seconds))

        return self._pool.submit(exchange)

    def join(self, policy: Policy, gpu: int = 0) -> None:
        """Wait until all have loaded the model, the one that rank 0 has, then meet them in the process group."""
        assert self._meeting is not None, "made with this object"
        found = self._all_came()
        own = digest_of_weights(policy)
        for index, digest in found.items():
            if digest != own:
                self.end()
                raise ModelError(
                    f"rank {index} of the learner loaded other weights than rank 0 from {policy.name}",
                    "each rank keeps a part of every tensor: the parts would be of two models",
                    "let the path lead to the same files for every rank, and leave them alone while a run starts",
                )
        device = next(policy.model.parameters()).device.type
        for index in self.followers:
            self._answers[index] = self._ask(index, ["join", self._meeting.name], self.deadline_s + LAST_WORDS_S)
        try:
            join(0, self.size, self._meeting.name, self.deadline_s, device, gpu)
        except RuntimeError as error:
            raise self._blame(error, LearnerStartError) from error

    def joined(self) -> None:
        """All have cut their model as rank 0 did."""
        self._all_came()

    def _all_came(self) -> dict[int, Any]:
        """Wait for every answer, each of which has its deadline; the watchdog is told that somebody works."""
        while wait(self._answers.values(), 1.0).not_done:
            tick("waiting for the other ranks of the learner, which load the model")
        return {index: self._take(index, each, None, LearnerStartError) for index, each in self._answers.items()}

    def together(self, call: str, args: Sequence[Any], own: Callable[[], T], digest: Callable[[T], Any]) -> T:
        """The same call on every rank; what rank 0 made of it.

        Args:
            digest: of what a rank made of it, the part that has to be the same on all.
        """
        if self.failed is not None:
            raise self.failed
        limit = self.deadline_s + LAST_WORDS_S
        for index in self.followers:
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
        # Whose connection has ended is about to be gone: it closes before the system has an exit code.
        ending = {index for index, answer in told.items() if isinstance(answer, BaseException)}
        killed = {index: each.killed(DYING_S if index in ending else 0.0) for index, each in self.followers.items()}
        words = {index: self._last_lines(index) for index in self.followers}
        silent = [index for index, each in self.followers.items() if told[index] is None and each.is_running]
        self.end()
        failure = self._typed(own, told, killed, silent, words, kind)
        self.failed = failure if isinstance(failure, LearnerLostError) else _gone(f"it ended with {failure}", kind)
        return failure

    def _typed(
        self, own: BaseException | None, told: Mapping[int, Any], killed: Mapping[int, str | None],
        silent: Sequence[int], words: Mapping[int, str], kind: type[LearnerLostError],
    ) -> BaseException:  # fmt: skip
        if own is not None and (isinstance(own, SurefootError) or not isinstance(own, Exception)):
            return own
        for index, how in killed.items():
            if how is not None:
                return _gone(f"rank {index} {how}{words[index]}", kind)
        for index, answer in told.items():
            if isinstance(answer, dict) and answer.get("error", [None])[0]:
                name, what, why, fix = answer["error"]
                return getattr(errors, name)(f"rank {index} of the learner: {what}", why, fix)  # type: ignore[no-any-return]
        if silent:
            return _gone(f"rank {silent[0]} gave no sign for {self.deadline_s:g} s: it hangs, or was stopped", kind)
        for index, answer in told.items():
            if not isinstance(answer, dict) or "error" in answer:
                return _gone(f"rank {index} failed{words[index]}", kind)
        if own is not None and _is_of_collective(own):
            return _apart(own)
        return own if own is not None else _gone("a rank failed", kind)

    def _last_lines(self, index: int) -> str:
        lines = self.followers[index].last_lines(SAID)
        return "\n  its last lines:" + "".join(f"\n    | {line}" for line in lines) if lines else ""

    def end(self) -> None:
        """End every rank, now."""
        for each in self.followers.values():
            each.end()

    def close(self) -> None:
        """Let them go, and this process leave the group. May be called twice."""
        self.end()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._meeting is not None:
            self._meeting.close()


def _answer(asked: Future[Any]) -> Any:
    """What a rank said; None while it has said nothing, the error when it ended without a word."""
    if not asked.done():
        return None
    error = asked.exception()
    return error if error is not None else asked.result()


def _is_of_collective(error: BaseException) -> bool:
    """Whether it is what lies between the ranks that says so, and not our own code."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _apart(error: BaseException) -> InvariantError:
    return InvariantError(
        f"rank 0 of the learner waited for ranks that were through: {' '.join(str(error).split())[:300]}",
        "they did something else than rank 0, so the shards of the weights would be of different versions",
        "nothing of it is saved; go on from the last checkpoint, and report it with the run folder",
    )


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


def lead(ranks: FollowerRanks, policy: Policy, make: Callable[[RankGroup], GRPOLearner]) -> LedLearner:
    """Rank 0 among its followers, and the learner of all of them; without one, nobody is left.

    Args:
        make: rank 0's own, of a model that it cuts as the others do.
    """
    try:
        ranks.join(policy)
        own = make(group_on(policy))
        ranks.joined()
    except BaseException:
        ranks.close()
        raise
    return LedLearner(own, ranks)


class LedLearner:
    """`protocols.Learner` on several ranks: every call is one of all of them."""

    adapter: Adapter | None = None
    """None: an adapter is handed over to answer with it, and then one process answers."""

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

    def close(self) -> None:
        """End the other ranks. May be called twice."""
        self.ranks.close()

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


class FollowingRank:
    """One of the other ranks, in its own process: does what rank 0 asks, question by question.

    Args:
        recipe: called with its rank and what rank 0 tells it when it begins.
    """

    learner: GRPOLearner

    def __init__(self, recipe: Callable[..., LearnerSpec]) -> None:
        self.recipe = recipe
        self.failed = False
        """Whether it could not do something: its weights may be of no version."""

    def reply(self, line: bytes) -> bytes:
        """The answer to one question; an error of ours goes back with its words, any other into the log."""
        try:
            told: Any = {"made": self._answer(json.loads(line))}
        except SurefootError as error:
            traceback.print_exc()
            told = {"error": [type(error).__name__, error.what, error.why, error.fix]}
        except Exception:  # noqa: BLE001 - rank 0 names it; the log has it
            traceback.print_exc()
            told = {"error": [None]}
        self.failed = "error" in told
        return json.dumps(told).encode()

    def _answer(self, question: Sequence[Any]) -> Any:
        call, *args = question
        if call == "begin":
            return self._begin(*args)
        if call == "join":
            return self._join(*args)
        return _CALLS[call](self.learner, *args)

    def _begin(self, index: int, size: int, deadline_s: float, *told: Any) -> str:
        self.index, self.size, self.deadline_s = index, size, deadline_s
        self.spec = self.recipe(index, *told)
        self.policy = self.spec.load()
        return digest_of_weights(self.policy)

    def _join(self, meeting: str) -> str:
        device = next(self.policy.model.parameters()).device.type
        join(self.index, self.size, meeting, self.deadline_s, device, self.spec.gpu or 0)
        self.learner = self.spec.learner(self.policy, group_on(self.policy))
        del self.policy  # whole weights that were cut
        return "joined"


def follow(rank: FollowingRank, questions: IO[bytes], say: Callable[[bytes], object]) -> None:
    """Answer line by line, until rank 0 leaves or something could not be done."""
    while not rank.failed and (line := questions.readline()):
        say(rank.reply(line) + b"\n")


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
