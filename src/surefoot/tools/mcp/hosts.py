"""Hosts that a contained tool server may reach: how a grant is written, and whether it covers a host, port or address.

    "api.example.com"        ports 443 and 80 of this name
    "api.example.com:8443"   this port alone
    "*.example.com"          every name below it, at any depth, and not itself
    "127.0.0.1:9000", "[2001:db8::1]:443"   an address

Promises   a host is compared in one spelling: lower case, no dot at the end, addresses as `ipaddress` writes them; what
           could be read in two ways (`127.1`, `0x7f.1`, `::ffff:127.0.0.1`) is granted by nothing.
           An address that a name led to is allowed when it is public, or was granted itself.
Never      looks a name up.

Read next: `proxy.py`, which keeps the grants.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

PORTS = (443, 80)
"""Of a grant that names no port."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_LONGEST_NAME = 253
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True)
class HostGrant:
    """One line of a grant.

    Example:
        >>> HostGrant.read("*.Example.com")
        HostGrant(host='*.example.com', ports=(443, 80))
    """

    host: str
    """A name, `*.` and a name, or an address."""
    ports: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> HostGrant:
        """The grant that a text spells; a ValueError says what is wrong with it."""
        _refuse_strange(text)
        below = text.startswith("*.")
        name, port = split(text[2:] if below else text)
        address = address_of(name)
        if below and (address is not None or "." not in name):
            raise ValueError("`*.` is followed by a domain of at least two parts, such as *.example.com")
        if address is not None and (address.is_unspecified or address.is_multicast):
            raise ValueError("that address is no host")
        if address is None and (name == "localhost" or name.endswith(".localhost")):
            raise ValueError("the name of this machine leads to it, which no name may; write 127.0.0.1 and the port")
        return cls(f"*.{name}" if below else name, PORTS if port is None else (port,))

    def covers(self, host: str, port: int) -> bool:
        """Whether a request for this host, in its one spelling, is granted."""
        named = host.endswith(self.host[1:]) if self.host.startswith("*.") else host == self.host
        return named and port in self.ports


def _refuse_strange(text: str) -> None:
    """What people write instead of a host, each by its name."""
    if not text:
        raise ValueError("it is empty")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("it holds a blank or a character that no host name has; international names begin with xn--")
    if text == "*":
        raise ValueError("that is every host: `true` grants the whole network")
    if "://" in text:
        raise ValueError("a host has no scheme: leave out what stands before and with ://")
    if "@" in text:
        raise ValueError("a host has no user name or password")
    if set(text) & set("/?#\\"):
        raise ValueError("a host has no path: grants are for hosts and ports")
    if "*" in text.removeprefix("*."):
        raise ValueError("`*` stands only at the beginning, before a dot")


def split(authority: str) -> tuple[str, int | None]:
    """`host`, `host:port` or `[address]:port` in its one spelling; a ValueError for anything else.

    Example:
        >>> split("API.example.com.:8443"), split("[::1]")
        (('api.example.com', 8443), ('::1', None))
    """
    if authority.startswith("["):
        inside, bracket, rest = authority[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("an address in brackets is followed by : and a port, or by nothing")
        return str(_version_6(inside)), _port(rest[1:]) if rest else None
    host, colon, port = authority.partition(":")
    if ":" in port:
        raise ValueError("an IPv6 address stands in brackets, such as [2001:db8::1]:443")
    return _name(host.lower()), _port(port) if colon else None


def _version_6(text: str) -> ipaddress.IPv6Address:
    if "%" in text:
        raise ValueError("an address with a zone belongs to one link")
    address = ipaddress.IPv6Address(text)
    if address.ipv4_mapped is not None:
        raise ValueError(f"write {address.ipv4_mapped}, which it means")
    return address


def _port(text: str) -> int:
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise ValueError("a port is a number from 1 to 65535")
    return int(text)


def _name(text: str) -> str:
    """A name, or an IPv4 address in its usual form."""
    name = text.removesuffix(".")
    labels = name.split(".")
    if len(name) > _LONGEST_NAME or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError("that is no host name")
    if _NUMBER.fullmatch(labels[-1]):
        return str(ipaddress.IPv4Address(name))  # no name ends in a number; `127.1` is refused here
    return name


def address_of(host: str) -> Address | None:
    """The address that a host in its one spelling is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class HostGrants:
    """All grants of one server."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._grants = tuple(map(HostGrant.read, texts))

    def cover(self, host: str, port: int) -> bool:
        """Whether a request for this host, in its one spelling, is granted."""
        return any(grant.covers(host, port) for grant in self._grants)

    def allow(self, address: Address, port: int) -> bool:
        """Whether a granted name may lead to this address: it is public, or granted itself."""
        return self.cover(str(address), port) or is_public(address)


def is_public(address: Address) -> bool:
    """Whether an address is a host of the internet: not this machine, its networks, or a service beside it.

    Example:
        >>> [is_public(ipaddress.ip_address(text)) for text in ("1.1.1.1", "169.254.169.254", "::ffff:127.0.0.1")]
        [True, False, False]
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    # Each of these beside `is_global`, whose tables differ between versions of Python.
    special = (
        address.is_private, address.is_loopback, address.is_link_local, address.is_multicast, address.is_reserved,
        address.is_unspecified,
    )  # fmt: skip
    return address.is_global and not any(special)


def in_words(texts: Iterable[str]) -> str:
    """Granted hosts for plans and reports.

    Example:
        >>> in_words(["api.example.com", "127.0.0.1:9000"])
        'reaches api.example.com (443, 80), 127.0.0.1:9000 and no other host'
    """
    bare = f" ({', '.join(map(str, PORTS))})"
    shown = [text + (bare if HostGrant.read(text).ports == PORTS else "") for text in texts]
    return f"reaches {', '.join(shown)} and no other host"
