"""A filter in front of the kernel: calls that contained code has no honest use for are refused.

Owns       the list, and the filter programs made of it.
Promises   another machine's call numbers kill the caller; calls newer than this list do not exist (ENOSYS), so that a
           new kernel opens nothing; the filter is inherited and cannot be taken off.
           A pair of local sockets is connected for good: a datagram pair, which could turn to another socket, is none.
Never      the only wall: every call here is also useless without privileges, network or files. It makes the kernel's
           surface smaller.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Sequence

from surefoot.envs.sandboxes.sandbox_kernel import number, prctl, syscall

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
_STREAM, _SEQUENCED, _KIND_OF_SOCKET = 1, 5, 0xF

_LOAD, _AND, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR, _NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24
_SET_SECCOMP, _MODE_FILTER = 22, 2
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_DENY, _NO_SUCH_CALL = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS

Instruction = tuple[int, int, int, int]


PLAIN, NETWORK, TELLING = "plain", "network", "telling"


def programs() -> dict[str, bytes]:
    """The filters for this machine: no socket at all; internet sockets; and one that tells a listener of those.

    The last one refuses nothing else: it stands behind the second, and its listener answers in the kernel's place.
    """
    families = _when(_EQUAL, _AF_INET, _NOTIFY) + _when(_EQUAL, _AF_INET6, _NOTIFY)
    telling = [(_LOAD, 0, 0, _NR), *_argument_check(number(_SOCKET), _ARG0, families), (_RETURN, 0, 0, _ALLOW)]
    return {PLAIN: program(), NETWORK: program(_ALLOW), TELLING: _packed(telling)}


def program(internet: int = _DENY) -> bytes:
    """A filter for this machine, as the kernel reads it.

    Args:
        internet: what becomes of a call that asks for an internet socket. Sockets of other kinds are always refused.
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
