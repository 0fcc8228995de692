"""Every descendant is found and ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from surefoot.system.process import descendants, family, kill_tree

FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
                         start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not os.path.exists("/proc"), reason="descendants are found through /proc")
def test_a_child_that_left_the_process_group_is_ended_too() -> None:
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        kill_tree(parent.pid)
        assert parent.wait(5) == -9
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


@pytest.mark.skipif(not os.path.exists("/proc"), reason="descendants are found through /proc")
def test_a_family_is_the_process_and_all_below_it_however_it_is_asked_for() -> None:
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert set(family(parent.pid)) == {parent.pid, child} == {parent.pid, *descendants(parent.pid)}
        kill_tree(parent.pid)
        parent.wait(5)
    assert family(parent.pid) == [parent.pid], "what has ended has no children"
