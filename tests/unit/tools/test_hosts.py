"""Granted hosts: how they are written, what they cover, and which addresses a name may lead to."""

from __future__ import annotations

import ipaddress
import pickle
from typing import Any

import pytest

from surefoot.errors import ToolError
from surefoot.tools.mcp import hosts
from surefoot.tools.mcp.hosts import HostGrant, HostGrants, is_public, split
from surefoot.tools.mcp.proxy import proxy_variables
from surefoot.tools.mcp.servers import Server


@pytest.mark.parametrize(
    ("text", "host", "ports"),
    [
        ("api.example.com", "api.example.com", (443, 80)),
        ("API.Example.com.:8443", "api.example.com", (8443,)),
        ("*.example.com", "*.example.com", (443, 80)),
        ("127.0.0.1:9000", "127.0.0.1", (9000,)),
        ("[2001:DB8:0::1]:443", "2001:db8::1", (443,)),
        ("xn--bcher-kva.example", "xn--bcher-kva.example", (443, 80)),
        ("intranet:8080", "intranet", (8080,)),
    ],
)
def test_a_grant_has_one_spelling(text: str, host: str, ports: tuple[int, ...]) -> None:
    assert HostGrant.read(text) == HostGrant(host, ports)


STRANGE = {
    "": "empty", "*": "every host", "*.com": "at least two parts", "a*.com": "only at the beginning",
    "*.*.example.com": "only at the beginning", "https://example.com": "no scheme", "example.com/x": "no path",
    "me:pw@example.com": "no user name", "example.com?x": "no path", "a b.com": "a blank", "bücher.example": "xn--",
    "x:0": "from 1 to 65535", "x:65536": "from 1 to 65535", "x:": "from 1 to 65535", "x:8_0": "from 1 to 65535",
    "x:+80": "from 1 to 65535", "127.1": "octets", "2130706433": "octets", "0x7f.0.0.1": "Only decimal digits",
    "127.0.0.01": "Leading zeros", "::1": "brackets", "[::1": "brackets", "[::1]9": "brackets", "a..b": "no host name",
    "[::ffff:127.0.0.1]:80": "which it means", "[fe80::1%eth0]:80": "zone", "localhost:80": "127.0.0.1",
    "x.localhost": "127.0.0.1", "0.0.0.0:80": "no host", "224.0.0.1:80": "no host", "-a.com": "no host name",
    "x\r\ny": "a character", f"{'a' * 64}.com": "no host name", "\x00": "a character",
}  # fmt: skip


@pytest.mark.parametrize("text", STRANGE)
def test_what_is_no_host_is_refused_with_what_is_wrong_by_the_name_of_the_server(text: str) -> None:
    with pytest.raises(ValueError, match=STRANGE[text]):
        HostGrant.read(text)
    with pytest.raises(ToolError, match="tool server 'search': network grants ") as refused:
        Server("search", command=("x",), network=(text,))
    assert "pw" not in refused.value.what.partition(", which")[0], "a password is not repeated"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "at least one"), ("example.com", "a list of hosts"), ((1,), "a list of hosts"), (None, "a list of hosts"),
        (1, "a list of hosts"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_hosts_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ToolError, match=said):
        Server("search", command=("x",), network=given)


def test_a_proxy_of_the_users_own_cannot_stand_beside_granted_hosts() -> None:
    for name in ("HTTPS_PROXY", "no_proxy"):
        with pytest.raises(ToolError, match=f"set {name.lower()}"):
            Server("search", command=("x",), network=("example.com",), env={name: "http://proxy.corp:3128"})
        assert Server("search", command=("x",), network=True, env={name: "x"}).network is True


def test_granted_hosts_are_shown_and_travel_with_the_server() -> None:
    server = Server("search", command=("x",), network=("api.example.com", "127.0.0.1:9000"))
    words = "contained, reaches api.example.com (443, 80), 127.0.0.1:9000 and no other host"
    assert (server.containment, server.hosts) == (words, ("api.example.com", "127.0.0.1:9000"))
    assert pickle.loads(pickle.dumps(server)) == server, "as a Ray worker gets it"
    for whole in (True, False):
        assert Server("search", command=("x",), network=whole).hosts == ()
    with pytest.raises(ToolError, match="has all of it with sandbox = false"):
        Server("search", command=("x",), network=("example.com",), sandbox=False)


def test_a_grant_covers_its_own_host_and_port_and_nothing_that_looks_like_it() -> None:
    grants = HostGrants(["api.example.com", "*.wide.example", "127.0.0.1:9000"])
    covered = [("api.example.com", 443), ("api.example.com", 80), ("a.wide.example", 80), ("a.b.wide.example", 443)]
    assert all(grants.cover(*each) for each in [*covered, ("127.0.0.1", 9000)])
    others = [
        ("api.example.com", 8443), ("example.com", 443), ("x.api.example.com", 443), ("api.example.com.evil.org", 443),
        ("wide.example", 443), ("notwide.example", 443), ("a.wide.example", 22), ("127.0.0.1", 9001),
        ("127.0.0.2", 9000), ("::1", 9000),
    ]  # fmt: skip
    assert not any(grants.cover(*each) for each in others)
    assert split("API.example.com.:443") == ("api.example.com", 443), "asked for in another spelling"


PRIVATE = (
    "127.0.0.1 127.9.9.9 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 240.0.0.1 "
    "255.255.255.255 ::1 :: fe80::1 fd00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1 "
    "64:ff9b::a9fe:a9fe 2002:7f00:1:: 2001:db8::1 64:ff9b:1::1"
).split()


def test_only_public_addresses_are_led_to_unless_one_is_granted_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    grants = HostGrants(["api.example.com", "10.0.0.7:443"])
    assert [text for text in PRIVATE if is_public(ipaddress.ip_address(text))] == []
    for text in ("1.1.1.1", "8.8.8.8", "2606:4700::1111", "64:ff9b::101:101", "::ffff:1.1.1.1"):
        assert is_public(ipaddress.ip_address(text))
    granted = ipaddress.ip_address("10.0.0.7")
    assert [grants.allow(granted, port) for port in (443, 80)] == [True, False]
    monkeypatch.setattr(hosts, "is_public", lambda address: True)
    assert grants.allow(ipaddress.ip_address("169.254.169.254"), 80), "planted: nobody looks where a name leads"


def test_a_program_is_told_of_the_proxy_by_every_usual_variable() -> None:
    told = proxy_variables()
    assert {told[name] for name in ("HTTP_PROXY", "https_proxy", "ALL_PROXY")} == {"http://127.0.0.1:3128"}
    assert (told["NO_PROXY"], told["no_proxy"]) == ("", "")
