"""What holds for every test: no network, no hub, no GPU by accident, and skips that are counted.

Nothing here imports torch: a test that does not need it should not wait for it.
"""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["GOMP_SPINCOUNT"] = "0"  # a thread that waits for its siblings sleeps: others need the core
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # two workers on two cores; a test that needs threads sets them itself

# A shell that starts us in the background has SIGINT ignored, and our children would inherit that: no test that
# interrupts one would ever end.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

NEEDS_GPU = "needs a CUDA GPU, none is visible"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=NEEDS_GPU))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests were skipped for which reason: a skip that nobody sees is a test that nobody has."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ") or "no reason given"] += 1
    for reason, number in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {number}: {reason}")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """Refuse to leave the machine. Loopback and Unix sockets work: servers under test live there."""
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        internet = self.family in (socket.AF_INET, socket.AF_INET6)
        if internet and address[0] not in ("localhost", "::1") and not str(address[0]).startswith("127."):
            raise OSError(f"tests do not use the network, and this one asked for {address}")
        real(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect)
        yield
