"""Values between tests and code: plain data arrives as it was, nothing else is believed."""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import fractions
import functools
import json
import math
import operator
import socket
import struct
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.sandbox.code_codec import NotPlainError, PlainCodec
from surefoot.sandbox.code_remote import Caller, Remote, RemoteFunction
from surefoot.sandbox.code_wire import CodeGoneError, CodeRaisedError, NotLentError
from surefoot.sandbox.code_worker import Worker

SIMPLE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
HASHABLE = st.recursive(SIMPLE, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
PLAIN = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4) | st.sets(HASHABLE, max_size=3) | st.dictionaries(HASHABLE, inner, max_size=3)
    ),
    max_leaves=12,
)


def refuse(value: Any) -> Any:
    raise NotPlainError(str(value))


@settings(max_examples=60, deadline=None)
@given(PLAIN)
def test_plain_data_arrives_as_it_was_with_its_types(value: Any) -> None:
    codec = PlainCodec(refuse, refuse)
    back = codec.unpack(json.loads(json.dumps(codec.pack(value))))
    assert (repr(back), type(back)) == (repr(value), type(value)) or back == value


def test_numbers_that_json_cannot_say_arrive_too() -> None:
    codec = PlainCodec(refuse, refuse)
    for value in (10**5000, -(2**70), math.inf, -0.0, True):
        back = codec.unpack(json.loads(json.dumps(codec.pack(value))))
        assert type(back) is type(value)
        assert str(back)[:1] == str(value)[:1] if isinstance(value, float) else back == value
    assert math.isnan(codec.unpack(codec.pack(math.nan)))


def test_a_few_types_of_the_standard_library_are_plain_too() -> None:
    codec, day = PlainCodec(refuse, refuse), datetime.datetime(2024, 2, 29, 23, 59, 59, 7, tzinfo=datetime.UTC)
    values = [
        range(3, 9, 2), collections.deque([1, (2,)]), fractions.Fraction(-3, 4), decimal.Decimal("1E+5"), day, day.date(),
        datetime.timedelta(days=-1, microseconds=5), collections.Counter("aab"), collections.OrderedDict(a=1),
    ]  # fmt: skip
    for value in values:
        assert codec.unpack(json.loads(json.dumps(codec.pack(value)))) == value


def test_a_subclass_travels_as_what_it_is_built_on() -> None:
    class Yes(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    codec = PlainCodec(refuse, refuse)
    assert type(codec.unpack(codec.pack(Yes(3)))) is int


def test_data_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotPlainError):
        PlainCodec(refuse, refuse).pack(loop)


CODE = """
class Box:
    def __init__(self, value): self.value = value
    def __eq__(self, other): return True
    def __len__(self): return 3
    def __getitem__(self, key): return key * 2
    def __contains__(self, key): return key == 1
    def grow(self, by=1): self.value += by; return self.value
    def me(self): return self
    def startswith(self, text): return True
    def __iter__(self): self.value += 1; return iter([1, 2] if self.value == 1 else [3])
WIDTH, WORD, SIZES, GIVEN = 4, "Hello", [4, 5], Box(0)
def give(): return Box(0)
kept = []
def keep(function): kept.append(function)
def tell(value): kept[0](value)
def echo(*words, **more): return [words, more]
def sort(rows, seen): rows.sort(); seen['n'] = len(rows)
def apply(function, value): return function(value)
def forgive(function, value):
    try: function(value)
    except BaseException: pass
    return "fine"
def fail(name): raise getattr(__builtins__, name, None)('why') if name != 'Own' else Own('why')
class Own(Exception): pass
def count(n): yield from range(n)
"""


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[Caller]:
    """The code's end in a thread of this process."""
    module = types.ModuleType("solution")
    exec(CODE, module.__dict__)
    module.__dict__["__builtins__"] = __import__("builtins")
    monkeypatch.setitem(sys.modules, "solution", module)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=Worker(theirs).serve)
    thread.start()
    yield Caller(ours, objects={"Box"}, plain={"pop", "count", "startswith", "is_integer"})
    ours.close()
    thread.join()
    theirs.close()


def remote(caller: Caller, name: str) -> Any:
    return RemoteFunction(caller, {"name": name})


def of_tests(function: Any) -> Any:
    """As if the script of a test process had defined it."""
    function.__module__ = "__main__"
    return function


def test_calls_attributes_and_changed_arguments_arrive(code: Caller) -> None:
    assert remote(code, "echo")(1, (2,), key={3}) == [(1, (2,)), {"key": {3}}]
    assert remote(code, "WIDTH") == 4.0
    assert remote(code, "WIDTH") + 1 == 5
    assert 10 - remote(code, "WIDTH") == 6
    rows, seen = [3, 1, 2], {"old": 1}
    remote(code, "sort")(rows, seen)
    assert (rows, seen) == ([3, 1, 2], {"old": 1}), "nobody asked what the code does to them"
    remote(code, "sort")(code.live(rows), code.live(seen))
    assert (rows, seen) == ([1, 2, 3], {"old": 1, "n": 3})
    assert list(remote(code, "count")(3)) == [0, 1, 2]


def test_objects_stay_with_the_code_and_are_used_from_afar(code: Caller) -> None:
    box = remote(code, "Box")(5)
    assert isinstance(box, Remote)
    assert (box.grow(), box.grow(by=4), box.value) == (6, 10, 10)
    assert (len(box), box[4], 1 in box, 2 in box, bool(box)) == (3, 8, True, False, True)
    assert box.me().grow() == 11
    assert (hasattr(box, "grow"), hasattr(box, "shrink")) == (True, False)


def test_an_object_that_no_test_asked_for_answers_nothing(code: Caller) -> None:
    given = remote(code, "give")()
    assert isinstance(given, Remote)
    asked = [
        lambda: given.value, lambda: given.grow(), lambda: given.startswith("x"), lambda: 1 in given, lambda: bool(given),
        lambda: len(given), lambda: given[0], lambda: str(given), lambda: f"{given}", lambda: repr(given),
        lambda: given + 1, lambda: round(given), lambda: given.__doc__, lambda: given == given,
        lambda: isinstance(given, str), lambda: isinstance(given, collections.abc.Iterable), lambda: given in [1],
    ]  # fmt: skip
    for each in asked:
        with pytest.raises(NotPlainError):
            each()
    assert list(given) == list(given) == [1, 2], "gone through once; it cannot become something else"
    with pytest.raises(TypeError):
        hash(given)


def test_a_part_of_an_object_does_not_pass_for_plain_data(code: Caller) -> None:
    box = remote(code, "Box")(5)
    with pytest.raises(NotPlainError):
        box.me().startswith("x")
    with pytest.raises(NotPlainError):
        assert 1 in box.me()
    assert 1 in box
    assert 1 in box.me(), "the tests search boxes"


def test_a_constant_is_plain_data_or_nothing(code: Caller) -> None:
    assert remote(code, "WORD").startswith("He")
    assert 4 in remote(code, "SIZES")
    assert (len(remote(code, "SIZES")), remote(code, "SIZES")[1], str(remote(code, "WIDTH"))) == (2, 5, "4")
    with pytest.raises(NotPlainError):
        remote(code, "GIVEN").startswith("He")
    with pytest.raises(NotPlainError):
        assert 3 in remote(code, "GIVEN")


def test_an_object_that_equals_everything_is_not_asked(code: Caller) -> None:
    box = remote(code, "Box")(5)
    for compare in (lambda: box == 5, lambda: box != 5, lambda: box == box, lambda: box < 3):
        with pytest.raises(NotPlainError):
            compare()


def test_a_function_of_the_tests_can_be_called_by_the_code(code: Caller) -> None:
    assert remote(code, "apply")(of_tests(lambda value: value + 1), 4) == 5
    with pytest.raises(ZeroDivisionError):
        remote(code, "apply")(of_tests(lambda value: 1 / 0), 4)
    with pytest.raises(RuntimeError, match="UnicodeDecodeError"):
        remote(code, "apply")(of_tests(lambda value: b"\xff".decode()), 4)
    kept: list[int] = []
    remote(code, "apply")(kept.append, 4)
    assert kept == [4]


def test_a_refusal_of_the_tests_own_function_ends_the_call_whatever_the_code_answers(code: Caller) -> None:
    def wants_three(value: Any) -> None:
        assert value == 3, "three was wanted"

    with pytest.raises(AssertionError, match="three was wanted"):
        remote(code, "forgive")(of_tests(wants_three), 4)
    with pytest.raises(NotPlainError):
        remote(code, "forgive")(of_tests(lambda box: box == 3), remote(code, "Box")(5))
    assert remote(code, "forgive")(of_tests(wants_three), 3) == "fine", "the next call is judged by itself"
    assert remote(code, "forgive")(of_tests(lambda value: [][value]), 3) == "fine", "it may have to catch that"
    remote(code, "keep")(of_tests(wants_three))
    with pytest.raises(AssertionError):
        remote(code, "forgive")(remote(code, "tell"), 4)


def test_a_function_of_the_tests_may_ask_the_code_while_the_code_waits_for_it(code: Caller) -> None:
    box = remote(code, "Box")(5)
    assert remote(code, "apply")(of_tests(lambda each: each.grow() + 1), box) == 7
    assert remote(code, "apply")(functools.partial(remote(code, "apply"), of_tests(lambda value: value + 1)), 4) == 5


def test_a_function_of_the_tests_may_be_kept_and_called_later(code: Caller) -> None:
    heard: list[int] = []
    remote(code, "keep")(heard.append)
    remote(code, "WIDTH") + 1
    remote(code, "tell")(3)
    assert heard == [3]


def test_what_every_python_has_is_named_and_not_lent(code: Caller) -> None:
    for function, value, result in ((len, "abc", 3), (eval, "1 + 1", 2), (str.upper, "a", "A"), (math.sqrt, 4, 2.0)):
        assert remote(code, "apply")(function, value) == result
    assert remote(code, "apply")(int, "7") == 7
    assert code.lent == []


def test_what_would_give_the_code_power_over_the_tests_is_not_lent(code: Caller) -> None:
    powers = [
        of_tests(lambda text: eval(text)), of_tests(lambda text: [exec(each) for each in text]),
        functools.partial(eval), functools.partial(getattr, code), operator.attrgetter("__class__"), code.ask,
    ]  # fmt: skip
    for power in powers:
        with pytest.raises(NotLentError):
            remote(code, "apply")(power, "1")
    assert code.lent == []


def test_what_the_code_raises_is_raised_here(code: Caller) -> None:
    for name in ("ValueError", "KeyError", "TypeError", "IndexError", "AttributeError"):
        with pytest.raises(getattr(__import__("builtins"), name)):
            remote(code, "fail")(name)
    with pytest.raises(CodeRaisedError, match="Own: why"):
        remote(code, "fail")("Own")
    for name in ("SystemExit", "StopIteration", "StopAsyncIteration", "GeneratorExit"):
        with pytest.raises(CodeRaisedError, match=name):
            remote(code, "fail")(name)
    with pytest.raises(StopIteration):
        next(remote(code, "count")(0))
    with pytest.raises(NameError, match="no_such_name"):
        remote(code, "no_such_name")(1)


@contextlib.contextmanager
def lying(reply: bytes) -> Iterator[Caller]:
    """The end of somebody who answers before any question, and then says no more."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=_say, args=(theirs, reply)).start()
        yield Caller(ours)


def _say(link: socket.socket, reply: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody has to listen to the end
        link.sendall(reply)
        link.shutdown(socket.SHUT_WR)


def framed(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


@pytest.mark.parametrize(
    "reply",
    [
        b"", b"\0\0", framed(b"nonsense"), framed(b"[]"), framed(b"[" * 100_000), struct.pack("!I", 2**31),
        framed(b'{"nonce": "wrong", "value": 1, "changed": {"l": []}}'), framed(b'{"value": 1}'),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_refused(reply: bytes) -> None:
    with lying(reply) as caller, pytest.raises(CodeGoneError):
        remote(caller, "f")(1)


@pytest.mark.parametrize(
    "value",
    ['{"i": 5}', '{"i": "x"}', '{"zz": 1}', "{}", '{"s": [{"l": []}]}', '{"d": [1]}', '{"o": "x"}', '5', '{"c": []}', '{"f": null}',
     '{"m": ["fractions.Fraction", {"l": ["1e99999999"]}]}', '{"m": ["os.system", {"l": ["x"]}]}', '{"m": []}'],
)  # fmt: skip
def test_a_value_that_is_none_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.sandbox.code_remote.os.urandom", lambda size: b"known")
    reply = framed(f'{{"nonce": "6b6e6f776e", "value": {value}, "changed": {{"l": [null]}}}}'.encode())
    with lying(reply) as caller, pytest.raises(CodeGoneError):
        remote(caller, "f")(1)
