"""Sees what runs and what is read in one process: function starts, opened files, imports, started processes.

The same file serves the pytest process, where facts are kept in memory by test, and its descendants, where each new
fact is appended to a log at once, so that a killed process loses nothing. It imports the standard library only: a child
may be any Python 3.11 or newer.

Facts are tuples of strings:

    ("b", path, qualname)        a block started; an empty qualname is the module itself
    ("s", path, qualname)        the same, in a program or a process that no later test can profit from
    ("f", path, stack)           a file was opened or a folder listed; stack: project blocks below, as JSON
    ("w", path)                  a file was opened for writing
    ("i", importer, name)        a module was imported by name while running
    ("l", pid, number)           a Python process was started ...
    ("h", parent, log)           ... and says hello
    ("x", reason)                something happened that cannot be recorded

Read next: `engines.py`, how function starts are seen.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import resolve_name
from types import CodeType, FrameType
from typing import Any

Fact = tuple[str, ...]
VARIABLE = "SUREFOOT_AFFECTED"
_LOADERS = ("<frozen importlib", "/_pytest/", "/linecache.py", "/coverage/", "/inspect.py", "/tokenize.py")
_TOOL = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))) + os.sep
"""Where the selection itself lies: what it looks at between tests is everything, and no test's business."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Recorder:
    """Facts of one process for one session.

    Args:
        folder: the session's folder: `settings.json`, `now` (number of the running test), one log for each child.
    """

    def __init__(self, folder: str, *, child: bool) -> None:
        self.folder, self.child = folder, child
        with open(os.path.join(folder, "settings.json"), encoding="utf-8") as file:
            settings = json.load(file)
        self.root: str = settings["root"].rstrip("/") + "/"
        self.not_ours: frozenset[str] = frozenset(settings["not_ours"])
        self.facts: dict[int, set[Fact]] = {}
        self.paths: dict[str, str | None] = {}
        self.read_from: set[tuple[object, ...]] = set()
        self.launched = 0
        self._open_clock()
        self.label, self.seen = -1, set[Fact]()
        self._log = -1
        if child:
            self.become_child()

    def _open_clock(self) -> None:
        descriptor = os.open(os.path.join(self.folder, "now"), os.O_RDONLY if self.child else os.O_RDWR)
        access = mmap.ACCESS_READ if self.child else mmap.ACCESS_WRITE
        self._map = mmap.mmap(descriptor, 8, access=access)
        os.close(descriptor)
        self.now = memoryview(self._map).cast("Q")

    # -- facts ----------------------------------------------------------------------
    def begin(self, number: int) -> None:
        """From here on facts belong to test `number`, in this process and in all children; 0 is no test."""
        self.now[0] = number
        self.label, self.seen = number, self.facts.setdefault(number, set())
        self.read_from.clear()

    def note(self, fact: Fact) -> None:
        """Keep one fact for the test that runs now."""
        if self.child and self.label != self.now[0]:
            self.label, self.seen = self.now[0], set()
            self.read_from.clear()
        if fact not in self.seen:
            self.seen.add(fact)
            if self.child:
                os.write(self._log, json.dumps([self.label, *fact]).encode() + b"\n")

    def become_child(self) -> None:
        """Write to a log of this process's own; called at start, and in a forked child."""
        self.child, self.label, self.seen = True, -1, set()
        name = f"log-{os.getpid()}-{os.urandom(4).hex()}"
        self._log = os.open(os.path.join(self.folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.set_inheritable(self._log, False)
        self.note(("h", str(os.getppid()), name))

    # -- places ---------------------------------------------------------------------
    def ours(self, path: str) -> str | None:
        """The path below the project root, or None for everything that is not the project's."""
        try:
            return self.paths[path]
        except KeyError:
            found = self.paths[path] = self._ours(path)
            return found

    def _ours(self, path: str) -> str | None:
        if path.startswith("<"):
            return None
        whole = os.path.realpath(path)
        if not whole.startswith(self.root):
            _, package, below = whole.partition("/_ray_pkg_")  # Ray's copy of the working folder
            relative = below.partition("/")[2]
            if not package or not os.path.exists(self.root + relative):
                return None
        else:
            relative = whole[len(self.root) :]
        parts = relative.split("/")
        hidden = any(part in self.not_ours or part.endswith(".egg-info") for part in parts)
        return None if hidden or relative.endswith(".pyc") or parts[-1].startswith(".coverage") else relative

    def block(self, code: CodeType) -> Fact | None:
        """The block that a code object belongs to: nested functions belong to the outermost one."""
        path = self.ours(code.co_filename)
        if path is None:
            return None
        name = code.co_qualname.partition(".<locals>")[0]
        if name == "<module>":
            return ("s" if _is_program(code) else "b", path, "")
        return ("b", path, name)

    def stack(self, frame: FrameType | None) -> list[Fact]:
        """The project's blocks from `frame` outwards."""
        found = []
        while frame is not None:
            block = self.block(frame.f_code)
            if block is not None:
                found.append(block)
            frame = frame.f_back
        return found


def _is_program(code: CodeType) -> bool:
    """Whether a module's code runs as the program itself: nobody gets that by importing."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "__main__"


recorders: list[Recorder] = []
"""Those at work in this process: more than one when a recorded test itself starts a recorded pytest."""


# -- what the interpreter announces -----------------------------------------------------
on_every_event: list[Callable[[], None]] = []
"""What an engine wants to be called for at any announcement: to reach threads that it cannot reach otherwise."""


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "sys.setprofile":
        return  # announced in the middle of it: a second one from here is refused, and makes the first one fail
    for call in on_every_event:
        call()
    handler = _EVENTS.get(event)
    if handler is None:
        return
    for recorder in recorders:
        try:
            handler(recorder, event, args)
        except Exception as error:  # noqa: BLE001 - raised from here it would make the program's own call fail
            recorder.note(("x", f"recording {event} failed: {error!r}"))


def _caller() -> FrameType | None:
    """The frame that made the announced call; None while the interpreter starts."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def _on_open(recorder: Recorder, event: str, args: tuple[Any, ...]) -> None:
    path = _path_of(args[0])
    ours = None if path is None else recorder.ours(path)
    if ours is None:
        return
    flags = args[2] if isinstance(args[2], int) else 0
    mode = args[1] if isinstance(args[1], str) else ""
    if flags & _WRITES or set(mode) & set("wax+"):
        recorder.note(("w", ours))
        if not flags & os.O_RDWR and "+" not in mode:
            return
    _note_read(recorder, ours, source=ours.endswith(".py"))


def _on_list(recorder: Recorder, event: str, args: tuple[Any, ...]) -> None:
    path = _path_of(args[0] if args[0] is not None else ".")
    ours = None if path is None else recorder.ours(path)
    if ours is not None:
        _note_read(recorder, ours, source=True)
    elif path is not None and os.path.realpath(path) + "/" == recorder.root:
        _note_read(recorder, ".", source=True)


def _note_read(recorder: Recorder, path: str, *, source: bool) -> None:
    """Note a file or folder; with `source`, not when an import or a traceback is what looks at it."""
    outer = _caller()
    # A file read in a loop is one fact: the same file from the same place in the code is not looked into again.
    place = (path, recorder.now[0], *_codes(outer))
    if place in recorder.read_from:
        return
    recorder.read_from.add(place)
    while outer is not None and recorder.ours(outer.f_code.co_filename) is None:
        if source and any(word in outer.f_code.co_filename for word in _LOADERS):
            return  # blocks and the import graph stand for it
        outer = outer.f_back
    if outer is not None and recorder.now[0] == 0 and os.path.realpath(outer.f_code.co_filename).startswith(_TOOL):
        return
    recorder.note(("f", path, json.dumps([block[1:] for block in recorder.stack(outer)])))


def _codes(frame: FrameType | None) -> Iterator[int]:
    """The way from `frame` out to the test runner, whose own frames are many and always the same."""
    while frame is not None and "/_pytest/" not in frame.f_code.co_filename:
        yield id(frame.f_code)
        frame = frame.f_back


def _path_of(value: Any) -> str | None:
    if isinstance(value, bytes):
        value = os.fsdecode(value)
    return os.path.abspath(value) if isinstance(value, str) else None


def _on_import(recorder: Recorder, event: str, args: tuple[Any, ...]) -> None:
    binary = recorder.ours(args[1]) if isinstance(args[1], str) else None
    if binary is not None and not binary.endswith(".py"):
        recorder.note(("f", binary, "[]"))  # a compiled module of the project
    _note_import(recorder, args[0], _caller())


def _on_database(recorder: Recorder, event: str, args: tuple[Any, ...]) -> None:
    path = _path_of(args[0])
    ours = None if path is None else recorder.ours(path)
    if ours is not None:
        _note_read(recorder, ours, source=False)


def _on_code(recorder: Recorder, event: str, args: tuple[Any, ...]) -> None:
    """Code comes to life: once it is the project's, the engine has to look."""
    from .engines import engine

    place = args[0].co_filename if event == "exec" else args[0] if event == "cpython.run_file" else args[1]
    if isinstance(place, str) and recorder.ours(place) is not None:
        engine().wake()


def _note_import(recorder: Recorder, name: str, frame: FrameType | None) -> None:
    while frame is not None:
        importer = recorder.ours(frame.f_code.co_filename)
        if importer is not None:
            recorder.note(("i", importer, name))
            return
        frame = frame.f_back


def _on_start(recorder: Recorder, event: str, args: tuple[Any, ...]) -> None:
    words = _words(args[1])
    environment = args[3] if event == "subprocess.Popen" else args[2]
    folder = _path_of(args[2]) if event == "subprocess.Popen" and args[2] else None
    _note_arguments(recorder, words, folder or os.getcwd())
    if not _is_python(str(_path_of(args[0]) or (words or [""])[0]), words):
        return
    reason = _mute(words[1:], environment)
    if reason:
        recorder.note(("x", reason))
    elif event == "subprocess.Popen" and not {"-V", "--version", "-h", "--help"} & set(words[1:2]):
        recorder.launched += 1
        recorder.note(("l", str(os.getpid()), str(recorder.launched)))


def _words(value: Any) -> list[str]:
    many = value if isinstance(value, list | tuple) else [value]
    return [os.fsdecode(each) for each in many if isinstance(each, str | bytes | os.PathLike)]


def _note_arguments(recorder: Recorder, words: list[str], folder: str) -> None:
    """A project file named on a command line is read by whatever runs there."""
    for word in words:
        whole = os.path.join(folder, word)
        ours = recorder.ours(os.path.abspath(whole)) if len(word) < 4096 and "\0" not in word else None
        if ours is not None and os.path.isfile(whole):
            recorder.note(("f", ours, "[]"))
    if words and os.path.basename(words[0]) == "env" and {"-i", "-", "--ignore-environment"} & set(words):
        recorder.note(("x", "started a process with an empty environment (env -i)"))


def _is_python(executable: str, words: list[str]) -> bool:
    names = (os.path.basename(executable), os.path.basename(words[0]) if words else "")
    return any(name.startswith(("python", "pypy")) for name in names) or executable == sys.executable


def _mute(words: list[str], environment: Any) -> str | None:
    """Why a Python started like this cannot report, or None."""
    for word in words:
        if not word.startswith("-") or word in ("-c", "-m", "-"):
            break
        if not word.startswith("--") and set(word[1:]) & set("IES") and word[1] not in "XW":
            return f"started Python with {word}, which cannot report what it runs"
    if environment is None:
        return None
    known = {os.fsdecode(key): os.fsdecode(value) for key, value in dict(environment).items()}
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.environ.get(VARIABLE) != known.get(VARIABLE) or home not in known.get("PYTHONPATH", "").split(os.pathsep):
        return "started Python with an environment of its own, which cannot report what it runs"
    return None


_EVENTS = {
    "open": _on_open,
    "os.listdir": _on_list,
    "os.scandir": _on_list,
    "import": _on_import,
    "sqlite3.connect": _on_database,
    "exec": _on_code,
    "compile": _on_code,
    "code.__new__": _on_code,
    "cpython.run_file": _on_code,
    "subprocess.Popen": _on_start,
    "os.posix_spawn": _on_start,
    "os.exec": _on_start,
}
_real_import_module = importlib.import_module


def _import_module(name: str, package: str | None = None) -> Any:
    """`importlib.import_module`, noted also when the module is loaded already and nothing announces it."""
    absolute = resolve_name(name, package) if name.startswith(".") and package else name
    for recorder in recorders:
        _note_import(recorder, absolute, _caller())
    return _real_import_module(name, package)


# -- start and stop -----------------------------------------------------------------------
_installed = False


def start(recorder: Recorder) -> None:
    """Begin to record in this process."""
    global _installed
    from .engines import engine

    recorders.append(recorder)
    if not _installed:
        _installed = True
        sys.addaudithook(_audit)
        os.register_at_fork(after_in_child=_after_fork)
    importlib.import_module = _import_module
    engine().start(recorder)


def stop(recorder: Recorder) -> None:
    """End recording; facts stay in `recorder.facts`."""
    from .engines import engine

    engine().stop(recorder)
    recorders.remove(recorder)
    if not recorders:
        importlib.import_module = _real_import_module


def _after_fork() -> None:
    from .engines import engine

    for recorder in recorders:
        recorder.become_child()
        engine().became_child(recorder)


def start_child() -> None:
    """Called by `sitecustomize` in a new process: report to every session that the environment names."""
    for folder in os.environ[VARIABLE].split(os.pathsep):
        if os.path.isfile(os.path.join(folder, "now")):
            start(Recorder(folder, child=True))
