"""Each wall of the sandbox, taken down in a copy of the package: the probe that it holds back then gets out.

A probe that no missing wall lets through would prove nothing about that wall. And: the walls stand for an ordinary user
as they do for root.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from sandbox_host import needs_sandbox
from sandbox_probes import CALL_PROGRAM, CALLS, FILES, NETWORK, POWERS, PREAMBLE

import surefoot
import surefoot_harness
from surefoot.sandbox import walls

pytestmark = needs_sandbox
PACKAGE = Path(surefoot.__file__).parent
HARNESS = Path(surefoot_harness.__file__).parent
PARTS = ("__init__.py", "errors.py", "moved_names.py", "pairing.py", "sandbox", "system")
RUNNER = """
import json, sys
from surefoot.sandbox.sandbox import SandboxLimits, Sandbox, available
report = available()
outcomes = [Sandbox(SandboxLimits(wall_s=20.0, processes=8)).run_python(code).stdout for code in json.load(sys.stdin)] if report.usable else []
print(json.dumps([report.usable, report.missing, outcomes]))
"""


@dataclass(frozen=True)
class Wall:
    """Lines to change in a copy, and a probe that must get out when they are."""

    changes: tuple[tuple[str, str, str], ...]
    """File, what stands there, what stands there in the copy."""
    probe: str


NO_FILTER = ("server.py", "        walls.install(filter_program)\n", "")
SAME_USER = ("server.py", "    if switch_user:\n", "    if False:\n")
NO_LANDLOCK = ("server.py", 'walls.restrict(request["landlock"]', "walls.restrict(0")
SAME_NETWORK = ("walls.py", '"net": 0x40000000', '"net": 0')
SAME_PROCESSES = ("walls.py", '"pid": 0x20000000', '"pid": 0')
OPEN_ROOT = (
    "walls.py", '    set_flags("/", _SEALED | MS_NODEV)\n', '    os.chmod("/", 0o777)\n',
)  # fmt: skip
HOST_STAYS = ("walls.py", "    unmount(_OLD)\n    os.rmdir(_OLD)\n", "")

WALLS = {
    "the call filter": Wall((NO_FILTER,), CALL_PROGRAM.format(calls=CALLS)),
    "the call filter and Landlock and the network namespace": Wall(
        (NO_FILTER, NO_LANDLOCK, SAME_NETWORK), NETWORK["a server on this machine"]
    ),
    "the same, for abstract sockets": Wall((NO_FILTER, NO_LANDLOCK, SAME_NETWORK), NETWORK["a local socket, abstract"]),
    "the empty root": Wall((HOST_STAYS,), FILES["the host's root, by its former name"]),
    "the read-only root and Landlock": Wall((NO_LANDLOCK, OPEN_ROOT), FILES["the root folder, to write"]),
    "no programs in the scratch folder": Wall(
        (NO_LANDLOCK, ("walls.py", "MS_NODEV | MS_NOEXEC, options", "MS_NODEV, options")),
        FILES["a program of its own"],
    ),
    "the limits": Wall((("server.py", "        _limit(request)\n", ""),), POWERS["a core dump"]),
    "the closing of descriptors": Wall(
        (
            ("server.py", "    walls.close_from(len(wanted))\n", ""),
            ("server.py", "inheritable=place < len(streams))", "inheritable=True)"),
        ),
        FILES["descriptors of the parent"],
    ),
}
FREE = (
    "a secret file of the host",
    "the environment",
    "the list of processes",
    "the list of users",
    "the running Python, to write",
)


@pytest.fixture
def servers() -> Iterator[dict[str, object]]:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0surefoot-walls-{os.getpid()}")
        abstract.listen()
        yield {"port": tcp.getsockname()[1], "abstract": f"surefoot-walls-{os.getpid()}"}


def copy_of_the_package(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """The part of the package that the sandbox needs, with some lines changed, and psutil, which is ours to bring."""
    shutil.copytree(Path(psutil.__file__).parent, folder / "psutil", ignore=shutil.ignore_patterns("__pycache__"))
    target = folder / "surefoot"
    target.mkdir(parents=True)
    (folder / "surefoot_harness").mkdir()
    for part in PARTS:
        source = PACKAGE / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / part)
    for part in ("__init__.py", "errors.py", "system"):
        source = HARNESS / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / "surefoot_harness" / part)
    for file, stands, instead in changes:
        text = (target / "sandbox" / file).read_text()
        assert text.count(stands) == 1, f"{file} has changed: {stands!r}"
        (target / "sandbox" / file).write_text(text.replace(stands, instead))
    return folder


def run(python: str, source: Path, bodies: list[str], *, runner: str = RUNNER, **options: object) -> list[object]:
    """The probes, in sandboxes of the package in `source`."""
    environment = {"PYTHONPATH": str(source), "PATH": os.environ["PATH"], "SUREFOOT_SECRET": "the crown jewels"}
    done = subprocess.run(
        [python, "-B", "-c", runner], env=environment, input=json.dumps([PREAMBLE + body for body in bodies]), cwd="/",
        capture_output=True, text=True, check=False, **options,  # type: ignore[call-overload]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", WALLS)
def test_planted_without_a_wall_its_probe_gets_out(name: str, tmp_path: Path, servers: dict[str, object]) -> None:
    wall = WALLS[name]
    body = wall.probe if "TRIED" in wall.probe else wall.probe.format(**servers)
    usable, missing, outcomes = run(sys.executable, copy_of_the_package(tmp_path, *wall.changes), [body])
    assert usable, missing
    assert isinstance(outcomes, list)
    assert "GOT" in outcomes[0], outcomes[0]
    assert "GOT" not in run(sys.executable, PACKAGE.parent, [body])[2][0]  # type: ignore[index]


DATAGRAM = """
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):  # the second is the first under another name
    print("TRIED", kind, flush=True)
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        got(ours.sendto(b"HELLO", {path!r}))
        theirs.connect({path!r})
    except OSError as error:
        print(error)
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
pair[0].send(b"x")
assert pair[1].recv(9) == b"x" and [end.send(b"y") for end in socket.socketpair()] == [1, 1]
print("PAIRS WORK")
"""


def test_a_pair_of_sockets_reaches_no_socket_of_the_host(tmp_path: Path) -> None:
    """One that lies in a folder which is shown: a datagram pair could turn to it, so there are none."""
    planted = copy_of_the_package(tmp_path / "planted", ("walls.py", ", *_unless(_EQUAL, _SEQUENCED, _DENY)]", "]"))
    shown = tmp_path / "shown"
    shown.mkdir()
    for each in (shown, tmp_path):
        each.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as host:
        host.bind(str(shown / "s"))
        (shown / "s").chmod(0o777)
        host.setblocking(False)
        probe = DATAGRAM.format(path=str(shown / "s"))
        runner = RUNNER.replace("processes=8)", f"processes=8), read_only=[{str(shown)!r}]")
        for source, gets_out in ((PACKAGE.parent, False), (planted, True)):
            said = run(sys.executable, source, [probe], runner=runner)[2]
            assert isinstance(said, list)
            assert ("TRIED" in said[0], "PAIRS WORK" in said[0], "GOT" in said[0]) == (True, True, gets_out), said
            if gets_out:
                assert host.recv(99) == b"HELLO"
            else:
                with pytest.raises(BlockingIOError):
                    host.recv(99)


LAYERS = {
    "the call filter": ((NO_LANDLOCK, SAME_NETWORK), NETWORK["a server on this machine"]),
    "the network namespace": ((NO_FILTER, NO_LANDLOCK), NETWORK["a server on this machine"]),
    "Landlock, for the network": ((NO_FILTER, SAME_NETWORK), NETWORK["a server on this machine"]),
    "Landlock, for abstract sockets": ((NO_FILTER, SAME_NETWORK), NETWORK["a local socket, abstract"]),
    "Landlock, for files": ((OPEN_ROOT,), FILES["the root folder, to write"]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_where_several_walls_stand_each_holds_alone(name: str, tmp_path: Path, servers: dict[str, object]) -> None:
    if "Landlock" in name and walls.version() < 6:
        pytest.skip("this kernel's Landlock knows nothing of it")
    changes, probe = LAYERS[name]
    outcomes = run(sys.executable, copy_of_the_package(tmp_path, *changes), [probe.format(**servers)])[2]
    assert isinstance(outcomes, list)
    assert "TRIED" in outcomes[0]
    assert "GOT" not in outcomes[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user to become")
def test_planted_a_program_that_stays_root_is_seen(tmp_path: Path) -> None:
    roots_scratch = ("server.py", 'request["scratch_mb"], NOBODY,', 'request["scratch_mb"], 0,')
    package = copy_of_the_package(tmp_path, SAME_USER, roots_scratch)
    outcomes = run(sys.executable, package, [POWERS["to be root"]])[2]
    assert isinstance(outcomes, list)
    assert "GOT" in outcomes[0]


DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("GOT", os.getpid(), flush=True)
        os.closerange(0, 3)
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(0.5)
"""


def test_planted_without_the_pid_namespace_a_daemon_survives(tmp_path: Path) -> None:
    outcomes = run(sys.executable, copy_of_the_package(tmp_path, SAME_PROCESSES), [DAEMON])[2]
    assert isinstance(outcomes, list)
    survivor = int(outcomes[0].split("GOT")[1])
    os.kill(survivor, signal.SIGKILL)  # raises when it did not survive


def a_python_for_everybody() -> str | None:
    """An interpreter that an ordinary user can run: the one here may lie in somebody's home."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        test = subprocess.run(
            [python, "-c", "import sys, ctypes; sys.exit(sys.version_info < (3, 11))"], user=65533, group=65533,
            extra_groups=[], cwd="/", check=False, capture_output=True,
        ) if os.path.exists(python) and _all_may_enter(python) else None  # fmt: skip
        if test is not None and test.returncode == 0:
            return python
    return None


def _all_may_enter(path: str) -> bool:
    return all(os.stat(each).st_mode & 0o005 == 0o005 for each in Path(path).parents)


@pytest.mark.skipif(os.geteuid() != 0, reason="every other test already runs as an ordinary user")
def test_an_ordinary_user_is_contained_as_root_is(tmp_path: Path) -> None:
    python = a_python_for_everybody()
    if python is None:
        pytest.skip("no Python 3.11 here that an ordinary user can run")
    copy_of_the_package(tmp_path)
    secret = tmp_path / "secret.txt"
    secret.write_text("the crown jewels")
    for each in (tmp_path, *list(tmp_path.parents)[:3]):
        if each.stat().st_uid == os.geteuid() and each != Path("/"):
            each.chmod(each.stat().st_mode | 0o055)
    bodies = [(FILES[name]).format(secret=str(secret)) for name in FREE]
    calls = CALL_PROGRAM.format(calls=CALLS)
    usable, missing, outcomes = run(python, tmp_path, [*bodies, calls], user=65533, group=65533, extra_groups=[])
    assert usable, missing
    assert isinstance(outcomes, list)
    for stdout in outcomes:
        assert "TRIED" in stdout
        assert "GOT" not in stdout
