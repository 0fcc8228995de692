"""Twelve secrets around a tool run, a resumed run and a Ray run: in no process below, no file, no output, no report.

`test_secrets.py` plants secrets where they are printed; here nobody below the driver has them in the first place. A run
in a fork of the warm server shows what programs are given; that a fork of the driver itself (the reward workers) is
clean in the eyes of the kernel needs a process that was started with the secrets: `test_child_environments.py`, and the
nightly forms here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from canary_kit import CANARIES, REWARD, leaks, watch
from command import ROOT, surefoot

CONFIG = str(ROOT / "configs" / "tools_mcp.toml")
TINY = (
    "num_tasks=200 tasks_per_step=2 num_generations=2 max_steps=3 eval_steps=0 eval_on_start=false eval_tasks=4 save_steps=1 "
    "preflight_tasks=0 probe_reward_tasks=0 reward_workers=1 reward_timeout_s=220 stall_timeout_s=600 threads=1 device=cpu guard.mode=off "
    "learning_rate=1e-3 target_metric=none target_value=none eval_metric=none heldout_fraction=0 reward_weights=[1.0]"
).split()
KILLED = {"SUREFOOT_FAILPOINTS": "loop.after_learn=kill@2"}
UNLISTED = """
import os, surefoot.system.environment as listed
listed.inherited = lambda named=(), environ=None: dict(os.environ if environ is None else environ)
"""
"""Every process gets everything, as it was before there was a list."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    pytest.importorskip("mcp", reason="needs the mcp extra")
    (tmp_path / "r.py").write_text(REWARD)
    return tmp_path


def words(place: Path, *more: str) -> list[str]:
    return ["train", CONFIG, *TINY, f"reward_funcs=['{place}/r.py:watched']", "report_to=['tensorboard']", *more]


FORMS = [pytest.param(False, id="warm"), pytest.param(True, id="fresh", marks=pytest.mark.nightly)]


@pytest.mark.mcp
@pytest.mark.parametrize("fresh", FORMS)
def test_a_tool_run_and_its_resume_leave_twelve_secrets_with_the_driver_alone(place: Path, fresh: bool) -> None:
    killed, first = watch(place, *words(place), run="run", fresh=fresh, env=KILLED)
    assert killed.code == -9, killed.out + killed.err
    resumed, second = watch(place, "train", "--resume", "run", run="run", fresh=fresh)
    assert resumed.code == 0, resumed.out + resumed.err
    for seen in (first, second):
        assert len(seen) >= 4, f"fork server, worker, guardian, tool server: {sorted(seen)}"
        if not fresh:  # the fork server was started by somebody else, and so was what is forked from it
            seen = {who: held for who, held in seen.items() if "warm_command" not in who}
            assert any("calculator" in who for who in seen)
        assert {who: held for who, held in seen.items() if held} == {}
    shown = [surefoot(*ask, cwd=place, env=CANARIES) for ask in (("report", "run"), ("status", "run"))]
    assert {each.code for each in shown} == {0}, [each.err for each in shown]
    assert (place / "run" / "report.html").exists()
    assert leaks(killed) + leaks(resumed, *(each.out + each.err for each in shown)) == []
    assert "warning: the reward asked for OPENAI_KEY, which is set here and not passed on" in killed.out + killed.err
    assert "environment:" in (place / "run/logs/rewards.log").read_text(), "the reward did print"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.nightly
def test_a_ray_run_leaves_twelve_secrets_with_the_driver_alone(place: Path) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    ray = ["runtime.kind=ray", "runtime.engines=1", "runtime.workers=1", "pass_env=['JUDGE_API_KEY']"]
    ran, seen = watch(place, *words(place, *ray), run="run", fresh=True, env={"JUDGE_API_KEY": "key-of-the-judge"})
    assert ran.code == 0, ran.out + ran.err
    assert sum("ray::" in who for who in seen) >= 3, "learner, engine, worker"
    assert {who: held for who, held in seen.items() if held} == {}
    assert leaks(ran) == []
    assert (place / "judge").read_text() == "key-of-the-judge", "what was named has come all the way"
    said = (ran.run / "logs/worker-0.log").read_text()
    assert "warning: the reward asked for OPENAI_KEY, which is set here and not passed on" in said


@pytest.mark.nightly
@pytest.mark.mcp
def test_planted_environment_that_is_handed_on_whole_is_caught(place: Path) -> None:
    """Teeth: without the list, the processes hold what the driver holds, and a reward could print what has no shape."""
    hooks = place / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(UNLISTED)
    path = {"PYTHONPATH": f"{hooks}:{ROOT / 'src'}"}
    ran, seen = watch(place, *words(place), run="run", fresh=True, env=path)
    assert ran.code == 0, ran.out + ran.err
    held = {name for names in seen.values() for name in names}
    assert held == set(CANARIES), "every one of them was in a process below"
    assert sum(bool(names) for names in seen.values()) >= 3
    assert any(leak.endswith("NOTES_OF_MINE") for leak in leaks(ran)), "and this one in a log"
