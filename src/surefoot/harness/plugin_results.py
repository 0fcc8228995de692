"""Keeps what tests track: hands out trackers, and writes the results when the session ends.

Owns       the `Results` of this process: the main one writes the files, an xdist worker only journals.
Promises   a worker that crashes loses nothing it tracked; a results file that cannot be written is never exit 0.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from surefoot.harness.tracker.memory import MemoryMonitor
    from surefoot.harness.tracker.results import Results
    from surefoot.harness.tracker.tracker import Tracker

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
            from surefoot.harness.tracker.results import Results, Session

            if self._is_worker:
                told: dict[str, Any] = self._config.workerinput  # type: ignore[attr-defined]
                self._results = Results(Session.from_text(told[_INPUT]), told["workerid"])
            else:
                args = [str(word) for word in self._config.invocation_params.args]
                self._results = Results(Session.new(self._config.rootpath, self._folder, args))
        return self._results

    def tracker_for(self, test: str, monitor: MemoryMonitor) -> Tracker:
        """A fresh tracker for one test."""
        from surefoot.harness.tracker.tracker import Tracker

        return Tracker(test, self.results().open(), monitor)

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
            except OSError as error:
                self._trouble = f"unit_results.json could not be refreshed: {error}"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the results with the status that the process will really exit with."""
        if self._results is None:
            return
        if self._is_worker:
            self._results.close()
            return
        from surefoot.harness.tracker.about import coverage_of

        cov = self._config.pluginmanager.get_plugin("_cov")
        try:
            self._results.finish(int(session.exitstatus), *coverage_of(cov))
        except OSError as error:
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
