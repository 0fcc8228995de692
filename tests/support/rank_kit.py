"""Several ranks of one learner: processes that one interpreter forks, so that torch is imported once for all of them.

    python tests/support/rank_kit.py FOLDER JOB@SIZE...    what `JOB(folder, ranks)` writes, on so many ranks, in turn

A job is a function of `rank_jobs.py`, or such a function and a bug of `rank_jobs.BUGS`: `step+own_norm@2`. Size 1 is the learner without any sharding. A rank that raises prints it, and
the others are ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

PATIENCE_S = 120.0


def run_jobs(folder: Path, *jobs: str, patience_s: float = PATIENCE_S) -> None:
    """Do jobs in a process of their own; an AssertionError with what was printed when one failed."""
    words = [sys.executable, __file__, str(folder), *jobs]
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.path.dirname(__file__),
    }
    done = subprocess.run(words, capture_output=True, text=True, timeout=patience_s, env=environ, check=False)
    assert done.returncode == 0, f"{jobs} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"


def _fork_ranks(folder: Path, job: str, size: int) -> bool:
    """Whether all of them did it."""
    store = folder / f"store-{job}-{size}"
    store.unlink(missing_ok=True)
    children = [pid for index in range(size) if (pid := _fork(folder, job, index, size, store))]
    failed = False
    until = time.monotonic() + PATIENCE_S
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            children.remove(pid)
            failed = failed or status != 0
        if (failed or time.monotonic() > until) and children:
            failed = True
            for each in children:
                os.kill(each, 9)
        time.sleep(0.005)
    return not failed


def _fork(folder: Path, job: str, index: int, size: int, store: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        import rank_jobs
        import torch
        import torch.distributed as dist

        ranks = None
        if size > 1:
            from surefoot.learner.sharding import RankGroup

            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(store), size),
                rank=index,
                world_size=size,
                timeout=timedelta(seconds=60),
            )
            ranks = RankGroup(torch.device("cpu"))
        rank_jobs.do(job, folder, ranks)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    """One job after the other."""
    folder, *jobs = sys.argv[1:]
    import rank_jobs  # noqa: F401 - torch and ours, once
    import torch
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    asked = [job.partition("@") for job in jobs]
    return 0 if all(_fork_ranks(Path(folder), job, int(size)) for job, _, size in asked) else 1


if __name__ == "__main__":
    sys.exit(main())
