"""Addresses of servers: who may be sent a key, and what an address may hold.

Promises   one rule for every server that we ask: a key goes over https, or stays on this machine; an address with a
           user name or password in it is seen as such, however it is written.
Never      looks a name up: whoever answers for names must not decide where a key goes.

Read next: `engines/http_client.py` and `envs/servers/mcp_servers.py`, which refuse by it.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


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
