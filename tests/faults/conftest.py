"""Shared by the tests that start, kill and resume real runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kill_kit import Warm
from kill_runs import Bench


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """One fork server for all tests of this process, started by the first that asks."""
    server = Warm(tmp_path_factory.mktemp("warm"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def bench(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Runs of the cases in `kill_runs`, and what an uninterrupted one leaves."""
    return Bench(warm, tmp_path_factory.mktemp("runs"))
