"""What a warm child does with a spoilt run folder: every command in a fork of its own, with one defence taken away or none."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from kill_kit import be_command, ends_within


def look_at(order: str) -> None:
    """Run the commands of a file one after the other; write down how each ended."""
    wanted = json.loads(Path(order).read_text())
    looks = [_one(argv, wanted["deadline_s"], wanted["planted"]) for argv in wanted["commands"]]
    Path(order).with_name("looks.json").write_text(json.dumps(looks))


def _one(argv: list[str], deadline_s: float, planted: str) -> dict[str, Any]:
    out = os.memfd_create("said")
    pid = os.fork()
    if pid == 0:
        be_command(argv, lambda: _prepare(out, planted))
    code, peak = _end_of(pid, deadline_s)
    said = os.pread(out, os.fstat(out).st_size, 0).decode(errors="replace")
    os.close(out)
    return {"argv": argv, "code": code, "said": said, "more_mb": max(0.0, peak - _resident_mb())}


def _end_of(pid: int, deadline_s: float) -> tuple[int | None, float]:
    watch = os.pidfd_open(pid)
    in_time = ends_within(watch, deadline_s)
    os.close(watch)
    if not in_time:
        os.killpg(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None, used.ru_maxrss / 1024


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _prepare(out: int, planted: str) -> None:
    os.dup2(out, 1)
    os.dup2(out, 2)
    if planted:
        PLANTS[planted]()


# -- defences taken away ----------------------------------------------------------------------------


def _believe_the_config() -> None:
    from surefoot.run import evaluate, store

    store.is_as_told = evaluate.is_as_told = lambda folder, data: True


def _run_any_code() -> None:
    from surefoot.run import evaluate, session

    session.refuse_code = evaluate.refuse_code = lambda *_, **__: None


def _run_any_code_of_any_config() -> None:
    _believe_the_config()
    _run_any_code()


def _open_anything() -> None:
    from surefoot.rewards import pool
    from surefoot.system import files
    from surefoot.tracking import metrics

    def plain_descriptor(path: Path, flags: int) -> int:
        return os.open(path, flags & ~os.O_NOFOLLOW & ~os.O_NONBLOCK, 0o600)

    files.plain_descriptor = pool.plain_descriptor = metrics.plain_descriptor = plain_descriptor


def _follow_folders() -> None:
    from surefoot.report import data as report_data
    from surefoot.storage import run_folder

    run_folder.linked = report_data.linked = lambda root, *names: None


def _read_without_end() -> None:
    import surefoot_harness.metrics_file
    from surefoot.report import data as report_data
    from surefoot.system import files

    surefoot_harness.metrics_file.LINE_BYTES = report_data.LINE_BYTES = report_data.METRICS_BYTES = 1 << 40
    files.read_plain = lambda path, limit: files.open_plain(path).read()


PLANTS = {
    "believe": _believe_the_config, "code": _run_any_code, "all code": _run_any_code_of_any_config,
    "open": _open_anything, "folders": _follow_folders, "endless": _read_without_end,
}  # fmt: skip
