"""Chat templates in a process that can be ended: off the main thread, and whenever one step may last."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ModelError
from surefoot.learner import rendering as template_limits
from surefoot.learner import rendering as template_process
from surefoot.learner.rendering import Rendering, render_within_limits

AMPLE_S = 300.0
HELLO = "{% for m in messages %}{{ bos_token }}{{ m['content'] }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ONE_STEP = "{{ 9 ** (9 ** 9) }}"
"""Hours of one multiplication after the other, inside a single step."""


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert len(template_process._children) <= 1


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    template_process._end_all()


def rendering(template: str, content: str = "hi") -> Rendering:
    return Rendering(template, [{"role": "user", "content": content}], None, True, {"bos_token": "<s>"})


def render(template: str, content: str = "hi", here: Callable[[], str] = lambda: "rendered here") -> str:
    return render_within_limits(here, len(content), lambda: rendering(template, content))


def in_a_thread(act: Callable[[], str]) -> str:
    """What `act` returns or raises in another thread; a hang is an error."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append(act())
        except Exception as error:
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(AMPLE_S)
    assert done, "it did not end"
    if isinstance(done[0], Exception):
        raise done[0]
    return str(done[0])


def test_off_the_main_thread_a_template_is_rendered_elsewhere_and_on_it_here() -> None:
    assert in_a_thread(lambda: render(HELLO)) == "<s>hi"
    assert render(HELLO) == "rendered here"
    assert render(HELLO + "{{ 2 ** 3 }}") == "<s>hi8"


def test_off_the_main_thread_a_loop_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "CPU_SECONDS", 0.2)
    with pytest.raises(ModelError, match=r"was not done after 0\.2 s of processor time"):
        in_a_thread(lambda: render(ENDLESS))
    assert in_a_thread(lambda: render(HELLO)) == "<s>hi", "the next one is served as ever"


def test_a_step_without_end_is_ended_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "CPU_SECONDS", 0.2)
    with pytest.raises(ModelError, match=r"was not done after 0\.2 s of processor time"):
        render(ONE_STEP)
    assert template_process._children == [], "the process that was ended is gone"
    assert in_a_thread(lambda: render(HELLO)) == "<s>hi"


def test_planted_bug_rendered_here_in_a_thread_nobody_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: no timer reaches a thread, so a loop of many times its limit goes through."""

    def here() -> str:
        began = time.thread_time()
        while time.thread_time() - began < 0.2:
            pass
        return "nobody ended it"

    monkeypatch.setattr(template_limits, "CPU_SECONDS", 0.01)
    with pytest.raises(ModelError, match="processor time"):
        in_a_thread(lambda: render(ENDLESS, here=here))
    monkeypatch.setattr(template_limits, "_rendered", lambda render, given, asked: render())
    assert in_a_thread(lambda: render(ENDLESS, here=here)) == "nobody ended it"


def test_planted_bug_a_step_that_counts_as_plain_would_be_waited_for_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "is_plain", lambda template: True)
    assert render(ONE_STEP) == "rendered here"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'x' * 10**11 }}", "MiB"),
        ("{{ 'x' * 5000000 }}", "characters"),
        ("{{ 1 / 0 }}{{ 2 ** 3 }}", "ZeroDivisionError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
    ],
    ids=["memory", "length", "an error", "no template", "reaching out"],
)
def test_what_goes_wrong_elsewhere_is_said_here(template: str, words: str) -> None:
    with pytest.raises(ModelError, match="the chat template cannot be rendered") as caught:
        render(template)
    assert words in caught.value.what


def test_long_messages_and_odd_characters_come_back_to_the_letter() -> None:
    content = "zwölf\u2028\ud800\n\"'\\" + "x" * 300_000
    assert in_a_thread(lambda: render(HELLO, content)) == f"<s>{content}"


@pytest.mark.turns(3, 1)
def test_a_child_that_somebody_killed_is_replaced() -> None:
    in_a_thread(lambda: render(HELLO))
    os.kill(template_process._children[0]._process.pid, signal.SIGKILL)
    assert in_a_thread(lambda: render(HELLO)) == "<s>hi"


def test_many_threads_each_get_their_own_text() -> None:
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: texts.append(render(HELLO, f"number {n}"))) for n in range(8)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(AMPLE_S)
    assert sorted(texts) == [f"<s>number {n}" for n in range(8)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_child_knows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    template_process._end_all()
    monkeypatch.setenv("HF_TOKEN", "hf_planted_secret")
    in_a_thread(lambda: render(HELLO))
    known = Path(f"/proc/{template_process._children[0]._process.pid}/environ").read_bytes()
    assert b"PATH=" in known
    assert b"planted_secret" not in known


@pytest.mark.turns(3, 2)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_child_goes_when_its_parent_does() -> None:
    code = (
        "import json, os, sys\nsys.path[:] = json.loads(sys.argv[1])\n"
        "from surefoot.learner import rendering as p\n"
        "p.render_elsewhere(p.Rendering('x', [], None, True, {}), cpu_s=5, memory_bytes=2**29, most=9)\n"
        "print(p._children[0]._process.pid, flush=True)\nos._exit(0)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, json.dumps(sys.path)], capture_output=True, text=True, timeout=AMPLE_S, check=True
    )
    gone = Path(f"/proc/{int(ran.stdout)}/stat")
    ends = time.monotonic() + AMPLE_S
    while gone.exists() and gone.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < ends, "it lives on"
        time.sleep(0.05)
