"""A Ray cluster that belongs to one run, or a seat in one that is already there.

Owns       the random token, mark, namespace and temporary folder of a private cluster, and its end.
Promises   never attaches to whatever happens to run (RAY_ADDRESS is not looked at); a client without the token is
           refused; everything that listens does so on 127.0.0.1; the folder is readable by its owner only; after
           `close`, and after any death of the driver, no process, folder or shared memory of the cluster is left. A
           cluster that is given by address is joined only with a token from the environment, and is left standing. The
           processes see a list of variables, not ours.
Never      starts the dashboard, sends usage statistics, or prints other processes' output.

Told 127.0.0.1, Ray takes the host's own address instead and listens on all interfaces, on a host that has one (measured
with 2.60, in a network namespace with and without such an address). It is kept from that here (`_on_loopback`). A
cluster that is joined by address listens wherever its owner let it; what keeps strangers out there is the token.

Read next: `reaper.py`, the end; `actors.py`, who lives there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError, FleetError, SecurityError, StateError
from surefoot.runtime.ray.reaper import MARK, READY
from surefoot.system.environment import inherited
from surefoot.system.process import Child, temporary_folder
from surefoot.system.text import remember

_REAPER = Path(__file__).with_name("reaper.py")
_PREFIX = "sf-ray-"
_LONGEST_FOLDER = 24
"""Ray puts about 75 characters behind it, and a socket's name ends at 107."""
_OBJECT_STORE = 128 * 2**20
_GOODBYE_S = 20.0
LOOPBACK = "127.0.0.1"
_TOKEN, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"
_process_token: str | None = None
"""Ray reads the token once per process, so every private cluster of this process has the same."""


class Cluster:
    """Ray, initialised in this process until `close`.

    Args:
        address: join this cluster; None starts a private one.
        processes: how many actors will live there, for the private cluster's book-keeping.
    """

    def __init__(self, address: str | None, *, processes: int) -> None:
        _refuse_foreign_ray()
        self.address = address
        self.mark = secrets.token_hex(8)
        self.namespace = f"surefoot-{self.mark}"
        self.folder: Path | None = None
        self._reaper: Child | None = None
        if address is None:
            self._start(processes)
        else:
            self._join(address)

    @property
    def is_private(self) -> bool:
        """Whether it ends with us."""
        return self.address is None

    def _start(self, processes: int) -> None:
        # Ray opens its own folder to everybody (0777); the one around it is ours alone.
        self.folder = temporary_folder(_PREFIX, _short_folder())
        try:
            self._reaper = _start_reaper(self.mark, self.folder)
            with _environment({MARK: self.mark, _MODE: "token", _TOKEN: _token()}):
                self._init(
                    around=_on_loopback, address="local", _temp_dir=str(self.folder / "r"),
                    object_store_memory=_OBJECT_STORE, num_cpus=max(os.cpu_count() or 1, processes),
                    include_dashboard=False, _node_ip_address=LOOPBACK,
                )  # fmt: skip
                _refuse_other_address()
        except BaseException:
            self.close()
            raise

    def _join(self, address: str) -> None:
        if os.environ.get(_MODE) != "token" or not os.environ.get(_TOKEN):
            raise SecurityError(
                f"runtime.address = {address!r}, and {_MODE}=token with {_TOKEN} is not in the environment",
                "Ray runs what it is sent: a cluster without a token obeys everybody who can reach it",
                f"start the cluster with {_MODE}=token and a random {_TOKEN}, and set both here",
            )
        with _environment({}):
            self._init(address=address)

    def _init(self, around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext, **how: Any) -> None:
        try:
            with _signals_as_they_were(), around():
                _ray_init(namespace=self.namespace, **how)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
            where = "a private Ray cluster could not be started" if self.is_private else f"no way into {self.address}"
            raise FleetError(
                f"{where}: {' '.join(str(error).split())[:600]}",
                "engines, workers and the learner live there",
                'see the message above; `runtime.kind = "local"` needs no cluster',
            ) from error

    def close(self) -> None:
        """Leave; a private cluster ends, with everything that was started in it. May be called twice."""
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            ray.shutdown()
        if self._reaper is not None:
            _dismiss(self._reaper)
            self._reaper = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _ray_init(**how: Any) -> None:
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    _hold_ray_back()
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **how)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Ray replaces a loopback address by the host's own, so that others can join; nobody is to join this one."""
    from ray._private import services

    former = getattr(services, "resolve_ip_for_localhost", None)
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = former


def _refuse_other_address() -> None:
    import ray

    taken = ray.util.get_node_ip_address()
    if taken != LOOPBACK:
        raise SecurityError(
            f"the private Ray cluster took {taken} for its address, not {LOOPBACK}",
            "it then listens on every interface of this host",
            f"use a version of Ray that is tested here (constraints.txt); this is {ray.__version__}",
        )


@contextlib.contextmanager
def _signals_as_they_were() -> Iterator[None]:
    """Ray takes SIGTERM and the exception hook when it is imported; they belong to the run, which stops in order."""
    hook = sys.excepthook
    main = threading.current_thread() is threading.main_thread()
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} if main else {}
    try:
        yield
    finally:
        sys.excepthook = hook
        for number, handler in former.items():
            signal.signal(number, handler)


def room_for(needs: Mapping[str, float]) -> None:
    """Refuse what the cluster can never hold; it would wait for room until the start times out."""
    import ray

    there = ray.cluster_resources()
    short = {name: amount for name, amount in needs.items() if amount > there.get(name, 0.0)}
    if short:
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in short.items())
        found = ", ".join(f"{there.get(name, 0.0):g} {name}" for name in short)
        raise ConfigError(
            f"the run reserves {wanted}; the cluster has {found}",
            "an actor that finds no room waits for ever",
            "lower runtime.engines, runtime.workers, runtime.engine_gpus or runtime.learner_gpus, or add machines",
        )


def _refuse_foreign_ray() -> None:
    if sys.platform != "linux":
        raise ConfigError(
            f'runtime.kind = "ray" on {sys.platform}', "its processes are found and ended through /proc",
            'use Linux, or runtime.kind = "local"',
        )  # fmt: skip
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            'runtime.kind = "ray", and the package ray is not installed', "it starts and finds the processes",
            "pip install 'surefoot[ray]'",
        )  # fmt: skip
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise StateError(
            "Ray is already initialised in this process", "its cluster is somebody else's, and has another token",
            "call ray.shutdown() first, or run the training in a process of its own",
        )  # fmt: skip


def _token() -> str:
    global _process_token
    if _process_token is None:
        if "ray" in sys.modules and _TOKEN not in os.environ:
            raise StateError(
                "ray was imported before the run began", "it reads its token when it is first used",
                "import surefoot first, or run the training in a process of its own",
            )  # fmt: skip
        _process_token = secrets.token_hex(32)
    return _process_token


@contextlib.contextmanager
def _environment(entries: Mapping[str, str]) -> Iterator[None]:
    """What Ray and its processes see: the list of `child_environment`, and these; afterwards all is as it was.

    What a config passes on by name is not here: `ProcessSpec` brings it, to the processes that run our code.
    """
    remember(os.environ)  # other threads may print meanwhile
    kept = inherited(name for name in (_TOKEN, _MODE) if name in os.environ)
    wanted: dict[str, str | None] = {name: None for name in os.environ if name not in kept}
    wanted |= {
        "RAY_ADDRESS": None, "RAY_NAMESPACE": None, "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PYTHONFAULTHANDLER": None, **entries,
    }  # fmt: skip
    former = {name: os.environ.get(name) for name in wanted}
    _set(wanted)
    try:
        yield
    finally:
        _set(former)


def _set(entries: Mapping[str, str | None]) -> None:
    for name, value in entries.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _short_folder() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108 - mkdtemp makes it ours alone


def _start_reaper(mark: str, folder: Path) -> Child:
    try:
        reaper = Child.start(
            [sys.executable, "-I", "-S", str(_REAPER), mark, str(folder), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/", env={},
        )  # fmt: skip
    except OSError as error:
        raise FleetError(
            f"the process that cleans up after a cluster could not be started: {error}",
            "without it a killed run would leave its processes behind",
            "raise the limit on processes",
        ) from error
    with reaper.stdout:
        if reaper.stdout.readline() != READY:
            reaper.end()
            raise FleetError(
                "the process that cleans up after a cluster did not start", "a killed run would leave its own behind",
                f"try: {sys.executable} -I -S {_REAPER}",
            )  # fmt: skip
    return reaper


def _dismiss(reaper: Child) -> None:
    """Close the pipe and wait until it has looked around."""
    with contextlib.suppress(OSError):
        reaper.stdin.close()
    reaper.end(_GOODBYE_S, ask=None)


def _hold_ray_back() -> None:
    """Two things that Ray does to its driver whatever it is told.

    It prints a paragraph for each lost process (our fleet tells of it once), and answers SIGTERM by leaving at once.
    """
    from ray._private import utils, worker

    for module, name in ((worker, "print_to_stdstream"), (utils, "set_sigterm_handler")):
        if hasattr(module, name):
            setattr(module, name, lambda *args, **kwargs: None)
