"""A stranger's run folder: no command runs its code, waits for it, leaves it, or shows another file's text.

First what is promised one by one, each with the defence taken away beside it; then a thousand mutations by night, five of
them a day. `run_folder_kit.KINDS` says what they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kill_runs import PLAIN, Bench
from run_folder_kit import (
    CANARY,
    KINDS,
    LEDGER,
    Look,
    Scene,
    digests,
    forge_journal,
    look,
    make_outside,
    mutate,
    set_key,
)

import surefoot
from surefoot.errors import SecurityError, StateError

MUTATIONS, PARTS = 1000, 200
HANG_S = 2.0
"""Of a command that is expected to hang."""
Fresh = Callable[..., Scene]


@pytest.fixture(scope="session")
def templates(bench: Bench) -> tuple[Path, Path, Path]:
    """The folder of a run; a copy of it killed in its fifth step, and one of it at its end."""
    killed = bench.killed(PLAIN, "loop.before_log=kill@5")
    ended = bench.resume(killed.folder)
    assert ended.code == 0, ended.said
    finished = killed.folder.with_name("finished")
    shutil.copytree(killed.folder, finished, symlinks=True)
    make_outside(killed.folder / "run", killed.folder.with_name("outside"))
    return killed.folder, killed.copy, finished


@pytest.fixture
def fresh(templates: tuple[Path, Path, Path]) -> Fresh:
    """The folder as a kill left it, or as the run's end did, whatever the last mutation was."""

    def make(*, over: bool = False) -> Scene:
        place, killed, finished = templates
        for folder in (place / "run").rglob("*") if (place / "run").is_dir() else ():
            if folder.is_dir() and not folder.is_symlink():
                folder.chmod(0o700)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(finished if over else killed, place, symlinks=True)
        made = Scene(place, place.with_name("outside"))
        made.ran.unlink(missing_ok=True)
        return made

    return make


def one(bench: Bench, scene: Scene, command: str, planted: str = "", deadline_s: float = 60.0) -> Look:
    """The end of one command."""
    (found,) = look(bench.warm, scene, planted=planted, only=command, deadline_s=deadline_s)
    return found


# -- code ---------------------------------------------------------------------------------------------


def names_code(scene: Scene, file: Path) -> None:
    """The run's config names this file, which leaves a trace when it is imported."""
    file.write_text(scene.evil())
    set_key(scene.run / "config.toml", "", "reward_funcs", [f"{file}:f"])


@pytest.mark.parametrize("command", ["eval", "train"])
def test_an_edited_config_is_refused_before_its_code_is_imported(bench: Bench, fresh: Fresh, command: str) -> None:
    for planted in ("", "believe"):
        scene = fresh()
        names_code(scene, scene.place / "evil.py")
        found = one(bench, scene, command, planted)
        assert scene.ran.exists() == bool(planted), found.said
        if not planted:
            assert found.code == 3, found.said
            assert "config.toml changed since the run began" in found.said


@pytest.mark.parametrize("command", ["eval", "train"])
def test_code_in_the_run_folder_is_refused_even_if_the_journal_knows_it(
    bench: Bench, fresh: Fresh, command: str
) -> None:
    for planted in ("", "code"):
        scene = fresh()
        names_code(scene, scene.run / "evil.py")
        forge_journal(scene.run)
        found = one(bench, scene, command, planted)
        assert scene.ran.exists() == bool(planted), found.said
        if not planted:
            assert found.code == 5, found.said
            assert "names code in the run folder itself" in found.said
            assert "--allow-code" in found.said


@pytest.mark.turns(3)
def test_code_in_the_run_folder_is_run_when_that_is_allowed(bench: Bench, fresh: Fresh) -> None:
    for words in (["eval", "run", "--allow-code"], ["train", "--resume", "run", "--allow-code"]):
        scene = fresh()
        names_code(scene, scene.run / "evil.py")
        forge_journal(scene.run)
        ended = bench.warm.run(*words, cwd=scene.place)
        assert ended.code == 0, ended.said
        assert scene.ran.exists()


def test_the_python_functions_refuse_the_same(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = fresh()
    monkeypatch.chdir(scene.place)
    names_code(scene, scene.run / "evil.py")
    for function in (surefoot.evaluate, surefoot.resume):
        with pytest.raises(StateError, match=r"config\.toml changed since the run began"):
            function("run")
    forge_journal(scene.run)
    for function in (surefoot.evaluate, surefoot.resume):
        with pytest.raises(SecurityError, match="names code in the run folder itself"):
            function("run")
    assert not scene.ran.exists()


def test_without_a_journal_no_code_is_run_by_an_evaluation(bench: Bench, fresh: Fresh) -> None:
    scene = fresh()
    (scene.run / LEDGER).unlink()
    found = one(bench, scene, "eval")
    assert found.code == 5, found.said
    assert "no journal says that this is the config of the run" in found.said
    ended = bench.warm.run("eval", "run", "--allow-code", cwd=scene.place)
    assert ended.code == 0, ended.said


def test_allow_code_goes_with_a_resume(bench: Bench, fresh: Fresh) -> None:
    ended = bench.warm.run("train", "--allow-code", cwd=fresh().place)
    assert ended.code == 2
    assert "--allow-code goes with --resume" in ended.said


# -- files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "command"), [("environment.json", "report"), ("lock", "status")])
def test_a_pipe_is_not_waited_for(bench: Bench, fresh: Fresh, name: str, command: str) -> None:
    for planted in ("", "open"):
        scene = fresh()
        (scene.run / name).unlink(missing_ok=True)
        os.mkfifo(scene.run / name)
        found = one(bench, scene, command, planted, HANG_S if planted else 60.0)
        assert (found.code is None) == bool(planted), found


@pytest.mark.parametrize(("name", "planted"), [("config.toml", "open"), ("rollouts", "folders")])
def test_a_link_is_not_followed_into_the_page(bench: Bench, fresh: Fresh, name: str, planted: str) -> None:
    for defence in ("", planted):
        scene = fresh()
        path = scene.run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.symlink_to(scene.outside / "run" / name)
        found = one(bench, scene, "report", defence)
        assert found.code == 0, found.said
        page = (scene.run / "report.html").read_text()
        assert (CANARY in page) == bool(defence)
        assert bool(defence) or "a link" in page


def test_a_linked_folder_is_refused_by_eval_resume_and_ledger(bench: Bench, fresh: Fresh) -> None:
    for name, commands in (("checkpoints", ("eval", "train")), ("journal", ("ledger",))):
        scene = fresh()
        shutil.rmtree(scene.run / name)
        (scene.run / name).symlink_to(scene.outside / "run" / name)
        for command in commands:
            found = one(bench, scene, command)
            assert found.code == 3, found.said
            assert f"{name} is a link" in found.said
    assert one(bench, scene, "ledger", "folders").code == 0, "without the defence somebody else's ledger is shown"


def test_a_line_without_end_costs_no_memory(bench: Bench, fresh: Fresh) -> None:
    for planted in ("", "endless"):
        scene = fresh()
        with (scene.run / "metrics.jsonl").open("r+b") as file:
            file.truncate(128 << 20)
        looks = [one(bench, scene, command, planted) for command in ("report", "check")]
        assert [look.code for look in looks] == [0, 3], looks
        assert any(look.more_mb > 100 for look in looks) == bool(planted), [look.more_mb for look in looks]
        assert bool(planted) or "a line has more than" in (scene.run / "report.html").read_text()


@pytest.mark.turns(3, 1)
def test_logs_are_not_written_through_a_link(bench: Bench, fresh: Fresh) -> None:
    for planted in ("", "open"):
        scene = fresh()
        target = scene.place / "somebody's"
        target.write_text("theirs\n")
        log = scene.run / "logs" / "rewards.log"
        log.unlink(missing_ok=True)
        log.symlink_to(target)
        set_key(scene.run / "config.toml", "", "reward_funcs", [f"{scene.place}/loud.py:f"])
        (scene.place / "loud.py").write_text(
            "def f(prompts, completions, **_):\n    print('heard')\n    return [float(len(c)) for c in completions]\n"
        )
        forge_journal(scene.run)
        found = one(bench, scene, "train", planted)
        assert (target.read_text() != "theirs\n") == bool(planted), found.said
        if not planted:
            assert found.code == 74, found.said
            assert "it is a link" in found.said


def test_the_weights_that_are_evaluated_are_those_that_were_saved(bench: Bench, fresh: Fresh) -> None:
    scene = fresh(over=True)
    newest = scene.run / "checkpoints" / "step_6"
    weights = newest / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    found = one(bench, scene, "eval")
    assert found.code == 3, found.said
    assert "SHA-256 differs" in found.said


# -- the folder of a new run --------------------------------------------------------------------------


def test_an_output_folder_that_others_may_write_to_is_refused_and_another_narrowed(
    bench: Bench, fresh: Fresh, tmp_path: Path
) -> None:
    scene = fresh()
    for mode, code in ((0o777, 5), (0o775, 0)):
        output = tmp_path / f"{mode:o}"
        output.mkdir()
        output.chmod(mode)
        ended = bench.warm.run("train", "run.toml", f"output_dir={output}", "max_steps=1", cwd=scene.place)
        assert ended.code == code, ended.said
        assert "may be written to by everybody" in ended.said or not code
        assert output.stat().st_mode & 0o777 == (0o777 if code else 0o700)
        assert any(output.iterdir()) != bool(code)


# -- numbers that cannot be ---------------------------------------------------------------------------


def test_a_ledger_that_claims_a_step_without_end_is_refused_in_time_and_memory(bench: Bench, fresh: Fresh) -> None:
    """Found by mutation 473: every step up to it was looked for before any was missed."""

    def claim(records: list[dict[str, Any]]) -> None:
        trained = [record for record in records if record["event"] == "ledger.train"]
        trained[-1]["step"] = 10**18

    scene = fresh()
    forge_journal(scene.run, claim)
    found = one(bench, scene, "train")
    assert (found.code, found.more_mb < 500) == (3, True), found
    assert "says step 1000000000000000000 was trained" in found.said


def test_numbers_that_are_no_text_are_refused_by_line(bench: Bench, fresh: Fresh) -> None:
    """Found by mutation 927: a byte that no text has, inside the name of a metric, ended a resume as a bug of ours."""
    scene = fresh()
    path = scene.run / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"reward"', b'"rew\x8brd"', 1))
    found = one(bench, scene, "train")
    assert found.code == 3, found.said
    assert "metrics.jsonl:" in found.said


# -- everything at once -------------------------------------------------------------------------------


@pytest.mark.turns(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_mutation_of_a_run_folder_gets_through(bench: Bench, fresh: Fresh, part: int) -> None:
    found = []
    for number in range(part, MUTATIONS, PARTS):
        scene = fresh(over=bool(number // len(KINDS) % 2))
        before = digests(scene.outside)
        what = mutate(scene, number)
        found += [f"{number} {what}: {each}" for each in scene.trouble(look(bench.warm, scene), before)]
    assert found == [], "\n".join(found)
    assert bench.warm.orphans() == [], "processes are left"


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("kind", "planted", "command"),
    [("forged_config", "code", "eval"), ("link_to_a_file", "open", "report"), ("pipe", "open", "report")],
)
def test_planted_open_doors_are_seen_by_the_same_look(
    bench: Bench, fresh: Fresh, kind: str, planted: str, command: str
) -> None:
    """Teeth: with one defence taken away the mutations of its kind are found out."""
    numbers = [n for n in range(MUTATIONS) if KINDS[n % len(KINDS)].__name__ == kind]
    for number in numbers[:20]:
        scene = fresh(over=True)
        before = digests(scene.outside)
        mutate(scene, number)
        if scene.trouble([one(bench, scene, command, planted, 10.0)], before):
            return
    raise AssertionError(f"nobody misses {planted}")
