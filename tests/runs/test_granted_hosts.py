"""A run whose tool server is granted one host, through the real command: it fetches, the rest is refused, all is shown."""

from __future__ import annotations

import html
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import ROOT, surefoot
from mcp_runs import CONFIG, TINY
from sandbox_host import needs_sandbox

pytestmark = [
    pytest.mark.mcp,
    needs_sandbox,
]
FETCHING = """
import sys, urllib.error, urllib.request
_, here, granted, other = sys.argv
sys.path.append(here)
import calculator
counted = calculator.evaluate
def evaluate(expression):
    assert urllib.request.urlopen(granted, timeout=60).read() == b"the tariff"
    try:
        urllib.request.urlopen(other, timeout=60)
    except urllib.error.HTTPError as error:
        assert error.code == 403
        return counted(expression)
    raise AssertionError("the other host answered")
calculator.evaluate = evaluate
del sys.argv[1:]
calculator.main()
"""
"""The shipped calculator, which answers when its granted host did and another one was refused."""


class Tariff(http.server.BaseHTTPRequestHandler):
    """A page, and a count of its readers."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"the tariff")

    def log_message(self, format: str, *args: object) -> None:
        self.server.visits += 1  # type: ignore[attr-defined]


@pytest.fixture
def site() -> Iterator[http.server.ThreadingHTTPServer]:
    pytest.importorskip("mcp", reason="needs the mcp extra")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Tariff) as made:
        made.visits = 0  # type: ignore[attr-defined]
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    "runtime",
    [
        pytest.param([], id="local"),
        pytest.param(
            ["runtime.kind=ray", "runtime.workers=2"], id="ray", marks=[pytest.mark.ray, pytest.mark.turns(3, 1)]
        ),
    ],
)
def test_a_run_with_a_granted_host_passes_and_its_plan_record_and_report_name_the_grant(
    tmp_path: Path, site: http.server.ThreadingHTTPServer, runtime: list[str]
) -> None:
    if runtime:
        pytest.importorskip("ray", reason="needs the ray extra")
    host, servers = f"127.0.0.1:{site.server_address[1]}", ROOT / "examples/servers"
    (tmp_path / "fetching.py").write_text(FETCHING)
    entry = {
        "command": "python", "args": [str(tmp_path / "fetching.py"), str(servers), f"http://{host}/", "http://127.0.0.1:9/"],
        "isolation": "shared", "read": [str(servers)], "network": [host],
        "probe": {"tool": "evaluate", "arguments": {"expression": "6*7"}, "expect": "42"},
    }  # fmt: skip
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"calculator": entry}}))
    words = [CONFIG, *TINY, "max_steps=1", *runtime, f"tools.servers={tmp_path}/mcp.json"]
    grant = f"contained, reads {servers}, reaches {host} and no other host"
    plan = surefoot("train", "--dry-run", *words, cwd=tmp_path, run="")
    assert f"calculator: {grant}" in plan.out + plan.err

    ran = surefoot("train", *words, cwd=tmp_path)
    assert (ran.code, ran.verdict["status"]) == (0, "PASS"), ran.out + ran.err
    assert site.visits > 1, "the probe's, and those of the rollouts"  # type: ignore[attr-defined]
    assert json.loads((ran.run / "environment.json").read_text())["tool_servers"] == {"calculator": grant}
    refused = r"tried to reach the network [1-9]\d* times"
    said = re.sub(r"\s+", " ", ran.out + ran.err)
    assert re.search(rf"tool server calculator {refused} in this run: refused \(asked for 127\.0\.0\.1:9\)", said), said
    assert surefoot("report", str(ran.run), cwd=tmp_path, run="").code == 0
    page = html.unescape((ran.run / "report.html").read_text())
    assert re.search(
        rf"reaches {host} and no other host; {refused}, and was refused \(asked for 127\.0\.0\.1:9\)", page
    )
