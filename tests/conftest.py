"""What holds for every test: no network, no hub, no GPU by accident, and skips that are counted.

Nothing here imports torch: a test that does not need it should not wait for it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import zlib
from collections import Counter
from collections.abc import Iterator
from datetime import date
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

TIMES = Path(__file__).with_name("times.json")
CYCLE = 10
ANY = range(CYCLE)
EVERY = ((2.0, 10), (0.7, 5), (0.5, 2))
"""A test of so many seconds runs every n-th day."""
NEEDS_GPU = "needs a CUDA GPU, none is visible"
TURN = "SUREFOOT_TEST_TURN"
os.environ.setdefault(TURN, str(date.today().toordinal()))  # before the workers start: they all take the same turn


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="K/N", help="of N slices of the tests, by their names, only the K-th")


def pytest_configure() -> None:
    """A machine that others use too is slow at times; that says nothing about the code, and no test is timed here."""
    from hypothesis import HealthCheck, settings

    settings.register_profile("surefoot", suppress_health_check=[HealthCheck.too_slow], deadline=None)
    settings.load_profile("surefoot")


def pytest_report_header() -> str:
    return f"families of tests that take turns: {TURN}={os.environ[TURN]} repeats today's"


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _refuse_names_that_change(items)
    _take_turns(items, int(os.environ[TURN]))
    if (asked := config.getoption("--slice")) is not None:
        _only_slice(config, items, *(int(word) for word in asked.split("/")))
    if "PYTEST_XDIST_WORKER" in os.environ:
        _longest_file_first(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=NEEDS_GPU))


def _refuse_names_that_change(items: list[pytest.Item]) -> None:
    """A name made of a set differs from process to process, and two workers then refuse to start: nobody sees which."""
    for item in items:
        values = (
            item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        )
        if any(isinstance(value, set | frozenset) and len(value) > 1 and str(value) in item.name for value in values):
            raise pytest.UsageError(f"{item.nodeid} is named after a set, whose order changes: give it an id")


def _only_slice(config: pytest.Config, items: list[pytest.Item], number: int, of: int) -> None:
    """Leave the others out. A name alone decides, so a test that is added moves no other into another slice."""
    others = [item for item in items if zlib.crc32(item.name.encode()) % of != number - 1]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in set(others)]


def _take_turns(items: list[pytest.Item], turn: int) -> None:
    """Who belongs to this day and who to the night.

    Of a family marked `turns(n)` every n-th test belongs to the day, beginning elsewhere each day. `turns(n, k)` parts
    several long tests, so that they do not meet on one day; with `together=True` all of a family come on the same day,
    because they look at one long training, which any of them would have to pay for. Any other test that took long when
    it was last measured (`tests/times.json`) comes every second, fifth or tenth day; `every_day` says that this one may
    not wait. A test that was never measured runs.
    """
    seen: Counter[str] = Counter()
    measured = days_of(recorded_times())
    for item in items:
        if (mark := item.get_closest_marker("turns")) is not None:
            family = item.nodeid.partition("[")[0]
            seen[family] += 1
            n, *first = mark.args
            number = 1 if mark.kwargs.get("together") else seen[family]
            waits = (number + turn + sum(first)) % n != 0
        else:
            waits = turn % CYCLE not in measured.get(_name(item), ANY) and not item.get_closest_marker("every_day")
        if item.get_closest_marker("turns") or item.get_closest_marker("every_day"):
            item.user_properties.append(("tier", "marked"))  # its time does not decide: see scripts/slow_tests.py
        if waits:
            item.add_marker(pytest.mark.nightly)


def _name(item: pytest.Item) -> str:
    """As it stands in `times.json`: the file as seen from here, and the test."""
    inside = item.path.is_relative_to(TIMES.parent)
    return f"{item.path.relative_to(TIMES.parent).as_posix()}::{item.name}" if inside else ""


def _longest_file_first(items: list[pytest.Item]) -> None:
    """With whole files for each worker, a long one begun last would leave a core idle for minutes."""
    length: Counter[Path] = Counter()
    for test, seconds in recorded_times().items():
        length[TIMES.parent / test.partition("::")[0]] += round(seconds)
    items.sort(key=lambda item: -length[item.path])


def recorded_times(file: Path = TIMES) -> dict[str, float]:
    """Seconds of every long test, as `scripts/slow_tests.py` wrote them down."""
    return json.loads(file.read_text(encoding="utf-8"))["long"] if file.exists() else {}


def days_of(times: dict[str, float]) -> dict[str, range]:
    """On which days of a cycle each of these tests runs: the longest first, each where its days are emptiest so far."""
    load = [0.0] * CYCLE
    days = {}
    for test, seconds in sorted(times.items(), key=lambda pair: (-pair[1], pair[0])):
        every = next((n for least, n in EVERY if seconds >= least), 1)
        choices = [range(first, CYCLE, every) for first in range(every)]
        days[test] = min(choices, key=lambda choice: sum(load[day] for day in choice))
        for day in days[test]:
            load[day] += seconds
    return days


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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one thread for this test."""
    from one_thread import one_torch_thread  # not above: this file is also copied into projects that have no `support`

    with one_torch_thread():
        yield


@pytest.fixture(scope="session")
def bfloat16_products() -> None:
    """Skips where the CPU says that it multiplies in bfloat16 and dies of it, as some virtual machines do."""
    child = os.fork()  # a process that may die; it has torch loaded already
    if child == 0:
        import torch

        torch.set_num_threads(1)
        square = torch.ones(64, 64, dtype=torch.bfloat16)
        os._exit(0 if float((square @ square).sum()) == 64**3 else 1)
    if os.waitpid(child, 0)[1] != 0:
        pytest.skip("this CPU cannot multiply in bfloat16")
