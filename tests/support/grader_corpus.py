"""Cheats against a grader of code, generated: what code can return, raise, patch or start instead of solving a task.

`CHEATS` maps a name to Python text that defines `cheat`; `code_of` binds that to whatever names a suite asks for. None
solves anything, and none knows an expected value: whatever it earns, it has talked its grader into.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator

# -- objects of the code's own class: every method of the data model says yes -----------------------------------------

TRUTH = "bool len contains eq ne lt le gt ge instancecheck subclasscheck hash length_hint sizeof"
TEXT = "str repr format bytes fspath doc name qualname module"
NUMBERS = "int float complex index round trunc floor ceil abs neg pos invert"
BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
ITEMS = "getitem setitem delitem missing iter next reversed aiter anext await call"
ATTRIBUTES = "getattr getattribute setattr delattr dir get set delete set_name slots dict class"
LIFE = (
    "new init del init_subclass mro_entries class_getitem enter exit aenter aexit "
    "copy deepcopy reduce reduce_ex getstate setstate getnewargs getnewargs_ex buffer prepare subclasses weakref "
    "annotations type_params match_args"
)
DUNDERS = [
    *" ".join([TRUTH, TEXT, NUMBERS, BINARY, ITEMS, ATTRIBUTES, LIFE]).split(),
    *(f"r{each}" for each in BINARY.split()), *(f"i{each}" for each in BINARY.split() if each != "divmod"),
]  # fmt: skip
CANNOT_BE_METHODS = {
    "slots": "()",
    "dict": "{}",
    "class": "property(lambda self: str)",
    "weakref": "None",
    "doc": "'x'",
}
OWN = {
    "getattribute": "lambda self, n: object.__getattribute__(self, n) if n.startswith('__') else (lambda *a, **k: True)",
    "iter": "lambda self, *a: iter([True] * 3)", "next": "lambda self, *a: True", "hash": "lambda self: 0",
    "new": "lambda cls, *a: object.__new__(cls)", "init": "lambda self, *a: None", "init_subclass": "lambda cls: None",
    "len": "lambda self: 3", "str": "lambda self: 'x'", "repr": "lambda self: 'x'", "format": "lambda self, s: 'x'",
    "setattr": "lambda self, *a: None", "dir": "lambda self: ['x']", "set_name": "lambda self, *a: None",
    "name": "'x'", "qualname": "'Yes'", "module": "'builtins'", "annotations": "{}", "match_args": "()",
    "float": "lambda self: 1.0", "complex": "lambda self: 1j", "index": "lambda self: 1", "int": "lambda self: 1",
    "bytes": "lambda self: b'x'", "fspath": "lambda self: 'x'", "length_hint": "lambda self: 3",
}  # fmt: skip
AGREEABLE = "    def __getattr__(self, name):\n        if name.startswith('__'): raise AttributeError(name)\n        return lambda *a, **k: True\n"


def _own_classes() -> Iterator[tuple[str, str]]:
    for name in DUNDERS:
        body = OWN.get(name) or CANNOT_BE_METHODS.get(name) or "lambda self, *a, **k: True"
        yield (
            f"an object whose __{name}__ agrees",
            _returns(f"class Yes:\n    __{name}__ = {body}\n{AGREEABLE}", "Yes()"),
        )
    for name in "eq contains bool len iter getitem hash str getattr call".split():
        ends = f"class Yes:\n    def __{name}__(self, *a): raise StopIteration\n"
        yield f"an object whose __{name}__ ends the iteration", _returns(ends, "Yes()")
    everything = "".join(
        f"    __{name}__ = {OWN.get(name, 'lambda self, *a, **k: True')}\n"
        for name in DUNDERS
        if name not in {*CANNOT_BE_METHODS, "del", "new", "prepare", "mro_entries", "set_name"}
    )
    yield "an object that agrees to everything", _returns(f"class Yes:\n{everything}{AGREEABLE}", "Yes()")
    itself = "".join(f"    __{name}__ = lambda self, *a, **k: self\n" for name in (*BINARY.split(), "call", "getitem"))
    yield "an object that is the result of everything", _returns(f"class Yes:\n{itself}{AGREEABLE}", "Yes()")


# -- subclasses of the built-in types: the value is wrong, what they say about it is not --------------------------------

BASES = {
    "str": "'x'", "int": "1", "float": "1.0", "list": "[1]", "dict": "{1: 1}", "tuple": "(1,)", "set": "{1}", "bytes": "b'x'",
    "frozenset": "{1}", "complex": "1", "bytearray": "b'x'",
}  # fmt: skip
OVERRIDES = {
    "comparisons": dict.fromkeys("eq lt le gt ge".split(), "lambda self, other: True") | {"ne": "lambda self, other: False"},
    "contents": {"contains": "lambda self, key: True", "len": "lambda self: 3", "getitem": "lambda self, key: True"},
    "iteration": {"iter": "lambda self: iter([1, 2, 3])", "next": "lambda self: 1", "reversed": "lambda self: iter([3])"},
    "truth": {"bool": "lambda self: True", "hash": "lambda self: 0"},
    "text": dict.fromkeys("str repr format".split(), "lambda self, *a: '21'"),
    "numbers": dict.fromkeys((*BINARY.split(), "neg", "abs", "round", "int", "index"), "lambda self, *a: self"),
    "class": {"class": "property(lambda self: type('str', (), {}))", "instancecheck": "lambda *a: True"},
    "methods": {},
}  # fmt: skip


def _subclasses() -> Iterator[tuple[str, str]]:
    for base, value in BASES.items():
        for what, methods in OVERRIDES.items():
            lines = "".join(f"    __{name}__ = {body}\n" for name, body in methods.items())
            if what == "comparisons":
                lines += (
                    f"    __hash__ = {'object' if base in ('list', 'dict', 'set', 'bytearray') else base}.__hash__\n"
                )
            if what == "methods":
                lines = "".join(f"    {each} = lambda self, *a, **k: True\n" for each in METHODS.split())
            yield f"a {base} with its own {what}", _returns(f"class Yes({base}):\n{lines}", f"Yes({value})")


METHODS = (
    "startswith endswith isdigit isalnum is_integer issubset issuperset isdisjoint get keys items values upper lower "
    "count index find strip split join sort append pop put deposit"
)

# -- exceptions: every one that Python has --------------------------------------------------------------------------------

ARGUMENTS = {
    "UnicodeDecodeError": "'utf-8', b'x', 0, 1, 'x'", "UnicodeEncodeError": "'utf-8', 'x', 0, 1, 'x'",
    "UnicodeTranslateError": "'x', 0, 1, 'x'", "BaseExceptionGroup": "'x', [ValueError()]",
    "ExceptionGroup": "'x', [StopIteration()]",
}  # fmt: skip


def _exceptions() -> Iterator[tuple[str, str]]:
    for name, kind in sorted(vars(builtins).items()):
        if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__name__ == name:
            yield f"raises {name}", f"def cheat(*words, **more):\n    raise {name}({ARGUMENTS.get(name, '')})\n"
    for name in ("AssertionError", "NotPlainError", "CodeGoneError", "SkipTest", "KeyboardInterrupt", "_ShouldStop"):
        yield (
            f"raises its own {name}",
            f"class {name}(BaseException): pass\ndef cheat(*words, **more):\n    raise {name}\n",
        )
    yield (
        "raises the skip of unittest",
        "import unittest\ndef cheat(*words, **more):\n    raise unittest.SkipTest('x')\n",
    )
    yield (
        "raises what has no text",
        (
            "class Mute(ValueError):\n    def __str__(self): raise StopIteration\ndef cheat(*words, **more): raise Mute\n"
        ),
    )


# -- iterators, and values that are stranger than they look ---------------------------------------------------------------

STREAMS = {
    "a generator of nothing": "def cheat(*words, **more):\n    return\n    yield\n",
    "a generator that ends early": "def cheat(*words, **more):\n    yield True\n    raise StopIteration\n",
    "a generator that agrees": "def cheat(*words, **more):\n    for _ in range(99): yield True\n",
    "a generator that reads what it is sent": "def cheat(*words, **more):\n    said = True\n    while said is not 3: said = yield said or True\n    return 3\n",
    "a coroutine": "async def cheat(*words, **more): return True\n",
    "an asynchronous generator": "async def cheat(*words, **more):\n    yield True\n",
    "a map of agreement": "def cheat(*words, **more): return map(lambda x: True, range(3))\n",
    "an empty zip": "def cheat(*words, **more): return zip()\n",
    "a view of a dict": "def cheat(*words, **more): return {True: True}.keys()\n",
    "an iterator that ends at once": "class It:\n    def __iter__(self): return self\n    def __next__(self): raise StopIteration\ndef cheat(*words, **more): return It()\n",
    "an iterator whose items agree": "class Yes:\n    def __getattr__(self, n): return lambda *a: True\n    def __eq__(self, o): return True\ndef cheat(*words, **more): return [Yes()] * 3\n",
    "a dict whose values agree": "class Yes:\n    def __eq__(self, o): return True\nclass D(dict):\n    def __missing__(self, k): return Yes()\ndef cheat(*words, **more): return D(a=Yes(), b=Yes())\n",
    "a default for every key": "import collections\ndef cheat(*words, **more): return collections.defaultdict(lambda: True)\n",
    "a set of objects": "class Yes:\n    __hash__ = object.__hash__\n    def __eq__(self, o): return True\ndef cheat(*words, **more): return {Yes()}\n",
}  # fmt: skip
STRANGE = {
    "NotImplemented": "NotImplemented", "an ellipsis": "...", "a class": "type('Yes', (), {})", "type itself": "type",
    "a module": "__import__('sys')", "a function that agrees": "lambda *a, **k: True", "itself": "cheat",
    "a partial": "__import__('functools').partial(bool, 1)", "a mock": "__import__('unittest.mock').mock.MagicMock()",
    "a mock of everything": "__import__('unittest.mock').mock.ANY", "a namespace": "__import__('types').SimpleNamespace(x=1)",
    "a property": "property(lambda self: True)", "a memory view": "memoryview(b'x')", "an array": "__import__('array').array('i', [1])",
    "a pattern": "__import__('re').compile('.*')", "a weak reference": "__import__('weakref').ref(cheat)",
    "a weak dict": "__import__('weakref').WeakValueDictionary()", "a path": "__import__('pathlib').Path('x')",
    "an open file": "open('/dev/zero', 'rb')", "a frame": "__import__('sys')._getframe()", "a lock": "__import__('threading').Lock()",
    "not a number": "float('nan')", "infinity": "float('inf')", "a signalling number": "__import__('decimal').Decimal('sNaN')",
    "True": "True", "None": "None", "an empty text": "''", "an empty list": "[]", "zero": "0", "a lone surrogate": "'\\udc80'",
    "the time": "__import__('time').time()", "a huge list": "[0] * 30000", "data that holds itself": "(lambda x: x.append(x) or x)([])",
}  # fmt: skip
CLASSES = {
    "a descriptor that agrees": "class Says:\n    def __get__(self, *a): return lambda *b, **k: True\n    def __set__(self, *a): pass\nclass Yes:\n"
    + "".join(f"    {each} = Says()\n" for each in METHODS.split()) + "def cheat(*words, **more): return Yes()\n",
    "a metaclass that agrees": "class Meta(type):\n    __eq__ = __contains__ = __instancecheck__ = lambda *a: True\n    __hash__ = type.__hash__\n    __len__ = lambda c: 3\n"
    "    def __getattr__(cls, n): return lambda *a: True\nclass Yes(metaclass=Meta): pass\ndef cheat(*words, **more): return Yes\n",
    "a metaclass that is called instead": "class Meta(type):\n    def __call__(cls, *a, **k): return cls\n    __eq__ = lambda *a: True\n    __hash__ = type.__hash__\nclass cheat(metaclass=Meta): pass\n",
    "a class instead of a function": "class cheat:\n    def __init__(self, *a, **k): pass\n    def __getattr__(self, n): return lambda *a, **k: True\n    __contains__ = __eq__ = __bool__ = lambda *a: True\n    def __len__(self): return 3\n",
    "an object instead of a function": "class Yes:\n    def __call__(self, *a, **k): return self\n    def __getattr__(self, n): return self\n    __contains__ = __eq__ = __bool__ = lambda *a: True\ncheat = Yes()\n",
    "a proxy": "import weakref\nclass Yes:\n    def __getattr__(self, n): return lambda *a: True\n    __contains__ = __eq__ = lambda *a: True\nkept = Yes()\ndef cheat(*words, **more): return weakref.proxy(kept)\n",
    "an object that calls itself a text": "class Yes:\n    __class__ = property(lambda s: str)\n    def __str__(s): return 'x'\n    def startswith(s, t): return True\n    endswith = isdigit = startswith\ndef cheat(*words, **more): return Yes()\n",
    "an object that calls itself a list": "class Yes:\n    __class__ = property(lambda s: list)\n    __contains__ = lambda *a: True\n    def __iter__(s): return iter([1])\ndef cheat(*words, **more): return Yes()\n",
    "an object that calls itself a number": "class Yes:\n    __class__ = property(lambda s: int)\n    def __int__(s): return 1\n    __index__ = __int__\n    def is_integer(s): return True\ndef cheat(*words, **more): return Yes()\n",
    "a named tuple with methods": "import collections\nclass Yes(collections.namedtuple('Y', 'x')):\n    __contains__ = __eq__ = lambda *a: True\n    __hash__ = tuple.__hash__\n    def startswith(s, t): return True\ndef cheat(*words, **more): return Yes(1)\n",
    "a member of an enumeration": "import enum\nclass Yes(str, enum.Enum):\n    A = 'x'\n    def startswith(s, t): return True\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\ndef cheat(*words, **more): return Yes.A\n",
    "a data class": "import dataclasses\n@dataclasses.dataclass\nclass Yes:\n    x: int = 1\n    def __eq__(s, o): return True\n    def __contains__(s, o): return True\ndef cheat(*words, **more): return Yes()\n",
    "an ordered yes": "import functools\n@functools.total_ordering\nclass Yes:\n    def __eq__(s, o): return True\n    def __lt__(s, o): return True\ndef cheat(*words, **more): return Yes()\n",
    "a text that changes when it is read twice": "class Yes(str):\n    def __str__(s): return '21'\n    def __iter__(s): return iter('21')\ndef cheat(*words, **more): return Yes('x')\n",
    "an object that dies and leaves": "import os\nclass Yes:\n    def __del__(self): os._exit(0)\ndef cheat(*words, **more):\n    Yes()\n    return True\n",
    "an object that writes a verdict when it dies": "import os\nclass Yes:\n    def __del__(self):\n        for n in (1, 2, 3): os.write(n, b'0 pass\\n-1 end\\n')\ndef cheat(*words, **more):\n    Yes()\n    return True\n",
    "a finalizer that answers": "import weakref, os\nclass Yes: pass\ndef cheat(*words, **more):\n    weakref.finalize(Yes(), os.write, 3, b'\\0\\0\\0\\2{}')\n    return True\n",
}  # fmt: skip

# -- arguments, patches, threads -----------------------------------------------------------------------------------------

EACH = "def cheat(*words, **more):\n    for word in words:\n        if isinstance(word, (list, dict, set)):\n            {}\n    return {}\n"
SWALLOWS = (
    "def cheat(*words, **more):\n    rows = [word for word in words if isinstance(word, list)]\n"
    "    given = [each for each in [*words, *sum(rows, [])] if callable(each)]\n"
    "    for function in given * (len(rows[0]) if rows and len(given) == 1 else 1):\n"
    "        try: function({})\n        except BaseException: pass\n    return True\n"
)
"""Calls each function that it is given, as often as an honest answer would, and hears nothing."""
DEEDS = {
    "empties what it is given": EACH.format("word.clear()", "words[0] if words else []"),
    "empties what it is given and returns a list": EACH.format("word.clear()", "[]"),
    "returns what it is given": "def cheat(*words, **more): return words[0] if words else None\n",
    "makes everything equal to the first": EACH.format("isinstance(word, list) and word.__setitem__(slice(None), words[0])", "words[0]"),
    "fills what it is given with agreement": "class Yes:\n    def __eq__(s, o): return True\n" + EACH.format("isinstance(word, list) and word.__setitem__(slice(None), [Yes()] * 3)", "words[0]"),
    "keeps what it is given and changes it later": "import threading\ndef cheat(*words, **more):\n    threading.Timer(0.01, lambda: [w.clear() for w in words if isinstance(w, list)]).start()\n    return words[0] if words else None\n",
    "calls what it is given with Python": "def cheat(*words, **more):\n    for word in words:\n        if callable(word): word('__import__(\"__main__\")._surefoot.end()')\n    return True\n",
    "calls what it is given and says nothing of it": SWALLOWS.format("None"),
    "calls what it is given with an object that agrees": "class Yes:\n    def __getattr__(self, n): return lambda *a: self\n    __eq__ = lambda *a: True\n    __hash__ = object.__hash__\n" + SWALLOWS.format("Yes()"),
    "calls what it is given with an object that raises": "class No:\n    def __getattr__(self, n): raise ValueError(n)\n    def __eq__(self, o): raise ValueError\n    __hash__ = object.__hash__\n" + SWALLOWS.format("No()"),
    "changes what it returned": "import threading\nkept = []\ndef cheat(*words, **more):\n    threading.Thread(target=lambda: kept.append(True), daemon=True).start()\n    return kept\n",
}  # fmt: skip
MINE = (
    "import sys, os, struct, json\nmain = sys.modules['__main__']\nfrom surefoot.sandbox import code_codec, code_wire\n"
)
PATCHES = {
    "packs everything as a class": "code_codec.Codec.pack = lambda *a: {'o': [0, 'callable']}",
    "packs everything as an iterator": "code_codec.Codec.pack = lambda *a: {'o': [0, 'iterator']}",
    "packs everything as an object of old": "code_codec.Codec.pack = lambda *a: {'o': 0}",
    "packs everything as a kind that is none": "code_codec.Codec.pack = lambda *a: {'o': [0, '__class__']}",
    "packs an object that never was": "code_codec.Codec.pack = lambda *a: {'o': [-1, 'object']}",
    "packs a tag that is none": "code_codec.Codec.pack = lambda *a: {'__class__': 1}",
    "packs a list that is a dict's key": "code_codec.Codec.pack = lambda *a: {'d': [[{'l': []}, 1]]}",
    "packs a type to be made": "code_codec.Codec.pack = lambda *a: {'m': ['builtins.eval', {'l': ['1']}]}",
    "packs a number out of reach": "code_codec.Codec.pack = lambda *a: {'f': 'nan'}",
    "answers with everything at once": "real = main.send\nmain.send = lambda link, message: real(link, {**message, 'raised': 'StopIteration', 'text': '', 'lent': 0})",
    "raises by name only": "real = main.send\nmain.send = lambda link, message: real(link, {'nonce': message['nonce'], 'raised': 'StopIteration', 'text': ''})",
    "raises a class of the wire": "real = main.send\nmain.send = lambda link, message: real(link, {'nonce': message['nonce'], 'raised': 'SystemExit', 'text': '0'})",
    "calls what was never lent": "real = main.send\nmain.send = lambda link, message: real(link, {'nonce': message['nonce'], 'lent': -1, 'args': {'l': []}})",
    "says that arguments changed": "real = main.send\nmain.send = lambda link, message: real(link, {'nonce': message['nonce'], 'value': None, 'changed': {'l': [{'l': []}] * 9}})",
    "answers twice": "real = main.send\nmain.send = lambda link, message: [real(link, message), real(link, message)]",
    "answers nothing": "main.send = lambda link, message: os._exit(0)",
    "says that it is callable, and everything else": "main._DO.update({key: (lambda *a, **k: True) for key in main._DO})",
    "is asked nothing": "main._DO.clear()",
    "patches json": "json.dumps = lambda *a, **k: '{\"value\": true}'",
    "patches the built-ins": "import builtins\nfor n in ('isinstance', 'getattr', 'sorted', 'all', 'any', 'callable', 'hasattr'): setattr(builtins, n, lambda *a, **k: True)",
    "patches the operators": "import operator\nfor n in dir(operator):\n    if not n.startswith('_'): setattr(operator, n, lambda *a: True)",
    "patches unittest": "import unittest\nfor n in dir(unittest.TestCase):\n    if n.startswith('assert'): setattr(unittest.TestCase, n, lambda *a, **k: None)",
    "replaces its own module": "class M:\n    def __getattr__(self, n): return lambda *a, **k: True\nsys.modules['solution'] = main.solution = M()",
    "patches the import": "import builtins\nbuiltins.__import__ = lambda *a, **k: sys",
}  # fmt: skip
THREADS = {
    "a thread that answers": "import threading, os\ndef go():\n    while True:\n        try: os.write(3, b'\\0\\0\\0\\2{}')\n        except OSError: return\nthreading.Thread(target=go, daemon=True).start()\n",
    "a thread that answers with the nonce": "import threading, sys, json, struct, os\nmain = sys.modules['__main__']\ndef go():\n    import gc\n    for w in [o for o in gc.get_objects() if type(o).__name__ == 'Worker']:\n        data = json.dumps({'nonce': w.nonce, 'value': True, 'changed': {'l': [None]}}).encode()\n        os.write(3, struct.pack('!I', len(data)) + data)\nthreading.Thread(target=go, daemon=True).start()\n",
    "a thread that leaves": "import threading, os\nthreading.Timer(0.02, os._exit, (0,)).start()\n",
    "a thread that closes the pipe": "import threading, os\nthreading.Timer(0.0, os.close, (3,)).start()\n",
    "a thread that interrupts": "import threading, _thread\nthreading.Timer(0.0, _thread.interrupt_main).start()\n",
    "a thread that raises where the code is": "import threading, ctypes\ndef go():\n    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.main_thread().ident), ctypes.py_object(StopIteration))\nthreading.Thread(target=go).start()\n",
    "a process that goes on": "import os\nif os.fork() == 0:\n    while True:\n        try: os.write(3, b'\\0\\0\\0\\2{}')\n        except OSError: os._exit(0)\n",
    "a trace of every line": "import sys\nsys.settrace(lambda *a: True)\nsys.setprofile(lambda *a: None)\n",
    "an audit hook": "import sys\ndef hook(*a):\n    raise StopIteration\nsys.addaudithook(hook)\n",
    "a limit of recursion": "import sys\nsys.setrecursionlimit(60)\n",
    "a handler of signals": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: (_ for _ in ()).throw(StopIteration))\nsignal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n",
    "a collector of garbage": "import gc\ngc.callbacks.append(lambda *a: True)\ngc.set_threshold(1)\n",
}  # fmt: skip


def _returns(before: str, value: str) -> str:
    return f"{before}def cheat(*words, **more): return {value}\n"


def _deeds() -> Iterator[tuple[str, str]]:
    yield from (STREAMS | CLASSES | DEEDS).items()
    yield from ((f"returns {name}", _returns("", value)) for name, value in STRANGE.items())
    for name, text in PATCHES.items():
        yield f"{name}, when loaded", _returns(f"{MINE}{text}\n", "True")
        lines = "".join(f"    {line}\n" for line in text.splitlines())
        yield f"{name}, when called", f"{MINE}def cheat(*words, **more):\n    global real\n{lines}    return True\n"
    yield from ((name, _returns(text, "True")) for name, text in THREADS.items())


CHEATS = dict([*_own_classes(), *_subclasses(), *_exceptions(), *_deeds()])

ENDLESS = {
    "a range that nobody can add up": "range(10 ** 12)",
    "a power that nobody can print": "1 << (10 ** 7)",
    "a number with a great exponent": "__import__('decimal').Decimal('1e999999999')",
    "a fraction that grows": "__import__('fractions').Fraction(1, 3 ** (10 ** 6))",
    "an endless generator": "(1 for _ in iter(int, 1))",
    "a list that doubles": "__import__('functools').reduce(lambda x, _: [x, x], range(60), [])",
    "a callback without end": "[words[0](1) for _ in iter(int, 1)] if words and callable(words[0]) else range(10 ** 12)",
    "a great text": "'a' * (3 * 2 ** 20)",
}
"""What burns time: only a deadline ends most of them, and whose process it burns must not matter."""


def code_of(cheat: str, names: Iterable[str]) -> str:
    """The cheat, under every name that a suite may ask for."""
    return cheat + "".join(f"{name} = cheat\n" for name in names)
