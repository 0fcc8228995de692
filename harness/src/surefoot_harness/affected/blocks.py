"""One Python file becomes blocks: what runs when it is imported, and the body of each function.

    core    everything an import runs: statements, class bodies, decorators, defaults that are computed
    names   how a plain function or a literal constant is declared; matters to those who mention its name
    bodies  one hash for each function, nested functions included; matters to those who ran it

Promises   comments, blank lines and layout never change a hash; anything else does. A file that does not parse is one
           block with the hash of its bytes.

Read next: `blocks.py`, which names a block speaks of.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

# -- Which modules a file imports, read from its source: anywhere in it, function bodies included -


_DOTTED = re.compile(r"[^\W\d]\w*([.:][^\W\d]\w*)+")
_IMPORTERS = {"import_module", "importorskip", "__import__", "find_spec", "run_module"}


class Import(NamedTuple):
    """One imported name: `from ..a import b` is `Import("a.b", 2)`; the resolver takes the longest part that exists."""

    name: str
    level: int


def imports_of(tree: ast.AST) -> list[Import]:
    """Every import, and every string that names a module (`patch("pkg.mod.x")`, `pytest_plugins`).

    Example:
        >>> imports_of(ast.parse("from . import a"))
        [Import(name='a', level=1)]
    """
    found: set[Import] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(Import(alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = f"{node.module}." if node.module else ""
            found.update(Import(f"{start}{alias.name}", node.level) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if len(node.value) < 300 and _DOTTED.fullmatch(node.value):
                found.add(Import(node.value.replace(":", "."), 0))
        elif isinstance(node, ast.Call | ast.Assign):
            found.update(Import(name, 0) for name in _named_modules(node))
    return sorted(found)


def _named_modules(node: ast.Call | ast.Assign) -> list[str]:
    """Modules named by a plain string where a module is certainly meant, so one word is enough."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        strings: list[ast.expr] = list(node.args[:1]) if name in _IMPORTERS else []
    else:
        named = any(isinstance(target, ast.Name) and target.id == "pytest_plugins" for target in node.targets)
        strings = [*getattr(node.value, "elts", []), node.value] if named else []
    return [each.value for each in strings if isinstance(each, ast.Constant) and isinstance(each.value, str)]


# -- Which names a piece of code speaks of: the cheap, safe stand-in for knowing what it reads ----
# A name counts wherever it could be meant: as a variable, an attribute, a parameter, or a string that looks like a name
# or a path (`getattr(x, "limit")`, `patch("pkg.mod.limit")`, `Path("limits.json")`). Code that computes names is
# "wild":
# it may speak of any.


_BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller", "__import__"}
_ANY_NAME = {"globals", "vars", "dir", "eval", "exec", "getmembers", "resolve_name", "__dict__", "f_globals"}
_CHANGERS = {
    "append", "add", "update", "setdefault", "extend", "insert", "pop", "popitem", "clear", "remove", "discard",
    "appendleft", "extendleft", "put", "put_nowait", "register", "__setitem__",
}  # fmt: skip
_SPEAKING = {ast.Name, ast.Attribute, ast.arg, ast.keyword, ast.alias, ast.Constant, ast.MatchClass, ast.Call}
_WORD = re.compile(r"[^\W\d]\w*")
_LONGEST = 300  # a longer string is prose or data, not a name


class Mentions(NamedTuple):
    """The names spoken of, and whether names are computed."""

    words: set[str]
    wild: bool
    wild_self: bool
    """Wild, and all that it asks is an attribute of `self` or `cls`."""


def mentions_of(nodes: Sequence[ast.AST], *, at_import: bool, foreign: Collection[str] = ()) -> Mentions:
    """All names below `nodes`.

    At import, `from a import b`, `b = 1` and `__all__` bind or list a name without using it; whoever uses it mentions
    it again. What a text says that nobody reads, such as a docstring, is no mention. Names that are computed there to
    be bound, or looked up in a module of Python's own (`foreign`, as this file calls them), are none of the project's.
    """
    words: set[str] = set()
    wild = beyond_self = False
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if at_import and (isinstance(node, ast.Import | ast.ImportFrom) or _is_all(node)):
            words.update(alias.name.split(".")[-1] for alias in getattr(node, "names", []) if alias.asname)
            continue
        if _is_text(node) or (at_import and type(node) is ast.Name and type(node.ctx) is ast.Store):
            continue
        if type(node) is ast.AugAssign:
            words.update(_words(node.target))  # bound and used
        if type(node) in _SPEAKING:
            words.update(_words(node))
            harmless = at_import and _asks_elsewhere(node, foreign)
            if not harmless and _is_wild(node):
                wild, beyond_self = True, beyond_self or not _asks_self(node)
            if harmless and isinstance(node, ast.Call):
                waiting += node.args  # and not the name of the function: `dir` alone may be handed on
                continue
        if type(node) is not ast.Name:
            waiting += ast.iter_child_nodes(node)
    return Mentions(words, wild, wild and not beyond_self)


def _is_text(node: ast.AST) -> bool:
    """A text that nobody reads; one with examples is read by doctest."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and ">>>" not in str(node.value.value)


def _words(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):  # by far the most frequent
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.arg | ast.keyword):
        yield node.arg or ""
    elif isinstance(node, ast.alias):
        yield from node.name.split(".")
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) <= _LONGEST:
        yield from _WORD.findall(node.value)
        yield node.value.rpartition("/")[2]  # a file is looked for by its name
    elif isinstance(node, ast.MatchClass):
        yield from node.kwd_attrs


def listed_names(tree: ast.Module) -> set[str]:
    """Names in `__all__`: taking one of them away breaks every `import *`."""
    strings = [part for node in tree.body if _is_all(node) for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return {part.value for part in strings if isinstance(part.value, str)}


def _is_all(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "__all__"
        and isinstance(node.value, ast.List | ast.Tuple)
    )


def _is_wild(node: ast.AST) -> bool:
    if isinstance(node, ast.Name | ast.Attribute):
        return (node.id if isinstance(node, ast.Name) else node.attr) in _ANY_NAME
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    place = 0 if name in ("attrgetter", "methodcaller", "__import__") else 1
    named = node.args[place : place + 1]
    return name in _BY_NAME and not all(isinstance(each, ast.Constant) for each in named)


def _asks_elsewhere(node: ast.AST, foreign: Collection[str]) -> bool:
    """`dir(operator)`, `getattr(operator, name)` of Python's own modules, and `setattr(anything, name, value)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
        return False
    first = node.args[0]
    if node.func.id in ("getattr", "hasattr", "vars", "dir"):
        return isinstance(first, ast.Name) and first.id in foreign
    return node.func.id == "setattr"


def _asks_self(node: ast.AST) -> bool:
    """`getattr(self, name)`: no function or constant of a module is reached so, unless its class speaks of it."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
        return False
    return isinstance(first := node.args[0], ast.Name) and first.id in ("self", "cls")


def _modules_of_python(tree: ast.Module) -> Iterator[str]:
    """What a file calls modules of the standard library that it imports whole."""
    for node in tree.body:
        for alias in node.names if isinstance(node, ast.Import) else ():
            if alias.name.partition(".")[0] in sys.stdlib_module_names:
                yield alias.asname or alias.name.partition(".")[0]


def written_globals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names through which a call may leave something behind in the process, beyond its own variables.

    Example:
        `_CACHE[key] = value` gives `_CACHE`; `cls.pool = Pool()` gives `pool`; `self.x = 1` gives nothing.
    """
    parts = [part for each in [function.args, *function.body] for part in ast.walk(each)]
    stores = [each for part in parts if (each := _store(part)) is not None]
    own = _own_names(parts) if stores else set()
    declared = {name for part in parts if type(part) is ast.Global for name in part.names}
    return declared.union(*(_target(store, own) for store in stores))


def _store(node: ast.AST) -> ast.expr | None:
    """The place that a node changes, if it changes one through an attribute, an index or a method such as `append`."""
    kind = type(node)
    if kind is ast.Call:
        func = node.func  # type: ignore[attr-defined]
        return func.value if type(func) is ast.Attribute and func.attr in _CHANGERS else None
    if kind is ast.Attribute or kind is ast.Subscript:
        return None if type(node.ctx) is ast.Load else node  # type: ignore[attr-defined,return-value]
    return None


def _own_names(parts: Sequence[ast.AST]) -> set[str]:
    stored = {part.id for part in parts if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
    shared = {name for part in parts if isinstance(part, ast.Global) for name in part.names}
    return (stored | {part.arg for part in parts if isinstance(part, ast.arg)}) - shared


def _target(node: ast.expr, own: set[str]) -> set[str]:
    """The global that a store through `node` changes, if its root is not one of the function's own names."""
    attributes: list[str] = []
    root = node
    while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(root, ast.Attribute):
            attributes.append(root.attr)
        root = root.func if isinstance(root, ast.Call) else root.value
    if not isinstance(root, ast.Name):
        return set()
    if root.id in ("cls", "type"):  # an attribute of a class outlives every instance
        return set(attributes)
    return set() if root.id in own else {root.id, *attributes}


# -- One Python file becomes blocks: what runs when it is imported, and the body of each function -


Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

CORE = ""
"""The qualified name under which a file's import-time block is kept."""

_PLAIN = {
    "staticmethod", "classmethod", "property", "setter", "getter", "deleter", "abstractmethod", "overload", "override",
    "final", "contextmanager", "asynccontextmanager", "wraps", "fixture", "remote", "skipif", "skip", "parametrize",
    "usefixtures", "xfail", "filterwarnings", "mark", "depends_on", "given", "settings", "example", "hookimpl",
}  # fmt: skip
"""Decorators after which a call still runs the body each time (an unknown one may remember the result)."""
_BUILT_IN = {"staticmethod", "classmethod", "property"}
_TYPES = set("int float str bool bytes object list dict tuple set frozenset type complex None".split())
_CACHES = {"cache", "lru_cache", "cached_property"}
_PYTEST_NAMES = ("pytest_", "setup_", "teardown_", "pytestmark", "collect_ignore", "__")


@dataclass(frozen=True)
class Shared:
    """A function whose effect can outlive the test that ran it.

    `names` are what a later test would mention to profit from it; None means that anybody might who imports the file.
    """

    names: list[str] | None


@dataclass(frozen=True)
class Blocks:
    """What one file consists of, as hashes, and what each part speaks of."""

    core: str
    names: dict[str, str] = field(default_factory=dict)
    bodies: dict[str, str] = field(default_factory=dict)
    mentions: dict[str, list[str]] = field(default_factory=dict)  # by qualified name, CORE included
    wild: list[str] = field(default_factory=list)  # blocks that may speak of any name: getattr(x, computed)
    wild_self: list[str] = field(default_factory=list)  # of these, the ones that only ask `self` or `cls`
    shared: dict[str, Shared] = field(default_factory=dict)
    imports: list[Import] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)  # names that `__all__` promises

    def as_json(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return {**vars(self), "shared": {name: vars(each) for name, each in self.shared.items()}}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Blocks:
        """The reverse of `as_json`."""
        shared = {name: Shared(**each) for name, each in value["shared"].items()}
        return cls(**{**value, "shared": shared, "imports": [Import(*each) for each in value["imports"]]})


def digest(data: bytes | str) -> str:
    """A short content hash: 80 bits, far beyond accident."""
    raw = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    return hashlib.blake2b(raw, digest_size=10).hexdigest()


def split(source: bytes) -> Blocks:
    """The blocks of a file's source.

    Example:
        two files that differ in a comment give equal blocks; a changed `return` changes one entry of `bodies`.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Blocks(core=digest(source))
    return _Splitter(tree).blocks()


class _Splitter:
    """Walks the statements that an import runs and lifts the function bodies out of them."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.imports = imports_of(tree)
        self.bound = Counter(_bound_names(tree))
        self.foreign = {name for name in _modules_of_python(tree) if self.bound[name] == 1}
        self.lazy = Import("__future__.annotations", 0) in self.imports
        self.body_parts: dict[str, list[str]] = {}
        self.names: dict[str, str] = {}
        self.mentions: dict[str, set[str]] = {CORE: set()}
        self.wild: set[str] = set()
        self.wild_beyond_self: set[str] = set()
        self.shared: dict[str, Shared] = {}

    def blocks(self) -> Blocks:
        kept = self._lift_names(self._lift_bodies(self.tree.body, ""))
        core = digest("\n".join(ast.dump(statement) for statement in kept))
        self._mention(CORE, kept)
        return Blocks(
            core=core,
            names=self.names,
            bodies={name: digest("\n".join(parts)) for name, parts in self.body_parts.items()},
            mentions={name: sorted(words) for name, words in self.mentions.items()},
            wild=sorted(self.wild),
            wild_self=sorted(self.wild - self.wild_beyond_self),
            shared=self.shared,
            imports=self.imports,
            listed=sorted(listed_names(self.tree)),
        )

    # -- bodies ---------------------------------------------------------------------
    def _lift_bodies(self, statements: list[ast.stmt], prefix: str) -> list[ast.stmt]:
        """Empty every function below `statements`, classes and compound statements included."""
        for statement in statements:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self._lift_body(statement, prefix + statement.name)
            elif isinstance(statement, ast.ClassDef):
                self._lift_bodies(statement.body, f"{prefix}{statement.name}.")
            else:
                for inner in _nested_statements(statement):
                    self._lift_bodies(inner, prefix)
        return statements

    def _lift_body(self, function: Function, qualname: str) -> None:
        # A name defined twice (property and setter, if and else) shares one block: either one changes it.
        self.body_parts.setdefault(qualname, []).append("\n".join(map(ast.dump, function.body)))
        self._mention(qualname, [function.args, *function.body])
        self._note_shared(function, qualname)
        function.body = []
        if "." in qualname and _is_quiet(function, self.lazy) and not function.name.startswith("__"):
            self.names[qualname] = self.names.get(qualname, "") + digest(ast.dump(function))
            function.args = ast.arguments([], [], None, [], [], None, [])
            function.returns = None

    def _note_shared(self, function: Function, qualname: str) -> None:
        written = written_globals(function)
        decorators = {_last_name(each) for each in function.decorator_list if not _is_mark(each)}
        if decorators - _PLAIN - _CACHES:
            self.shared[qualname] = Shared(None)
        elif decorators & _CACHES or written:
            self.shared[qualname] = Shared(sorted({function.name, *written}))

    # -- names ----------------------------------------------------------------------
    def _lift_names(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Take out top-level definitions that do nothing by themselves; what is left is the core."""
        kept: list[ast.stmt] = []
        for statement in statements:
            name = _quiet_definition(statement, self.lazy)
            if name is None or self.bound[name] != 1 or name.startswith(_PYTEST_NAMES):
                kept.append(statement)
            else:
                # The place counts: a definition that moves below its first use breaks the import.
                self.names[name] = digest(f"{len(kept)} {ast.dump(statement)}")
        return kept

    def _mention(self, qualname: str, nodes: list[Any]) -> None:
        found = mentions_of(nodes, at_import=qualname == CORE, foreign=self.foreign)
        self.mentions.setdefault(qualname, set()).update(found.words)
        if found.wild:
            self.wild.add(qualname)
        if found.wild and not found.wild_self:
            self.wild_beyond_self.add(qualname)


def _nested_statements(statement: ast.stmt) -> list[list[ast.stmt]]:
    found = [getattr(statement, part) for part in ("body", "orelse", "finalbody") if getattr(statement, part, None)]
    found += [handler.body for handler in getattr(statement, "handlers", [])]
    found += [case.body for case in getattr(statement, "cases", [])]
    return found


def _quiet_definition(statement: ast.stmt, lazy: bool) -> str | None:
    """The name that a statement defines, if running it can neither fail nor do anything but bind that name."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return statement.name if _is_quiet(statement, lazy) else None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target, value = statement.target, statement.value
        if not lazy and not _is_safe_annotation(statement.annotation):
            return None
    else:
        return None
    return target.id if isinstance(target, ast.Name) and _is_literal(value) else None


def _is_quiet(function: Function, lazy: bool) -> bool:
    """Nothing is computed when it is defined: no decorator that does, plain defaults, annotations that cannot fail."""
    arguments = function.args
    defaults = [*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)]
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [function.returns, *(each.annotation for each in every if each is not None)]
    return (
        all(map(_is_literal, defaults))
        and (lazy or all(each is None or _is_safe_annotation(each) for each in annotations))
        and all(isinstance(each, ast.Name) and each.id in _BUILT_IN for each in function.decorator_list)
    )


def _is_safe_annotation(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in _TYPES)


def _is_literal(node: ast.expr) -> bool:
    """A value written out in full, whose evaluation cannot fail."""
    if isinstance(node, ast.Tuple | ast.List):
        return all(map(_is_literal, node.elts))
    if isinstance(node, ast.Set):
        return all(isinstance(each, ast.Constant) for each in node.elts)
    if isinstance(node, ast.Dict):
        return all(isinstance(key, ast.Constant) for key in node.keys) and all(map(_is_literal, node.values))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub | ast.Not) and _is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add | ast.Sub | ast.Mult) and _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Constant)


def _is_number(node: ast.expr) -> bool:
    return (isinstance(node, ast.Constant) and isinstance(node.value, int | float)) or (
        isinstance(node, ast.BinOp) and _is_literal(node)
    )


def _is_mark(node: ast.expr) -> bool:
    """Whether a decorator is `@pytest.mark.NAME`, with arguments or without: a note beside a function, no wrapper."""
    target = node.func if isinstance(node, ast.Call) else node
    return isinstance(target, ast.Attribute) and _last_name(target.value) == "mark"


def _last_name(node: ast.expr) -> str:
    """`cache` for `@cache`, `@functools.cache` and `@functools.cache()`."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else "?"


def _bound_names(tree: ast.Module) -> list[str]:
    """Every name that the module's namespace may get, once for each place that binds it."""
    names: list[str] = []
    inside: list[ast.AST] = list(tree.body)
    while inside:
        node = inside.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
            names += [word for part in ast.walk(node) if isinstance(part, ast.Global) for word in part.names]
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.append(node.id)
        elif isinstance(node, ast.alias):
            names.append((node.asname or node.name).split(".")[0])
        inside += ast.iter_child_nodes(node)
    return names
