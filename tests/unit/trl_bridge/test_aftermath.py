"""What a stop leaves behind."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from surefoot.errors import SurefootError
from surefoot.trl_bridge import guard
from surefoot.trl_bridge.guard import checkpoints_in, steps_until, write_verdict

SCRIPT = """
import sys
from surefoot.errors import CollapseStopError, ConfigError
from surefoot.trl_bridge.guard import exit_with_own_code
HOOK
exit_with_own_code()
exit_with_own_code()
raise ERROR("what", "why", "fix")
"""


@pytest.mark.parametrize(
    ("hook", "error", "code"),
    [
        ("", "CollapseStopError", 79),
        ("", "ConfigError", 1),
        ("sys.excepthook = lambda *_: print('earlier hook', file=sys.stderr)", "CollapseStopError", 79),
    ],
)
def test_a_script_that_does_not_catch_the_stop_exits_with_its_code(hook: str, error: str, code: int) -> None:
    script = SCRIPT.replace("HOOK", hook).replace("ERROR", error)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.count("earlier hook" if hook else f"{error}: what") == 1, "said once, by whoever says it"


def test_the_verdict_leaves_out_what_json_cannot_say(tmp_path: Path) -> None:
    @dataclass
    class Status:
        fire: bool = True
        reason: str = "held-out fell"
        step: int = 40
        best_step: int = 25
        kl_ema: float = math.nan

    for step in (10, 20, 30, 40):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-5").write_text("a file")
    (tmp_path / "checkpoint-25").mkdir()  # of another run
    write_verdict(tmp_path, Status(), strict=True, own={10, 20, 30, 40}, curves="reward\nheld-out")
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["checkpoint"] == "checkpoint-40"
    assert verdict["checkpoint_before_decline"] == "checkpoint-20"
    assert "kl_ema" not in verdict["guard"]
    assert verdict["curves"] == ["reward", "held-out"]
    assert sorted(checkpoints_in(tmp_path)) == [10, 20, 25, 30, 40]
    assert steps_until(tmp_path / "checkpoint-25") == {10, 20, 25}
    assert steps_until(tmp_path / "somewhere else") == set()


def test_a_foreign_guards_status_is_written_too(tmp_path: Path) -> None:
    write_verdict(tmp_path / "new" / "folder", SimpleNamespace(fire=True), strict=False, own=())
    verdict = json.loads((tmp_path / "new" / "folder" / "verdict.json").read_text())
    assert (verdict["status"], verdict["exit_code"], verdict["guard"]) == ("FAIL", None, {"fire": True})


def test_one_process_is_the_first_rank_and_all_of_them() -> None:
    assert (guard.rank(), guard.world_size()) == (0, 1)
    assert guard.from_first(lambda: 7) == 7
    assert guard.summed([1.0, 2.0]) == [1.0, 2.0]
    with pytest.raises(ZeroDivisionError):
        guard.from_first(lambda: 1 // 0)
    assert isinstance(guard._boxed(lambda: 1 // 0)[1], SurefootError)
