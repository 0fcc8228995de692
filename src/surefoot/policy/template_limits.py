"""How long and how large a chat template may get: it comes with a model folder, so it is a stranger's program.

Owns       the limits on one rendering: processor time, memory, and the text that comes out; and where it is rendered.
Promises   a template that loops, swells or reaches for what it may not have ends as a `ModelError`, in every thread.
Never      judges what a template says; `chat.py` does.

transformers renders in jinja2's sandbox, which keeps files and Python's insides away. The sandbox counts
neither time nor memory, so that is done here. Processor time and not the clock: a busy machine, or one that
slept, is no fault of the template. A plain template on the main thread is rendered there, and a timer ends it between
two of its steps. Signals reach the main thread only, and no signal ends a step that lasts: everything else is rendered
in a process that can be ended. The memory limit needs Linux.

Read next: `template_kinds.py`, what is plain; `template_process.py`, the process.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from surefoot.errors import ModelError
from surefoot.policy.template_kinds import is_plain
from surefoot.policy.template_process import OutOfTimeError, RenderError, Rendering, render_elsewhere

CPU_SECONDS = 5.0
MEMORY_BYTES = 512 * 2**20
EXTRA_CHARACTERS = 2**20
"""What a template may add to the messages it was given."""


def render_within_limits(render: Callable[[], str], given: int, asked: Callable[[], Rendering]) -> str:
    """The text of one rendering of `given` characters of messages; whatever goes wrong becomes a `ModelError`.

    Args:
        render: does it here.
        asked: what it takes to do the same elsewhere.
    """
    try:
        text = _rendered(render, given, asked())
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


def _rendered(render: Callable[[], str], given: int, asked: Rendering) -> str:
    if threading.current_thread() is threading.main_thread():
        with limited():
            if is_plain(asked.template):
                return render()
    most = given + EXTRA_CHARACTERS
    return render_elsewhere(asked, cpu_s=CPU_SECONDS, memory_bytes=MEMORY_BYTES, most=most)


@contextmanager
def limited() -> Iterator[None]:
    """Inside this, on the main thread, a loop ends when its time or its memory is used up."""
    with _limited_time(), _limited_memory():
        yield


def _in_words(error: Exception) -> str:
    if isinstance(error, RenderError):
        return str(error)
    if isinstance(error, OutOfTimeError):
        return f"it was not done after {CPU_SECONDS:g} s of processor time"
    if isinstance(error, MemoryError):
        return f"it took more than {MEMORY_BYTES // 2**20} MiB"
    return f"{type(error).__name__}: {error}"[:500]


@contextmanager
def _limited_time() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise OutOfTimeError

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
