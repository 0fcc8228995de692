"""The file of tool servers: read strictly, every problem at once, nothing of our environment by accident."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ToolError
from surefoot.tools.mcp.servers import read_servers


def written(tmp_path: Path, table: Any) -> Path:
    path = tmp_path / "mcp.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return path


def test_a_server_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOCK_ZONE", "UTC")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    servers, pins = read_servers(written(tmp_path, {"mcpServers": {
        "clock": {
            "command": "python", "args": ["{here}/clock.py"], "isolation": "shared", "connections": 3, "sha256": "ab",
            "env": {"A": "b"}, "pass_env": ["CLOCK_ZONE"], "tools": ["now"], "idempotent": ["now"],
            "probe": {"tool": "now", "arguments": {"zone": "UTC"}, "expect": "12:30"},
        },
        "far": {"url": "http://127.0.0.1:1/mcp", "token_env": "SECRET_TOKEN"},
    }}))  # fmt: skip
    clock, far = servers
    assert clock.command == (sys.executable, f"{tmp_path}/clock.py")
    assert (clock.env, clock.tools, clock.probe) == (
        {"A": "b", "CLOCK_ZONE": "UTC"},
        ("now",),
        ("now", {"zone": "UTC"}),
    )
    assert (clock.probe_answer, far.probe_answer) == ("12:30", None)
    assert (clock.connections, clock.isolation, far.isolation) == (3, "shared", "isolated")
    assert (far.url, far.token_env, pins) == ("http://127.0.0.1:1/mcp", "SECRET_TOKEN", {"clock": "ab"})
    assert "SECRET_TOKEN" not in clock.environment(str(tmp_path))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("{", "not JSON"),
        ([], "not of the form"),
        ({"servers": {}}, "not of the form"),
        ({"mcpServers": {}}, "names no server"),
        ({"mcpServers": {"a": []}}, "a: not an object"),
        ({"mcpServers": {"a": {"comand": "x"}}}, "did you mean command"),
        ({"mcpServers": {"a": {"command": ["x"]}}}, "command is a list"),
        ({"mcpServers": {"a": {"command": "x", "args": [1]}}}, "args holds something"),
        ({"mcpServers": {"a": {"command": "x", "env": {"A": 1}}}}, "env holds something"),
        ({"mcpServers": {"a": {"command": "x", "connections": True}}}, "connections is a bool"),
        ({"mcpServers": {"a": {"command": "x", "sandbox": "no"}}}, "sandbox is a str, it must be a bool"),
        ({"mcpServers": {"a": {"command": "x", "read": [1]}}}, "read holds something"),
        ({"mcpServers": {"a": {"command": "x", "network": "api.example.com"}}}, "must be a bool or a list"),
        ({"mcpServers": {"a": {"command": "x", "network": [1]}}}, "network holds something"),
        ({"mcpServers": {"a": {"command": "x", "network": []}}}, "a list of hosts with at least one"),
        ({"mcpServers": {"a": {"command": "x", "network": ["x.example", "http://x"]}}}, "grants 'http://x'.*no scheme"),
        ({"mcpServers": {"a": {"url": "http://x", "network": ["x.example"]}}}, "no command that we start"),
        ({"mcpServers": {"a": {"url": "http://x", "sandbox": True}}}, "not ours to contain"),
        ({"mcpServers": {"a": {"command": "x", "sandbox": False, "write": ["y"]}}}, "has all of it"),
        ({"mcpServers": {"a": {"command": "x", "sandobx": False}}}, "did you mean sandbox"),
        ({"mcpServers": {"a": {"command": "x", "probe": {"tool": "t"}}}}, "probe is"),
        ({"mcpServers": {"a": {"command": "x", "probe": {"tool": "t", "arguments": {}, "expect": 42}}}}, "probe is"),
        ({"mcpServers": {"a": {"command": "x", "probe": {"tool": "t", "arguments": {}, "expct": "42"}}}}, "probe is"),
        ({"mcpServers": {"a": {"command": "x", "pass_env": ["NOT_SET_ANYWHERE"]}}}, "NOT_SET_ANYWHERE"),
        ({"mcpServers": {"a": {"command": "x", "url": "http://x"}}}, "exactly one of"),
        ({"mcpServers": {"a": {"url": "http://10.0.0.1/mcp", "token_env": "PATH"}}}, "the token in PATH would go to"),
        ({"mcpServers": {"a": {"url": "https://me:pw@example.org/mcp"}}}, "user name or password"),
        ({"mcpServers": {"a b": {"command": "x"}}}, "letters, digits"),
        ('{"mcpServers": {"a": {"command": "x"}, "a": {"command": "y"}}}', "more than once"),
    ],
)
def test_a_file_that_is_not_clear_is_refused(tmp_path: Path, table: Any, said: str) -> None:
    with pytest.raises(ToolError, match=said):
        read_servers(written(tmp_path, table))


def test_a_server_is_contained_and_granted_what_its_entry_says(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    [plain, granted, free] = read_servers(written(tmp_path, {"mcpServers": {
        "plain": {"command": "x"},
        "granted": {"command": "x", "sandbox": True, "read": ["{here}/data", "data"], "write": ["/srv"], "network": True},
        "free": {"command": "x", "sandbox": False},
    }}))[0]  # fmt: skip
    assert (plain.contained, plain.read, plain.write, plain.network) == (True, (), (), False)
    assert granted.read == (tmp_path / "data", tmp_path / "data")
    assert (granted.contained, granted.write, granted.network) == (True, (Path("/srv"),), True)
    assert (free.contained, free.sandbox) == (False, False)


def test_a_list_of_hosts_is_granted_as_it_is_written(tmp_path: Path) -> None:
    table = {"mcpServers": {"a": {"command": "x", "network": ["api.example.com", "127.0.0.1:9000"]}}}
    [server] = read_servers(written(tmp_path, table))[0]
    assert server.network == ("api.example.com", "127.0.0.1:9000")


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="2 problem") as refused:
        read_servers(written(tmp_path, {"mcpServers": {"a": {"comand": "x"}, "b": {"command": 3}}}))
    assert "a: unknown key" in str(refused.value)
    assert "b: command is" in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="cannot be read"):
        read_servers(tmp_path / "none.json")
