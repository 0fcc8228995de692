"""A tool server from the package registry that nobody here wrote, unchanged: mcp-server-time."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from surefoot.records import Task
from surefoot.tools.mcp.toolkit import MCPToolkit, Server, ServerLimits

pytestmark = [
    pytest.mark.mcp,
    pytest.mark.skipif(importlib.util.find_spec("mcp_server_time") is None, reason="mcp-server-time is not installed"),
]
TIME = Server(
    "time",
    command=(sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"),
    probe=("get_current_time", {"timezone": "UTC"}),
)
AMPLE = ServerLimits(connect_timeout_s=120, call_timeout_s=120)


def test_a_foreign_server_is_available_answers_refuses_and_reports_errors() -> None:
    kit = MCPToolkit([TIME], AMPLE)
    try:
        assert [spec.name for spec in kit.specs] == ["time__get_current_time", "time__convert_time"]
        box = kit.open(Task(id="time/1", prompt="What is 12:00 in Tokyo in UTC?"), "train/0/0", seed=0)
        asked = {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "UTC"}
        answer = box.call("time__convert_time", asked, 120)
        assert answer.outcome == "ok"
        assert json.loads(answer.text)["target"]["datetime"].endswith("03:00:00+00:00")
        assert box.call("time__get_current_time", {"timezone": "Mars/Base"}, 120).outcome == "error"
        assert box.call("time__get_current_time", {"zone": "UTC"}, 120).outcome == "refused"
        box.close()
        pins = kit.pins
    finally:
        kit.close()
    again = MCPToolkit([TIME], AMPLE, pins=pins)
    try:
        again.start()
        assert again.pins == pins
    finally:
        again.close()
