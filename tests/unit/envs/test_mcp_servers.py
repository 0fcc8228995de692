"""A server is declared clearly or not at all, and sees only what it is given."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.envs.servers.mcp_servers import Limits, Server
from surefoot.errors import ToolError


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
        Limits(**settings)


def test_of_our_environment_only_a_few_names_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setenv("PATH", "/bin")
    seen = Server("a", command=("x",), env={"GRANTED": "1"}).environment("/private")
    assert seen["PATH"] == "/bin"
    assert (seen["GRANTED"], seen["HOME"], seen["TMPDIR"]) == ("1", "/private", "/private")
    assert "canary" not in seen.values()
