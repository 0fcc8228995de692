"""The tools of the shipped servers, in memory: hostile arguments, exact arithmetic, search, two calculators alike."""

from __future__ import annotations

import asyncio
import sys
from fractions import Fraction
from typing import Any

import pytest
from example_solver import SERVERS, module
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mcp", reason="needs the mcp extra")

from mcp import Client, StdioServerParameters
from mcp.server.mcpserver.exceptions import ToolError

from surefoot.errors import SecurityError, ToolFailedError
from surefoot.records import Task
from surefoot.sandbox.sandbox import ProgramOutcome
from surefoot.tools.mcp.toolkit import MCPToolkit, Server

pytestmark = pytest.mark.mcp
arithmetic, calculator, python_server = module("arithmetic"), module("calculator"), module("python_server")
quotes, search = module("quotes"), module("search")
HUGE = "x" * 1_000_000
Call = tuple[str, dict[str, Any]]


async def _answers(server: Any, calls: list[Call], mode: str) -> list[tuple[bool, str]]:
    async with Client(server, mode=mode) as client:
        said = [await client.call_tool(tool, arguments) for tool, arguments in calls]
        return [(bool(each.is_error), each.content[0].text) for each in said]  # type: ignore[union-attr]


def answers(server: Any, calls: list[Call], mode: str = "auto") -> list[tuple[bool, str]]:
    """For every call: whether it was an error, and what was said. No checks of ours stand before the server."""
    return asyncio.run(_answers(server, calls, mode))


def build(name: str) -> Any:
    return module(name).build()


def span(start: str, end: str) -> dict[str, str]:
    return {"symbol": "VRX", "start": start, "end": end}


HOSTILE: dict[str, list[Call]] = {
    "calculator": [("evaluate", {"expression": text}) for text in [
        "", " ", HUGE, "9**9**9", "9" * 498 + "^9", "1/0", "5 % (2-2)", "0**-1", "2**0.5", "(" * 400, "1 2", "3 +", "1;2",
        "-" * 400 + "1", ")", "__import__('os')", "1e999", "①+①", "٣+٣", "\0", "1.2.3", "**", "1_000", "0x10",
    ]]
    + [("evaluate", {}), ("evaluate", {"expression": 42}), ("evaluate", {"expression": None}), ("eval", {})],
    "quotes": [("latest", {"symbol": text}) for text in ["", "VR", HUGE, "'; DROP TABLE", "💥", "../data", "VRX\0", "date"]]
    + [("change", span(*days)) for days in [
        ("2024-06-20", "2024-12-31"), ("1999-01-04", "2024-12-31"), ("2024-12-31", "2023-01-02"), ("-1", "2024-12-31"),
        ("2024-02-30", "2024-12-31"), ("2024-01-02", "9999-12-31"), ("today", "now"), ("٢٠٢٤-٠١-٠٢", "2024-12-31"),
    ]]
    + [("history", span("2023-01-02", "2024-12-31")), ("symbols", {"contains": "%' OR 1=1"}), ("symbols", {"contains": HUGE})],
    "fundamentals": [("results", {"symbol": "VRX", "year": year}) for year in [-1, 0, 2020, 10**30, "soon", None, 1e400]]
    + [("profile", {"symbol": text}) for text in ["", "VRXX", HUGE, "💥"]]
    + [("sector", {"name": text}) for text in ["", "shiping", "*", HUGE]]
    + [
        ("compare", {"symbols": symbols, "metric": metric, "year": 2024})
        for symbols, metric in [
            ([], "revenue"), (["VRX"], "revenue"), (["VRX"] * 1000, "revenue"), (["VRX", "NO"], "revenue"),
            (["VRX", "KVR"], "__class__"), ("VRX", "revenue"), ([1, 2], "revenue"),
        ]
    ],
    "search": [("search", {"query": text}) for text in ["", HUGE, "💥", "?!", "\0"]]
    + [("search", {"query": "rope", "k": k}) for k in [0, -1, 10**9, 10**30, "many", 2.5]]
    + [("open", {"id": text}) for text in ["", "../../etc/passwd", HUGE, "river", "💥"]],
    "messages": [("read", {"id": number}) for number in [0, -1, 161, 10**30, "one", None]]
    + [("inbox", {"sender": text}) for text in ["nobody", HUGE, "💥"]]
    + [("inbox", {"limit": number}) for number in [0, -5, 10**9]]
    + [("find", {"text": text}) for text in ["", HUGE]]
    + [("send", {"to": to, "text": text}) for to, text in [("nobody", "hi"), ("Daendin Manman", ""), ("", "hi"), (HUGE, "hi")]]
    + [("send", {"to": "Daendin Manman", "text": HUGE})],
}  # fmt: skip


def not_a_clean_error(tool: str, answer: tuple[bool, str]) -> str:
    """What is wrong with the answer to a hostile call: taken as good, a crash, or endless."""
    failed, text = answer
    if not failed:
        return f"{tool} took it: {text[:80]}"
    if text == f"Error executing tool {tool}":
        return f"{tool} crashed"
    return "" if len(text) < 1000 else f"{tool} answered with {len(text)} characters"


@pytest.mark.parametrize("server", HOSTILE)
def test_hostile_arguments_give_tool_errors_and_the_server_lives_on(server: str) -> None:
    calls = HOSTILE[server]
    found = answers(build(server), calls)
    problems = [not_a_clean_error(tool, said) for (tool, _), said in zip(calls, found, strict=True)]
    assert [problem for problem in problems if problem] == []


def test_planted_crash_is_told_from_a_tool_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: without the look-up that refuses unknown symbols the server crashes, and that is seen."""
    monkeypatch.setattr(quotes.Prices, "symbol", lambda self, given: given)
    ((failed, text),) = answers(quotes.build(), [("latest", {"symbol": "NOPE"})])
    assert not_a_clean_error("latest", (failed, text)) == "latest crashed"


def test_an_unknown_ticker_is_answered_with_near_names() -> None:
    found = answers(quotes.build(), [("latest", {"symbol": "VRZ"}), ("latest", {"symbol": "qqqqqq"})])
    assert found[0] == (True, "Error executing tool latest: unknown symbol 'VRZ'; did you mean VRX, KVR, VRTH?")
    assert found[1] == (True, "Error executing tool latest: unknown symbol 'qqqqqq'")


def test_a_day_without_trading_is_answered_with_its_neighbours() -> None:
    ((failed, text),) = answers(quotes.build(), [("change", span("2024-06-20", "2024-06-24"))])
    assert failed
    assert text.endswith("2024-06-20 was no trading day; the nearest are 2024-06-19 and 2024-06-24")


ENDED: dict[str, Any] = dict(
    exit_code=0, stdout="42\n", stderr="", timed_out=False, killed=None, output_cut=False, unsafe=False
)


@pytest.mark.parametrize(
    "how", [{"exit_code": 1}, {"exit_code": None, "timed_out": True}, {"killed": "memory"}], ids=str
)
def test_a_program_that_does_not_end_well_is_a_tool_error_whatever_it_printed(how: dict[str, Any]) -> None:
    assert python_server.told(ProgramOutcome(**ENDED)) == "42"
    with pytest.raises(ToolError):
        python_server.told(ProgramOutcome(**(ENDED | how)))


def test_a_sandbox_that_fails_gives_the_rollout_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program did nothing wrong: an error text would teach the model that it had."""

    class Broken:
        def __init__(self, *_: object, **__: object) -> None: ...
        def run_python(self, code: str) -> ProgramOutcome:
            raise SecurityError("the keeper is gone", "why", "fix")

    monkeypatch.setattr(python_server, "Sandbox", Broken)
    toolkit = MCPToolkit([Server("python", in_memory=python_server.build)])
    box = toolkit.open(Task(id="one", prompt="?"), "one", 0)
    try:
        with pytest.raises(ToolFailedError, match="the keeper is gone"):
            box.call("python__run", {"code": "print(42)"}, 30.0)
    finally:
        box.close()
        toolkit.close()


# -- the calculator -------------------------------------------------------------------------------
def test_the_quick_calculator_and_the_one_of_the_sdk_are_the_same_tool() -> None:
    """Over stdio in both protocols, and in memory: same tools, same answers, same errors."""
    process = StdioServerParameters(command=sys.executable, args=[str(SERVERS / "calculator.py")])
    calls = [("evaluate", {"expression": text}) for text in ["6*7", "1/3", "2**-3", "1/0", "(1", "0.1+0.2", "7//2 % 3"]]
    calls.append(("nope", {}))
    wanted = answers(calculator.build(), calls)
    assert [text for _, text in wanted[:3]] == ["42", "0.333333333333", "0.125"]
    assert answers(process, calls) == answers(process, calls, "legacy") == wanted

    async def tools(server: Any) -> Any:
        async with Client(server) as client:
            return [(t.name, t.description, t.input_schema) for t in (await client.list_tools()).tools]

    assert asyncio.run(tools(process)) == asyncio.run(tools(calculator.build()))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"nonsense", -32700), (b"[" * 100_000, -32700), (b"[1]", -32600), (b'{"id": 1}', -32600),
        (b'{"id": 1, "method": "tools/call", "params": [1]}', -32602), (b'{"id": 1, "method": "drop"}', -32601),
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_gets_an_error_and_no_crash(line: bytes, code: int) -> None:
    said = calculator.answer(line)
    assert said is not None
    assert said["error"]["code"] == code


def test_a_notification_gets_no_answer() -> None:
    assert calculator.answer(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}') is None


numbers = st.integers(0, 10**6).map(lambda n: (str(n), Fraction(n)))


def joined(operator: str) -> Any:
    work = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__}[operator]
    return lambda pair: (f"({pair[0][0]} {operator} {pair[1][0]})", work(pair[0][1], pair[1][1]))


expressions = st.recursive(
    numbers, lambda inner: st.one_of(*(st.tuples(inner, inner).map(joined(each)) for each in "+-*")), max_leaves=12
)


@settings(max_examples=200, deadline=None)
@given(expressions)
def test_arithmetic_is_exact(pair: tuple[str, Fraction]) -> None:
    text, value = pair
    if len(text) <= arithmetic.MAX_LENGTH:
        assert arithmetic.evaluate(text) == str(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 - 3 - 4", "-5"), ("2 ** 3 ** 2", "512"), ("-2 ** 2", "-4"), ("100 / 10 / 5", "2"), ("7 % 3 * 2", "2"),
        ("-7 // 2", "-4"), ("1 / 8", "0.125"), ("2 / 3", "0.666666666667"), ("-1 / 3", "-0.333333333333"), ("6×7", "42"),
        ("1 / 10 ** 13", "0"), (".5 + 1.", "1.5"), ("2 * (3 + 4) - 6 / 2", "11"), ("+-+3", "-3"), ("2^10", "1024"),
    ],
)  # fmt: skip
def test_signs_powers_and_rounding_follow_the_rules(text: str, value: str) -> None:
    assert arithmetic.evaluate(text) == value


# -- search ---------------------------------------------------------------------------------------
def test_every_article_is_found_first_by_its_own_title() -> None:
    index = search.Index(search.rows("corpus.jsonl"))
    assert len(index.articles) >= 300
    missed = [a["title"] for a in index.articles.values() if a["id"] not in index.rank(a["title"])[:2]]
    assert missed == []


def test_a_rare_word_outweighs_a_common_one_and_accents_do_not_matter() -> None:
    index = search.Index([
        {"id": "a", "title": "Rope", "text": "The the the the harbour."},
        {"id": "b", "title": "Gulls", "text": "Feathers at the harbour."},
        {"id": "c", "title": "Salt", "text": "The mine."},
    ])  # fmt: skip
    assert index.rank("the feathers")[0] == "b"
    assert index.rank("FÉATHERS") == ["b"]
    assert index.rank("harbour") == ["b", "a"], "the shorter article first"
    assert index.rank("nothing") == []
