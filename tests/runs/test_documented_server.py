"""The server of docs/agents.md, word for word: what it finds wrong is what the model reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, surefoot
from doc_blocks import blocks

pytestmark = pytest.mark.mcp
FILES = ("calculator.py", "mcp.json", "run.toml")
WHY = 'cannot read "turn 9024"'


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The page's three files, in a folder of their own."""
    pytest.importorskip("mcp", reason="needs the mcp extra")
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    found = {block.file: block.text for block in blocks(page) if block.file in FILES}
    assert sorted(found) == sorted(FILES)
    for name, text in found.items():
        body = text.split("\n", 1)[1] if name.endswith(".json") else text  # JSON has no line for a name
        (tmp_path / str(name)).write_text(body, encoding="utf-8")
    return tmp_path


def said(folder: Path) -> tuple[str, str]:
    """Outcome and text of one call that the calculator cannot do, as a rollout gets them."""
    from surefoot.records import Task
    from surefoot.tools.mcp.servers import read_servers
    from surefoot.tools.mcp.toolkit import MCPToolkit

    toolkit = MCPToolkit(read_servers(folder / "mcp.json")[0])
    try:
        box = toolkit.open(Task(id="t", prompt="?"), "attempt", seed=0)
        assert box.call("calculator__evaluate", {"expression": "12*34"}, 60.0).text == "408"
        answer = box.call("calculator__evaluate", {"expression": "turn 9024"}, 60.0)
        return answer.outcome, answer.text
    finally:
        toolkit.close()


def test_what_the_documented_calculator_finds_wrong_reaches_the_model(written: Path) -> None:
    assert said(written) == ("error", f"Error executing tool evaluate: {WHY}")
    ran = surefoot("train", "run.toml", cwd=written)
    assert ran.code == 0, ran.out + ran.err
    calls = [call for row in rows(ran.run) for turn in row["turns"] for call in turn["calls"]]
    wrong = [call for call in calls if call["outcome"] == "error"]
    assert wrong, f"no call failed in this run: {calls}"
    for call in wrong:
        expression = json.loads(call["arguments"])["expression"]
        assert call["answer"] == f'Error executing tool evaluate: cannot read "{expression}"'


def test_planted_bug_another_exception_tells_the_model_nothing(written: Path) -> None:
    """Which is why the page names the SDK's own: a later SDK that passes others on may have this test changed."""
    source = (written / "calculator.py").read_text()
    assert "raise ToolError(" in source
    (written / "calculator.py").write_text(source.replace("raise ToolError(", "raise ValueError("))
    assert said(written) == ("error", "Error executing tool evaluate")


def rows(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "rollouts").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
