"""Under torchrun or accelerate launch: the process of rank 0 is the run, the others are ranks of its learner.

    launcher ──▶ RANK 0   surefoot train ...   the run; listens on a socket in a folder of our own until all have come
             └─▶ RANK k   the same words       connects, says what it was asked to train, then does what rank 0 asks

Owns       the environment of launchers, and the socket between their processes.
Promises   processes that were asked for different runs are refused by the first key that differs; a further rank ends
           with rank 0, however that ends, and with 0: what became of the run is rank 0's exit code, and the launcher
           sees one failure, not two; a request to stop reaches rank 0 alone, which needs the others to save.
Never      pickles, listens on a network, or replaces a rank: the processes are the launcher's.

Read next: `runtime/learner_ranks.py`, what rank 0 asks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import ConfigError, LearnerStartError, SecurityError, StateError
from surefoot.run.learner_rank import recipe_of
from surefoot.system.files import APPEND, plain_descriptor
from surefoot.system.signals import ASKING, Deadline

if TYPE_CHECKING:
    from surefoot.config.load import LoadedConfig
    from surefoot.runtime.learner_ranks import Follower
    from surefoot.runtime.specs import LearnerSpec

_LONGEST_FOLDER = 60
"""The name of a socket ends at 107 bytes, on macOS at 103."""
_HELLO_CAP = 1 << 20
_PAUSE_S = 0.05
_LEAVE_S = 2.0
"""How long a further rank may take to leave by itself when rank 0 has left."""


# -- What a launcher tells its processes ------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One process of several that a launcher has started with the same words."""

    rank: int
    size: int
    meeting: str
    """Where the processes of this start meet, in the launcher's words; each restart has its own."""
    attempt: int = 0
    """How often the launcher has started them again."""
    restarts: int = 0
    """How often it may."""


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """What a launcher has put into the environment; None where this process is one by itself.

    Example:
        >>> launch_of({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}) is None
        True
    """
    if "LOCAL_RANK" not in environ or (size := _whole(environ, "WORLD_SIZE", "1")) == 1:
        return None
    rank, here = _whole(environ, "RANK"), _whole(environ, "LOCAL_WORLD_SIZE")
    if not 0 <= rank < size:
        raise _unusable(f"RANK = {rank} with WORLD_SIZE = {size}")
    if here != size:
        raise ConfigError(
            f"the launcher started {size} processes (WORLD_SIZE), {here} of them on this machine (LOCAL_WORLD_SIZE)",
            "under a launcher the ranks meet on a socket of one machine, which no network can reach",
            'start all of them on one machine, or let Ray place them: runtime.kind = "ray", without a launcher',
        )
    if not environ.get("MASTER_PORT"):
        raise _unusable("MASTER_PORT is not there")
    words = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    attempt, restarts = (
        _whole(environ, f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )  # fmt: skip
    return Launch(rank, size, json.dumps([environ.get(name, "") for name in words]), attempt, restarts)


def _whole(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default)
    if text is None or not text.isdecimal():
        raise _unusable(f"{name} is not there" if text is None else f"{name} = {text!r} is no whole number")
    return int(text)


def _unusable(what: str) -> ConfigError:
    return ConfigError(
        f"LOCAL_RANK and WORLD_SIZE say that a launcher started this process, and {what}",
        "which rank this is, and where the others are, cannot be told",
        "use torchrun or accelerate launch, which set all of it; or unset LOCAL_RANK",
    )


def refuse_launcher(environ: Mapping[str, str], what: str) -> None:
    """Raise where a launcher has started many of what only one may do."""
    if (launch := launch_of(environ)) is not None:
        raise ConfigError(
            f"{what} in one of {launch.size} processes of a launcher (WORLD_SIZE, LOCAL_RANK)",
            "each of them would do the same once more, into the same places; only the command `surefoot train` knows "
            "what to do there",
            f"start it once, without torchrun or accelerate launch; for ranks, runtime.learner_ranks={launch.size}",
        )


# -- What was asked for -----------------------------------------------------------------------------


def refuse_other_size(launch: Launch, ranks: int, where: str) -> None:
    """Raise where the run has another number of ranks than the launcher has started."""
    if ranks != launch.size:
        raise ConfigError(
            f"runtime.learner_ranks = {ranks} ({where}), and the launcher started {launch.size} processes (WORLD_SIZE)",
            "each process of the launcher is one rank of the learner, and every rank has to come",
            f"let the launcher start {ranks}, or leave runtime.learner_ranks to it",
        )


def refuse_unlaunchable(loaded: LoadedConfig, launch: Launch) -> None:
    """Raise for what a launcher's processes cannot be: ranks on Ray, or a run that a restart would not find."""
    if loaded.config.runtime.kind == "ray":
        raise ConfigError(
            f'runtime.kind = "ray" in one of {launch.size} processes of a launcher (WORLD_SIZE, LOCAL_RANK)',
            "Ray places the ranks of the learner itself, and the launcher's processes would be left over",
            f"start it once, without a launcher, with runtime.learner_ranks={launch.size}",
        )
    if launch.restarts and loaded.config.output_dir is None:
        raise ConfigError(
            f"the launcher may start the run again ({launch.restarts} restarts), and output_dir is left out",
            "a restart could not tell which folder to go on with, and would begin another run",
            "name output_dir, or allow no restarts",
        )


def run_to_go_on_with(loaded: LoadedConfig, launch: Launch) -> Path | None:
    """The folder of this very run, where the launcher starts it again and it has come so far as to have one."""
    output = loaded.config.output_dir
    if not launch.attempt or output is None or not (loaded.path(output) / "config.toml").is_file():
        return None
    from surefoot.run.store import read_run_config
    from surefoot.storage.run_folder import RunFolder

    folder = loaded.path(output)
    kept = read_run_config(RunFolder.open(folder)).config
    if other := _first_difference(asked_of(kept), asked_of(loaded.resolved)):
        key, there, here = other
        raise StateError(
            f"{folder} holds another run than the launcher starts again: {key} = {there} there, {here} here",
            "going on with it would continue a run that nobody asked for",
            "choose another output_dir",
        )
    return folder


def asked_of(config: Any, **words: Any) -> dict[str, Any]:
    """What a process was asked to train, flat: every key of its config, and what else was said.

    Args:
        config: resolved, a model of pydantic.
    """
    return _flat(config.model_dump(mode="json")) | _flat(words)


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return found


def _first_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    for key in sorted({*ours, *theirs}):
        if ours.get(key) != theirs.get(key):
            return key, ours.get(key), theirs.get(key)
    return None


def part_of(
    launch: Launch, asked: Mapping[str, Any], start_timeout_s: float, lead: Callable[[LaunchedRanks], int]
) -> int:
    """This process's part of what all of them were asked: the run with the others, or a rank of it; the exit code.

    Args:
        lead: what rank 0 does.
    """
    if launch.rank:
        return follow_launch(launch, asked, start_timeout_s)
    with LaunchedRanks(launch, asked, start_timeout_s) as others:
        return lead(others)


# -- Rank 0 -----------------------------------------------------------------------------------------


class LaunchedRanks:
    """The other processes of the launcher, connected to rank 0; a context, after which they have ended.

    Args:
        asked: what this process is asked to train; the others have to be asked for the same.
    """

    def __init__(self, launch: Launch, asked: Mapping[str, Any], start_timeout_s: float) -> None:
        self.launch = launch
        self._connections: dict[int, tuple[socket.socket, int]] = {}
        os.register_at_fork(after_in_child=self._forget)  # a reward process would keep a connection open
        path = _place(launch)
        with _listening(path) as door:
            try:
                self._welcome(door, json.loads(json.dumps(asked)), Deadline(start_timeout_s))
            except BaseException:
                self.close()
                raise
            finally:
                path.unlink(missing_ok=True)

    def _welcome(self, door: socket.socket, asked: Mapping[str, Any], deadline: Deadline) -> None:
        while len(self._connections) < self.launch.size - 1:
            door.settimeout(max(deadline.left, 0.01))
            try:
                connection, _ = door.accept()
            except TimeoutError:
                missing = sorted({*range(1, self.launch.size)} - {*self._connections})
                raise _nobody(f"rank {missing[0]} of the launcher's {self.launch.size} processes", deadline) from None
            self._connections[0] = (connection, 0)  # until it has said which it is
            hello = _read_line(connection, deadline)
            if other := _first_difference(asked, hello["asked"]):
                key, ours, theirs = other
                raise ConfigError(
                    f"rank {hello['rank']} of the launcher was asked for another run: {key} = {theirs} there, "
                    f"{ours} on rank 0",
                    "the ranks of one learner compute one step, by the same numbers",
                    "start every process with the same words in the same folder, as torchrun does",
                )
            self._connections[hello["rank"]] = (self._connections.pop(0)[0], hello["pid"])

    def followers(self, logs: Path) -> dict[int, Follower]:
        """They, ready to be led."""
        from surefoot.runtime.learner_ranks import SocketFollower, log_of

        return {
            index: SocketFollower(connection, pid, log_of(logs, index))
            for index, (connection, pid) in sorted(self._connections.items())
        }

    def close(self) -> None:
        """Let them go. May be called twice."""
        for connection, _ in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._forget()

    def _forget(self) -> None:
        for connection, _ in self._connections.values():
            connection.close()

    def __enter__(self) -> LaunchedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- The other ranks --------------------------------------------------------------------------------


def follow_launch(launch: Launch, asked: Mapping[str, Any], start_timeout_s: float) -> int:
    """Do what rank 0 asks, and end with it; the exit code."""
    connection = _knock(launch, Deadline(start_timeout_s))
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)  # the launcher tells all; rank 0 stops, and needs this one to save
    hello = {"rank": launch.rank, "pid": os.getpid(), "asked": asked}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    watch = threading.Thread(target=_leave_with_rank_0, args=(connection,), daemon=True, name="surefoot-rank-0")
    watch.start()
    from surefoot.runtime.learner_ranks import FollowingRank, follow

    with contextlib.suppress(OSError):  # rank 0 has left in the middle of an answer
        follow(FollowingRank(_begin), connection.makefile("rb"), connection.sendall)
    watch.join()  # an error has been told: rank 0 ends the run, and this process must not end before it
    return 0


def _leave_with_rank_0(connection: socket.socket) -> None:
    """End this process when rank 0 has gone, also from the middle of a collective that nobody will finish."""
    watch = select.poll()
    watch.register(connection, select.POLLRDHUP if sys.platform == "linux" else 0)
    while not watch.poll():
        pass
    last = threading.Timer(_LEAVE_S, os._exit, (0,))
    last.daemon = True
    last.start()


def _begin(index: int, config_json: str, base: str, logs: str) -> LearnerSpec:
    """As a rank that the run starts itself; what it prints goes where that one's does."""
    from surefoot.runtime.learner_ranks import log_of

    descriptor = plain_descriptor(log_of(Path(logs), index), APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    return recipe_of(index, config_json, base, logs)


# -- Where they meet --------------------------------------------------------------------------------


def _place(launch: Launch) -> Path:
    """A socket that this user alone can reach; the processes of one start find the same, and no other start does."""
    usual = tempfile.gettempdir()
    root = Path(usual if len(usual) <= _LONGEST_FOLDER else "/tmp")  # noqa: S108 - the folder below is ours alone
    folder = root / f"surefoot-launch-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) != 0o700:
        raise SecurityError(
            f"{folder} is not a folder of this user alone (0700)",
            "whoever can write there could lead the ranks of this run",
            "remove it, or set TMPDIR to a folder of your own",
        )
    return folder / hashlib.sha256(launch.meeting.encode()).hexdigest()[:24]


@contextlib.contextmanager
def _listening(path: Path) -> Any:
    """A socket at this path, in place of one that nobody listens on any more."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with door:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.connect(str(path))
            raise StateError(
                "another rank 0 waits for the same processes of a launcher",
                "they have the same MASTER_ADDR and MASTER_PORT, and RANK 0 twice",
                "give each launcher a port of its own (--master-port, or --standalone)",
            )
        path.unlink(missing_ok=True)
        door.bind(str(path))
        door.listen()
        yield door


def _knock(launch: Launch, deadline: Deadline) -> socket.socket:
    """A connection to rank 0, as soon as it listens."""
    path = _place(launch)
    while not deadline.expired:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            time.sleep(_PAUSE_S)
        else:
            return connection
    raise _nobody("rank 0 of the launcher", deadline)


def _read_line(connection: socket.socket, deadline: Deadline) -> Any:
    inbox = b""
    while not inbox.endswith(b"\n") and len(inbox) < _HELLO_CAP:
        connection.settimeout(max(deadline.left, 0.01))
        try:
            block = connection.recv(1 << 16)
        except TimeoutError:
            raise _nobody("the word of a process of the launcher that has connected", deadline) from None
        if not block:
            raise _not_started("a process of the launcher connected and left without a word")
        inbox += block
    connection.settimeout(None)
    return json.loads(inbox)


def _nobody(who: str, deadline: Deadline) -> LearnerStartError:
    return _not_started(f"{who} did not come within runtime.start_timeout_s = {deadline.seconds:g} s")


def _not_started(cause: str) -> LearnerStartError:
    return LearnerStartError(
        f"the learner did not start: {cause}",
        "each process of the launcher is one rank of the learner, and every rank has to come",
        "see what that process printed; raise runtime.start_timeout_s if it takes longer here",
    )
