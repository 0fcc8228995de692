"""Reward calls as they are meant to go; `tests/faults/test_rewards.py` has the rest."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.errors import RewardError, StorageError
from surefoot.rewards.pool import RewardJob, RewardPool


def job(*completions: str, **columns: list[Any]) -> RewardJob:
    return RewardJob(["p"] * len(completions), list(completions), columns)


def values(pool: RewardPool, *jobs: RewardJob, name: str = "f") -> list[float | None]:
    return [marks[name].value for marks in pool.score(jobs)]


def test_closures_and_lambdas_work_because_workers_are_forked() -> None:
    bonus = {"long": 10.0}
    with RewardPool({"f": lambda prompts, completions, **_: [bonus["long"] + len(c) for c in completions]}) as pool:
        assert values(pool, job("a", "abc")) == [11.0, 13.0]


def test_results_come_back_in_the_order_of_the_jobs_whoever_is_faster(tmp_path: Path) -> None:
    def pid(completions: list[str], **_: object) -> list[int]:
        """The first job is the slowest: it waits until another worker has been asked too."""
        (tmp_path / str(os.getpid())).touch()
        give_up = time.monotonic() + 5
        while completions == ["0"] and len(list(tmp_path.iterdir())) < 2 and time.monotonic() < give_up:
            time.sleep(0.01)
        return [os.getpid()] * len(completions)

    functions = {"n": lambda completions, **_: [int(c) for c in completions], "pid": pid}
    with RewardPool(functions, workers=3) as pool:
        marks = pool.score([job(*(str(10 * g + i) for i in range(g % 4 + 1))) for g in range(20)])
        assert [m["n"].value for m in marks] == [10 * g + i for g in range(20) for i in range(g % 4 + 1)]
        assert os.getpid() not in {m["pid"].value for m in marks}
        assert len({m["pid"].value for m in marks}) > 1
        assert pool.describe_failures() == {}


def test_siblings_are_scored_in_one_call() -> None:
    calls: list[int] = []

    def count(completions: list[str], **_: Any) -> list[int]:
        calls.append(len(completions))
        return [len(calls)] * len(completions)

    with RewardPool({"f": count}, workers=1) as pool:
        assert values(pool, job("a", "b", "c"), job("d", "e")) == [1, 1, 1, 2, 2]
    assert calls == []  # they happened elsewhere


def test_a_function_gets_the_columns_it_names_or_all_of_them() -> None:
    def named(completions: list[str], answer: list[str]) -> list[bool]:
        return [c == a for c, a in zip(completions, answer, strict=True)]

    def everything(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[int]:
        return [len(columns) + len(prompts)] * len(completions)

    with RewardPool({"named": named, "everything": everything}) as pool:
        marks = pool.score([job("2", "3", answer=["2", "2"], level=[1, 1])])
    assert [(m["named"].value, m["everything"].value) for m in marks] == [(1.0, 4.0), (0.0, 4.0)]


def test_coroutines_tuples_and_arrays_are_lists_too() -> None:
    async def later(completions: list[str], **_: Any) -> list[float]:
        return [0.25] * len(completions)

    functions = {
        "later": later,
        "tuple": lambda completions, **_: (0.5,) * len(completions),
        "array": lambda completions, **_: np.ones(len(completions)),
    }
    with RewardPool(functions) as pool:
        assert [{name: mark.value for name, mark in marks.items()} for marks in pool.score([job("a", "b")])] == [
            {"later": 0.25, "tuple": 0.5, "array": 1.0}
        ] * 2


def test_large_columns_travel_whole() -> None:
    blob = "x" * 5_000_000
    with RewardPool({"f": lambda completions, blob, **_: [len(b) for b in blob]}) as pool:
        assert values(pool, job("a", "b", blob=[blob, blob + "y"])) == [5_000_000, 5_000_001]


def test_nothing_to_score_is_nothing_scored() -> None:
    with RewardPool({"f": len}) as pool:
        assert pool.score([]) == []


def test_a_column_that_cannot_be_copied_is_refused_and_the_pool_goes_on() -> None:
    with RewardPool({"f": lambda completions, **_: [1.0]}) as pool:
        with pytest.raises(RewardError, match="cannot be sent to reward function f"):
            pool.score([job("a", bad=[lambda: 1])])
        assert values(pool, job("a")) == [1.0]


def test_lists_of_different_lengths_and_reserved_names_are_refused() -> None:
    with pytest.raises(RewardError, match=r"2 prompts but {'answer': 1}"):
        RewardJob(["p", "p"], ["a", "b"], {"answer": ["2"]})
    with pytest.raises(RewardError, match="column named 'prompts'"):
        RewardJob(["p"], ["a"], {"prompts": ["2"]})


@pytest.mark.parametrize(
    "settings", [{"workers": 0}, {"timeout_s": 0.0}, {"functions": {}}, {"functions": {"f": 3}}], ids=str
)
def test_a_pool_that_could_never_answer_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RewardError):
        RewardPool(**{"functions": {"f": print}, **settings})


def test_a_pool_that_is_not_running_says_so() -> None:
    pool = RewardPool({"f": print})
    with pytest.raises(RewardError, match="not running"):
        pool.score([job("a")])
    pool.start().close()
    pool.close()
    with pytest.raises(RewardError, match="not running"):
        pool.score([job("a")])


def test_a_log_that_cannot_be_opened_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no_such_folder"):
        RewardPool({"f": print}, log_path=tmp_path / "no_such_folder" / "log").start()


def test_scoring_never_imports_torch() -> None:
    program = (
        "import sys; from surefoot.rewards.pool import RewardJob, RewardPool; import surefoot.rewards.grading, surefoot.rewards.functions\n"
        "with RewardPool({'f': lambda completions, **_: ['torch' in sys.modules]}) as pool:\n"
        "    print('torch' in sys.modules, pool.score([RewardJob(['p'], ['c'])])[0]['f'].value)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("False 0.0", "")
