"""The kernel's own calls that Python has no name for: processes in new namespaces, mounts, privileges.

Owns       the numbers, and the turning of -1 into an OSError that names the call.
Promises   needs nothing but ctypes and libc; imports nothing of ours, for it runs in a process that must stay small.
Never      decides what to mount or to drop; `walls.py` and `server.py` do.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import signal
import socket
import struct
from collections.abc import Mapping, Sequence

NEW_NAMESPACES = {
    "user": 0x10000000, "mount": 0x00020000, "pid": 0x20000000, "net": 0x40000000, "ipc": 0x08000000, "uts": 0x04000000,
}  # fmt: skip
NEW_CGROUP = 0x02000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SET_PDEATHSIG, _SET_DUMPABLE, _CAPBSET_DROP, _SET_NO_NEW_PRIVS, _SET_SECUREBITS, _CAP_AMBIENT = 1, 4, 24, 38, 28, 47
_CLEAR_ALL_AMBIENT = 4
_LOCKED_NO_ROOT = 0b11101111
"""No rights come back by being root, by changing ids or by inheritance, and nobody can undo that."""
_CAP_VERSION_3, _LAST_CAP = 0x20080522, 63
_NUMBERS = {  # what glibc wraps badly or not at all: (x86_64, aarch64)
    "clone": (56, 220), "pivot_root": (155, 41), "mount_setattr": (442, 442), "capset": (126, 91),
    "close_range": (436, 436),
}  # fmt: skip
MACHINES = ("x86_64", "aarch64")
ORDER, ORDER_WITH_NETWORK = b"spawn", b"spawn with network"
"""What a caller says to the sandbox server: a sandbox with all new namespaces, or with all but the network's."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_lock = ctypes.PyDLL(None, use_errno=True)
"""Keeps the interpreter's lock during the call: a clone must not return into an interpreter that is unlocked."""


def number(numbers: tuple[int, int]) -> int:
    """The column of this machine."""
    return numbers[MACHINES.index(platform.machine())]


def syscall(what: str, call: int, *arguments: object) -> int:
    """One raw call; an OSError that says what was tried when the kernel refuses."""
    return checked(what, _libc.syscall(ctypes.c_long(call), *map(_argument, arguments)))


def checked(what: str, result: int) -> int:
    """The result, unless it says that the call failed."""
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def clone(flags: int) -> int:
    """A child in new namespaces: 0 in the child, its pid in the parent. Single-threaded callers only."""
    call = ctypes.c_long(number(_NUMBERS["clone"]))
    nothing = ctypes.c_long(0)
    pid = _libc_with_lock.syscall(call, ctypes.c_long(flags | signal.SIGCHLD), nothing, nothing, nothing, nothing)
    return checked("clone into new namespaces", pid)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    checked(f"mount {kind or 'bind'} on {target}", result)


def unmount(target: str) -> None:
    """Detach a tree; what still uses it keeps it alive, and nobody else can reach it."""
    checked(f"unmount {target}", _libc.umount2(target.encode(), DETACH))


def set_flags(target: str, flags: int, *, below: bool = False) -> None:
    """Add mount flags, whatever the mount had before; to all mounts below it as well when asked."""
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    how = _AT_RECURSIVE if below else 0
    call = number(_NUMBERS["mount_setattr"])
    syscall(f"mount flags of {target}", call, _AT_FDCWD, target.encode(), how, attributes, len(attributes))


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root of this mount namespace and hang the former one below it."""
    syscall("pivot_root", number(_NUMBERS["pivot_root"]), new.encode(), old.encode())


def set_host_name(name: str) -> None:
    """The host's name inside."""
    checked("sethostname", _libc.sethostname(name.encode(), len(name)))


def close_from(first: int) -> None:
    """Close every descriptor from `first` on, whoever opened it."""
    syscall("close_range", number(_NUMBERS["close_range"]), first, 2**32 - 1, 0)


def forgo_privileges() -> None:
    """Make sure that nothing run from here on can be given a capability, whatever its file or its user says."""
    for capability in range(_LAST_CAP + 1):
        if _libc.prctl(_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) == -1:
            break  # beyond the last one that this kernel knows
    prctl("securebits", _SET_SECUREBITS, _LOCKED_NO_ROOT)
    prctl("ambient capabilities", _CAP_AMBIENT, _CLEAR_ALL_AMBIENT)
    prctl("no_new_privs", _SET_NO_NEW_PRIVS, 1)


def drop_privileges() -> None:
    """Give up every capability that this process has."""
    header, nothing = struct.pack("Ii", _CAP_VERSION_3, 0), bytes(24)
    syscall("capset", number(_NUMBERS["capset"]), header, nothing)


def die_with_parent() -> None:
    """Be killed when the parent goes. A change of ids undoes it: call this after."""
    prctl("death signal", _SET_PDEATHSIG, signal.SIGKILL)


def hide_from_siblings() -> None:
    """No core dump, and no look into this process by others of the same user."""
    prctl("dumpable", _SET_DUMPABLE, 0)


def prctl(what: str, option: int, value: int, pointer: object = 0) -> None:
    """prctl(2)."""
    checked(what, _libc.prctl(option, ctypes.c_ulong(value), _argument(pointer), 0, 0))


def _argument(value: object) -> object:
    return ctypes.c_long(value) if isinstance(value, int) else value


# -- Landlock: the second wall around files, network and signals, where the kernel has it ---------


_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_PATH_BENEATH, _ASK_VERSION = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_TRUNCATE = 1 << 14
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many rights over files each version knows."""
_TCP_BIND_CONNECT, _TCP_CONNECT, _NET_PORT = 0b11, 0b10, 2
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11


def version() -> int:
    """Which Landlock this kernel speaks; 0 when it has none, or it is switched off."""
    try:
        return syscall("landlock version", _CREATE, 0, 0, _ASK_VERSION)
    except OSError:
        return 0


def restrict(
    known: int, writable: Sequence[str], devices: Sequence[str], *, network: bool = False, connect: int | None = None
) -> None:
    """Bind this process, and all it becomes, to the rules. Needs no_new_privs.

    Args:
        network: leave connections alone.
        connect: the one TCP port that may be connected to.
    """
    if known == 0:
        return
    everything = (1 << _FILE_RIGHTS.get(known, 16)) - 1
    attributes = struct.pack("Q", everything)
    if known >= 4:
        attributes += struct.pack("Q", 0 if network else _TCP_BIND_CONNECT)
    if known >= 6:
        attributes += struct.pack("Q", _ABSTRACT_SOCKETS_AND_SIGNALS)
    rules = syscall("landlock rules", _CREATE, attributes, len(attributes), 0)
    try:
        _allow(rules, "/", _EXECUTE | _READ_FILE | _READ_DIR)
        for folder in writable:
            _allow(rules, folder, everything & ~(_EXECUTE | _MAKE_CHAR | _MAKE_BLOCK))
        for device in devices:
            _allow(rules, device, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & everything)
        if connect is not None and known >= 4 and not network:
            port = struct.pack("=QQ", _TCP_CONNECT, connect)
            syscall(f"landlock rule for port {connect}", _ADD_RULE, rules, _NET_PORT, port, 0)
        syscall("landlock", _RESTRICT, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    where = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        syscall(f"landlock rule for {path}", _ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, where), 0)
    finally:
        os.close(where)


# -- A filter in front of the kernel: calls that contained code has no honest use for are refused -
# Owns       the list, and the filter programs made of it.
# Promises   another machine's call numbers kill the caller; calls newer than this list do not exist (ENOSYS), so that a
# new kernel opens nothing; the filter is inherited and cannot be taken off.
# A pair of local sockets is connected for good: a datagram pair, which could turn to another socket, is none.
# Never      the only wall: every call here is also useless without privileges, network or files. It makes the kernel's
# surface smaller.


_ABSENT = -1
REFUSED: dict[str, tuple[int, int]] = {  # (x86_64, aarch64)
    # other processes and their memory
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    # namespaces and mounts
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "statmount": (457, 457), "listmount": (458, 458), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    # memory that no limit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmctl": (31, 195),
    "shmat": (30, 196), "shmdt": (67, 197), "msgget": (68, 186), "msgctl": (71, 187), "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "semget": (64, 190), "semctl": (66, 191), "semop": (65, 193), "semtimedop": (220, 192), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "io_setup": (206, 0), "io_submit": (209, 2),
    # parts of the kernel with a long history of holes
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263), "modify_ldt": (154, _ABSENT), "personality": (135, 92), "vmsplice": (278, 75),
    # the machine itself
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "syslog": (103, 116), "quotactl": (179, 60), "quotactl_fd": (443, 443), "iopl": (172, _ABSENT),
    "ioperm": (173, _ABSENT), "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
    "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "uselib": (134, _ABSENT), "mbind": (237, 235),
    "set_mempolicy": (238, 237), "set_mempolicy_home_node": (450, 450), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}  # fmt: skip
NEWEST_KNOWN = 462
_CLONE, _CLONE3, _IOCTL, _PRLIMIT, _SECCOMP = (56, 220), (435, 435), (16, 29), (302, 261), (317, 277)
_SOCKET, _SOCKETPAIR = (41, 198), (53, 199)
_NEW_NAMESPACE_FLAGS = 0x7E020080
_TERMINAL_INPUT = (0x5412, 0x541C, 0x5423)
"""TIOCSTI, TIOCLINUX, TIOCSETD: ways to type into a terminal or to change what it is."""
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_STREAM, _SEQUENCED, _KIND_OF_SOCKET, _TCP = 1, 5, 0xF, 6

_LOAD, _AND, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR, _NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_NR, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32
_SET_SECCOMP, _MODE_FILTER = 22, 2
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_DENY, _NO_SUCH_CALL = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS

Instruction = tuple[int, int, int, int]


PLAIN, NETWORK, TELLING = "plain", "network", "telling"
HOSTS, TELLING_HOSTS = "hosts", "telling hosts"
TELLING_ON = {HOSTS: TELLING_HOSTS}
"""Filter -> the one that tells of what it refuses, where that is not `TELLING`."""


def programs() -> dict[str, bytes]:
    """The filters for this machine: no socket at all; internet sockets; TCP sockets; and two that tell a listener.

    Those refuse nothing else: they stand behind the second, and their listener answers in the kernel's place.
    """
    families = _when(_EQUAL, _AF_INET, _NOTIFY) + _when(_EQUAL, _AF_INET6, _NOTIFY)
    telling = [(_LOAD, 0, 0, _NR), *_argument_check(number(_SOCKET), _ARG0, families), (_RETURN, 0, 0, _ALLOW)]
    not_tcp = [*_when(_EQUAL, _AF_INET6, _NOTIFY), *_unless(_EQUAL, _AF_INET, _ALLOW), *_tcp_only(_NOTIFY)]
    telling_hosts = [(_LOAD, 0, 0, _NR), *_argument_check(number(_SOCKET), _ARG0, not_tcp), (_RETURN, 0, 0, _ALLOW)]
    return {
        PLAIN: program(), NETWORK: program(_ALLOW), TELLING: _packed(telling),
        HOSTS: program(tcp_only=True), TELLING_HOSTS: _packed(telling_hosts),
    }  # fmt: skip


def _tcp_only(otherwise: int) -> list[Instruction]:
    """Of sockets of one family: streams of its usual protocol, which is TCP, and no others (SCTP, MPTCP)."""
    stream = [(_LOAD, 0, 0, _ARG1), (_AND, 0, 0, _KIND_OF_SOCKET), *_unless(_EQUAL, _STREAM, otherwise)]
    return [*stream, (_LOAD, 0, 0, _ARG2), *_when(_EQUAL, 0, _ALLOW), *_unless(_EQUAL, _TCP, otherwise)]


def program(internet: int = _DENY, *, tcp_only: bool = False) -> bytes:
    """A filter for this machine, as the kernel reads it.

    Args:
        internet: what becomes of a call that asks for an internet socket. Sockets of other kinds are always refused.
        tcp_only: let sockets for TCP over IPv4 through, whatever becomes of the others.
    """
    lines: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _AUDIT[platform.machine()]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NR),
    ]  # fmt: skip
    # x32 numbers reach the same calls by another door.
    lines += _when(_GREATER_EQUAL, _X32, _KILL) + _when(_GREATER_EQUAL, NEWEST_KNOWN + 1, _NO_SUCH_CALL)
    lines += _when(_EQUAL, number(_CLONE3), _NO_SUCH_CALL)  # its flags lie in memory, unseen; libc falls back to clone
    for numbers in REFUSED.values():
        if number(numbers) != _ABSENT:
            lines += _when(_EQUAL, number(numbers), _DENY)
    lines += _argument_check(number(_CLONE), _ARG0, _when(_ANY_BIT, _NEW_NAMESPACE_FLAGS, _DENY))
    families = _when(_EQUAL, _AF_INET, internet) + _when(_EQUAL, _AF_INET6, internet)
    if tcp_only:
        families = [*_unless(_EQUAL, _AF_INET, _DENY), *_tcp_only(_DENY), (_RETURN, 0, 0, _ALLOW)]
    lines += _argument_check(number(_SOCKET), _ARG0, [*families, (_RETURN, 0, 0, _DENY)])
    kinds = [(_LOAD, 0, 0, _ARG1), (_AND, 0, 0, _KIND_OF_SOCKET), *_when(_EQUAL, _STREAM, _ALLOW)]
    pair = [*_unless(_EQUAL, _AF_UNIX, _DENY), *kinds, *_unless(_EQUAL, _SEQUENCED, _DENY)]
    lines += _argument_check(number(_SOCKETPAIR), _ARG0, pair)
    # Limits of another process: the first one has the same user, and must live to report.
    lines += _argument_check(number(_PRLIMIT), _ARG0, _unless(_EQUAL, 0, _DENY))
    terminal = [line for request in _TERMINAL_INPUT for line in _when(_EQUAL, request, _DENY)]
    lines += _argument_check(number(_IOCTL), _ARG1, terminal)
    lines.append((_RETURN, 0, 0, _ALLOW))
    return _packed(lines)


def _packed(lines: Sequence[Instruction]) -> bytes:
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _when(test: int, value: int, action: int) -> list[Instruction]:
    return [(test, 0, 1, value), (_RETURN, 0, 0, action)]


def _unless(test: int, value: int, action: int) -> list[Instruction]:
    return [(test, 1, 0, value), (_RETURN, 0, 0, action)]


def _argument_check(call: int, where: int, check: Sequence[Instruction]) -> list[Instruction]:
    """Look at an argument of one call (its lower half; flags and requests have no upper one), then allow it."""
    inside = [(_LOAD, 0, 0, where), *check, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(inside), call), *inside]


def install(filter_program: bytes) -> None:
    """Put the filter in front of this process and all it becomes. Needs no_new_privs."""
    header, _buffer = _header(filter_program)
    prctl("seccomp filter", _SET_SECCOMP, _MODE_FILTER, header)


def install_telling(filter_program: bytes) -> int:
    """The same for a filter that tells a listener; its descriptor. An OSError where somebody listens already."""
    header, _buffer = _header(filter_program)
    return syscall("seccomp listener", number(_SECCOMP), _SET_MODE_FILTER, _NEW_LISTENER, header)


def _header(filter_program: bytes) -> tuple[bytes, object]:
    """What the kernel is given, and the memory that it points to."""
    buffer = ctypes.create_string_buffer(filter_program, len(filter_program))
    return struct.pack("HxxxxxxP", len(filter_program) // 8, ctypes.addressof(buffer)), buffer


# -- The loopback device of a new network, and a door in it ----------------------------------------


_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_WAITING = 64
"""Connections that wait in the kernel until somebody takes them."""


def listen_within(port: int) -> socket.socket:
    """A listening socket on 127.0.0.1 of the network that this process is in, whose loopback device is switched on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            _, flags = struct.unpack("16sH22x", fcntl.ioctl(asking, _GET_FLAGS, struct.pack("16sH22x", b"lo", 0)))
            fcntl.ioctl(asking, _SET_FLAGS, struct.pack("16sH22x", b"lo", flags | _UP))
        except OSError as error:
            raise OSError(error.errno, f"switch on the loopback device: {error.strerror}") from error
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(_WAITING)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"listen on 127.0.0.1:{port} inside: {error.strerror}") from error
    return listener


# -- The empty root: what contained code sees of the file system ----------------------------------


SCRATCH = "/scratch"
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_OLD = "/.host"
_BASE = "/tmp"  # noqa: S108 - only a place to stand on; it is covered at once, in a mount namespace of our own
_INODES_PER_MB = 64
_SEALED = MS_RDONLY | MS_NOSUID


def build(views: Sequence[str], scratch_mb: int, owner: int, writable: Sequence[str] = ()) -> None:
    """Swap the root of this mount namespace for one that holds `views`, the devices and a scratch folder.

    Args:
        writable: further views, on top of the others, in which files can be made but no programs started.
    """
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("root", _BASE, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1k,mode=0755")
    os.chdir(_BASE)
    os.mkdir(_OLD[1:], 0o700)
    pivot_root(".", _OLD[1:])
    os.chdir("/")
    for view in views:
        _show(view, _SEALED | MS_NODEV)
    for folder in writable:
        _show(folder, MS_NOSUID | MS_NODEV | MS_NOEXEC, on_top=True)
    for device in DEVICES:
        _show(device, _SEALED | MS_NOEXEC)
    unmount(_OLD)
    os.rmdir(_OLD)
    os.mkdir(SCRATCH, 0o755)
    if not os.path.lexists(_BASE):
        os.symlink(SCRATCH, _BASE)
    os.symlink(SCRATCH, "/dev/shm")  # noqa: S108 - named semaphores live there; here they count as scratch
    set_flags("/", _SEALED | MS_NODEV)
    options = f"size={scratch_mb}m,nr_inodes={scratch_mb * _INODES_PER_MB},mode=0700,uid={owner},gid={owner}"
    mount("scratch", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    os.chdir(SCRATCH)


def write_files(files: Mapping[str, bytes]) -> None:
    """Put the caller's files into the scratch folder. Names were checked by the caller's side."""
    for name, content in files.items():
        path = os.path.join(SCRATCH, name)
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def _show(path: str, flags: int, *, on_top: bool = False) -> None:
    """The host's file or folder under its own name, with all that is mounted below it; the flags go for all of it."""
    source = _OLD + path
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.makedirs(path, 0o755, exist_ok=on_top)  # it may be part of another view, which this one covers
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    mount(source, path, "", MS_BIND | MS_REC)
    set_flags(path, flags, below=True)
