"""A fork that has the libraries loaded is, to whoever looks, the command in an interpreter of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import warm_command
from command import python, surefoot, typed

STORY = """
import os, random, sys, tempfile
print(__name__, sys.argv[1:], os.getcwd(), sys.path[0], os.environ.get("GREETING"), tempfile.gettempdir())
print(random.random(), file=sys.stderr)
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "a script.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["version"], ["--help"], ["train", "--help"], ["no-such-command"], ["train", "max_stepps=3"],
        ["train", "tasks=nowhere.jsonl"], ["check", "nowhere", "1 < 2"], ["eval", "nowhere"], ["ledger", "nowhere"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_it_says_what_a_fresh_interpreter_says_on_the_same_streams_with_the_same_code(
    words: list[str], tmp_path: Path
) -> None:
    warm, cold = (surefoot(*words, cwd=tmp_path, fresh=fresh) for fresh in (False, True))
    assert (warm.code, warm.out, warm.err) == (cold.code, cold.out, cold.err)
    assert warm.out + warm.err, "nothing was compared"


def test_an_environment_that_is_read_at_the_start_gets_a_fresh_interpreter(tmp_path: Path) -> None:
    ran = surefoot("version", cwd=tmp_path, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert "import time:" in ran.err
    assert "import time:" not in surefoot("version", cwd=tmp_path).err


def test_a_script_has_its_own_folder_dice_and_name(tmp_path: Path) -> None:
    path = script(tmp_path, STORY)
    first, second = (python(path, cwd=tmp_path) for _ in range(2))
    assert first.out == f"__main__ [] {tmp_path} {tmp_path} None {os.environ.get('TMPDIR', '/tmp')}\n"
    assert first.out == second.out
    assert first.err != second.err, "two processes that draw the same numbers hide what depends on them"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys; sys.exit('no more')", 1, "no more\n"),
        ("import sys; sys.exit(7)", 7, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit, sys; atexit.register(print, 'at the end', file=sys.stderr)", 0, "at the end\n"),
        ("import sys\nsys.excepthook = lambda *_: sys.exit(79)\n1 / 0", 79, ""),
        ("import threading, time, sys\nthreading.Timer(0.2, lambda: sys.stderr.write('later')).start()", 0, "later"),
    ],
)
def test_an_end_is_pythons_own(text: str, code: int, said: str, tmp_path: Path) -> None:
    ran = python(script(tmp_path, text), cwd=tmp_path)
    assert ran.code == code
    assert ran.err.endswith(said)


def started(program: Path) -> subprocess.Popen[bytes]:
    """The process that a caller sees in place of the warm one."""
    words = [*typed(), str(program)]
    words[words.index("surefoot")] = "python"
    return subprocess.Popen(words, cwd=program.parent, stdout=subprocess.PIPE)


def test_the_process_that_stands_for_it_passes_signals_on_and_dies_of_the_same(tmp_path: Path) -> None:
    waits = script(tmp_path, "import signal; print('ready', flush=True); signal.pause()")
    with started(waits) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == -signal.SIGTERM


def test_a_caller_that_is_gone_takes_its_fork_along(tmp_path: Path) -> None:
    waits = script(tmp_path, "import os, signal; print(os.getpid(), flush=True); signal.pause()")
    with started(waits) as running:
        assert running.stdout is not None
        fork = int(running.stdout.readline())
        running.kill()
        assert running.stdout.read() == b"", "its end of the pipe closes when it ends"
    assert not Path(f"/proc/{fork}/fd/1").exists()


def test_one_that_takes_too_long_is_an_error_and_is_ended(tmp_path: Path) -> None:
    warm = warm_command.shared()
    waits = script(tmp_path, "import signal; signal.pause()")
    with pytest.raises(TimeoutError):
        warm.run([str(waits)], tmp_path, warm.env, what="python", timeout_s=0.2)
    assert surefoot("version", cwd=tmp_path).code == 0, "the server goes on"
