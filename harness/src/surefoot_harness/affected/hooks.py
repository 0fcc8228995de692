"""The pytest side: choose after collection, record while tests run, remember when they end.

Read next: `select.py` for the rules, `session.py` for the recording.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import random
import sys
import time
import tomllib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from surefoot_harness.affected.options import MARKER, TESTMON_NOTE
from surefoot_harness.affected.records import ObservedUse, ProjectView, load, save, sort_out
from surefoot_harness.affected.remember import (
    FinishedTest,
    OutsideTests,
    SessionReport,
    StateBuilder,
    dump_report,
    load_report,
    merge_reports,
)
from surefoot_harness.affected.select import Choice, Judge, choose, explain, find_test, nearest
from surefoot_harness.affected.session import OUTSIDE, start_recording
from surefoot_harness.affected.tree import Tree, environment
from surefoot_harness.errors import ConfigError

# -- What a project declares for affected-test selection: `[tool.surefoot.affected]` in pyproject.toml


def read_extra(root: Path) -> dict[str, list[str]]:
    """Pattern of tests to globs of files; a malformed table is refused, since ignoring it would lose dependencies."""
    try:
        text = (root / "pyproject.toml").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        tool = tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise _refused(f"pyproject.toml is not TOML: {error}") from error
    table = tool.get("surefoot", {}).get("affected", {})
    unknown = set(table) - {"extra"}
    if unknown:
        raise _refused(f"unknown key tool.surefoot.affected.{min(unknown)}; the only one is extra")
    extra = table.get("extra", {})
    for pattern, globs in extra.items():
        if not isinstance(globs, list) or not all(isinstance(each, str) for each in globs):
            raise _refused(f"tool.surefoot.affected.extra[{pattern!r}] is not a list of globs")
    return dict(extra)


def _refused(what: str) -> ConfigError:
    return ConfigError(what, "a dependency that is not understood would be ignored", 'see "Declare the rest" in docs')


def globs_for(test: str, extra: dict[str, list[str]]) -> list[str]:
    """The globs declared for a node id."""
    path = test.partition("::")[0]
    return [
        glob
        for pattern, globs in extra.items()
        if fnmatch.fnmatchcase(test, pattern) or fnmatch.fnmatchcase(path, pattern)
        for glob in globs
    ]


# -- The pytest side: choose after collection, record while tests run, remember when they end -----


NAME = "surefoot-affected"
_CHANNEL = "surefoot_affected"


def register(config: pytest.Config) -> None:
    """Take part in this session: as the process that runs tests, or as the controller of those that do."""
    if config.pluginmanager.has_plugin(NAME):
        return
    config.addinivalue_line("markers", MARKER)
    shared = _is_controller(config)
    if shared and config.getoption("affected_why"):
        raise pytest.UsageError("--why explains one test and runs none: leave -n out")
    try:
        plugin = Controller(config) if shared else Affected(config)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error
    config.pluginmanager.register(plugin, NAME)


def _is_controller(config: pytest.Config) -> bool:
    if hasattr(config, "workerinput"):
        return False
    return bool(config.getoption("numprocesses", None) or config.getoption("tx", None))


class _Base:
    """What both kinds share: the state before, the project as it is, and the line at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.root = config, config.rootpath.resolve()
        self.started = time.time()
        self.environment = environment()
        self.state, self.notice = load(self.root)
        self.tree = Tree(self.root, self.state.known())
        self.view = ProjectView(self.tree, self.state.roots, self.state.edges)
        self.judge = Judge(self.state, self.view, self.environment)
        self.report = SessionReport()

    def remember(self) -> None:
        """Write the next state."""
        self.report.outside.started = self.started
        memory = StateBuilder(self.state, self.view, self.environment, self.report.outside)
        save(self.root, memory.learn(self.report.ran, self.judge, self.report.gone))

    def settle(self, session: pytest.Session) -> None:
        """Nothing to do after green is a pass; a filter of the user's that matches nothing is not."""
        nothing_to_do = self.report.offered > 0 and self.report.chosen == 0
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and nothing_to_do:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how many tests were chosen out of how many, and what was odd."""
        note = TESTMON_NOTE if self.config.getoption("affected_testmon", False) else None
        lines = [note, self.notice, *self.report.notices, *self._count()]
        for line in filter(None, lines):
            terminalreporter.write_line(line)

    def _count(self) -> list[str]:
        if not self.report.collected:
            return []
        left = self.report.offered - self.report.chosen
        moved = f" ({self.judge.moved})" if self.judge.moved else "" if self.state.tests else " (first run)"
        return [f"affected: {self.report.chosen} of {self.report.offered} tests affected{moved}, {left} left out"]


class Affected(_Base):
    """The process that collects and runs tests: plain pytest, or one xdist worker."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self.extra = read_extra(self.root)
        self.why: str | None = config.getoption("affected_why")
        self.explained: list[str] = []
        self.numbers: dict[str, int] = {}
        self.outcomes: dict[str, FinishedTest] = {}
        self.fixtures: dict[int, tuple[Any, list[int]]] = {}
        self.used: dict[str, set[int]] = {}
        self.choice: Choice | None = None
        self.next_number = OUTSIDE
        self.recording = None if self.why else start_recording(self.root)
        if self.recording:
            self.recording.begin(OUTSIDE)

    # -- choose -----------------------------------------------------------------------
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> Generator[None, object, object]:
        """See every test before other filters, choose among what they leave."""
        self.report.collected = [item.nodeid for item in items]
        complete = not session.testsfailed and not any("::" in word for word in self.config.args)
        files = {item.nodeid.partition("::")[0] for item in items} if complete else set()
        here = set(self.report.collected)
        self.report.gone = [
            test
            for test in self.state.tests
            if test not in here
            and (test.partition("::")[0] in files or not (self.root / test.partition("::")[0]).exists())
        ]
        result = yield
        if self.why:
            self.explained = self._explain(self.why)
            items.clear()
        else:
            self._choose(items)
        return result

    def _choose(self, items: list[pytest.Item]) -> None:
        uid = getattr(self.config, "workerinput", {}).get("testrunuid")
        dice = random.Random(uid) if uid else random.Random()
        audit = self.config.getoption("affected_audit", 0)
        self.choice = choose(items, self.judge, self.config, audit, dice)
        self.report.offered = len(items)
        self.report.chosen = len(self.choice.affected)
        if self.choice.left_out:
            self.config.hook.pytest_deselected(items=self.choice.left_out)
        items[:] = self.choice.to_run

    def _explain(self, wanted: str) -> list[str]:
        tests = find_test(wanted, self.report.collected)
        if not tests:
            raise pytest.UsageError(f"--why: no test {wanted!r}; {nearest(wanted, self.report.collected)}")
        return [line for test in tests for line in explain(self.judge, test)]

    # -- record -----------------------------------------------------------------------
    def _number(self) -> int:
        self.next_number += 1
        return self.next_number

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Everything between here and the end of teardown belongs to `item`."""
        if self.recording is None:
            return (yield)
        number = self.numbers.setdefault(item.nodeid, self._number())
        self.outcomes[item.nodeid] = self._fresh(item)
        start = time.perf_counter()
        self.recording.begin(number)
        try:
            return (yield)
        finally:
            self.recording.end()
            self.outcomes[item.nodeid].seconds = time.perf_counter() - start

    def _fresh(self, item: pytest.Item) -> FinishedTest:
        path = _relative(item.path, self.root)
        folders = [Path(path).parent, *Path(path).parent.parents]
        conftests = [(folder / "conftest.py").as_posix() for folder in folders]
        globs = [str(word) for mark in item.iter_markers("depends_on") for word in mark.args]
        known = [each for each in conftests if each in self.tree.blocks]
        return FinishedTest("unfinished", path, known, globs + globs_for(item.nodeid, self.extra))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
        """Keep the worst of the three phases, and which wider fixtures the test has."""
        report = yield
        one = self.outcomes.get(item.nodeid)
        if one is not None:
            ranks = ["unfinished", "passed", "skipped", "failed"]
            one.outcome = max(one.outcome, report.outcome, key=ranks.index)
            if report.when == "teardown" and one.outcome == "unfinished":
                one.outcome = "failed"
        self.used.setdefault(item.nodeid, set()).update(map(id, _fixture_definitions(item)))
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """What a wider fixture runs belongs to every test that uses it, not to the first alone."""
        if self.recording is None or fixturedef.scope == "function":
            return (yield)
        before, number = self.recording.recorder.label, self._number()
        self.fixtures.setdefault(id(fixturedef), (fixturedef, []))[1].append(number)
        self.recording.begin(number)
        try:
            return (yield)
        finally:
            self.recording.begin(before)

    # -- remember ---------------------------------------------------------------------
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Store what ended well; in an xdist worker, hand it to the controller."""
        result = yield
        if self.recording is None:
            session.exitstatus = pytest.ExitCode.OK if self.explained else session.exitstatus
            return result
        self._gather()
        self.recording.stop()
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[_CHANNEL] = dump_report(self.report)
        elif not self.config.getoption("collectonly") and session.exitstatus != pytest.ExitCode.INTERNAL_ERROR:
            self.remember()
            self.settle(session)
        return result

    def _gather(self) -> None:
        if self.recording is None:
            return
        evidence = sort_out(self.recording.collect())
        for test, one in self.outcomes.items():
            if one.outcome == "unfinished":
                continue  # interrupted: whatever was known before stays
            one.evidence = evidence.get(self.numbers[test], ObservedUse())
            for name in self.used.get(test, ()):
                for number in self.fixtures[name][1] if name in self.fixtures else ():
                    one.evidence.add(evidence.get(number, ObservedUse()))
            self.report.ran[test] = one
        self.report.outside = OutsideTests(
            evidence.get(OUTSIDE, ObservedUse()), _early_files(self.recording.early, self.root), _roots(self.root)
        )
        self.report.notices += self._missed()

    def _missed(self) -> list[str]:
        audited = {item.nodeid for item in self.choice.audited} if self.choice else set()
        failed = [test for test in sorted(audited) if test in self.outcomes and self.outcomes[test].outcome == "failed"]
        lines = [f"MISSED: {test} failed although nothing it is known to depend on changed" for test in failed]
        return [*lines, f"affected: {len(audited)} unaffected test(s) audited, {len(failed)} missed"] if audited else []

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The explanation when one was asked for, otherwise the count."""
        if self.why:
            for line in filter(None, [self.notice, *self.explained]):
                terminalreporter.write_line(line)
        else:
            super().pytest_terminal_summary(terminalreporter)


class Controller(_Base):
    """The xdist controller: runs nothing itself, keeps what its workers report."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self.parts: list[SessionReport] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker that died says nothing, so its tests stay as they were."""
        text = getattr(node, "workeroutput", {}).get(_CHANNEL)
        if text:
            self.parts.append(load_report(text))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Merge and store."""
        result = yield
        self.report = merge_reports(self.parts)
        if self.parts and session.exitstatus != pytest.ExitCode.INTERNAL_ERROR:
            self.remember()
            self.settle(session)
        return result


@functools.lru_cache(maxsize=4096)  # asked once a test, and most tests share their file
def _relative(path: Path, root: Path) -> str:
    return Path(os.path.relpath(path.resolve(), root)).as_posix()


def _fixture_definitions(item: pytest.Item) -> list[Any]:
    """Definitions of all fixtures that a test has or asked for; those asked for by name at run time included."""
    info = getattr(item, "_fixtureinfo", None)
    found = [each for many in getattr(info, "name2fixturedefs", {}).values() for each in many]
    request = getattr(item, "_request", None)
    return found + list(getattr(request, "_fixture_defs", {}).values()) if request else found


def _early_files(names: set[str], root: Path) -> set[str]:
    places = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    inside = [place for place in places if isinstance(place, str) and _may_lie_in(place, str(root))]
    return {_relative(Path(place), root) for place in inside if Path(place).resolve().is_relative_to(root)}


def _may_lie_in(place: str, root: str) -> bool:
    """Cheap enough for every loaded module: a folder is resolved once, a file only when it is a link itself."""
    return os.path.islink(place) or _real_folder(os.path.dirname(place)).startswith(root)


_real_folder = functools.lru_cache(maxsize=4096)(os.path.realpath)


def _roots(root: Path) -> set[str]:
    places = [Path(place or ".").resolve() for place in sys.path]
    inside = {_relative(place, root) for place in places if place.is_relative_to(root)}
    return {"" if place == "." else place for place in inside}
