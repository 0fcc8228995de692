"""The shipped MCP servers as processes: they start, answer, isolate, refuse; and solve the shipped tasks."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_solver import DEADLINE_S, SERVERS, contained, is_right, module, servers_of, shipped_tasks, solve

pytest.importorskip("mcp", reason="needs the mcp extra")

from surefoot.records import Task
from surefoot.tools.mcp.servers import read_servers
from surefoot.tools.mcp.toolkit import MCPToolkit, Server, ServerLimits

pytestmark = pytest.mark.mcp
PATIENT = ServerLimits(connect_timeout_s=DEADLINE_S, call_timeout_s=DEADLINE_S)
ATTEMPT = Task(id="shipped", prompt="Solve it.")
ANSWERS = {
    "calculator__evaluate": ({"expression": "6*7"}, "42"),
    "python__run": ({"code": "print(6 * 7)"}, "42"),
    "quotes__latest": ({"symbol": "VRX"}, "VRX closed at 365.11 dral on 2024-12-31."),
    "fundamentals__profile": (
        {"symbol": "vrx"},
        "VRX: Veirex Brothers. Sector: food. Headquarters: Brolmabrihafen. Founded: 1986.",
    ),
    "search__search": (
        {"query": "How high is Mount Bonhorn?", "k": 1},
        "[mountain-mount-bonhorn] Mount Bonhorn: Mount Bonhorn is a mountain in Talverne.",
    ),
    "messages__read": (
        {"id": 1},
        "[1] 2024-03-01 11:20  Daendin Manman: Request 24199\n"
        "Request 24199: please order 707 signal flags for the ferry team.",
    ),
}
"""A call and its whole answer for every server."""


def declared() -> list[Server]:
    """The servers of the shipped table that this host can run."""
    return [each for each in read_servers(SERVERS / "servers.json")[0] if each.name != "python" or contained()]


@pytest.fixture(scope="module")
def toolkit() -> Iterator[MCPToolkit]:
    kit = MCPToolkit(declared(), PATIENT)
    kit.start()
    yield kit
    kit.close()


def test_every_server_shakes_hands_and_answers_its_probe(toolkit: MCPToolkit) -> None:
    found = {name.split("__")[0] for name in toolkit.names}
    assert found | {"python"} == {"calculator", "python", "quotes", "fundamentals", "search", "messages"}
    assert all(server.probe for server in toolkit.servers.values()), "a server without a probe counts as available"


@pytest.mark.parametrize("tool", ANSWERS)
def test_the_known_question_has_the_known_answer_twice(toolkit: MCPToolkit, tool: str) -> None:
    if toolkit.tool(tool) is None:
        pytest.skip("no sandbox on this host")
    arguments, wanted = ANSWERS[tool]
    box = toolkit.open(ATTEMPT, f"known/{tool}", 0)
    answers = [box.call(tool, arguments, DEADLINE_S).text for _ in range(2)]
    box.close()
    assert answers == [wanted, wanted]


def documented() -> list[tuple[str, str, str]]:
    """Tool, arguments and answer of every call that docs/servers.md shows."""
    page = (SERVERS.parents[1] / "docs" / "servers.md").read_text(encoding="utf-8")
    return re.findall(r"```text\n(\w+__\w+) (\{[^\n]*\})\n(.*?)\n```", page, flags=re.DOTALL)


def test_the_documentation_shows_what_the_servers_really_say(toolkit: MCPToolkit) -> None:
    calls = [call for call in documented() if toolkit.tool(call[0])]
    assert {tool.split("__")[0] for tool, _, _ in calls} == set(toolkit.servers)
    box = toolkit.open(ATTEMPT, "documentation", 0)
    said = [box.call(tool, json.loads(arguments), DEADLINE_S).text for tool, arguments, _ in calls]
    box.close()
    assert said == [answer for _, _, answer in calls]


def sample() -> list[Any]:
    """Of every category and complexity the first and the last task; one is enough where a process has to start."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for task in shipped_tasks():
        kinds.setdefault((task["category"], task["complexity"]), []).append(task)
    picked = [task for tasks in kinds.values() for task in ([] if "messages" in servers_of(tasks[0]) else tasks[:1])]
    picked += [tasks[-1] for tasks in kinds.values()]
    return [pytest.param(task, id=task["task_metadata"]["task_id"]) for task in picked]


@pytest.mark.parametrize("task", sample())
def test_the_expected_calls_lead_to_the_truth(toolkit: MCPToolkit, task: dict[str, Any]) -> None:
    if "python" in servers_of(task) and not contained():
        pytest.skip("no sandbox on this host")
    box = toolkit.open(ATTEMPT, task["task_metadata"]["task_id"], 0)
    answer = solve(task, box)
    box.close()
    assert is_right(task, answer), f"{answer} is not {task['reward_spec']['ground_truth']}"


@pytest.mark.nightly
def test_every_shipped_task_is_solved_by_its_calls() -> None:
    """All of them; the mailboxes, one for each rollout, are in this process because starting 200 takes minutes."""
    shared = [each for each in declared() if each.name != "messages"]
    kit = MCPToolkit([*shared, Server("messages", in_memory=module("messages").build)], PATIENT)
    tasks = [task for task in shipped_tasks() if contained() or "python" not in servers_of(task)]
    wrong = []
    for task in tasks:
        box = kit.open(ATTEMPT, task["task_metadata"]["task_id"], 0)
        answer = solve(task, box)
        box.close()
        if not is_right(task, answer):
            wrong.append((task["task_metadata"]["task_id"], answer))
    kit.close()
    assert wrong == []
    assert len(tasks) >= (1000 if contained() else 900)


# -- isolation ----------------------------------------------------------------------------------
def counts_after_a_letter(kit: MCPToolkit) -> tuple[str, str]:
    """How many messages a second rollout sees before and after a first one has sent a letter."""
    first, second = kit.open(ATTEMPT, "first", 0), kit.open(ATTEMPT, "second", 0)
    try:
        before = second.call("messages__inbox", {"limit": 1}, DEADLINE_S).text.split("\n")[0]
        letter = {"to": "Daendin Manman", "text": "Who stands in for you?"}
        sent = first.call("messages__send", letter, DEADLINE_S)
        assert re.search(r"message 1002\.", sent.text), sent.text
        return before, second.call("messages__inbox", {"limit": 1}, DEADLINE_S).text.split("\n")[0]
    finally:
        first.close()
        second.close()


def test_a_letter_of_one_rollout_is_never_in_the_mailbox_of_another(toolkit: MCPToolkit) -> None:
    before, after = counts_after_a_letter(toolkit)
    assert before == after == "160 messages, showing 1"


def test_planted_sharing_of_the_mailbox_is_seen() -> None:
    """Teeth: one mailbox for all rollouts, and the check above goes red."""
    kit = MCPToolkit([Server("messages", in_memory=module("messages").build, isolation="shared")], PATIENT)
    before, after = counts_after_a_letter(kit)
    kit.close()
    assert (before, after) == ("160 messages, showing 1", "161 messages, showing 1")


# -- availability: the check that ships with the servers -----------------------------------------
BROKEN = {
    "dead": "import sys\nsys.exit('the harbour is closed')\n",
    "chatter": "print('hello')\nimport sys\nsys.stdin.read()\n",
    "torn": "import lighthouse_without_lamp\n",
}
"""Files that exist and are no servers."""


def test_available_means_a_handshake_and_a_call_that_succeeds(tmp_path: Path) -> None:
    folder = tmp_path / "ser vers ö"
    folder.mkdir()
    for name, program in BROKEN.items():
        (folder / f"{name}.py").write_text(program, encoding="utf-8")
    table: dict[str, Any] = {name: {"command": "python", "args": [f"{{here}}/{name}.py"]} for name in BROKEN}
    healthy = {"command": "python", "args": [str(SERVERS / "calculator.py")], "read": [str(SERVERS)]}
    table["healthy"] = healthy | {"probe": {"tool": "evaluate", "arguments": {"expression": "6*7"}}}
    table["liar"] = healthy | {"probe": {"tool": "evaluate", "arguments": {"expression": "6*7"}, "expect": "41"}}
    table["polite"] = healthy | {"probe": {"tool": "evaluate", "arguments": {"expression": "6*"}}}
    (folder / "mine.json").write_text(json.dumps({"mcpServers": table}), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(SERVERS / "check.py"), "--table", str(folder / "mine.json")],
        capture_output=True, text=True, encoding="utf-8", timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    found = re.findall(r"^(PASS|FAIL)  (\w+)", done.stdout, re.MULTILINE)
    assert found == [*(("FAIL", name) for name in BROKEN), ("PASS", "healthy"), ("FAIL", "liar"), ("FAIL", "polite")]
    for last_words in ("| the harbour is closed", "No module named 'lighthouse_without_lamp'"):
        assert last_words in done.stdout
    assert "ends too early" in done.stdout, "a handshake alone is not enough"
    assert "with '42', and '41' is expected" in done.stdout, "nor is any answer"


@pytest.mark.parametrize(
    ("words", "code"), [(["calculater"], 2), (["--table", "no.json"], 4), (["--deadline", "-1"], 4)]
)
def test_a_check_that_cannot_tell_never_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], code: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["check.py", *words])
    assert module("check").main() == code
    assert capsys.readouterr().out == ""


def test_the_check_passes_when_every_server_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["check.py", "calculator"])
    assert module("check").main() == 0
    assert capsys.readouterr().out == "PASS  calculator    calculator__evaluate\n"


# -- other ways in --------------------------------------------------------------------------------
def test_over_http_the_answer_is_the_same() -> None:
    server = subprocess.Popen(
        [sys.executable, str(SERVERS / "quotes.py"), "--http", "0"], stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        assert server.stderr is not None
        address = server.stderr.readline().split()[-1]
        kit = MCPToolkit([Server("quotes", url=address, isolation="shared")], PATIENT)
        arguments, wanted = ANSWERS["quotes__latest"]
        answer = kit.open(ATTEMPT, "http", 0).call("quotes__latest", arguments, DEADLINE_S)
        kit.close()
        assert (answer.text, answer.outcome) == (wanted, "ok")
    finally:
        server.terminate()
        server.communicate(timeout=60)


def test_a_mailbox_is_not_served_over_http_where_rollouts_cannot_be_told_apart() -> None:
    done = subprocess.run([sys.executable, str(SERVERS / "messages.py"), "--http", "0"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "belongs to one connection" in done.stderr


def test_a_port_that_cannot_be_had_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=f"quotes: cannot serve on port {port}"):
            module("serving")._over_http(module("quotes").build(), port)
    for words in (["--http", "99999"], ["--http", "-1"], ["--http", "٣"]):
        with pytest.raises(SystemExit) as refused:
            module("serving").parser("").parse_args(words)
        assert refused.value.code == 2
    assert capsys.readouterr().err.count("is no port") == 3


def test_the_python_server_refuses_a_host_without_sandbox_unless_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host that cannot contain programs, by a report that says so."""
    from surefoot.sandbox import host

    barren = host.HostReport(usable=False, missing=("no user namespaces",))
    monkeypatch.setattr(host, "available", lambda: barren)
    monkeypatch.setattr(sys, "argv", ["python_server.py"])
    with pytest.raises(SystemExit) as refused:
        module("python_server").main()
    assert refused.value.code == 5
    said = capsys.readouterr().err
    assert "no user namespaces" in said
    assert "--allow-unsafe" in said
    assert module("python_server").build(allow_unsafe=True).name == "python"
