"""Chooses tests: marker groups, shards, the fast form, gates and assets, each with a reason that is printed.

Owns       what a pytest session leaves out, why, and how often.
Promises   nothing leaves the list silently; a run that selected nothing is not a success unless it was allowed.
Never      knows the rules: they are in `selection.py`, `selection.py` and `assets.py`, which do not know pytest.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from surefoot_harness.errors import StorageError

if TYPE_CHECKING:
    from surefoot_harness.assets import Asset
    from surefoot_harness.project import Project
    from surefoot_harness.selection import GroupChoice, MarkerGroup, Proof
    from surefoot_harness.tracker.memory import MemoryMonitor
    from surefoot_harness.tracker.results import Results
    from surefoot_harness.tracker.tracker import MetricTracker


_OUTPUT = "surefoot_left_out"
_NO_ASSET = "no asset: "


class Declared(NamedTuple):
    """A project's `[tool.surefoot]` table, read and checked."""

    project: Project
    groups: dict[str, MarkerGroup]
    slow_tests: tuple[str, ...]
    shards: dict[str, tuple[str, ...]]
    assets: dict[str, Asset]


def declared_in(file: Path) -> Declared | None:
    """What a pyproject.toml declares, or None; a malformed declaration is a usage error."""
    from surefoot_harness.errors import ConfigError
    from surefoot_harness.project import read_project

    try:
        project = read_project(file)
        if project is None:
            return None
        from surefoot_harness.assets import read_assets
        from surefoot_harness.selection import read_folders, read_groups

        return Declared(
            project, read_groups(project), project.words("slow_tests"), read_folders(project), read_assets(project)
        )
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error


class Selection:
    """The hooks of one pytest process."""

    def __init__(self, config: pytest.Config, declared: Declared | None) -> None:
        self._config, self._declared = config, declared
        self._left_out: Counter[str] = Counter()
        self._proof: Proof | None = None
        self._ran = self._held_back = 0
        self._asset_trouble: dict[str, str | None] = {}
        self._lacking: dict[str, str | None] = {}
        self._refused: dict[str, str] = {}
        self._asked: GroupChoice | None = None
        self._check_options()

    # -- what was asked for ---------------------------------------------------------

    def _option(self, name: str) -> Any:
        return self._config.getoption(f"surefoot_{name}", None)

    def _check_options(self) -> None:
        """Refuse a wish that cannot be fulfilled before anything is collected."""
        if self._declared is None and not self._option("shard") and not self._option("prove_shards"):
            return
        from surefoot_harness.errors import ConfigError

        try:
            self._asked = self._ask()
            if self._option("shard"):
                from surefoot_harness.selection import shard

                shard(self._option("shard"), self._folders)
        except ConfigError as error:
            raise pytest.UsageError(str(error)) from error
        if self._option("prove_shards") and self._config.getoption("numprocesses", None):
            raise pytest.UsageError("--prove-shards runs no test, so it needs no workers: leave out -n")

    def _ask(self) -> GroupChoice | None:
        if not self._groups:
            return None
        from surefoot_harness.selection import ask

        included = [name for name in self._groups if self._option(f"with_{name}")]
        only = [name for name in self._groups if self._option(f"only_{name}")]
        return ask(included, only, self._groups)

    @property
    def _groups(self) -> dict[str, MarkerGroup]:
        return self._declared.groups if self._declared else {}

    @property
    def _slow(self) -> tuple[str, ...]:
        return self._declared.slow_tests if self._declared else ()

    @property
    def _folders(self) -> dict[str, tuple[str, ...]]:
        return self._declared.shards if self._declared else {}

    # -- choosing -------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        """Ours first, on everything that was collected; then the others; `run_first` last, so that it stays first."""
        self._refuse(items)
        if self._option("prove_shards"):
            self._prove(items)
            yield
            return
        kept = []
        removed = []
        for item in items:
            reason = self._reason_against(item)
            if reason is None:
                kept.append(item)
            else:
                removed.append(item)
                self._left_out[reason] += 1
        if removed:
            items[:] = kept
            self._config.hook.pytest_deselected(items=removed)
        for item in items:
            self._hold_back(item)
        yield
        items.sort(key=lambda item: item.get_closest_marker("run_first") is None)

    def _reason_against(self, item: pytest.Item) -> str | None:
        if self._asked is not None and not self._config.option.markexpr:
            reason = self._asked.reason_against(self._marks(item), self._groups)
            if reason is not None:
                return reason
        if self._option("fast"):
            from surefoot_harness.selection import is_listed

            if any(is_listed(item.nodeid, entry) for entry in self._slow):
                return "listed in slow_tests (--fast)"
        if self._option("shard"):
            from surefoot_harness.selection import shard

            if not shard(self._option("shard"), self._folders)(item.nodeid):
                return f"not in shard {self._option('shard')}"
        return None

    def _marks(self, item: pytest.Item) -> list[str]:
        return [name for name in self._groups if item.get_closest_marker(name)]

    # -- what cannot be right: collection errors --------------------------------------

    def _refuse(self, items: list[pytest.Item]) -> None:
        for item in items[:]:
            problem = self._problem(item)
            if problem:
                items.remove(item)
                self._collection_error(item.nodeid, problem)
        if self._option("fast"):
            for entry in self._unknown_slow(items):
                problem = f"slow_tests lists {entry}, and there is no such test\n  fix: correct or remove the entry"
                self._collection_error(entry, problem)

    def _problem(self, item: pytest.Item) -> str | None:
        for name in self._asset_names(item):
            if name not in self._assets:
                return f"needs the asset {name}, which [tool.surefoot.assets] does not declare"
        if not self._groups or self._config.option.markexpr:
            return None
        from surefoot_harness.selection import conflict

        return conflict(self._marks(item), self._groups)

    def _unknown_slow(self, items: list[pytest.Item]) -> list[str]:
        from surefoot_harness.selection import unknown_entries

        root, given = self._config.rootpath, [word for word in self._config.args if "::" in word]
        named = {(self._config.invocation_params.dir / word.split("::")[0]).resolve() for word in given}
        rerun = bool(self._config.getoption("lf", False))
        ids = [item.nodeid for item in items]
        return unknown_entries(self._slow, ids, root, lambda file: rerun or (root / file).resolve() in named)

    def _collection_error(self, node_id: str, problem: str) -> None:
        report = pytest.CollectReport(node_id, "failed", f"{node_id}: {problem}", [])
        self._config.hook.pytest_collectreport(report=report)

    def _prove(self, items: list[pytest.Item]) -> None:
        from surefoot_harness.errors import ConfigError
        from surefoot_harness.selection import prove

        try:
            self._proof = prove(self._option("prove_shards"), [item.nodeid for item in items], self._folders)
        except ConfigError as error:
            raise pytest.UsageError(str(error)) from error
        for node_id in self._proof.orphans:
            self._collection_error(node_id, "is in no shard, so it would never run")
        for node_id in self._proof.doubles:
            self._collection_error(node_id, "is in more than one shard")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """A proof runs no test."""
        return True if self._proof is not None and not session.testsfailed else None

    # -- gates and assets ---------------------------------------------------------------

    def _hold_back(self, item: pytest.Item) -> None:
        """Skip a test whose token, module, GPUs or asset are not here; in strict mode it fails when its turn comes."""
        for name in self._marks(item):
            missing = self._missing(name)
            if missing:
                self._stop(item, missing, strict=bool(self._option("strict_gates")))
                return
        for name in self._asset_names(item):
            if name not in self._asset_trouble:
                from surefoot_harness.assets import trouble

                self._asset_trouble[name] = trouble(self._assets[name])
            missing = self._asset_trouble[name]
            if missing:
                self._stop(item, _NO_ASSET + missing, strict=bool(self._option("strict_assets")))
                return

    def _missing(self, name: str) -> str | None:
        """What a group lacks here; asked once a session, for the answer may take a process."""
        if name not in self._lacking:
            self._lacking[name] = self._groups[name].missing()
        return self._lacking[name]

    def _stop(self, item: pytest.Item, reason: str, *, strict: bool) -> None:
        if strict:
            self._refused[item.nodeid] = reason
        else:
            item.add_marker(pytest.mark.skip(reason=reason))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Strict mode: what is missing is a failure of the test that needs it."""
        if item.nodeid in self._refused:
            pytest.fail(self._refused[item.nodeid], pytrace=False)

    @property
    def _assets(self) -> dict[str, Asset]:
        return self._declared.assets if self._declared else {}

    def _asset_names(self, item: pytest.Item) -> list[str]:
        return [str(name) for mark in item.iter_markers("needs_asset") for name in mark.args]

    def asset_path(self, name: str) -> Path:
        """The folder of a declared asset."""
        if name not in self._assets:
            raise LookupError(f"[tool.surefoot.assets] declares no {name}; it declares: {', '.join(self._assets)}")
        return self._assets[name].folder

    # -- the end ------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Every xdist worker chose the same tests, so one worker's account is the session's."""
        told = getattr(node, "workeroutput", {}).get(_OUTPUT, {})
        self._left_out = max(self._left_out, Counter(told), key=lambda counts: counts.total())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count tests that ran, and those that were held back by a gate or an asset."""
        if report.when == "call" or report.failed:
            self._ran += 1
        elif report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            self._held_back += reason.startswith(("no token: ", "no module: ", "no GPUs: ", _NO_ASSET))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Nothing selected is not a pass, and neither is a run that held back everything it selected."""
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[_OUTPUT] = dict(self._left_out)
            return
        empty = pytest.ExitCode.NO_TESTS_COLLECTED
        if session.exitstatus == 0 and self._held_back and not self._ran:
            session.exitstatus = empty
        if session.exitstatus == empty and self._option("allow_empty"):
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Each reason for which tests were left out, with their number."""
        say = terminalreporter.write_line
        for reason, count in sorted(self._left_out.items()):
            say(f"surefoot: {count} deselected: {reason}")
        if self._proof is not None:
            say(f"surefoot: {self._proof}")
        if not self._ran and self._proof is None and not self._config.option.collectonly:
            end = "allowed by --allow-empty" if self._option("allow_empty") else "not a pass; see --allow-empty"
            if self._left_out or self._held_back:
                say(f"surefoot: no test ran: {end}")


# -- Keeps what tests track: hands out trackers, and writes the results when the session ends -----
# Owns       the `Results` of this process: the main one writes the files, an xdist worker only journals.
# Promises   a worker that crashes loses nothing it tracked; a results file that cannot be written is never exit 0.


_INPUT = "surefoot_session"


class ResultsPlugin:
    """The hooks of one pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._results: Results | None = None
        self._trouble: str | None = None

    @property
    def _is_worker(self) -> bool:
        return hasattr(self._config, "workerinput")

    @property
    def _folder(self) -> Path:
        return self._config.rootpath / str(self._config.getini("surefoot_results_dir") or "")

    def results(self) -> Results:
        """The results of this session, made on first use."""
        if self._results is None:
            from surefoot_harness.tracker.results import Results, TrackedSession

            if self._is_worker:
                told: dict[str, Any] = self._config.workerinput  # type: ignore[attr-defined]
                self._results = Results(TrackedSession.from_text(told[_INPUT]), told["workerid"])
            else:
                args = [str(word) for word in self._config.invocation_params.args]
                self._results = Results(TrackedSession.new(self._config.rootpath, self._folder, args))
        return self._results

    def tracker_for(self, test: str, monitor: MemoryMonitor) -> MetricTracker:
        """A fresh tracker for one test."""
        from surefoot_harness.tracker.tracker import MetricTracker

        return MetricTracker(test, self.results().open(), monitor)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell an xdist worker which session it belongs to."""
        node.workerinput[_INPUT] = self.results().session.as_text()

    def pytest_sessionstart(self) -> None:
        """An old result must not outlive the start of a new session."""
        wanted = bool(self._config.option.surefoot_unit_results)
        looks_only = self._config.option.collectonly or self._config.getoption("surefoot_prove_shards", None)
        if self._is_worker or looks_only:
            return  # a session that runs no test leaves the last result as it is
        folder = os.fspath(self._folder)
        used = any(
            os.path.exists(os.path.join(folder, name)) for name in ("unit_results.json", ".unit_results_journal")
        )
        if wanted or used:
            self.results().begin(wanted=wanted)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After each test, whichever process ran it."""
        if report.when == "teardown" and self._results is not None and not self._is_worker:
            try:
                self._results.refresh()
            except (OSError, StorageError) as error:
                self._trouble = f"unit_results.json could not be refreshed: {error}"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the results with the status that the process will really exit with."""
        if self._results is None:
            return
        if self._is_worker:
            self._results.close()
            return
        from surefoot_harness.tracker.results import coverage_of

        cov = self._config.pluginmanager.get_plugin("_cov")
        try:
            self._results.finish(int(session.exitstatus), *coverage_of(cov))
        except (OSError, StorageError) as error:
            self._trouble = f"unit_results.json could not be written: {error}"
            if int(session.exitstatus) == 0:
                session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say where the numbers went, and what was odd."""
        notes = list(self._results.notes) if self._results is not None else []
        if self._results is not None and self._results.written:
            notes.insert(0, f"results: {' and '.join(self._results.written)} in {self._results.session.folder}")
        for note in [*notes, *([self._trouble] if self._trouble else [])]:
            terminalreporter.write_line(f"surefoot: {note}")
