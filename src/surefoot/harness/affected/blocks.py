"""One Python file becomes blocks: what runs when it is imported, and the body of each function.

    core    everything an import runs: statements, class bodies, decorators, defaults that are computed
    names   how a plain function or a literal constant is declared; matters to those who mention its name
    bodies  one hash for each function, nested functions included; matters to those who ran it

Promises   comments, blank lines and layout never change a hash; anything else does. A file that does not parse is one
           block with the hash of its bytes.

Read next: `mentions.py`, which names a block speaks of.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from surefoot.harness.affected.imports import Import, imports_of
from surefoot.harness.affected.mentions import listed_names, mentions_of, written_globals

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

CORE = ""
"""The qualified name under which a file's import-time block is kept."""

_PLAIN = {
    "staticmethod", "classmethod", "property", "setter", "getter", "deleter", "abstractmethod", "overload", "override",
    "final", "contextmanager", "asynccontextmanager", "wraps", "fixture", "remote", "skipif", "skip", "parametrize",
    "usefixtures", "xfail", "filterwarnings", "mark", "depends_on", "given", "settings", "example",
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
        self.lazy = Import("__future__.annotations", 0) in self.imports
        self.body_parts: dict[str, list[str]] = {}
        self.names: dict[str, str] = {}
        self.mentions: dict[str, set[str]] = {CORE: set()}
        self.wild: set[str] = set()
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
        decorators = {_last_name(each) for each in function.decorator_list}
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
        found = mentions_of(nodes, at_import=qualname == CORE)
        self.mentions.setdefault(qualname, set()).update(found.words)
        if found.wild:
            self.wild.add(qualname)


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
