"""What a caller asks of the sandbox, and what it hears back. The ways out of it are tried in tests/faults."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from sandbox_host import needs_sandbox

from surefoot.errors import ConfigError, SecurityError, ToolError, ToolFailedError
from surefoot.sandbox import host, process
from surefoot.sandbox.sandbox import HostReport, ProgramOutcome, Sandbox, SandboxLimits, available, run_code
from surefoot.system.frames import pack


@needs_sandbox
def test_a_program_is_heard_as_it_was() -> None:
    outcome = Sandbox().run_python(
        "import helper, sys\nprint(helper.twice(sys.stdin.read()))\nprint('oh \\u00e9', file=sys.stderr)\nsys.exit(3)",
        stdin="grüß".encode(),
        files={"helper.py": b"def twice(text): return text * 2\n"},
    )
    assert outcome == ProgramOutcome(3, "grüßgrüß\n", "oh é\n", False, None, False, False)


@needs_sandbox
def test_any_program_of_the_system_runs_without_a_shell() -> None:
    outcome = Sandbox().run(["cat", "a file; rm -rf *", "deep/er"], files={"a file; rm -rf *": b"1", "deep/er": b"2"})
    assert (outcome.exit_code, outcome.stdout) == (0, "12")


@needs_sandbox
def test_a_signal_is_a_negative_exit_code() -> None:
    assert run_code("import os; os.abort()").exit_code == -signal.SIGABRT


@needs_sandbox
def test_a_program_that_is_not_there_is_the_callers_mistake() -> None:
    with pytest.raises(ToolError, match="cannot run /usr/bin/no-such-program") as caught:
        Sandbox().run(["no-such-program"])
    assert not isinstance(caught.value, ToolFailedError)


@needs_sandbox
def test_input_that_nobody_reads_and_output_that_fills_every_pipe_do_not_block() -> None:
    assert Sandbox().run(["true"], stdin=b"x" * 10**6).exit_code == 0
    outcome = Sandbox(SandboxLimits(output_bytes=2**20)).run(["cat"], stdin=b"x" * 10**6)
    assert (outcome.exit_code, len(outcome.stdout)) == (0, 10**6)


@needs_sandbox
def test_only_what_was_named_is_shown_and_folders_can_be_imported_from(tmp_path: Path) -> None:
    shown = tmp_path / "shown here"
    shown.mkdir()
    (shown / "extra.py").write_text("VALUE = 7\n")
    (tmp_path / "beside.txt").write_text("not shown")
    code = f"import extra, os\nprint(extra.VALUE, os.listdir({str(tmp_path)!r}), os.access(extra.__file__, os.W_OK))"
    assert Sandbox(read_only=[shown]).run_python(code).stdout == "7 ['shown here'] False\n"


@needs_sandbox
def test_the_same_program_behaves_the_same_twice() -> None:
    code = "import os\nprint(hash('a'), sorted(os.environ), os.getpid(), os.getcwd(), os.uname().nodename)"
    assert run_code(code).stdout == run_code(code).stdout


@needs_sandbox
def test_many_threads_share_one_sandbox_and_each_hears_its_own() -> None:
    sandbox, heard = Sandbox(), {}

    def ask(number: int) -> None:
        heard[number] = sandbox.run(["cat"], stdin=str(number).encode()).stdout

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {number: str(number) for number in range(16)}


@needs_sandbox
def test_the_keeper_knows_nothing_and_its_sandboxes_go_first_when_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SUREFOOT_SECRET", "jewels")
    process.close_server()
    watched = Sandbox().start(["sleep", "600"], b"", {})
    try:
        keeper = Path(f"/proc/{process._server().process.pid}")
        assert [each.split(b"=")[0] for each in (keeper / "environ").read_bytes().split(b"\0")[:-1]] == [b"PYTHONPATH"]
        assert os.readlink(keeper / "cwd") == "/"
        assert Path(f"/proc/{watched.sandboxed.pid}/oom_score_adj").read_text() == "1000\n"
    finally:
        watched.close()


@needs_sandbox
def test_the_report_can_be_asked_for_at_the_command_line() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(process.__file__).parents[2])}
    words = [sys.executable, "-m", "surefoot.sandbox"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[0], done.stderr) == (0, "sandbox: usable", "")


@needs_sandbox
def test_a_keeper_that_died_is_replaced() -> None:
    assert run_code("print(1)").stdout == "1\n"
    keeper = process._server()
    keeper.process.send(signal.SIGKILL, group=False)
    keeper.process.wait()
    assert run_code("print(2)").stdout == "2\n"
    assert process._server() is not keeper


@needs_sandbox
@pytest.mark.parametrize("moment", ["at once", "while it runs", "after its keeper"])
def test_everything_ends_with_the_caller_even_when_it_is_killed(moment: str) -> None:
    script = (
        "import os, sys\nfrom surefoot.sandbox import process\nfrom surefoot.sandbox.sandbox import Sandbox\n"
        "watched = Sandbox().start(['sh', '-c', 'echo up; sleep 600'], b'', {})\n"
        "keeper = process._server().process\nprint(keeper.pid, watched.sandboxed.pid, flush=True)\n"
        "if sys.argv[1] != 'at once':\n"
        "    stdout = next(iter(watched.outputs))\n    os.set_blocking(stdout, True)\n    os.read(stdout, 9)\n"
        "if sys.argv[1] == 'after its keeper':\n    os.kill(keeper.pid, 9)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(process.__file__).parents[2])}
    words = [sys.executable, "-c", script, moment]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        wait_for_the_end_of(pid)


def wait_for_the_end_of(pid: int) -> None:
    """Block until a process that is not our child has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    try:
        assert select.select([descriptor], [], [], 30)[0], f"{pid} is still there"
    finally:
        os.close(descriptor)


@needs_sandbox
def test_a_forked_process_gets_a_keeper_of_its_own() -> None:
    run_code("pass")
    mine = process._server().process.pid
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = run_code("print('from the child')").stdout + str(process._server().process.pid)
            os.write(writable, text.encode())
            process.close_server()
        finally:
            os._exit(0)
    os.close(writable)
    os.waitpid(child, 0)
    words = os.read(readable, 999).decode().splitlines()
    os.close(readable)
    assert words[0] == "from the child"
    assert int(words[1]) != mine
    assert run_code("print(3)").stdout == "3\n"


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x", "a\0b", "."])
def test_a_file_name_that_leads_out_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no name for a file"):
        host.checked_name(name)


@pytest.mark.parametrize("path", ["/", "/proc", "/dev/shm", "/sys/kernel", "/no/such/folder"])
def test_the_whole_host_and_its_devices_cannot_be_shown(path: str) -> None:
    with pytest.raises(ConfigError):
        host.views([Path(path)])


@pytest.mark.parametrize("argv", [[], ["a\0b"], [b"true"]])
@needs_sandbox
def test_what_is_no_program_is_refused(argv: list[Any]) -> None:
    with pytest.raises(ConfigError, match="is no program"):
        Sandbox().run(argv)


@needs_sandbox
def test_files_that_do_not_fit_are_refused_before_the_start() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        Sandbox(SandboxLimits(scratch_mb=1)).run(["true"], files={"big": bytes(2**20 + 1)})


@pytest.mark.parametrize(
    "change", [{"wall_s": 0}, {"wall_s": float("nan")}, {"cpu_s": 1.5}, {"files": -1}, {"memory_mb": True}]
)
def test_a_limit_that_is_none_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        SandboxLimits(**change)


def masked(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """A host whose kernel refuses the one call that makes namespaces."""

    def refuse(streams: object) -> None:
        raise error

    monkeypatch.setattr(host, "spawn", refuse)
    host.available.cache_clear()


@pytest.fixture
def forgetting() -> Any:
    """The next test asks the kernel anew."""
    yield
    host.available.cache_clear()


def test_a_host_without_namespaces_is_refused_and_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, forgetting: None
) -> None:
    masked(monkeypatch, OSError(1, "clone into new namespaces: Operation not permitted"))
    assert available() == HostReport(False, ("namespaces: clone into new namespaces: Operation not permitted",))
    assert "NOT usable" in str(available())
    with pytest.raises(SecurityError, match="clone into new namespaces: Operation not permitted") as caught:
        Sandbox()
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("value", ["linux", "darwin"])
def test_another_system_or_machine_is_named(value: str, monkeypatch: pytest.MonkeyPatch, forgetting: None) -> None:
    host.available.cache_clear()
    monkeypatch.setattr(host.sys, "platform", value)
    monkeypatch.setattr(host.platform, "machine", lambda: "pdp11")
    assert not available().usable
    assert ("pdp11" if value == "linux" else "darwin") in available().missing[0]


def test_unsafe_is_spelled_out_and_every_outcome_says_so(monkeypatch: pytest.MonkeyPatch, forgetting: None) -> None:
    masked(monkeypatch, OSError(1, "clone: no"))
    sandbox = Sandbox(SandboxLimits(wall_s=30.0, output_bytes=100), allow_unsafe=True)
    outcome = sandbox.run_python("import os\nprint(sorted(os.listdir('.')), len(os.environ) < 15)", files={"x y": b"1"})
    assert outcome == ProgramOutcome(0, "['main.py', 'x y'] True\n", "", False, None, False, True)
    flooded = sandbox.run_python("while True: print('x' * 999)")
    assert (flooded.killed, len(flooded.stdout), flooded.unsafe) == ("output", 100, True)


def test_unsafe_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch, forgetting: None) -> None:
    masked(monkeypatch, OSError(1, "clone: no"))
    assert Sandbox(SandboxLimits(wall_s=0.2), allow_unsafe=True).run_python("while True: pass").killed == "deadline"
    code = "import subprocess, sys\np = subprocess.Popen(['sleep', '600'])\nprint(p.pid, flush=True)\nsys.stderr.write('x' * 99999)"
    outcome = Sandbox(allow_unsafe=True).run_python(code)
    assert (outcome.killed, outcome.unsafe) == ("output", True)
    wait_for_the_end_of(int(outcome.stdout))


@needs_sandbox
def test_allowing_unsafe_does_not_choose_it() -> None:
    assert Sandbox(allow_unsafe=True).run_python("pass").unsafe is False


@needs_sandbox
def test_a_sandbox_that_fails_is_our_failure_and_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox()
    monkeypatch.setattr(sandbox, "_views", ["/usr", "/usr"])  # the second cannot be made
    with pytest.raises(ToolFailedError, match="could not be built") as caught:
        sandbox.run(["true"])
    assert caught.value.reason == "sandbox_failed"


@needs_sandbox
def test_a_kernel_that_has_no_namespace_left_is_our_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Sandbox()

    def refuse(streams: object) -> None:
        raise OSError(28, "clone into new namespaces: No space left on device")

    monkeypatch.setattr(host, "spawn", refuse)
    with pytest.raises(ToolFailedError, match="No space left") as caught:
        sandbox.run(["true"])
    assert caught.value.reason == "sandbox_failed"


@needs_sandbox
def test_a_process_that_runs_out_of_descriptors_anywhere_says_so_and_leaks_none() -> None:
    sandbox, limit = Sandbox(), resource.getrlimit(resource.RLIMIT_NOFILE)
    assert sandbox.run(["true"]).exit_code == 0, "the keeper is up"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, limit[1]))
    hoard, endings = [], []
    try:
        with contextlib.suppress(OSError):
            while True:
                hoard.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(12):
            os.close(hoard.pop())
            endings.append(how_it_ends(sandbox))
    finally:
        for descriptor in hoard:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert endings[0] == "sandbox_failed"
    assert endings[-1] == "0"
    assert set(endings) == {"sandbox_failed", "0"}


def how_it_ends(sandbox: Sandbox) -> str:
    try:
        return str(sandbox.run(["true"]).exit_code)
    except ToolFailedError as error:
        return error.reason


@needs_sandbox
def test_a_fork_of_ours_that_holds_the_pipes_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    real, forked = host.spawn, []

    def spawn(streams: Any) -> Any:
        sandboxed = real(streams)
        forked.append(os.fork())
        if forked[-1] == 0:
            signal.pause()
        return sandboxed

    sandbox = Sandbox()
    monkeypatch.setattr(host, "spawn", spawn)
    try:
        assert sandbox.run_python("print(1)") == ProgramOutcome(0, "1\n", "", False, None, False, False)
    finally:
        for child in forked:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@needs_sandbox
def test_an_ending_that_nobody_reported_is_no_result() -> None:
    sandbox = Sandbox()
    watched = sandbox.start(["sleep", "600"], b"", {})
    try:
        watched.sandboxed.kill()  # as the kernel does when the host runs out of memory
        process.attend([watched])
        with pytest.raises(ToolFailedError, match="without a report"):
            process.exit_code(watched)
    finally:
        watched.close()


@needs_sandbox
def test_planted_without_the_watch_on_memory_many_processes_take_more_than_one_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        break\nx = b'x' * 40 * 2**20\ntime.sleep(0.4)"
    sandbox = Sandbox(SandboxLimits(memory_mb=64))
    assert sandbox.run_python(code).killed == "memory"
    monkeypatch.setattr(process, "excess_mb", lambda *words: None)
    assert sandbox.run_python(code).killed is None


@needs_sandbox
def test_planted_an_environment_that_is_handed_on_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT_SECRET", "jewels")
    code = "import os; print(os.environ.get('SUREFOOT_SECRET'))"
    assert Sandbox().run_python(code).stdout == "None\n"
    monkeypatch.setattr(host, "environment", lambda shown: dict(os.environ))
    assert Sandbox().run_python(code).stdout == "jewels\n"


def test_a_descriptor_that_is_handed_out_arrives_with_its_report_for_us_alone_and_is_given_back() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull, "rb") as file:
        ours.setblocking(False)
        reports = process.SandboxReports()
        theirs.sendall(pack(b'{"egress": 1}'))
        socket.send_fds(theirs, [pack(b'{"listening": true}')], [file.fileno()])
        theirs.sendall(pack(b'{"exit": 0}'))
        assert reports.read(ours) == [{"egress": 1}, {"listening": True}, {"exit": 0}]
        [handed] = reports.descriptors
        assert (os.get_inheritable(handed), os.fstat(handed)) == (False, os.fstat(file.fileno()))
        reports.close()
        reports.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handed)


def test_reports_come_whole_however_they_are_cut_and_nonsense_is_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        reports = process.SandboxReports()
        sent = pack(b'{"egress": 2}') + pack(b'{"exit": 0}')
        theirs.sendall(sent[:12])
        assert (reports.read(ours), reports.ended) == ([], False)
        theirs.sendall(sent[12:])
        assert (reports.read(ours), reports.ended) == ([{"egress": 2}, {"exit": 0}], False)
        theirs.sendall(pack(b"{") + pack(b'{"exit": 1}'))
        assert reports.read(ours) == [{"exit": 1}], "a report that cannot be read is no report"
        theirs.close()
        reports.read(ours)
        assert reports.ended
    for line in (b"\xff" * 8, b"\0\0"):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(line)
            theirs.close()
            reports = process.SandboxReports()
            assert (reports.read(ours), reports.ended) == ([], True)
