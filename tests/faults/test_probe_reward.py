"""`surefoot probe-reward` on graders with planted bugs: each is caught by name, a healthy one passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Ran, surefoot

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
    from surefoot.sandbox.sandbox import available

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


# -- where there are tools, answers are messages --------------------------------------------------

TALKS = """
def right(completions, answer, **_):
    return [float(talk[-1]["content"].strip() == gold) for talk, gold in zip(completions, answer)]

def only_after_a_call(completions, answer, **_):
    called = [any(message["role"] == "tool" for message in talk) for talk in completions]
    return [float(talk[-1]["content"] == gold and busy) for talk, gold, busy in zip(completions, answer, called)]

def tried(completions, answer, **_):
    called = [any(message["role"] == "tool" for message in talk) for talk in completions]
    solved = [talk[-1]["content"] == gold for talk, gold in zip(completions, answer)]
    return [float(max(right, 0.5 * busy)) for right, busy in zip(solved, called)]

def double(number: int) -> int:
    "Twice a number."
    return 2 * number

class World:
    def reset(self, **row):
        return None

    def press(self) -> str:
        "Press the button."
        return "pressed"

    def get_reward(self) -> float:
        return 1.0
"""


def probe_tools(folder: Path, *words: str) -> dict[str, Any]:
    (folder / "t.py").write_text(TALKS)
    done = surefoot("probe-reward", *words, "num_tasks=60", "--json", cwd=folder)
    assert done.code in (0, 1), done
    kind = json.loads(done.out)["kinds"][0]
    assert (kind["verdict"] == "PASS") is (done.code == 0)
    return dict(kind)


def test_the_shipped_tool_configs_are_probed_and_pass(tmp_path: Path) -> None:
    called = probe_tools(tmp_path, str(ROOT / "configs/tools_mcp.toml"))
    assert (called["verdict"], called["pay"]["right"], called["pay"]["busy"]) == ("PASS", 1.0, -0.1)
    facts = probe_tools(tmp_path, str(ROOT / "configs/tools_components.toml"), "component_weights={}")
    earned = [facts["pay"][name] for name in ("right", "wrong", "busy", "empty")]
    assert facts["verdict"] == "PASS"
    assert earned == pytest.approx([1.0, 0.05, 0.05, 0.0]), "wrong answers, with a call or without, and nothing"
    said = surefoot("probe-reward", str(ROOT / "configs/tools_components.toml"), "num_tasks=60", cwd=tmp_path)
    line = "a right answer (the answer alone) earns 1, a wrong one 0.05, an empty one 0, a wrong one after calls 0.05"
    assert line in said.out


def test_rewards_that_read_messages_are_asked_with_messages(tmp_path: Path) -> None:
    tools = 'tools.functions=["t.py:double"]'
    plain = probe_tools(tmp_path, tools, 'reward_funcs=["t.py:right"]')
    assert (plain["verdict"], plain["pay"]["calls"]) == ("PASS", False)
    after = probe_tools(tmp_path, tools, 'reward_funcs=["t.py:only_after_a_call"]')
    assert (after["verdict"], after["pay"]["calls"], after["pay"]["right"]) == ("PASS", True, 1.0)
    tried = probe_tools(tmp_path, tools, 'reward_funcs=["t.py:tried"]')
    assert (tried["pay"]["wrong"], tried["pay"]["busy"], tried["pay"]["refused"]) == (0.0, 0.5, [])


def test_what_a_world_says_of_itself_cannot_be_probed(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(TALKS)
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"prompt": f"Press {n}"}) + "\n" for n in range(8)))
    words = [word for word in ALONE if not word.startswith("eval_metric")]
    done = surefoot("probe-reward", *words, "tools.environment=t.py:World", cwd=tmp_path)
    assert done.code == 4, done
    assert "the rollouts' own world does" in done.err
