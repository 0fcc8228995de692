"""Attempts of a contained program to reach the network, refused one by one and counted by its sandbox's first process.

The kernel's filter does not refuse such a call by itself: it holds the program and asks us, who refuse and count.

    program --socket(internet)--> filter --tells--> Counter: EPERM, one more

Owns       the listener, and the count that was not reported yet.
Promises   every attempt is refused, counted or not; the caller hears of the first at once and of the others a few times
           a second, so that a program that does nothing else floods nobody.
Never      lets a call through. Where the kernel gives no listener the plain filter refuses, and the caller is told that
           nobody counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import resource
import select
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from surefoot.sandbox import walls
from surefoot.system.frames import pack, read_frame

_NOTE = struct.Struct("QII iIQ6Q")
_ANSWER = struct.Struct("QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_TELL_S = 0.1


class EgressCounter:
    """Made before the program is forked; `be_told` is the program's side of it, the rest is ours."""

    def __init__(self, link: socket.socket) -> None:
        self.untold = 0
        """Attempts since the last report."""
        self._link = link
        self._ours, self._theirs = socket.socketpair()
        self._listener: int | None = None
        self._told_at = 0.0

    def be_told(self, filter_program: bytes) -> bool:
        """In the process that becomes the program: install the filter and hand its listener over."""
        try:
            listener = walls.install_telling(filter_program)
        except OSError:  # somebody outside listens to us already, and the kernel has room for one
            return False
        socket.send_fds(self._theirs, [b"!"], [listener])
        os.close(listener)
        return True

    def listen(self) -> list[int]:
        """What to wait for; empty where nobody can count, which the caller is told."""
        self._theirs.close()
        _, descriptors, _, _ = socket.recv_fds(self._ours, 1, 1)
        self._ours.close()
        if not descriptors:
            self._tell({"counted": False})
            return []
        self._listener = descriptors[0]
        return descriptors

    def pause(self) -> float | None:
        """Seconds until the next report is due; None when there is nothing to report."""
        return max(0.0, self._told_at + _TELL_S - time.monotonic()) if self.untold else None

    def look(self, ready: list[int]) -> None:
        """Refuse what was tried, and report it when that is due."""
        if self._listener in ready:
            self._refuse()
        if self.untold and time.monotonic() >= self._told_at + _TELL_S:
            self._tell({"egress": self.untold})
            self.untold, self._told_at = 0, time.monotonic()

    def _refuse(self) -> None:
        assert self._listener is not None, "it was ready"
        note = bytearray(_NOTE.size)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, note)
            number = _NOTE.unpack(note)[0]
            self.untold += 1
            fcntl.ioctl(self._listener, _SEND, bytearray(_ANSWER.pack(number, 0, -errno.EPERM, 0)))
        except OSError:  # whoever asked is gone, or was woken by a signal and asks again
            return

    def _tell(self, message: dict[str, object]) -> None:
        try:
            self._link.sendall(pack(json.dumps(message).encode()))
        except OSError:  # the caller has gone; the end of its link says so, too
            return


# -- The first process of a sandbox: builds its world, gives up its rights, starts the program, reports how it ended
# sandbox server --clone--> init (pid 1 of its own namespace) --fork--> the program
# |  reads one request, reports one ending on the caller's socket; before it, where the
# |  request asks for that, how often the program tried to reach the network
#
# Owns       the order in which doors close.
# Promises   the program starts only when every door that the request names is closed; a door that does not close is
# reported by name, and nothing runs; when the program ends, or the caller goes, everything that it
# started is gone with init.
# Never      leaves the caller's socket, or any other descriptor, to the program.


REQUEST_CAP = 64 * 2**20
NOBODY = 65534
_MIB = 2**20
_STACK = 8 * _MIB


def run_init(
    link: socket.socket, streams: list[int], filters: Mapping[str, bytes], *, server: int, switch_user: bool
) -> NoReturn:
    """Be pid 1: everything from the request to the end of the program.

    Args:
        streams: what the program has as descriptors 0, 1, 2 and so on.
        filters: the calls that it may not make, by name of the filter.
        server: pidfd of the process that we end with.
        switch_user: whether this process is root within its namespace and becomes somebody else.
    """
    try:
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        link = _place(streams, link, server)
        request = _read_request(link)
        if request is not None:
            if request.get("listen"):
                _hand_out(link, walls.listen_within(request["listen"]))
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


def _hand_out(link: socket.socket, listener: socket.socket) -> None:
    """Give the caller a socket of this network, which stays one whoever holds it; nobody keeps it here."""
    with listener:
        socket.send_fds(link, [pack(json.dumps({"listening": True}).encode())], [listener.fileno()])


def _prepare(request: Mapping[str, Any], server: int, switch_user: bool) -> None:
    """Close every door that can be closed before the program starts."""
    walls.set_host_name("sandbox")
    writable = request.get("writable", [])
    walls.build(request["views"], request["scratch_mb"], NOBODY, writable)
    os.umask(0o077)
    walls.forgo_privileges()
    if switch_user:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    walls.drop_privileges()
    walls.die_with_parent()
    if select.select([server], [], [], 0)[0]:  # it went before we asked to go with it, so nobody will tell us
        os._exit(0)
    os.close(server)
    walls.hide_from_siblings()
    walls.write_files(request["files"])
    network = request.get("filter") == walls.NETWORK
    folders, door = [walls.SCRATCH, *writable], request.get("listen")
    walls.restrict(request["landlock"], folders, walls.DEVICES, network=network, connect=door)
    os.chdir(request.get("cwd") or walls.SCRATCH)


def _run(
    request: Mapping[str, Any], streams: int, filters: Mapping[str, bytes], link: socket.socket
) -> dict[str, Any]:  # fmt: skip
    """Start the program and stay until it has ended, or the caller has gone; reap whatever else ends meanwhile."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only to be woken; exec puts the default back
    counter = EgressCounter(link) if request.get("count_egress") else None
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
            status = _reap(program)
            if status is not None:
                return {"exit": os.waitstatus_to_exitcode(status), "egress": counter.untold if counter else 0}


def _reap(program: int) -> int | None:
    """Wait for everybody who has ended; how the program did, if it was among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == program:
            return status
        if pid == 0:
            return None


def _become(
    request: Mapping[str, Any], filters: Mapping[str, bytes], link: socket.socket, counter: EgressCounter | None
) -> NoReturn:
    """Limits, filter, exec. What goes wrong here is told before the program exists, so nobody else can tell it."""
    argv = request["argv"]
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; an exec would hand that on
            signal.signal(number, signal.SIG_DFL)
        _limit(request)
        name = request.get("filter", walls.PLAIN)
        filter_program = filters[name]
        if counter is not None and counter.be_told(filters[walls.TELLING_ON.get(name, walls.TELLING)]):
            filter_program = filters[walls.NETWORK]  # what that one lets through, the listener refuses
        walls.install(filter_program)
        if argv:  # none: somebody only asks whether all doors close
            os.execve(argv[0], argv, request["env"])  # noqa: S606 - no shell: that is the point
    except OSError as error:
        missing = error.filename is not None
        what = f"cannot run {argv[0]}: {error.strerror}" if missing else error.strerror
        _report(link, {"failed": what, "errno": error.errno, "program": missing})
    finally:
        os._exit(0)


def _place(streams: list[int], link: socket.socket, server: int) -> socket.socket:
    """The streams become 0, 1, 2 and so on; link and server (they end with exec) come after them, the rest closes."""
    wanted = [*streams, link.fileno(), server]
    above = max(*wanted, len(wanted)) + 1
    for place, descriptor in enumerate(wanted):  # first out of each other's way
        os.dup2(descriptor, above + place)
    link.detach()
    for place in range(len(wanted)):
        os.dup2(above + place, place, inheritable=place < len(streams))
    walls.close_from(len(wanted))
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


# -- The small process that gives birth to sandboxes ----------------------------------------------
# A trainer holds gigabytes and runs many threads: neither may be copied for every little program. This process is
# single-threaded, a few megabytes, started once, and knows nothing: no environment, no secrets, no open files.
#
# caller --4 or more descriptors--> sandbox server --clone--> init of a sandbox
# caller <==== pid and pidfd of init, on the first of those descriptors ====
#
# Owns       the births, and the map of user ids (which only somebody outside the new namespace may write).
# Promises   when the caller goes (close, exit, SIGKILL) this process goes, and with it every sandbox.
# Never      reads what is to be run.


LEAST_STREAMS, MOST_STREAMS = 4, 8
_LOOK_UP_S = 2.0


def serve(control: socket.socket, parent: int) -> None:
    """Give birth on request until the caller closes its end, or is no longer our parent."""
    spawner = _Spawner()
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    with contextlib.suppress(OSError):  # a fork of the caller may hold the other end open after the caller is gone
        selector.register(os.pidfd_open(parent), selectors.EVENT_READ)
    while os.getppid() == parent:
        if not any(key.fileobj is control for key, _ in selector.select(_LOOK_UP_S)):
            continue
        data, descriptors, _, _ = socket.recv_fds(control, 32, MOST_STREAMS)
        if not data:
            return
        try:
            if len(descriptors) >= LEAST_STREAMS:  # fewer: we ran out of them, and the caller hears its link close
                link = socket.socket(fileno=os.dup(descriptors[0]))
                spawner.spawn(link, descriptors[1:], network=data == walls.ORDER_WITH_NETWORK)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


class _Spawner:
    """All that is the same for every sandbox, worked out once."""

    def __init__(self) -> None:
        self.facts = {"landlock": walls.version()}
        self.filters = walls.programs()
        self.own = os.pidfd_open(os.getpid())
        self.flags = sum(walls.NEW_NAMESPACES.values())
        if os.path.exists("/proc/self/ns/cgroup"):
            self.flags |= walls.NEW_CGROUP
        self.switch_user = os.geteuid() == 0 and _is_mapped("uid", NOBODY) and _is_mapped("gid", NOBODY)

    def spawn(self, link: socket.socket, streams: list[int], *, network: bool) -> None:
        """One sandbox. It waits for its request, which comes only after our answer: its ids are mapped by then.

        Args:
            network: leave it in our own network. It is then the request's filter that says which sockets it may have.
        """
        with link:
            try:
                pid = walls.clone(self.flags & ~walls.NEW_NAMESPACES["net"] if network else self.flags)
                if pid == 0:
                    run_init(link, streams, self.filters, server=self.own, switch_user=self.switch_user)
                self._map_ids(pid)
                _write(pid, "oom_score_adj", "1000")  # when memory runs out, these go first
                pidfd = os.pidfd_open(pid)
            except OSError as error:
                _tell(link, {"failed": error.strerror or str(error), "errno": error.errno})
                return
            _tell(link, {"pid": pid, **self.facts}, pidfd)
            os.close(pidfd)

    def _map_ids(self, pid: int) -> None:
        """Who is who inside: root (to build with) and nobody, or one ordinary user under nobody's name."""
        if not self.switch_user:
            if os.geteuid() == 0 and _outside_of_root() == 0:
                raise OSError(errno.EPERM, "give up root: no other user id can be mapped here")
            _write(pid, "setgroups", "deny")
        for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
            lines = f"0 0 1\n{NOBODY} {NOBODY} 1\n" if self.switch_user else f"{NOBODY} {own} 1\n"
            _write(pid, f"{kind}_map", lines)


def _write(pid: int, name: str, text: str) -> None:
    try:
        with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, f"write {name} of a new user namespace: {error.strerror}") from error


def _is_mapped(kind: str, wanted: int) -> bool:
    """Whether an id exists in the user namespace that we are in ourselves."""
    return any(first <= wanted < first + count for first, _, count in _map_of(kind))


def _outside_of_root() -> int:
    return next((outside for first, outside, _ in _map_of("uid") if first == 0), 0)


def _map_of(kind: str) -> list[tuple[int, int, int]]:
    with open(f"/proc/self/{kind}_map", encoding="ascii") as file:
        lines = [[int(field) for field in line.split()] for line in file]
    return [(line[0], line[1], line[2]) for line in lines]


def _tell(link: socket.socket, message: dict[str, Any], *descriptors: int) -> None:
    data = pack(json.dumps(message).encode())
    with contextlib.suppress(OSError):  # the caller gave up meanwhile: init reads the end of its link and leaves
        socket.send_fds(link, [data], list(descriptors))


def main() -> None:
    """`python -m surefoot.sandbox.server DESCRIPTOR PARENT`."""
    descriptor, parent = map(int, sys.argv[1:3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the caller decides when to stop, and closes its end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for anybody: no zombies
    gc.disable()
    gc.freeze()
    serve(socket.socket(fileno=descriptor), parent)


if __name__ == "__main__":
    main()
