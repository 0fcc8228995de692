"""Landlock: the second wall around files, network and signals, where the kernel has it.

Owns       the rules: read and run what is visible, write in the scratch folder, granted folders and three devices.
Promises   takes what this kernel's version knows and leaves the rest out.
Never      replaces the empty root; it holds should a mount turn out to be writable after all.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

from surefoot.envs.sandboxes.sandbox_kernel import syscall

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_PATH_BENEATH, _ASK_VERSION = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_TRUNCATE = 1 << 14
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many rights over files each version knows."""
_TCP_BIND_CONNECT = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11


def version() -> int:
    """Which Landlock this kernel speaks; 0 when it has none, or it is switched off."""
    try:
        return syscall("landlock version", _CREATE, 0, 0, _ASK_VERSION)
    except OSError:
        return 0


def restrict(known: int, writable: Sequence[str], devices: Sequence[str], *, network: bool = False) -> None:
    """Bind this process, and all it becomes, to the rules. Needs no_new_privs.

    Args:
        network: leave connections alone.
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
        syscall("landlock", _RESTRICT, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    where = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        syscall(f"landlock rule for {path}", _ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, where), 0)
    finally:
        os.close(where)
