"""The kernel's own calls that Python has no name for: processes in new namespaces, mounts, privileges.

Owns       the numbers, and the turning of -1 into an OSError that names the call.
Promises   needs nothing but ctypes and libc; imports nothing of ours, for it runs in a process that must stay small.
Never      decides what to mount or to drop; `sandbox_root.py` and `sandbox_init.py` do.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct

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
ORDER, ORDER_WITH_NETWORK = b"bear", b"bear with network"
"""What a caller says to the keeper: a sandbox with all new namespaces, or with all but the network's."""

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
