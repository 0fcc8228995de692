"""A server is declared clearly or not at all, and sees only what it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ToolError
from surefoot.tools.mcp.servers import Server, ServerLimits


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "a b", "command": ("x",)}, "letters"),
        ({"name": "x" * 40, "command": ("x",)}, "letters"),
        ({"name": "a"}, "exactly one"),
        ({"name": "a", "command": ("x",), "url": "http://x"}, "exactly one"),
        ({"name": "a", "command": "python -m x"}, "list of texts"),
        ({"name": "a", "command": ("x\0y",)}, "list of texts"),
        ({"name": "a", "url": "file:///etc/passwd"}, "no address"),
        ({"name": "a", "in_memory": object()}, "function that makes a server"),
        ({"name": "a", "command": ("x",), "isolation": "mine"}, "isolation"),
        ({"name": "a", "command": ("x",), "connections": 0}, "connections"),
        ({"name": "a", "command": ("x",), "sandbox": False, "network": True}, "has all of it"),
        ({"name": "a", "url": "http://x", "read": (Path("/"),)}, "no command that we start"),
        ({"name": "a", "url": "http://x", "token_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
    ],
)
def test_a_server_that_is_not_declared_clearly_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ToolError, match=says):
        Server(**settings)


@pytest.mark.parametrize("settings", [
    {"call_timeout_s": 0}, {"call_timeout_s": float("nan")}, {"max_line_bytes": float("inf")}, {"restarts": -1},
    {"concurrency": True}, {"shutdown_s": "2"},
])  # fmt: skip
def test_a_limit_that_limits_nothing_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ToolError, match=next(iter(settings))):
        ServerLimits(**settings)


ADDRESSES = [
    ("http://10.0.0.1:8931/mcp", True, "clear text"), ("http://localhost.example.org/mcp", True, "clear text"),
    ("http://127.0.0.1.example.org/mcp", True, "clear text"), ("http://2130706433/mcp", True, "clear text"),
    ("http://[::ffff:10.0.0.1]/mcp", True, "clear text"), ("http://me:hidden-pw@10.0.0.1/mcp", False, "user name or password"),
    ("https://me:hidden-pw@example.org/mcp", True, "user name or password"),
    ("https://hidden-pw@example.org/mcp", False, "user name or password"),
    ("ftp://me:hidden-pw@example.org/mcp", False, "user name or password"),
    ("http://127.0.0.1\\@10.0.0.1/mcp", True, "backslash"), ("http://10.0.0.1\t/mcp", False, "cannot be seen"),
    ("http://[fe80/mcp", False, "cannot be read"), ("http:///mcp", False, "no address"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "token", "says"), ADDRESSES)
def test_a_token_goes_over_https_or_stays_on_this_machine_and_an_address_holds_none(
    url: str, token: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOL_TOKEN", "canary-token")
    with pytest.raises(ToolError, match=says) as refused:
        Server("a", url=url, token_env="TOOL_TOKEN" if token else None)
    assert "hidden-pw" not in str(refused.value)
    assert "canary-token" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["https://example.org/mcp", "http://127.0.0.1:1/mcp", "http://[::1]:1/", "http://localhost/"]
)
def test_a_token_may_go_where_nobody_reads_along(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOL_TOKEN", "canary-token")
    assert Server("a", url=url, token_env="TOOL_TOKEN").url == url
    assert Server("a", url="http://10.0.0.1/mcp").url == "http://10.0.0.1/mcp", (
        "without a token there is nothing to lose"
    )


def test_planted_rule_that_trusts_every_way_sends_the_token_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOL_TOKEN", "canary-token")
    monkeypatch.setattr("surefoot.tools.mcp.servers.keeps_a_key", lambda url: True)
    monkeypatch.setattr("surefoot.tools.mcp.servers.holds_credentials", lambda url: False)
    assert Server("a", url="http://10.0.0.1/mcp", token_env="TOOL_TOKEN").token_env == "TOOL_TOKEN"
    assert Server("a", url="http://me:pw@10.0.0.1/mcp").url == "http://me:pw@10.0.0.1/mcp"


def test_the_values_that_a_server_is_given_are_not_shown() -> None:
    assert "canary" not in repr(Server("a", command=("x",), env={"A_TOKEN": "canary"}))


def test_what_a_server_can_reach_is_said_in_words() -> None:
    granted = Server("a", command=("x",), read=(Path("/data"),), write=(Path("/notes"),), network=True)
    assert granted.containment == "contained, reads /data, writes /notes, has the network"
    assert Server("a", command=("x",)).containment == "contained, no network"
    assert Server("a", command=("x",), sandbox=False).containment.startswith("NOT contained")
    elsewhere = Server("a", url="http://x"), Server("a", in_memory=object)
    assert [(each.contained, "contained" in each.containment) for each in elsewhere] == [(False, False)] * 2


def test_of_our_environment_only_a_few_names_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setenv("PATH", "/bin")
    seen = Server("a", command=("x",), env={"GRANTED": "1"}).environment("/private")
    assert seen["PATH"] == "/bin"
    assert (seen["GRANTED"], seen["HOME"], seen["TMPDIR"]) == ("1", "/private", "/private")
    assert "canary" not in seen.values()
