"""The command-line options of affected-test selection. Every pytest session loads it, so it imports next to nothing."""

from __future__ import annotations

import argparse
import importlib.util
import os
from typing import Any

MARKER = "depends_on(glob, ...): files that the test depends on beyond what can be seen; for `pytest --affected`"


TESTMON_NOTE = (
    "affected: --testmon means --affected here: pytest-testmon is not installed, its .testmondata is not read"
)


class _AsAffected(argparse.Action):
    """`--testmon`, the spelling that other projects know: the same as `--affected`, and that it was spelled so."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.affected = namespace.affected_testmon = True


def has_testmon() -> bool:
    """Whether pytest-testmon is installed: then `--testmon` is its own, and stays so."""
    return importlib.util.find_spec("testmon") is not None


def add_options(group: Any) -> None:
    """Add `--affected` and its companions to a pytest option group."""
    if not has_testmon():
        group.addoption(
            "--testmon",
            action=_AsAffected,
            nargs=0,
            dest="affected_testmon",
            default=False,
            help="the same as --affected, where pytest-testmon is not installed",
        )
    group.addoption(
        "--affected",
        action="store_true",
        dest="affected",
        default=False,
        help="run only the tests whose outcome could have changed since they last passed",
    )
    group.addoption(
        "--why",
        metavar="TEST",
        dest="affected_why",
        default=None,
        help="say whether --affected would run TEST, and for which reasons; runs nothing",
    )
    group.addoption(
        "--affected-audit",
        metavar="N",
        dest="affected_audit",
        type=int,
        default=0,
        help="with --affected: also run N unaffected tests, chosen at random; one that fails is a miss",
    )


def wanted(options: Any) -> bool:
    """Whether a parsed set of options asks for this part at all."""
    return bool(getattr(options, "affected", False) or getattr(options, "affected_why", None))


def start_early(options: Any, root: str) -> None:
    """Start recording before the first conftest.py is imported, so that what an import runs is seen as well.

    Called from the plugin's `pytest_load_initial_conftests`; when it is not called, modules that were imported before
    `register` are judged by reading them instead.
    """
    controller = getattr(options, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if getattr(options, "affected", False) and not getattr(options, "affected_why", None) and not controller:
        from surefoot_harness.affected.session import start_recording

        start_recording(root)
