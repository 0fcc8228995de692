"""Nothing gets out of the sandbox: files, network, powers, system calls, bombs; and nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from figures import Record, note
from sandbox_host import needs_sandbox
from sandbox_probes import CALL_PROGRAM, CALLS, FILES, NETWORK, POWERS, PREAMBLE, WITHOUT_SANDBOX

from surefoot.sandbox import process
from surefoot.sandbox.sandbox import ProgramOutcome, Sandbox, SandboxLimits
from surefoot.system.process import family

pytestmark = needs_sandbox
PROBES = {**FILES, **NETWORK, **POWERS}
LIMITS = SandboxLimits(wall_s=20.0, processes=8, scratch_mb=4, output_bytes=20_000)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Things worth stealing, readable by everybody, so that only the sandbox protects them."""
    folder = tmp_path_factory.mktemp("host with spaces")
    for each in (folder, *folder.parents):
        if os.stat(each).st_uid == os.getuid() and each != each.parent and "pytest" in str(each):
            each.chmod(0o755)
    (folder / ".ssh").mkdir()
    for name in ("secret.txt", "answers.json", ".ssh/id_rsa"):
        (folder / name).write_text("the crown jewels")
    tcp, local, abstract = (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX),
    )
    local.bind(str(folder / "s"))
    (folder / "s").chmod(0o777)
    abstract.bind(f"\0surefoot-{os.getpid()}")
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    for server in (local, abstract):
        server.listen()
    os.environ["SUREFOOT_SECRET"] = "the crown jewels"
    with tcp, local, abstract, victim:
        yield {
            "secret": str(folder / "secret.txt"), "answers": str(folder / "answers.json"), "home": str(folder),
            "folder": str(folder), "repository": str(Path(__file__).parents[2]), "port": tcp.getsockname()[1],
            "local": str(folder / "s"), "abstract": f"surefoot-{os.getpid()}", "victim": victim.pid,
        }  # fmt: skip
        del os.environ["SUREFOOT_SECRET"]
        victim.kill()


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    made = Sandbox(LIMITS)
    assert made.run_python("open('/scratch/left', 'w').write('mine')").exit_code == 0
    return made


def probe(body: str, **host: Any) -> str:
    return PREAMBLE + body.format(**host)


PROBED = "probe of the sandbox (files, network, powers): tried from inside, did not get it"


def refused(outcome: ProgramOutcome) -> bool:
    """It tried, and it did not get it."""
    return "TRIED" in outcome.stdout and "GOT" not in outcome.stdout


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_does_not_get(name: str, host: dict[str, Any], sandbox: Sandbox, record_property: Record) -> None:
    readable, writable = os.pipe()
    os.set_inheritable(readable, True)
    try:
        outcome = sandbox.run_python(probe(PROBES[name], **host))
    finally:
        os.close(readable)
        os.close(writable)
    assert refused(outcome), outcome
    os.kill(host["victim"], 0)
    note(record_property, "P15", PROBED, 1)


@pytest.mark.parametrize("name", WITHOUT_SANDBOX)
def test_the_same_probe_succeeds_where_nothing_contains_it(name: str, host: dict[str, Any], tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as victim:
        body = probe(PROBES[name], **{**host, "victim": victim.pid})
        done = subprocess.run([sys.executable, "-c", body], cwd=tmp_path, capture_output=True, text=True, check=False)
        victim.kill()
    assert "GOT" in done.stdout, (done.stdout, done.stderr)


def test_no_system_call_of_the_list_reaches_the_kernel(sandbox: Sandbox, record_property: Record) -> None:
    outcome = sandbox.run_python(probe(CALL_PROGRAM, calls=CALLS))
    assert outcome.exit_code == 0, outcome
    assert outcome.stdout.count("TRIED") == len(CALLS) + 1, "one for each, and one for the program"
    assert [line for line in outcome.stdout.splitlines() if line.startswith("GOT")] == []
    note(record_property, "P15", "system call that model-written code may not make: refused by the kernel", len(CALLS))


def test_there_are_more_than_forty_probes() -> None:
    assert len(PROBES) + len(CALLS) > 80


BOMBS = {
    "processes": (
        """
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
        count += 1
except OSError:
    print("stopped at", count)
""",
        lambda outcome: "stopped at 7" in outcome.stdout,
    ),
    "threads": (
        """
count = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        count += 1
except RuntimeError:
    print("stopped at", count, flush=True)
    os._exit(0)
""",
        lambda outcome: "stopped at 7" in outcome.stdout,
    ),
    "memory of one process": ("x = bytearray(600 * 2**20)", lambda outcome: "MemoryError" in outcome.stderr),
    "memory of many processes": (
        """
for _ in range(6):
    if os.fork() == 0:
        break
x = b"x" * 150 * 2**20
time.sleep(600)
""",
        lambda outcome: outcome.killed == "memory",
    ),
    "memory shared by many mappings": (
        """
import mmap
for _ in range(6):
    m = mmap.mmap(-1, 150 * 2**20)
    if os.fork() == 0:
        m.write(b"x" * 150 * 2**20)
        time.sleep(600)
    m.close()
time.sleep(600)
""",
        lambda outcome: outcome.killed == "memory",
    ),
    "disk": (
        """
count = 0
try:
    while True:
        open(f"file{count}", "wb").write(b"x" * 2**18)
        count += 1
except OSError:
    print("stopped at", count)
""",
        lambda outcome: "stopped at" in outcome.stdout and int(outcome.stdout.split()[-1]) <= 4 * 4,
    ),
    "many small files": (
        """
count = 0
try:
    while True:
        os.close(os.open(f"file{count}", os.O_CREAT))
        count += 1
except OSError:
    print("stopped at", count)
""",
        lambda outcome: "stopped at" in outcome.stdout and int(outcome.stdout.split()[-1]) <= 256,
    ),
    "descriptors": (
        """
count = 0
try:
    while True:
        os.open("/dev/null", os.O_RDONLY)
        count += 1
except OSError:
    print("stopped at", count)
""",
        lambda outcome: "stopped at" in outcome.stdout and int(outcome.stdout.split()[-1]) <= 64,
    ),
    "output": (
        "while True:\n    os.write(1, b'x' * 9999)",
        lambda outcome: outcome.killed == "output" and outcome.output_cut and len(outcome.stdout) == 20_000,
    ),
    "errors": (
        "while True:\n    os.write(2, b'\\xff' * 9999)",
        lambda outcome: outcome.killed == "output" and len(outcome.stderr) == 20_000,
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_stopped_at_its_limit(name: str, sandbox: Sandbox) -> None:
    body, stopped = BOMBS[name]
    outcome = sandbox.run_python(PREAMBLE + body)
    assert stopped(outcome), outcome


ENDLESS = {
    "computes": "while True: pass",
    "sleeps": "time.sleep(600)",
    "ignores every signal": """
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
time.sleep(600)
""",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "stops its first process": "os.kill(1, signal.SIGSTOP)\ntime.sleep(600)",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_at_the_deadline_everything_ends(name: str) -> None:
    outcome = Sandbox(SandboxLimits(wall_s=0.5)).run_python(PREAMBLE + ENDLESS[name])
    assert (outcome.timed_out, outcome.killed, outcome.exit_code) == (True, "deadline", None)


def test_too_much_processor_time_is_named() -> None:
    outcome = Sandbox(SandboxLimits(wall_s=60.0, cpu_s=1)).run_python("while True: pass")
    assert (outcome.killed, outcome.timed_out, outcome.exit_code) == ("cpu", False, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGINT])
def test_the_first_process_cannot_be_killed_from_inside(number: signal.Signals, sandbox: Sandbox) -> None:
    outcome = sandbox.run_python(f"import os\nos.kill(1, {number})\nos.kill(os.getppid(), {number})\nprint('and now?')")
    assert (outcome.exit_code, outcome.stdout) == (0, "and now?\n")


def test_killing_everybody_kills_only_those_inside(sandbox: Sandbox, host: dict[str, Any]) -> None:
    outcome = sandbox.run_python(
        "import os\nif os.fork() == 0:\n    os.setsid()\n    os.kill(-1, 9)\nimport time\ntime.sleep(60)"
    )
    assert outcome.exit_code == -signal.SIGKILL
    os.kill(host["victim"], 0)


def test_a_daemon_does_not_survive_its_program(sandbox: Sandbox) -> None:
    daemon = "surefoot-daemon-of-a-test"
    body = f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        libc.prctl(15, b"{daemon[:15]}", 0, 0, 0)
        print("up", flush=True)
        os.closerange(0, 3)
        time.sleep(600)
    os._exit(0)
os.wait()
"""
    outcome = sandbox.run_python(PREAMBLE + body)
    assert outcome.exit_code == 0
    names = [read(path) for path in Path("/proc").glob("[0-9]*/comm")]
    assert daemon[:15] not in names


def read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def test_nothing_is_left_behind(sandbox: Sandbox, tmp_path: Path) -> None:
    keeper = process._server().process.pid
    before = (
        Path("/proc/self/mountinfo").read_text(),
        len(os.listdir("/proc/self/fd")),
        sorted(os.listdir("/dev/shm")),
    )
    for body in ("os.abort()", "os.fork(); time.sleep(.1)", "open('/dev/shm/mine', 'w')", "os.write(1, b'x' * 10**6)"):
        sandbox.run_python(PREAMBLE + body)
    after = (Path("/proc/self/mountinfo").read_text(), len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm")))
    assert after == before
    assert wait_until(lambda: family(keeper) == [keeper]), "the keeper has no child left"
    assert len(os.listdir(f"/proc/{keeper}/fd")) < 10


def wait_until(condition: Any) -> bool:
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        if condition():
            return True
        time.sleep(0.01)
    return False
