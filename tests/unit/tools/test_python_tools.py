"""Plain functions as tools: what the model is told of them, what reaches them, and what comes back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import ToolError, ToolFailedError
from surefoot.records import Task
from surefoot.tools.python import instances, pool
from surefoot.tools.python.environments import FunctionToolkit
from surefoot.tools.python.function_schema import SchemaError, describe
from surefoot.tools.python.pool import EnvLimits, EnvToolbox
from surefoot.tools.schema import wrong

TASK = Task(id="t", prompt="?")
BRIEF = EnvLimits(max_stuck=2)


@contextmanager
def opened(*functions: Callable[..., Any], limits: EnvLimits | None = None) -> Iterator[EnvToolbox]:
    toolkit = FunctionToolkit(functions, limits)
    try:
        yield toolkit.open(TASK, "train/0/0/0", seed=1)
    finally:
        toolkit.close()


# -- a corpus of functions, read by us and by transformers -----------------------


def nothing() -> str:
    """Takes nothing."""
    return ""


def plain(a: int, b: float, c: str, d: bool) -> str:
    """Four plain arguments.

    Args:
        a: a whole number
        b: a number
        c: a text
        d: yes or no
    """
    return f"{a}{b}{c}{d}"


def optional(a: int | None, b: Optional[str] = None, c: float = 2.5) -> None:  # noqa: UP045 - both spellings are read
    """Optional ones.

    With a second paragraph.

    Args:
        a: may be null
        b: may be left out,
            and goes on in a second line
        c: has a default

    Returns:
        nothing
    """


def unions(a: int | str, b: Union[int, float, None], c: list[int] | dict[str, int], d: list | tuple) -> dict[str, int]:  # noqa: UP007
    """Unions.

    Args:
        a: one of two
        b: one of three
        c: needs anyOf
        d: the same in JSON

    Returns:
        an object

    Raises:
        ValueError: never
    """
    return {}


def containers(
    a: list[str], b: dict[str, float], c: tuple[int, str], d: list[list[int]], e: dict, f: list, g: Any, h: tuple
) -> Any:
    """Containers.

    Args:
        a: texts
        b: numbers by name
        c: a pair
        d: a table
        e: anything by name
        f: anything in a row
        g: anything
        h: anything fixed
    """


def literals(
    a: Literal["x", "y"], b: Literal[1, 2, "three"], c: Literal[True, None] = None, d: list[Literal["k"]] | None = None
) -> None:
    """Literals.

    Args:
        a: one of two texts
        b: mixed
        c: odd
        d: inside a list
    """


def choices(drink: str, size: int = 1) -> None:
    """Choices in the docstring.

    Args:
        drink: what to drink (choices: ["tea ", "coffee (black)"])
        size: how much (Choices: [1, 2, 3])
    """


async def waits(seconds: float) -> None:
    """An async one.

    Args:
        seconds: how long
    """


class Holder:
    def method(self, key: str) -> str:
        """A method.

        Args:
            key: which
        """
        return key

    @staticmethod
    def static(key: str) -> str:
        """A static one.

        Args:
            key: which
        """
        return key


CORPUS: list[Callable[..., Any]] = [
    nothing, plain, optional, unions, containers, literals, choices, waits, Holder().method, Holder.method, Holder.static,
]  # fmt: skip


@pytest.mark.parametrize("function", CORPUS, ids=lambda f: f.__qualname__)
def test_a_tool_is_described_as_chat_templates_have_always_seen_it(function: Callable[..., Any]) -> None:
    from transformers.utils import get_json_schema

    theirs = get_json_schema(function)["function"]
    theirs.pop("return", None)
    ours = describe(function)
    assert ours == theirs
    assert json.dumps(ours) == json.dumps(theirs), "the order of the words is part of the prompt"


def no_hint(a) -> None:  # type: ignore[no-untyped-def]
    """No hint.

    Args:
        a: what
    """


def no_description(a: int) -> None:
    """Says nothing of a."""


def no_docstring(a: int) -> None: ...


def odd_type(a: set[int]) -> None:
    """A set.

    Args:
        a: what
    """


def any_length(a: tuple[int, ...]) -> None:
    """A tuple.

    Args:
        a: what
    """


def bad_choices(a: str) -> None:
    """Choices.

    Args:
        a: what (choices: tea, coffee)
    """


UNFIT: list[Callable[..., Any]] = [no_hint, no_description, no_docstring, odd_type, any_length, bad_choices]


@pytest.mark.parametrize("function", UNFIT, ids=lambda f: f.__name__)
def test_what_transformers_refuses_we_refuse_and_name_it(function: Callable[..., Any]) -> None:
    from transformers.utils import get_json_schema

    with pytest.raises(Exception):
        get_json_schema(function)
    with pytest.raises(SchemaError, match=function.__name__):
        describe(function)
    with pytest.raises(ToolError, match=function.__name__) as refused:
        FunctionToolkit([function])
    assert not isinstance(refused.value, ToolFailedError), "refused at the start, not lost under a rollout"


def many(*args: int) -> None:
    """Many.

    Args:
        args: all of them
    """


def words(**kwargs: int) -> None:
    """Many.

    Args:
        kwargs: all of them
    """


def only_by_position(a: int, /) -> None:
    """One.

    Args:
        a: it
    """


@pytest.mark.parametrize(
    "function",
    [many, words, only_by_position, lambda a: a, 3, print],
    ids=["args", "kwargs", "pos", "l", "n", "builtin"],
)
def test_what_a_model_cannot_call_by_name_is_refused(function: Any) -> None:
    with pytest.raises(ToolError):
        FunctionToolkit([function])


def test_a_description_may_hold_words_with_colons_and_a_section_after_the_arguments() -> None:
    def search(query: str, top: int = 3) -> str:
        """Search.

        Args:
            query: what to look for, such as
                author: somebody
                or a word
            top (int): how many

        Example:
            search("x")
        """
        return query

    properties = describe(search)["parameters"]["properties"]
    assert properties["query"]["description"] == "what to look for, such as author: somebody or a word"
    assert properties["top"]["description"] == "how many"
    assert set(properties) == {"query", "top"}


def test_no_tools_and_two_of_one_name_are_refused() -> None:
    with pytest.raises(ToolError, match="no tools"):
        FunctionToolkit([])
    with pytest.raises(ToolError, match="two tools"):
        FunctionToolkit([Holder().method, Holder().method])


# -- arguments -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"a": "1", "b": 1.0, "c": "", "d": True}, "a: '1' is not a whole number"),
        ({"a": 1.0, "b": 1.0, "c": "", "d": True}, "a: 1.0 is not a whole number"),
        ({"a": True, "b": 1.0, "c": "", "d": True}, "a: True is not a whole number"),
        ({"a": 1, "b": float("nan"), "c": "", "d": True}, "b: nan is not a number"),
        ({"a": 1, "b": 1, "c": None, "d": True}, "c: None is not text"),
        ({"a": 1, "b": 1, "c": "", "d": 1}, "d: 1 is not true or false"),
        ({"a": 1, "b": 1, "c": ""}, "'d' is missing"),
        ({"a": 1, "b": 1, "c": "", "d": True, "e": 1}, "no argument 'e'"),
        ({"a": 1, "b": 1, "c": "", "d": True, "self": 1}, "no argument 'self'"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_never_reach_the_function(
    arguments: dict[str, Any], problem: str
) -> None:
    with opened(plain) as toolbox:
        answer = toolbox.call("plain", arguments, 5)
    assert answer.outcome == "refused"
    assert problem in json.loads(answer.text)["problem"]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "nullable": True}, [1, None], ["x", 1.5]),
        ({"type": ["integer", "string"]}, [1, "x"], [None, 1.5, []]),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}, [[1], [], None], [["x"], 1]),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
            [[1, "x"]],
            [[1], [1, 2], ["x", 1]],
        ),
        ({"type": "object", "additionalProperties": {"type": "number"}}, [{}, {"x": 1}], [{"x": "y"}, []]),
        ({"enum": [1, "x"]}, [1, "x"], [True, "y", 1.0]),
        ({"type": "integer", "minimum": 0, "maximum": 3}, [0, 3], [-1, 4]),
        ({"type": "array", "minItems": 2, "maxItems": 2}, [[1, 2]], [[1], [1, 2, 3]]),
        ({}, [None, 1, "x", {}], []),
    ],
)
def test_each_word_of_the_schema_is_checked(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    whole = {"type": "object", "properties": {"a": schema}}
    assert [wrong({"a": value}, whole) for value in good] == [None] * len(good)
    assert [value for value in bad if wrong({"a": value}, whole) is None] == []


PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([containers, unions, literals, optional, plain]),
    st.dictionaries(st.sampled_from("abcdefgh"), PLAIN_VALUES),
)
def test_ours_accepts_nothing_that_a_full_validator_refuses(
    function: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = describe(function)["parameters"]
    if wrong(arguments, schema) is None:
        strict = json.loads(json.dumps({**schema, "additionalProperties": False}), object_hook=_spelled_out)
        assert list(jsonschema.Draft202012Validator(strict).iter_errors(arguments)) == []


def _spelled_out(schema: dict[str, Any]) -> dict[str, Any]:
    """`nullable` in the words of the standard."""
    if not schema.pop("nullable", False):
        return schema
    return {"anyOf": [schema, {"type": "null"}]}


def test_an_unknown_tool_is_answered_with_the_nearest_names() -> None:
    with opened(plain, nothing) as toolbox:
        answer = toolbox.call("nothin", {}, 5)
    assert answer.outcome == "refused"
    assert json.loads(answer.text)["tools"][0] == "nothing"


# -- answers ---------------------------------------------------------------------


def echo(value: Any) -> Any:
    """Says it again.

    Args:
        value: what
    """
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("4", "4"), (4, "4"), (0.1, "0.1"), (None, ""), (True, "True"), ([1, "ä"], '[1, "ä"]'), ({"a": None}, '{"a": null}'),
        ("", ""), ("safe\u202eevil\x1b[2J", "safe\\u202eevil\\x1b[2J"), ("line\n\ttab", "line\n\ttab"),
    ],
)  # fmt: skip
def test_results_become_text_that_a_person_can_check(value: Any, text: str) -> None:
    with opened(echo) as toolbox:
        assert toolbox.call("echo", {"value": value}, 5) == pool.ToolAnswer(text)


def test_a_long_result_is_cut_where_the_reader_can_see_it_and_names_its_size() -> None:
    def flood(n: int) -> str:
        """Much.

        Args:
            n: how much
        """
        return "x" * n

    with opened(flood, limits=EnvLimits(max_chars=200)) as toolbox:
        for size in (201, 10_000_000):
            text = toolbox.call("flood", {"n": size}, 5).text
            assert len(text) <= 200
            assert f"of {size} characters" in text


def test_an_object_in_itself_and_one_that_cannot_be_shown_are_errors_of_the_tool() -> None:
    def circle() -> Any:
        """Never ends."""
        value: list[Any] = []
        value.append(value)
        return value

    class Shy:
        def __str__(self) -> str:
            raise RuntimeError("no")

    def shy() -> Any:
        """Cannot be shown."""
        return Shy()

    with opened(circle, shy) as toolbox:
        assert [toolbox.call(name, {}, 5).outcome for name in ("circle", "shy")] == ["error", "error"]


def test_an_exception_is_the_tools_answer_with_type_and_message_and_without_a_traceback() -> None:
    def fails() -> str:
        """Fails."""
        raise FileNotFoundError("no such page")

    async def fails_later() -> str:
        """Fails too."""
        await asyncio.sleep(0)
        raise TimeoutError("the page took too long")

    with opened(fails, fails_later) as toolbox:
        assert toolbox.call("fails", {}, 5) == pool.ToolAnswer("FileNotFoundError: no such page", "error")
        assert toolbox.call("fails_later", {}, 5) == pool.ToolAnswer("TimeoutError: the page took too long", "error")
        assert toolbox.call("fails", {}, 5).outcome == "error", "the toolbox lives on"


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), MemoryError(), GeneratorExit()], ids=repr)
def test_what_no_answer_can_be_made_of_is_a_failure_and_not_an_answer(error: BaseException) -> None:
    def leaves() -> str:
        """Leaves."""
        raise error

    with opened(leaves, nothing) as toolbox:
        with pytest.raises(ToolFailedError) as failed:
            toolbox.call("leaves", {}, 5)
        assert failed.value.reason == "tool_crashed"
        with pytest.raises(ToolFailedError):
            toolbox.call("nothing", {}, 5)


def test_a_tool_may_say_itself_that_its_world_has_failed() -> None:
    def down() -> str:
        """Down."""
        raise ToolFailedError("the database is down", "nothing can be looked up", "start it", "database_down")

    with opened(down) as toolbox:
        with pytest.raises(ToolFailedError, match="database is down") as failed:
            toolbox.call("down", {}, 5)
        assert failed.value.reason == "database_down"


def test_planted_world_that_makes_a_failure_an_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "is_failure", lambda error: False)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_tool_may_say_itself_that_its_world_has_failed()


# -- threads and deadlines ---------------------------------------------------------


def test_all_calls_of_one_world_run_in_one_thread_and_two_worlds_in_two() -> None:
    def where() -> int:
        """Which thread."""
        return threading.get_ident()

    toolkit = FunctionToolkit([where])
    boxes = [toolkit.open(TASK, f"train/0/0/{i}", seed=1) for i in range(2)]
    seen = [[box.call("where", {}, 5).text for _ in range(3)] for box in boxes]
    toolkit.close()
    assert [len(set(each)) for each in seen] == [1, 1]
    assert seen[0] != seen[1]
    assert str(threading.get_ident()) not in seen[0] + seen[1]


class Gate:
    """A tool that hangs until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def hang(self) -> str:
        """Hangs."""
        self.gate.wait()
        return "late"


def test_a_call_that_hangs_fails_by_its_deadline_and_its_thread_is_counted_until_it_comes_back() -> None:
    tool = Gate()
    toolkit = FunctionToolkit([tool.hang, nothing], BRIEF)
    toolbox = toolkit.open(TASK, "train/0/0/0", seed=1)
    with pytest.raises(ToolFailedError) as failed:
        toolbox.call("hang", {}, 0.01)
    assert failed.value.reason == "tool_timeout"
    with pytest.raises(ToolFailedError) as again:
        toolbox.call("nothing", {}, 5)
    assert again.value.reason == "tool_timeout", "the toolbox is dead, under the same reason"
    toolbox.close()
    assert toolkit.stuck.now == 1
    other = toolkit.open(TASK, "train/0/0/1", seed=1)
    assert other.call("nothing", {}, 5).outcome == "ok", "siblings do not notice"
    thread = next(t for t in threading.enumerate() if t is toolbox._runner._thread)  # type: ignore[attr-defined]
    tool.gate.set()
    thread.join(5)
    assert toolkit.stuck.now == 0
    toolkit.close()


def test_too_many_stuck_threads_stop_the_run() -> None:
    tool = Gate()
    toolkit = FunctionToolkit([tool.hang], BRIEF)
    try:
        for attempt in range(BRIEF.max_stuck):
            with pytest.raises(ToolFailedError):
                toolkit.open(TASK, f"train/0/0/{attempt}", seed=1).call("hang", {}, 0.01)
        with pytest.raises(ToolError, match="3 tool calls are stuck, the last one in call hang") as stopped:
            toolkit.open(TASK, "train/0/0/9", seed=1).call("hang", {}, 0.01)
        assert not isinstance(stopped.value, ToolFailedError)
    finally:
        tool.gate.set()
        toolkit.close()


def test_planted_count_that_never_counts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.StuckThreads, "add", lambda self, what: None)
    with pytest.raises(AssertionError, match="did not match"):
        test_too_many_stuck_threads_stop_the_run()


def test_an_async_tool_that_overruns_is_cancelled_and_leaves_no_stuck_thread() -> None:
    cancelled = threading.Event()

    async def forever() -> None:
        """Waits."""
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    toolkit = FunctionToolkit([forever], BRIEF)
    with pytest.raises(ToolFailedError) as failed:
        toolkit.open(TASK, "train/0/0/0", seed=1).call("forever", {}, 0.01)
    assert failed.value.reason == "tool_timeout"
    assert cancelled.is_set()
    assert toolkit.stuck.now == 0
    toolkit.close()


def test_async_tools_keep_one_event_loop_for_all_calls() -> None:
    loops: list[int] = []

    async def which() -> int:
        """Which loop."""
        loops.append(id(asyncio.get_running_loop()))
        return len(loops)

    with opened(which) as toolbox:
        assert [toolbox.call("which", {}, 5).text for _ in range(3)] == ["1", "2", "3"]
    assert len(set(loops)) == 1


def test_closing_ends_every_thread() -> None:
    before = set(threading.enumerate())
    toolkit = FunctionToolkit([nothing])
    for i in range(5):
        toolkit.open(TASK, f"train/0/0/{i}", seed=1).call("nothing", {}, 5)
    assert len(set(threading.enumerate()) - before) == 5
    toolkit.close()
    assert set(threading.enumerate()) <= before


def test_a_tool_cannot_change_the_arguments_that_others_keep() -> None:
    def spoil(rows: list[int]) -> int:
        """Spoils.

        Args:
            rows: what to spoil
        """
        rows.clear()
        return len(rows)

    given = {"rows": [1, 2, 3]}
    with opened(spoil) as toolbox:
        toolbox.call("spoil", given, 5)
    assert given == {"rows": [1, 2, 3]}
