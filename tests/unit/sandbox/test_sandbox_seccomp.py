"""The call filter, run instruction by instruction as the kernel would."""

from __future__ import annotations

import errno
import platform
import struct

import pytest

from surefoot.sandbox import walls
from surefoot.sandbox.walls import MACHINES

pytestmark = pytest.mark.skipif(platform.machine() not in MACHINES, reason="no list for this machine")
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


def judge(number: int, *arguments: int, arch: int | None = None, filtered_by: str = "plain") -> int:
    """What the filter answers to one call."""
    program = [struct.unpack("HBBI", line) for line in _pieces(walls.programs()[filtered_by])]
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("IIQ6Q", number, arch or ARCH[platform.machine()], 0, *padded)
    position, value = 0, 0
    while True:
        code, yes, no, constant = program[position]
        position += 1
        if code == 0x06:
            return int(constant)
        if code == 0x20:
            (value,) = struct.unpack_from("I", data, constant)
        elif code == 0x54:
            value &= constant
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
            position += yes if holds else no


def _pieces(program: bytes) -> list[bytes]:
    return [program[begin : begin + 8] for begin in range(0, len(program), 8)]


def here(numbers: tuple[int, int]) -> int:
    return numbers[MACHINES.index(platform.machine())]


@pytest.mark.parametrize("machine", MACHINES)
def test_every_refused_call_is_refused_and_every_jump_lands_inside(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    for name, numbers in walls.REFUSED.items():
        if here(numbers) >= 0:
            assert judge(here(numbers)) == EPERM, name


def test_honest_calls_pass() -> None:
    read, write, mmap = (0, 1, 9) if platform.machine() == "x86_64" else (63, 64, 222)
    assert {judge(number) for number in (read, write, mmap)} == {ALLOW}


def test_calls_of_another_machine_and_by_another_door_are_fatal() -> None:
    assert judge(0, arch=0x40000003) == KILL, "32-bit calls"
    assert judge(0x40000000 | 41) == KILL, "x32 numbers"


def test_what_is_newer_than_the_list_does_not_exist() -> None:
    assert judge(walls.NEWEST_KNOWN + 1) == ENOSYS
    assert judge(walls.NEWEST_KNOWN) == ALLOW


def test_arguments_decide_where_a_call_has_an_honest_use() -> None:
    clone, pair, ioctl = here((56, 220)), here((53, 199)), here((16, 29))
    assert judge(clone, 0x11) == ALLOW
    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert judge(clone, 0x11 | flag) == EPERM
    assert [judge(pair, 1, kind | 0x80800) for kind in range(8)] == [EPERM, ALLOW, *[EPERM] * 3, ALLOW, EPERM, EPERM]
    assert judge(pair, 2, 1) == EPERM
    assert (judge(ioctl, 0, 0x5401), judge(ioctl, 0, 0x5412)) == (ALLOW, EPERM)
    assert judge(here((435, 435))) == ENOSYS
    assert (judge(here((302, 261)), 0), judge(here((302, 261)), 1)) == (ALLOW, EPERM), "limits: one's own only"


def test_only_the_filter_of_a_granted_network_lets_internet_sockets_through() -> None:
    socket, tell = here((41, 198)), 0x7FC00000
    families = (2, 10)
    for family in range(64):
        internet = family in families
        assert judge(socket, family) == EPERM
        assert judge(socket, family, filtered_by="network") == (ALLOW if internet else EPERM)
        assert judge(socket, family, filtered_by="telling") == (tell if internet else ALLOW)
    for numbers in walls.REFUSED.values():
        if here(numbers) >= 0:
            assert judge(here(numbers), filtered_by="network") == EPERM


def test_the_filter_of_granted_hosts_lets_tcp_over_ipv4_through_and_tells_of_every_other_internet_socket() -> None:
    socket, tell, flags = here((41, 198)), 0x7FC00000, 0x80800
    for family in (0, 1, 2, 10, 16, 17, 38, 40):
        for kind in (0, 1, 2, 3, 4, 5, 6, 10):
            for protocol in (0, 1, 6, 17, 132, 262):
                tcp = (family, kind) == (2, 1) and protocol in (0, 6)
                asked = (socket, family, kind | flags, protocol)
                assert judge(*asked, filtered_by="hosts") == (ALLOW if tcp else EPERM), asked
                told = family in (2, 10) and not tcp
                assert judge(*asked, filtered_by="telling hosts") == (tell if told else ALLOW), asked
    for numbers in walls.REFUSED.values():
        if here(numbers) >= 0:
            assert judge(here(numbers), filtered_by="hosts") == EPERM


def test_the_upper_half_of_an_argument_does_not_hide_a_flag() -> None:
    assert judge(here((56, 220)), 0x10000011 | 1 << 40) == EPERM
    assert judge(here((16, 29)), 0, 0x5412 | 1 << 40) == EPERM, "the kernel reads 32 bits of a request"
