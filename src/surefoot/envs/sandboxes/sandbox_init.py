"""The first process of a sandbox: builds its world, gives up its rights, starts the program, reports how it ended.

    keeper --clone--> init (pid 1 of its own namespace) --fork--> the program
                        |  reads one request, reports one ending on the caller's socket; before it, where the
                        |  request asks for that, how often the program tried to reach the network

Owns       the order in which doors close.
Promises   the program starts only when every door that the request names is closed; a door that does not close is
           reported by name, and nothing runs; when the program ends, or the caller goes, everything that it
           started is gone with init.
Never      leaves the caller's socket, or any other descriptor, to the program.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from surefoot.envs.rewards.frames import pack, read_frame
from surefoot.envs.sandboxes import sandbox_kernel as kernel
from surefoot.envs.sandboxes import sandbox_landlock as landlock
from surefoot.envs.sandboxes import sandbox_root as root
from surefoot.envs.sandboxes import sandbox_seccomp as seccomp
from surefoot.envs.sandboxes.sandbox_egress import Counter

REQUEST_CAP = 64 * 2**20
NOBODY = 65534
_MIB = 2**20
_STACK = 8 * _MIB


def live(
    link: socket.socket, streams: list[int], filters: Mapping[str, bytes], *, keeper: int, switch_user: bool
) -> NoReturn:
    """Be pid 1: everything from the request to the end of the program.

    Args:
        streams: what the program has as descriptors 0, 1, 2 and so on.
        filters: the calls that it may not make, by name of the filter.
        keeper: pidfd of the process that we end with.
        switch_user: whether this process is root within its namespace and becomes somebody else.
    """
    try:
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        link = _place(streams, link, keeper)
        request = _read_request(link)
        if request is not None:
            _prepare(request, len(streams) + 1, switch_user)
            _report(link, _run(request, len(streams), filters, link))
    except OSError as error:
        _report(link, {"failed": error.strerror or str(error), "errno": error.errno})
    except BaseException as error:
        _report(link, {"failed": f"{type(error).__name__}: {error}", "errno": 0})
        raise
    finally:
        os._exit(0)


def _read_request(link: socket.socket) -> dict[str, Any] | None:
    """The request's first line is JSON, the contents of its files follow it; None when the caller has gone."""
    frame = read_frame(link, REQUEST_CAP)
    if frame is None:
        return None
    head, _, rest = frame.partition(b"\n")
    request: dict[str, Any] = json.loads(head)
    files, begin = {}, 0
    for name, size in request["files"]:
        files[name] = rest[begin : begin + size]
        begin += size
    request["files"] = files
    return request


def _prepare(request: Mapping[str, Any], keeper: int, switch_user: bool) -> None:
    """Close every door that can be closed before the program is born."""
    kernel.set_host_name("sandbox")
    writable = request.get("writable", [])
    root.build(request["views"], request["scratch_mb"], NOBODY, writable)
    os.umask(0o077)
    kernel.forgo_privileges()
    if switch_user:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    kernel.drop_privileges()
    kernel.die_with_parent()
    if select.select([keeper], [], [], 0)[0]:  # it went before we asked to go with it, so nobody will tell us
        os._exit(0)
    os.close(keeper)
    kernel.hide_from_siblings()
    root.write_files(request["files"])
    network = request.get("filter") == seccomp.NETWORK
    landlock.restrict(request["landlock"], [root.SCRATCH, *writable], root.DEVICES, network=network)
    os.chdir(request.get("cwd") or root.SCRATCH)


def _run(
    request: Mapping[str, Any], streams: int, filters: Mapping[str, bytes], link: socket.socket
) -> dict[str, Any]:  # fmt: skip
    """Start the program and stay until it has ended, or the caller has gone; bury whoever else ends meanwhile."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only to be woken; exec puts the default back
    counter = Counter(link) if request.get("count_egress") else None
    program = os.fork()
    if program == 0:
        _become(request, filters, link, counter)
    for stream in range(streams):
        os.close(stream)  # the caller's pipes must end with the program
    told = counter.listen() if counter is not None else []
    while True:
        ready, _, _ = select.select([link.fileno(), woken, *told], [], [], counter.pause() if counter else None)
        if link.fileno() in ready:  # the caller says nothing after its request: this is the end of its link
            os._exit(0)
        if counter is not None:
            counter.look(ready)
        if woken in ready:
            os.read(woken, 4096)
            status = _bury(program)
            if status is not None:
                return {"exit": os.waitstatus_to_exitcode(status), "egress": counter.untold if counter else 0}


def _bury(program: int) -> int | None:
    """Wait for everybody who has ended; how the program did, if it was among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program:
            return status
        if pid == 0:
            return None


def _become(
    request: Mapping[str, Any], filters: Mapping[str, bytes], link: socket.socket, counter: Counter | None
) -> NoReturn:
    """Limits, filter, exec. What goes wrong here is told before the program exists, so nobody else can tell it."""
    argv = request["argv"]
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; an exec would hand that on
            signal.signal(number, signal.SIG_DFL)
        _limit(request)
        filter_program = filters[request.get("filter", seccomp.PLAIN)]
        if counter is not None and counter.be_told(filters[seccomp.TELLING]):
            filter_program = filters[seccomp.NETWORK]  # what that one lets through, the listener refuses
        seccomp.install(filter_program)
        if argv:  # none: somebody only asks whether all doors close
            os.execve(argv[0], argv, request["env"])  # noqa: S606 - no shell: that is the point
    except OSError as error:
        missing = error.filename is not None
        what = f"cannot run {argv[0]}: {error.strerror}" if missing else error.strerror
        _report(link, {"failed": what, "errno": error.errno, "program": missing})
    finally:
        os._exit(0)


def _place(streams: list[int], link: socket.socket, keeper: int) -> socket.socket:
    """The streams become 0, 1, 2 and so on; link and keeper (they end with exec) come after them, the rest closes."""
    wanted = [*streams, link.fileno(), keeper]
    above = max(*wanted, len(wanted)) + 1
    for place, descriptor in enumerate(wanted):  # first out of each other's way
        os.dup2(descriptor, above + place)
    link.detach()
    for place in range(len(wanted)):
        os.dup2(above + place, place, inheritable=place < len(streams))
    kernel.close_from(len(wanted))
    return socket.socket(fileno=len(streams))


def _limit(request: Mapping[str, Any]) -> None:
    """What the request names; a server, which has no natural end, has no limit on time and memory."""
    endless = request["cpu_s"] is None
    limits: dict[int, int | tuple[int, int] | None] = {
        resource.RLIMIT_CPU: None if endless else (request["cpu_s"], request["cpu_s"] + 1),
        resource.RLIMIT_AS: None if endless else request["memory_mb"] * _MIB,
        resource.RLIMIT_NPROC: request["processes"] + 1,  # init counts too
        resource.RLIMIT_NOFILE: request["files_open"],
        resource.RLIMIT_FSIZE: None if endless else request["scratch_mb"] * _MIB,
        resource.RLIMIT_CORE: 1,  # not 0: only 1 also keeps a crash from the host's core handler
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_SIGPENDING: 64,
        resource.RLIMIT_STACK: _STACK,
    }
    for which, value in limits.items():
        if value is None:
            continue
        pair = value if isinstance(value, tuple) else (value, value)
        _, hard = resource.getrlimit(which)
        ceiling = pair[1] if hard == resource.RLIM_INFINITY else min(pair[1], hard)
        resource.setrlimit(which, (min(pair[0], ceiling), ceiling))


def _report(link: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        link.sendall(pack(json.dumps(message).encode()))
    except OSError:  # the caller has gone; so shall we
        os._exit(1)
