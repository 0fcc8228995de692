"""Every regular expression of the package, found by reading its syntax, and the texts that a slow one would choke on.

`collect` reads the tree, `attacks` makes texts from an expression's own parse, `slow` measures. What is measured is
processor time over a range of lengths: an expression is slow when four times the text takes more than nine times as long
(linear is 4, quadratic 16) where it takes long enough to be measured at all.
"""

from __future__ import annotations

import ast
import collections
import gc
import itertools
import re
import re._constants as sre
import re._parser as parser  # the parse of an expression has no public form
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALLS = ("compile", "match", "search", "fullmatch", "sub", "subn", "split", "findall", "finditer")
WORDS = ("import re", "from re", ", re", *(f".{call}(" for call in CALLS))
"""A file without any of these neither has an expression nor uses one."""
LONGEST = 16_384
NOTICED_S = 0.004
"""What takes less than this for the longest text is far from quadratic: that would be 100 million steps."""
WORST_RATIO = 9.0


@dataclass(frozen=True)
class Found:
    """One expression: where it stands, what it is, and how it is used."""

    place: str
    source: str
    """As the code writes it: what the tables of the tests name it by."""
    pattern: str | bytes | None
    """None when it is made at run time."""
    flags: int
    uses: tuple[str, ...]


def collect(root: Path) -> list[Found]:
    """Every call of `re` below `root`; other ways to it (an alias, `from re import`) are an error."""
    texts = {path: path.read_text() for path in sorted(root.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items() if any(word in text for word in WORDS)}
    nodes = {path: [n for n in ast.walk(tree) if isinstance(n, LOOKED_AT)] for path, tree in trees.items()}
    used = _uses(each for found in nodes.values() for each in found)
    parts = (_of_module(path.relative_to(root), tree, nodes[path], used) for path, tree in trees.items())
    return [found for part in parts for found in part]


LOOKED_AT = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.Call, ast.Attribute)


def _of_module(path: Path, tree: ast.Module, nodes: list[ast.AST], used: dict[str, set[str]]) -> Iterator[Found]:
    constants = _constants(tree)
    names = {id(node.value): _target(node) for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in ("re", "regex"):
            raise AssertionError(f"{path}:{node.lineno}: import re, so that its expressions can be found")
        if isinstance(node, ast.Import) and any(
            a.name == "regex" or (a.name == "re" and a.asname not in (None, "re")) for a in node.names
        ):
            raise AssertionError(
                f"{path}:{node.lineno}: import re by its own name, so that its expressions can be found"
            )
        if not (isinstance(node, ast.Call) and _is_re(node.func)):
            continue
        called = node.func.attr  # type: ignore[attr-defined]
        argument = node.args[0]
        uses = tuple(sorted(used.get(names.get(id(node), ""), ()))) or ("search", "findall")
        yield Found(
            f"{path}:{node.lineno}", ast.unparse(argument), _value(argument, constants), _flags(node, called),
            uses if called == "compile" else (called,),
        )  # fmt: skip


def _is_re(func: ast.expr) -> bool:
    return (
        isinstance(func, ast.Attribute)
        and isinstance(func.value, ast.Name)
        and func.value.id == "re"
        and func.attr in CALLS
    )


def _uses(nodes: Iterable[ast.AST]) -> dict[str, set[str]]:
    """Which methods are called on which name, anywhere: `NAME.match(...)`; a name used otherwise may be used anyhow."""
    called: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in CALLS:
            name = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
            called.setdefault(name, set()).add(node.attr)
    return called


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else ""


def _constants(tree: ast.Module) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and (name := _target(node)):
            value = _value(node.value, known)
            if value is not None:
                known[name] = value
    return known


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """The value of a text, a number or what is put together of them; None for everything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes | int):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _value(node.left, known), _value(node.right, known)
        return None if left is None or right is None else left + right
    if isinstance(node, ast.JoinedStr):
        parts = [_value(p.value if isinstance(p, ast.FormattedValue) else p, known) for p in node.values]
        return None if None in parts else "".join(map(str, parts))
    return None


def _flags(node: ast.Call, called: str) -> int:
    given = [k.value for k in node.keywords if k.arg == "flags"]
    given += node.args[1:2] if called == "compile" else node.args[2:3] if called != "sub" else node.args[4:5]
    names = {n.attr for each in given for n in ast.walk(each) if isinstance(n, ast.Attribute)}
    flags = 0
    for name in names:
        flags |= int(getattr(re, name, 0))
    return flags


# -- texts that hurt ----------------------------------------------------------------------------------


def attacks(pattern: str | bytes, flags: int) -> list[str]:
    """Pieces and ends for `pump`: what the expression repeats, what stands before it, and what it does not expect.

    Each is "piece" or "prefix\\0piece\\0end"; an end that does not fit makes it go back over all that fitted.
    """
    tree = parser.parse(pattern, flags)
    pieces = list(dict.fromkeys(_pieces(tree)))[:24]
    chars = sorted({c for piece in pieces for c in piece} | set(_representatives(tree)))[:40]
    prefixes = list(dict.fromkeys(p for p in _prefixes(tree) if p))[:4]
    pairs = ["".join(pair) for pair in itertools.islice(itertools.permutations(chars[:8], 2), 56)]
    plain = [("", piece, end) for end in ENDS for piece in pieces]
    plain += [("", piece, "") for piece in [*chars, *pairs]]
    rest = [("", piece, end) for end in ENDS[1:] for piece in chars]
    rest += [(prefix, piece, end) for prefix in prefixes for end in ENDS for piece in [*pieces, *chars]]
    return list(dict.fromkeys("\0".join(each) for each in [*plain, *rest]))


ENDS = ("", "\x01", "x\n")
HAND_WRITTEN = (
    "\0.\0x",
    "\0```a\n\0",
    "\0 \0x",
    "\0\n\0x",
    "\0\n \0x",
    "\0a.\0",
    "\0[\0",
    "\0{\0",
    "\0<think>\0",
    "\0a \0",
)


def pump(attack: str, length: int) -> str:
    """The text of an attack, about this long."""
    prefix, piece, end = attack.split("\0")
    return prefix + piece * max(1, (length - len(prefix) - len(end)) // len(piece)) + end


def _example(tree: Any, most: int = 1) -> str:
    """A text that this part of an expression matches, as short as `most` repetitions allow."""
    return "".join(_example_of(op, value, most) for op, value in tree)


def _example_of(op: Any, value: Any, most: int) -> str:
    if op in (sre.LITERAL,):
        return chr(value)
    if op is sre.NOT_LITERAL:
        return "a" if chr(value) != "a" else "b"
    if op is sre.ANY:
        return "a"
    if op is sre.IN:
        return _members(value)[0]
    if op is sre.BRANCH:
        return _example(value[1][0], most)
    if op is sre.SUBPATTERN:
        return _example(value[3], most)
    if op is sre.ATOMIC_GROUP:
        return _example(value, most)
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        low, high, inner = value
        return _example(inner, most) * min(int(high), max(int(low), most))
    if op is sre.GROUPREF_EXISTS:
        return _example(value[1], most)
    return ""  # places, lookarounds and references take no room of their own


_KINDS = {
    sre.CATEGORY_DIGIT: "7", sre.CATEGORY_SPACE: " ", sre.CATEGORY_WORD: "a", sre.CATEGORY_NOT_DIGIT: "a",
    sre.CATEGORY_NOT_SPACE: "a", sre.CATEGORY_NOT_WORD: "!",
}  # fmt: skip
CANDIDATES = "a \n7!.-_/\"'\\{}[]()<>=:,;#`*\t~AZéß\u3000"


def _members(value: Any) -> list[str]:
    """A few characters that a class takes."""
    kinds = {sre.CATEGORY_DIGIT: r"\d", sre.CATEGORY_SPACE: r"\s", sre.CATEGORY_WORD: r"\w"}
    kinds |= {sre.CATEGORY_NOT_DIGIT: r"\D", sre.CATEGORY_NOT_SPACE: r"\S", sre.CATEGORY_NOT_WORD: r"\W"}
    inside, named, negated = "", [], False
    for op, given in value:
        if op is sre.NEGATE:
            negated = True
        elif op is sre.LITERAL:
            inside += re.escape(chr(given))
            named.append(chr(given))
        elif op is sre.RANGE:
            inside += f"{re.escape(chr(given[0]))}-{re.escape(chr(given[1]))}"
            named.append(chr(given[0]))
        elif op is sre.CATEGORY:
            inside += kinds[given]
            named.append(_KINDS[given])
    taken = re.compile(f"[{'^' if negated else ''}{inside}]")
    found = [c for c in ([] if negated else named) + list(CANDIDATES) if taken.fullmatch(c)]
    return found or ["a"]


def _walk(tree: Any) -> Iterator[tuple[Any, Any]]:
    for op, value in tree:
        yield op, value
        for part in _parts(op, value):
            yield from _walk(part)


def _parts(op: Any, value: Any) -> list[Any]:
    if op is sre.BRANCH:
        return list(value[1])
    if op is sre.SUBPATTERN:
        return [value[3]]
    if op is sre.ATOMIC_GROUP:
        return [value]
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        return [value[2]]
    if op in (sre.ASSERT, sre.ASSERT_NOT):
        return [value[1]]
    if op is sre.GROUPREF_EXISTS:
        return [part for part in value[1:] if part is not None]
    return []


def _alternatives(tree: Any) -> list[str]:
    """Examples of a part: one for each branch and each of a few members of its classes."""
    found = [_example(tree), _example(tree, 2)]
    for op, value in tree:
        if op is sre.BRANCH:
            found += [_example(part) for part in value[1]]
        elif op is sre.IN:
            found += _members(value)[:6]
        elif op is sre.SUBPATTERN:
            found += _alternatives(value[3])
    return found


def _pieces(tree: Any) -> Iterator[str]:
    """What can stand again and again: the bodies of repetitions, the whole expression, and what leads to a repetition."""
    for op, value in _walk(tree):
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT) and value[1] > 8:
            yield from (text for text in _alternatives(value[2]) if text)
    yield from (
        text for text in (_example(tree), _example(tree)[:-1], _example(tree, 3), f"{_example(tree)[:-1]}\n") if text
    )
    for text in _prefixes(tree):
        if text:
            yield text
            yield f"{text}\n"  # at the beginning of every line


def _prefixes(tree: Any, before: str = "") -> Iterator[str]:
    """What the expression takes before each of its repetitions."""
    for op, value in tree:
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT) and value[1] > 8:
            yield before
        for part in _parts(op, value):
            yield from _prefixes(part, before)
        before += _example_of(op, value, 1)


def _representatives(tree: Any) -> Iterator[str]:
    for op, value in _walk(tree):
        if op is sre.LITERAL:
            yield chr(value)
        elif op is sre.IN:
            yield from _members(value)[:3]
        elif op in (sre.ANY, sre.NOT_LITERAL):
            yield "a"


# -- measuring ------------------------------------------------------------------------------------------


class TooLongError(Exception):
    """Measuring one length took a second of processor time."""


@contextmanager
def _a_while() -> Iterator[None]:
    """The engine of `re` looks at signals now and then, so that even an exponential expression ends."""

    def stop(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def slow(call: Callable[[str], object], attack: str, longest: int = LONGEST) -> str | None:
    """Says how the call's time grew when it grew faster than the text; None when it did not."""
    times: dict[int, float] = {}
    length = 16
    while length <= longest:
        try:
            with _a_while():
                times[length] = _seconds(call, pump(attack, length))
                if times[length] > NOTICED_S and length >= 64:
                    ratio = min(_ratio(call, attack, length) for _ in range(2))
                    if ratio > WORST_RATIO:
                        return (
                            f"{length} characters like {attack!r} take {ratio:.0f} times as long as a quarter of them"
                        )
        except TooLongError:
            return f"{length} characters like {attack!r} take more than a second"
        length *= 4 if length >= 1024 else 2
    return None


def _ratio(call: Callable[[str], object], attack: str, length: int) -> float:
    quick, whole = (min(_seconds(call, pump(attack, n)) for _ in range(3)) for n in (length // 4, length))
    return whole / max(quick, 1e-6)


def _seconds(call: Callable[[str], object], text: str) -> float:
    gc.disable()  # a text of many matches would also pay for everybody else's garbage
    try:
        began = time.thread_time()  # the clock of the process only ticks while a timer is set on it
        call(text)
        return time.thread_time() - began
    finally:
        gc.enable()


def calls_of(found: Found, pattern: str | bytes) -> list[tuple[str, Callable[[str], object]]]:
    """The ways in which the package uses an expression, as functions of a text."""
    compiled = re.compile(pattern, found.flags)
    walks = {"sub", "subn", "split", "findall", "finditer"}
    ways: dict[str, Callable[[Any], object]] = {use: getattr(compiled, use) for use in found.uses if use not in walks}
    if walks & set(found.uses):
        ways["finditer"] = lambda text: collections.deque(compiled.finditer(text), maxlen=0)
    if isinstance(pattern, bytes):
        return [(use, lambda text, way=way: way(text.encode())) for use, way in ways.items()]
    return list(ways.items())
