"""Tool servers in a sandbox: what they cannot reach, what a grant gives them, and what is counted.

Every attempt is made twice by the same server: contained, where it is refused, and not contained, where it succeeds;
without the second the first would prove nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_host import AMPLE, AMPLE_S, needs_sandbox

from surefoot.errors import ConfigError, SecurityError, ToolError
from surefoot.records import Task
from surefoot.sandbox import host
from surefoot.sandbox import process as sandbox_link
from surefoot.sandbox.sandbox import HostReport
from surefoot.tools.mcp.lines import WireFault
from surefoot.tools.mcp.process import NOBODY, hint, refuse_bad_grants, views
from surefoot.tools.mcp.stdio import ServerProcess
from surefoot.tools.mcp.toolkit import MCPToolkit, Server, ServerLimits
from surefoot.tracking.process_logs import FILE, EgressLog, attempts_of, hosts_of

pytestmark = [
    pytest.mark.mcp,
    needs_sandbox,
]
HOSTILE = Path(__file__).parents[1] / "support" / "hostile_server.py"
CANARY = "canary-of-the-host"


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Things of the host that anybody on this machine may touch: only the sandbox stands in the way."""
    secret = tmp_path / "secret.txt"
    secret.write_text(CANARY)
    secret.chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "door"))
        local.listen()
        victim = str(os.getpid())
        yield {
            "read": str(secret), "write": str(tmp_path / "new.txt"), "connect": str(tcp.getsockname()[1]),
            "send": "9", "local": str(tmp_path / "door"), "signal": victim, "processes": victim,
        }  # fmt: skip


def attempts(targets: dict[str, str], *, sandbox: bool, log: Path) -> tuple[dict[str, str], MCPToolkit]:
    server = Server("hostile", command=(sys.executable, str(HOSTILE)), isolation="shared", sandbox=sandbox)
    kit = MCPToolkit([server], AMPLE, log_dir=log)
    try:
        box = kit.open(Task(id="t", prompt="try"), "train/0/0", 0)
        asked = {**targets, "environment": f"/proc/{os.getpid()}/environ"}
        said = {
            what: box.call(
                "hostile__attempt", {"what": "read" if what == "environment" else what, "target": target}, AMPLE_S
            ).text
            for what, target in asked.items()
        }
        box.close()
    finally:
        kit.close()
    return said, kit


def test_a_hostile_server_reaches_nothing_when_contained_and_everything_when_not(
    targets: dict[str, str], tmp_path: Path
) -> None:
    refused, kit = attempts(targets, sandbox=True, log=tmp_path / "logs")
    assert {what for what, text in refused.items() if not text.startswith("REFUSED")} == set(), refused
    assert not os.path.exists(targets["write"])
    assert kit.denied == {"hostile": 2}, "one connection and one datagram; a local socket is no egress"
    assert attempts_of(tmp_path / "logs") == {"hostile": 2}

    planted, free = attempts(targets, sandbox=False, log=tmp_path / "free")
    assert {what for what, text in planted.items() if not text.startswith("GOT")} <= {"send"}, planted  # IPv6 or none
    assert CANARY in planted["read"]
    assert os.path.exists(targets["write"])
    assert (free.denied, attempts_of(tmp_path / "free")) == ({}, {})


# -- one process, without a protocol -----------------------------------------------------------------
def told(script: str, **keys: Any) -> tuple[list[Any], int | None, str, list[int]]:
    """What a server in plain Python says in JSON, its status, its last words, and what was counted."""
    counted: list[int] = []

    async def story() -> tuple[list[Any], int | None, str]:
        command = (sys.executable, "-S", "-E", "-c", "import json, os, socket\n" + script)
        process = ServerProcess(
            Server("x", command=command, **keys), ServerLimits(), lambda attempts, host="": counted.append(attempts)
        )
        said = [message async for message, _ in process.messages()]
        status = await process.exit_status(AMPLE_S)
        process.keep_stderr()
        await process.end(0.0)
        return said, status, process.tail()

    return *asyncio.run(story()), counted


def nobodys(folder: Path) -> Path:
    """A folder that a contained server may use, whoever runs this."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    return folder


READ = "print(json.dumps({'said': open(%r).read()}), flush=True)"


def test_a_folder_is_there_when_it_is_granted_and_read_only(tmp_path: Path) -> None:
    folder = nobodys(tmp_path / "data")
    (folder / "facts.txt").write_text("the moon is far")
    (folder / "facts.txt").chmod(0o666)
    read = READ % str(folder / "facts.txt")
    said, status, tail, _ = told(read)
    assert (said, status) == ([], 1)
    assert "FileNotFoundError" in tail
    assert str(folder / "facts.txt") in hint(Server("x", command=("sh",)), tail, 0), "named, for the error"
    assert told(read, read=(folder,))[0] == [{"said": "the moon is far"}]
    write = f"open({str(folder / 'facts.txt')!r}, 'a')"
    assert "Read-only file system" in told(write, read=(folder,))[2]
    said = told(f"{write}.write(', and round')\n{read}", write=(folder,))[0]
    assert said == [{"said": "the moon is far, and round"}]
    assert (folder / "facts.txt").read_text() == "the moon is far, and round"


def test_a_folder_to_write_in_may_lie_in_one_to_read_and_runs_no_programs(tmp_path: Path) -> None:
    outer = nobodys(tmp_path / "outer")
    inner = nobodys(outer / "inner")
    script = (
        f"open({str(inner / 'x')!r}, 'w').write('#!/bin/sh\\n')\nos.chmod({str(inner / 'x')!r}, 0o755)\n"
        f"found = []\nfor path in ({str(outer / 'y')!r}, '/usr/y', '/y'):\n    try:\n        open(path, 'w')\n"
        "    except OSError as error:\n        found.append(error.strerror)\n"
        f"try:\n    os.execv({str(inner / 'x')!r}, ['x'])\nexcept OSError as error:\n    found.append(error.strerror)\n"
        "print(json.dumps({'found': found}), flush=True)"
    )
    said, _, tail, _ = told(script, read=(outer,), write=(inner,))
    assert said == [{"found": ["Read-only file system"] * 3 + ["Permission denied"]}], tail


CONNECT = (
    "try:\n    said = socket.create_connection(('127.0.0.1', %d), 5).getpeername()[1]\n"
    "except OSError as error:\n    said = error.errno\nprint(json.dumps({'said': said}), flush=True)\n"
)


def test_a_granted_network_is_the_whole_network_and_nothing_is_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        port = tcp.getsockname()[1]
        said, _, _, counted = told(CONNECT % port)
        assert (said, sum(counted)) == ([{"said": 1}], 1), "EPERM"
        assert told(CONNECT % port, network=True)[0::3] == ([{"said": port}], [])
    unix = "try:\n    socket.socket(socket.AF_UNIX)\nexcept OSError as error:\n    print(json.dumps({'said': error.errno}))"
    assert told(unix, network=True)[0] == [{"said": 1}], "abstract sockets of the host belong to its network"


def test_attempts_without_end_are_counted_all_and_flood_nobody() -> None:
    script = (
        "for _ in range(3000):\n    try:\n        socket.socket()\n    except PermissionError:\n        pass\n"
        "    else:\n        raise SystemExit(3)\n"
    )
    began = time.monotonic()
    _, status, _, counted = told(script)
    assert (status, sum(counted)) == (0, 3000)
    assert len(counted) <= 3 + (time.monotonic() - began) / 0.1, "told a few times a second"


LISTENED = """
import asyncio, ctypes, sys
from surefoot.sandbox import walls as sandbox_kernel, walls as sandbox_seccomp
sandbox_kernel.prctl("no_new_privs", 38, 1)
listener = sandbox_seccomp.install_telling(sandbox_seccomp.programs()["telling"])
from test_contained_servers import CONNECT, told
said, status, tail, counted = told(CONNECT % 9)
print(said, counted)
"""


def test_where_somebody_listens_already_attempts_are_refused_and_said_not_to_be_counted() -> None:
    """The kernel has room for one listener in a chain of filters: a container's own may have taken it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    done = subprocess.run(
        [sys.executable, "-c", LISTENED], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[{'said': 1}] [0]\n"), done.stderr


def test_a_server_has_the_variables_that_it_is_given_and_a_home_that_nobody_else_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    script = (
        "open('note', 'w').write('x')\n"
        "seen = {'env': dict(os.environ), 'cwd': os.getcwd(), 'home': os.listdir(os.environ['HOME'])}\n"
        "print(json.dumps(seen), flush=True)"
    )
    for _ in range(2):
        [said] = told(script, env={"GRANTED": "yes"})[0]
        assert said["env"]["GRANTED"] == "yes"
        assert CANARY not in json.dumps(said)
        assert (said["cwd"], said["home"]) == ("/scratch", ["note"]), "and it begins empty every time"


def test_of_an_installation_only_what_it_imports_is_shown(tmp_path: Path) -> None:
    """A virtual environment elsewhere, with an editable package: its Python works, the files beside the package do not."""
    venv, source = tmp_path / "venv", tmp_path / "source"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (source / "mine").mkdir(parents=True)
    (source / "mine" / "__init__.py").write_text("SAID = 'from a package in its sources'\n")
    (source / ".env").write_text(CANARY)
    [site] = (venv / "lib").glob("python*/site-packages")
    (site / "mine.pth").write_text(f"{source}\n")
    for folder in (tmp_path, source, source / "mine"):
        folder.chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(venv)
    script = f"import json, os, mine; print(json.dumps(dict(said=mine.SAID, seen=os.listdir({str(source)!r}))))"

    async def story(python: Path) -> list[Any]:
        process = ServerProcess(Server("x", command=(str(python), "-c", script)), ServerLimits())
        said = [message async for message, _ in process.messages()]
        await process.exit_status(AMPLE_S)
        process.keep_stderr()
        await process.end(0.0)
        return said or [process.tail()]

    for python in (venv / "bin" / "python", link / "bin" / "python"):
        assert asyncio.run(story(python)) == [{"said": "from a package in its sources", "seen": ["mine"]}]


@pytest.mark.parametrize("early", [True, False])
def test_when_the_process_that_sandboxes_are_born_by_is_killed_servers_end_and_the_next_one_starts(early: bool) -> None:
    async def story() -> tuple[int | None, int | None]:
        process = ServerProcess(Server("x", command=("sh", "-c", "echo '{}'; sleep 600")), ServerLimits())
        assert early or await anext(process.messages()) == ({}, 2), "it is up"
        assert sandbox_link._current is not None
        sandbox_link._current.process.send(signal.SIGKILL, group=False)
        ended = await process.exit_status(AMPLE_S)
        await process.end(0.0)
        again = ServerProcess(Server("x", command=("sh", "-c", "exit 7")), ServerLimits())
        status = await again.exit_status(AMPLE_S)
        await again.end(0.0)
        return ended, status

    assert asyncio.run(story()) == (137, 7)


def fill_descriptors() -> list[int]:
    """Every descriptor that this process may have, taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, max(map(int, os.listdir("/proc/self/fd"))) + 20), hard))
    filled: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            filled.append(os.open(os.devnull, os.O_RDONLY))
    return filled


@pytest.fixture
def limits_come_back() -> Iterator[None]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


@pytest.mark.usefixtures("limits_come_back")
def test_a_start_that_fails_leaves_no_descriptor(tmp_path: Path) -> None:
    gone = Server("x", command=("sh",), read=(tmp_path / "gone",))

    async def story() -> None:
        with pytest.raises(ConfigError, match="does not exist"):
            ServerProcess(gone, ServerLimits())
        for free in (0, 3, 5, 7):  # within the first pipe, the second and the third, and after them
            filled = fill_descriptors()
            for descriptor in filled[:free]:
                os.close(descriptor)
            try:
                with pytest.raises(WireFault, match="cannot be started"):
                    ServerProcess(Server("x", command=("sh",)), ServerLimits())
            finally:
                for descriptor in filled[free:]:
                    os.close(descriptor)

    assert told("")[1] == 0, "what is opened once is open"
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(story())
    assert len(os.listdir("/proc/self/fd")) == before


# -- refusals ---------------------------------------------------------------------------------------
def test_without_a_sandbox_a_server_is_refused_unless_it_is_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    report = HostReport(False, ("user namespaces",))
    monkeypatch.setattr(host, "available", lambda: report)
    server = Server("clock", command=("sh", "-c", "exit 0"))
    with pytest.raises(SecurityError, match="tool server clock cannot be contained on this host: user names") as caught:
        MCPToolkit([server]).start()
    assert caught.value.exit_code == 5
    assert '"sandbox": false' in caught.value.fix
    with pytest.raises(ToolError, match=r"tool server clock .* ended with status 0"):
        MCPToolkit([Server("clock", command=("sh", "-c", "exit 0"), sandbox=False)], AMPLE).start()
    monkeypatch.setattr("surefoot.tools.mcp.toolkit.refuse_without_walls", lambda server: None)
    monkeypatch.setattr(host, "spawn", broken)
    with pytest.raises(ToolError, match="cannot be started: "):  # planted: nobody looks first; it still does not run
        MCPToolkit([server], AMPLE).start()


def broken(*_: object, **__: object) -> None:
    raise OSError(1, "clone into new namespaces: Operation not permitted")


@pytest.mark.parametrize("path", ["/", "/proc", "/dev", "/sys/kernel"])
def test_what_no_sandbox_shows_cannot_be_granted(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot show"):
        refuse_bad_grants(Server("x", command=("sh",), read=(Path(path),)))


def test_a_grant_that_is_of_no_use_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="which does not exist"):
        refuse_bad_grants(Server("x", command=("sh",), read=(tmp_path / "nowhere",)))
    (tmp_path / "file").touch()
    with pytest.raises(ToolError, match="which is no folder"):
        refuse_bad_grants(Server("x", command=("sh",), write=(tmp_path / "file",)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's servers become somebody else")
def test_a_folder_that_is_roots_alone_is_refused_before_the_server_fails(tmp_path: Path) -> None:
    folder = tmp_path / "roots"
    folder.mkdir(mode=0o700)
    for keys in ({"read": (folder,)}, {"write": (folder,)}):
        with pytest.raises(ToolError, match="the user `nobody`") as caught:
            refuse_bad_grants(Server("x", command=("sh",), **keys))
        assert "chown" in caught.value.fix
    folder.chmod(0o755)
    refuse_bad_grants(Server("x", command=("sh",), read=(folder,)))
    os.chown(folder, NOBODY, NOBODY)
    refuse_bad_grants(Server("x", command=("sh",), write=(folder,)))


def test_a_module_beside_the_script_is_named_when_it_is_missed(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "server.py").write_text("import helper\n")
    server = Server("mine", command=(sys.executable, "-S", "-E", str(tmp_path / "server.py")))
    with pytest.raises(ToolError, match="No module named 'helper'") as caught:
        MCPToolkit([server], AMPLE).start()
    assert f"it cannot see {tmp_path}/helper.py" in caught.value.fix
    assert '"read"' in caught.value.fix
    assert str(tmp_path / "server.py") in views(server)
    assert str(tmp_path) not in views(server)


def test_a_server_that_fails_without_the_network_is_told_of_the_grant(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("import socket\nsocket.create_connection(('127.0.0.1', 9))\n")
    server = Server("mine", command=(sys.executable, "-S", "-E", str(tmp_path / "server.py")))
    with pytest.raises(ToolError, match="Operation not permitted") as caught:
        MCPToolkit([server], AMPLE).start()
    assert 'tried to reach the network 1 times, which "network": true grants' in caught.value.fix


# -- the file of attempts -------------------------------------------------------------------------
def test_the_count_of_a_run_is_over_all_processes_and_reads_no_strange_file(tmp_path: Path) -> None:
    for totals in ((1, 2, 3, 4, 4), (10,)):
        log = EgressLog(tmp_path)
        for total in totals:
            log.note("search", total)
        log.note("search", totals[-1] + 1, last=True)
    assert attempts_of(tmp_path) == {"search": 16}
    with open(tmp_path / FILE, "a", encoding="utf-8") as file:
        file.write('{"who": 1}\n[]\nnull\n{"who": "a", "server": "s", "attempts": "x"}\n' + "[" * 5000)
    assert attempts_of(tmp_path) == {"search": 16}
    assert hosts_of(tmp_path) == {}
    log = EgressLog(tmp_path)
    log.note("fetch", 3, hosts={"a.example:443": 2, "b\x1b[31m": 1})
    log.note("fetch", 9, last=True, hosts={"a.example:443": 8, "b\x1b[31m": 1})
    with open(tmp_path / FILE, "a", encoding="utf-8") as file:
        file.write('{"who": "a", "server": "fetch", "attempts": 0, "hosts": [1]}\n')
    assert attempts_of(tmp_path) == {"search": 16, "fetch": 9}
    assert hosts_of(tmp_path) == {"fetch": ("a.example:443", r"b\x1b[31m")}
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / FILE).symlink_to(tmp_path / FILE)
    assert attempts_of(strange) == {}
    (strange / FILE).unlink()
    os.mkfifo(strange / FILE)
    assert attempts_of(strange) == {}
