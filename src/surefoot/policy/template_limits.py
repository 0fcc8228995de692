"""How long and how large a chat template may get: it comes with a model folder, so it is a stranger's program.

Owns       the limits on one rendering: processor time, memory, and the text that comes out.
Promises   a template that loops, swells or reaches for what it may not have ends as a `ModelError`.
Never      judges what a template says; `chat.py` does.

transformers renders in jinja2's sandbox, which keeps files and Python's insides away. The sandbox counts
neither time nor memory, so that is done here. Processor time and not the clock: a busy machine, or one that
slept, is no fault of the template. The time limit needs the main thread, the memory limit Linux.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from surefoot.errors import ModelError

CPU_SECONDS = 5.0
MEMORY_BYTES = 512 * 2**20
EXTRA_CHARACTERS = 2**20
"""What a template may add to the messages it was given."""


class _OutOfTimeError(Exception):
    """Raised inside the template when its time is up."""


def render_within_limits(render: Callable[[], str], given: int) -> str:
    """The text of one rendering of `given` characters of messages; whatever goes wrong becomes a `ModelError`."""
    try:
        with _limited_time(), _limited_memory():
            text = render()
    except Exception as error:
        raise ModelError(
            f"the chat template cannot be rendered: {_in_words(error)}",
            "what cannot be rendered cannot be asked",
            "mend chat_template.jinja, or use messages that it knows",
        ) from error
    if len(text) > given + EXTRA_CHARACTERS:
        raise ModelError(
            f"the chat template made {len(text):,} characters of {given:,}",
            f"a template adds headers, not more than {EXTRA_CHARACTERS:,} characters",
            "mend chat_template.jinja",
        )
    return text


def _in_words(error: Exception) -> str:
    if isinstance(error, _OutOfTimeError):
        return f"it was not done after {CPU_SECONDS:g} s of processor time"
    if isinstance(error, MemoryError):
        return f"it took more than {MEMORY_BYTES // 2**20} MiB"
    return f"{type(error).__name__}: {error}"[:500]


@contextmanager
def _limited_time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def stop(*_: object) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, stop)
    # Again every second, should a helper of the template swallow the first one.
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _limited_memory() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/statm", "rb") as file:
        now = int(file.read().split()[5]) * resource.getpagesize()
    limits = [each for each in (soft, hard, now + MEMORY_BYTES) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
