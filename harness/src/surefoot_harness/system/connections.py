"""Addresses of servers: who may be sent a key, and what an address may hold.

Promises   one rule for every server that we ask: a key goes over https, or stays on this machine; an address with a
           user name or password in it is seen as such, however it is written.
Never      looks a name up: whoever answers for names must not decide where a key goes.

Read next: `engines/openai.py` and `tools/mcp/servers.py`, which refuse by it.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import psutil


def holds_credentials(url: str) -> bool:
    """Whether a user name or password stands in it.

    Example:
        >>> holds_credentials("https://me:pw@example.org/x"), holds_credentials("https://example.org/b@c")
        (True, False)
    """
    return "@" in urlsplit(url).netloc


def keeps_a_key(url: str) -> bool:
    """Whether a key that is sent there can be read by nobody on the way: https, or this machine.

    Example:
        >>> [keeps_a_key(url) for url in ("https://example.org", "http://127.0.0.1:8000/v1", "http://10.0.0.1/v1")]
        [True, True, False]
    """
    split = urlsplit(url)
    return split.scheme == "https" or is_loopback(split.hostname or "")


def is_loopback(host: str) -> bool:
    """Whether it is this machine, by its number or as `localhost`; any other name may lead anywhere."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has this address; None where none has.

    Example:
        >>> interface_of("192.0.2.1") is None
        True
    """
    found = (name for name, each in psutil.net_if_addrs().items() if address in [entry.address for entry in each])
    return next(found, None)


# -- HTTP connections that end at a moment, whatever the other side drips -------------------------
# A socket's own timeout begins anew with every byte, so that a server which sends one now and then is waited for
# without
# end. Here every wait (for a connection, the handshake of TLS, room to send, a line of headers, a piece of the body)
# may
# only take what is left until the deadline.
#
# Promises   connecting, sending and reading raise TimeoutError at the deadline.
# Never      looks a name up in less time than the system takes for it: that wait is the system's own.


Clock = Callable[[], float]


class _Line(socket.socket):
    """A plain connection; `ends` and `clock` are set before it is used."""

    ends: float
    clock: Clock

    def recv_into(self, *args: Any) -> int:
        _hurry(self)
        return super().recv_into(*args)

    def sendall(self, *args: Any) -> None:
        _hurry(self)  # Python counts its timeout over the whole of it
        super().sendall(*args)


class _SecureLine(ssl.SSLSocket):
    """The same under TLS."""

    ends: float
    clock: Clock

    def recv_into(self, *args: Any) -> int:
        _hurry(self)
        return super().recv_into(*args)

    def send(self, *args: Any) -> int:
        _hurry(self)  # `sendall` of TLS calls this for each part
        return super().send(*args)


def _hurry(line: _Line | _SecureLine) -> None:
    """The next wait ends at the deadline, which may be now."""
    left = line.ends - line.clock()
    if left <= 0:
        raise TimeoutError("the answer did not end in time")
    line.settimeout(left)


class DeadlineConnection(http.client.HTTPConnection):
    """One HTTP connection that is over at `ends`.

    Args:
        ends: a moment of `clock`.
        https: whether to speak TLS; the server's certificate is checked against the system's, or `context`.
    """

    def __init__(
        self, host: str, port: int | None, ends: float, *, https: bool = False, clock: Clock = time.monotonic,
        context: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        if https:
            self.default_port = http.client.HTTPS_PORT
        super().__init__(host, port)
        self._ends, self._clock = ends, clock
        self._tls = (context or ssl.create_default_context()) if https else None

    def connect(self) -> None:
        """Open the line, and TLS on it, before the deadline."""
        line = self._dial()
        self.sock = line
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            self._tls.sslsocket_class = _SecureLine
            _hurry(line)  # the handshake is one wait: it keeps to the timeout as a whole
            secure = self._tls.wrap_socket(line, server_hostname=self.host)
            assert isinstance(secure, _SecureLine), "the context makes what it was told to make"
            secure.ends, secure.clock = self._ends, self._clock
            self.sock = secure

    def _dial(self) -> _Line:
        """The first of the host's addresses that answers; all of them together have until the deadline."""
        problem: OSError = OSError(f"{self.host} has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            line = _Line(family, kind, protocol)
            line.ends, line.clock = self._ends, self._clock
            try:
                _hurry(line)
                line.connect(address)
            except OSError as error:
                line.close()
                problem = error
            else:
                return line
        raise problem
