"""The pytest plugin: options, markers and fixtures. Everything else is loaded when it is needed.

Owns       the names that a test author sees: `tracker`, `memory_monitor`, `distributed_runner`, `asset_path`,
           the markers `run_first` and `needs_asset`, and the options.
Promises   loading it imports nothing but pytest; a project that uses none of it gets no file and no subprocess.
Never      decides anything itself: `plugin_hooks.py` chooses tests, `plugin_hooks.py` keeps their numbers.

pytest loads plugins of installed packages in every session, so this file has to be cheap.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from surefoot_harness.distributed import DistributedRunner
    from surefoot_harness.plugin_hooks import Declared
    from surefoot_harness.tracker.memory import MemoryMonitor
    from surefoot_harness.tracker.tracker import MetricTracker

SELECTION, RESULTS = "surefoot-selection", "surefoot-results"
_DECLARED: pytest.StashKey[Declared | None] = pytest.StashKey()

_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--unit-results", {"action": "store_true", "help": "write unit_results.json even if no test uses `tracker`"}),
    ("--strict-gates", {"action": "store_true", "help": "a gated test without its token fails instead of skipping"}),
    ("--strict-assets", {"action": "store_true", "help": "a test without its asset fails instead of skipping"}),
    ("--allow-empty", {"action": "store_true", "help": "exit 0 although no test was selected"}),
    ("--shard", {"metavar": "I/N|NAME", "help": "run part I of N, or the folders of [tool.surefoot.shards] NAME"}),
    ("--prove-shards", {"metavar": "N|named", "help": "run nothing; prove that each test is in exactly one shard"}),
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Options of ours, and two for each marker group that the project declares."""
    group = parser.getgroup("surefoot", "surefoot: selection and results")
    for flag, settings in _OPTIONS:
        group.addoption(flag, dest="surefoot_" + flag[2:].replace("-", "_"), **settings)
    parser.addini("surefoot_results_dir", "folder of unit_results.json, relative to the root folder", default="")
    _add_affected(group)
    config = pluginmanager.get_plugin("pytestconfig")
    if config is not None:
        config.stash[_DECLARED] = _declared(config)
        _add_declared(group, config.stash[_DECLARED])


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Affected-test selection starts to record before the first conftest.py is imported."""
    from surefoot_harness.affected import options

    options.start_early(early_config.known_args_namespace, str(early_config.rootpath))


def pytest_configure(config: pytest.Config) -> None:
    """Register markers, the selection and the results."""
    from surefoot_harness.affected.options import MARKER
    from surefoot_harness.own_command import own_name
    from surefoot_harness.plugin_hooks import ResultsPlugin, Selection

    config.addinivalue_line("markers", "run_first: run before the tests that do not have this mark")
    config.addinivalue_line("markers", f"needs_asset(name): needs an asset built by `{own_name()} assets build NAME`")
    config.addinivalue_line("markers", MARKER)
    declared = config.stash.get(_DECLARED, None)
    for group in declared.groups.values() if declared else ():
        config.addinivalue_line("markers", f"{group.name}: {group.description or 'group of ' + group.flag}")
    config.pluginmanager.register(Selection(config, declared), SELECTION)
    config.pluginmanager.register(ResultsPlugin(config), RESULTS)
    if config.getoption("affected", False) or config.getoption("affected_why", None):
        from surefoot_harness.affected import hooks

        hooks.register(config)


@pytest.fixture(scope="session")
def memory_monitor() -> MemoryMonitor:
    """Who is asked for device memory; override it to bring your own (an object with `read()`)."""
    from surefoot_harness.tracker.memory import DefaultMonitor

    return DefaultMonitor()


@pytest.fixture
def tracker(request: pytest.FixtureRequest, memory_monitor: MemoryMonitor) -> Iterator[MetricTracker]:
    """Record numbers of this test: `tracker.track("loss", 0.5)`. They end up in unit_results.json."""
    found: MetricTracker = _part(request.config, RESULTS).tracker_for(request.node.nodeid, memory_monitor)
    yield found
    found.close()


@pytest.fixture
def distributed_runner(tmp_path: Path) -> Iterator[DistributedRunner]:
    """Run one program as several ranks: `distributed_runner(work, world_size=2, timeout=60)`."""
    from surefoot_harness.distributed import DistributedRunner

    runner = DistributedRunner(tmp_path, on_missing_devices=pytest.skip)
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def asset_path(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Where a built asset lies: `asset_path("tiny_model")`."""
    find: Callable[[str], Path] = _part(pytestconfig, SELECTION).asset_path
    return find


def _part(config: pytest.Config, name: str) -> Any:
    return config.pluginmanager.get_plugin(name)


def _add_affected(group: pytest.OptionGroup) -> None:
    from surefoot_harness.affected import options

    options.add_options(group)


def _declared(config: pytest.Config) -> Declared | None:
    """What the project's pyproject.toml says; None, at the price of one look per folder, when it says nothing."""
    root, start = config.rootpath, config.invocation_params.dir
    for folder in dict.fromkeys((root, start, *start.parents)):
        if os.path.isfile(folder / "pyproject.toml"):
            from surefoot_harness.plugin_hooks import declared_in

            found = declared_in(folder / "pyproject.toml")
            if found is not None:
                return found
    return None


def _add_declared(group: pytest.OptionGroup, declared: Declared | None) -> None:
    """Options that only a project with declarations has: common words such as --fast belong to others elsewhere."""
    if declared is None:
        return
    if declared.slow_tests:
        what = "leave out the tests listed in [tool.surefoot] slow_tests"
        group.addoption("--fast", action="store_true", dest="surefoot_fast", help=what)
    for found in declared.groups.values():
        also = f"run the tests marked {found.name} too" + (f": {found.description}" if found.description else "")
        only = f"run only the tests marked {found.name}"
        try:
            group.addoption(found.flag, action="store_true", dest=f"surefoot_with_{found.name}", help=also)
            group.addoption(found.only_flag, action="store_true", dest=f"surefoot_only_{found.name}", help=only)
        except (ValueError, argparse.ArgumentError) as error:
            raise pytest.UsageError(f"[tool.surefoot.groups.{found.name}] cannot have its options: {error}") from error
