"""`surefoot probe-reward` on graders with planted bugs: each is caught by name, a healthy one passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Ran, surefoot

GRADERS = """
import random

def healthy(completions, answer, **_):
    return [1.0 if said.strip() == gold else 0.0 for said, gold in zip(completions, answer)]

def contains(completions, answer, **_):
    return [1.0 if gold in said else 0.0 for said, gold in zip(completions, answer)]

def contained(completions, answer, **_):
    return [1.0 if said in gold else 0.0 for said, gold in zip(completions, answer)]

def begins(completions, answer, **_):
    return [1.0 if said.startswith(gold) else 0.0 for said, gold in zip(completions, answer)]

def one_side_small(completions, answer, **_):
    return [1.0 if said.lower() == gold else 0.0 for said, gold in zip(completions, answer)]

def too_tolerant(completions, answer, **_):
    def close(said, gold):
        try:
            return abs(float(said) - float(gold)) <= 0.05 * abs(float(gold))
        except ValueError:
            return said == gold
    return [float(close(said, gold)) for said, gold in zip(completions, answer)]

def generous(completions, answer, **_):
    def same(said, gold):
        try:
            return float(said) == float(gold)
        except ValueError:
            return True
    return [float(same(said, gold)) for said, gold in zip(completions, answer)]

def by_chance(completions, answer, **_):
    return [random.random() for _ in completions]

def runs_it(completions, answer, **_):
    def same(said, gold):
        try:
            return str(eval(said)).removesuffix(".0") == gold
        except Exception:
            return said == gold
    return [float(same(said, gold)) for said, gold in zip(completions, answer)]

def constant(completions, answer, **_):
    return [0.0 for _ in completions]

def fragile(completions, answer, **_):
    return [float(int(said) == int(gold)) for said, gold in zip(completions, answer)]

def broken(completions, answer, **_):
    raise ImportError("no module named judge")

def short(completions, answer, **_):
    return [1.0]
"""
CAUGHT = {
    "contains": ("adversarial", "searched for inside the text"),
    "contained": ("empty", "saying nothing pays"),
    "begins": ("adversarial", "only the beginning is compared"),
    "one_side_small": ("gold", "full is 1"),
    "too_tolerant": ("adversarial", "tolerance is too wide"),
    "generous": ("adversarial", "counts as right"),
    "by_chance": ("repeated", "not a function of the answer"),
    "runs_it": ("adversarial", "run as code"),
    "constant": ("gold", "nothing is told apart"),
}
ALONE = [
    "tasks=t.jsonl",
    "tasks_per_step=1",
    "heldout_fraction=0",
    "eval_steps=0",
    "eval_metric=none",
    "target_metric=",
]


def probe(folder: Path, *words: str, rows: list[dict[str, Any]] | None = None) -> Ran:
    sums = [{"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in [(17, 25), (30, 4), (50, 50)]]
    towns = [{"id": town, "prompt": f"Which town is {town[::-1]}?", "answer": town} for town in ("Rome", "Paris")]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or [*sums, *towns]))
    (folder / "r.py").write_text(GRADERS)
    return surefoot("probe-reward", *ALONE, *words, cwd=folder)


def test_a_healthy_grader_passes(tmp_path: Path) -> None:
    done = probe(tmp_path, 'reward_funcs=["r.py:healthy"]')
    assert (done.code, done.out.splitlines()[-1]) == (0, "PASS"), done
    assert "0/100 paid" in done.out


@pytest.mark.parametrize("grader", CAUGHT)
def test_a_planted_grader_bug_is_caught_by_name(grader: str, tmp_path: Path) -> None:
    check, says = CAUGHT[grader]
    done = probe(tmp_path, f'reward_funcs=["r.py:{grader}"]', "--json")
    assert done.code == 1, done
    report = json.loads(done.out)
    kind = report["kinds"][0]
    assert (report["verdict"], kind["kind"]) == ("FAIL", grader)
    assert any(says in finding["says"] for finding in kind["findings"] if finding["check"] == check), kind["findings"]


def test_a_grader_that_fails_on_some_answers_is_incomplete(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(3)]
    done = probe(tmp_path, 'reward_funcs=["r.py:fragile"]', rows=rows)
    assert (done.code, done.out.splitlines()[-1]) == (1, "INCOMPLETE"), done
    assert "got no score (fragile:raised)" in done.out


@pytest.mark.parametrize(
    ("grader", "says"),
    [("broken", "no module named judge"), ("short", "returned 1 values"), ("missing", "no function 'missing'")],
)
def test_a_grader_that_cannot_be_run_at_all_exits_4(grader: str, says: str, tmp_path: Path) -> None:
    done = probe(tmp_path, f'reward_funcs=["r.py:{grader}"]')
    assert done.code == 4, done
    assert says in done.err
    assert "fix:" in done.err


def test_without_gold_answers_nothing_passes(tmp_path: Path) -> None:
    rows = [{"prompt": "Write a poem.", "answer": None}, {"prompt": "Write a song.", "answer": None}]
    done = probe(tmp_path, 'reward_funcs=["r.py:constant"]', rows=rows)
    assert (done.code, done.out.splitlines()[-1]) == (1, "INCOMPLETE"), done
    assert "2 task(s) have no gold answer" in done.out


def test_built_in_scorers_pass(tmp_path: Path) -> None:
    """Exact match, reasoning-gym's own scorer, and every verifier that needs no sandbox."""
    none = {"answer": None, "choices": None, "checks": None}
    rows = [
        {"prompt": "Half?", "verifier_type": "math", **none, "answer": "1/2"},
        {"prompt": "Factor x^2-1", "verifier_type": "math", **none, "answer": "(x-1)(x+1)"},
        {"prompt": "Clips?", "verifier_type": "gsm8k", **none, "answer": "24 + 48 = 72 #### 72"},
        {"prompt": "Capital of France?", "verifier_type": "exact", **none, "answer": "Paris"},
        {"prompt": "Largest?", "verifier_type": "choice", **none, "answer": "C", "choices": ["1", "2", "3"]},
        {"prompt": "Greet.", "verifier_type": "format", **none, "answer": "Hello", "checks": [{"check": "no_commas"}]},
    ]
    for done in (
        surefoot("probe-reward", "num_tasks=100", cwd=tmp_path),
        surefoot("probe-reward", "tasks=reasoning_gym:chain_sum", "num_tasks=50", cwd=tmp_path),
        probe(tmp_path, rows=rows),
    ):
        assert (done.code, done.out.splitlines()[-1]) == (0, "PASS"), done


def test_code_is_probed_in_the_sandbox(tmp_path: Path) -> None:
    from surefoot.envs.sandbox import available

    if not available().usable:
        pytest.skip(f"this host has no sandbox: {available().missing}")
    row = {"prompt": "Add.", "verifier_type": "code", "answer": "def add(a, b):\n    return a + b\n",
           "tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}  # fmt: skip
    done = probe(tmp_path, "--adversarial", "6", rows=[row])
    assert (done.code, done.out.splitlines()[-1]) == (0, "PASS"), done


def test_a_task_that_no_verifier_can_judge_is_refused_with_its_name(tmp_path: Path) -> None:
    done = probe(tmp_path, rows=[{"prompt": "?", "verifier_type": "rubric", "answer": "x"}])
    assert done.code == 4, done
    assert "rubric" in done.err
    assert "known are" in done.err
