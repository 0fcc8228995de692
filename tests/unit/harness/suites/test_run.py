"""Whole trials in this process: a stranger's trainer, the local executor, real snapshots."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError, StateError
from surefoot.harness.suites import plan, run, session, verdicts
from surefoot.harness.suites.manifest import Overrides


def test_a_good_recipe_passes_and_leaves_its_evidence(project: Any) -> None:
    assert project.run(project.recipe()) == 0
    record = project.verdict()
    assert record["status"] == "PASS"
    assert set(verdicts.KEYS) <= record.keys()
    assert record["commit"] == project.git("rev-parse", "HEAD").strip()
    assert (record["dirty"], record["steps_reached"], record["max_steps"]) == (None, 4, 4)
    names = {path.name for path in project.folder().iterdir()}
    assert names == {"run", "run.log", "metrics.json", "provenance.json", "verdict.json", "exit_1"}
    assert "the student wrote FAIL" in (project.folder() / "run.log").read_text()
    assert project.git("status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("mode", "status", "code"),
    [
        ("crash", "ERROR", 70),
        ("silent", "ERROR", 3),
        ("nan", "FAIL", 1),
        ("short", "INCOMPLETE", 70),
        ("late-crash", "ERROR", 70),
    ],
)
def test_a_trainer_that_fails_says_so_in_the_verdict_and_the_exit_code(
    project: Any, mode: str, status: str, code: int
) -> None:
    assert project.run(project.recipe(mode)) == code
    assert project.verdict()["status"] == status


def test_a_crash_is_told_before_any_check_and_shows_the_end_of_the_log(project: Any) -> None:
    project.run(project.recipe("crash"))
    assert project.verdict()["checks"] == []
    assert any("the student wrote FAIL" in line for line in project.said)


def test_a_trainer_that_does_not_exist_is_an_error_and_the_next_recipe_still_runs(project: Any) -> None:
    missing = project.recipe(name="two").replace('"{python}"', '"no-such-trainer"')
    assert project.run(missing + project.recipe()) == 3
    assert project.verdict("two")["status"] == "ERROR"
    assert project.verdict()["status"] == "PASS"


def test_time_that_runs_out_ends_the_trainer(project: Any) -> None:
    assert project.run(project.recipe("forever").replace("minutes = 5", "minutes = 0.005")) == 76
    record = project.verdict()
    assert record["status"] == "INCOMPLETE"
    assert "out of time" in record["reasons"][0]


def test_the_trainer_runs_in_the_snapshot_not_in_the_tree(project: Any) -> None:
    project.run(project.recipe())
    assert project.seen()["cwd"] == project.verdict()["snapshot"]
    assert "code_snapshots" in project.seen()["cwd"]


def test_extra_words_pass_through_exactly_and_are_recorded(project: Any) -> None:
    words = ["lr=0.1", "a b", "it's", '"quoted"', "$HOME", "*", ""]
    project.run(project.recipe(), extra=words)
    assert project.seen()["argv"] == words
    assert project.verdict()["extra_args"] == words


def test_settings_do_not_leak_from_one_recipe_into_the_next(project: Any) -> None:
    first = project.recipe(more='env = {ONLY_ONE = "1", SHARED = "a b"}')
    second = project.recipe(name="two", more='env = {SHARED = "two"}')
    assert project.run(first + second) == 0
    one, two = project.seen("one")["env"], project.seen("two")["env"]
    assert (one["ONLY_ONE"], one["SHARED"]) == ("1", "a b")
    assert ("ONLY_ONE" in two, two["SHARED"]) == (False, "two")
    assert "SHARED" not in os.environ


def test_every_seed_has_its_own_folder_and_all_must_pass(project: Any) -> None:
    recipe = project.recipe(more="seeds = [3, 5]").replace('"good"', '"good", "{seed}"')
    assert project.run(recipe) == 0
    assert [project.seen(f"one/seed_{seed}")["argv"][0] for seed in (3, 5)] == ["3", "5"]


def test_a_chain_continues_the_former_run(project: Any) -> None:
    assert project.run(project.recipe(steps=5, more="steps_per_run = 2")) == 0
    record = project.verdict()
    assert record["steps_reached"] == 5
    assert project.seen()["argv"] == [str(project.folder() / "run")], "the last run was told where to resume"
    assert [(project.folder() / f"exit_{n}").read_text() for n in (1, 2, 3)] == ["0\n"] * 3


def test_a_chain_stops_at_the_run_that_fails(project: Any) -> None:
    project.run(project.recipe("crash", steps=5, more="steps_per_run = 2"))
    assert "(run 1 of 3)" in project.verdict()["reasons"][0]
    assert not (project.folder() / "exit_2").exists()


def test_overrides_are_in_the_verdict(project: Any) -> None:
    check = 'last(data["train/reward"]) > 0.2'
    changes = Overrides(set=("max_steps=2",), relax=(f"{check}=>" + check.replace("0.2", "0.1"),), reason="short")
    assert project.run(project.recipe(), overrides=changes) == 0
    record = project.verdict()
    assert (record["max_steps"], record["overrides"]) == (2, list(changes.recorded()))
    assert record["checks"][1]["check"] == 'last(data["train/reward"]) > 0.1'


def test_event_files_become_metrics_and_are_judged(project: Any, event_file: Any) -> None:
    pytest.importorskip("tensorboard", reason="reads event files")
    events = b"".join([event_file([("train/loss", 1 / step, step) for step in range(1, 5)])])
    (project.root / "events.out.tfevents.1.node-a.7.0").write_bytes(events)
    command = 'command = ["cp", "{snapshot}/events.out.tfevents.1.node-a.7.0", "{run}/"]'
    recipe = re.sub("command = .*", lambda _: command, project.recipe()).replace(
        ", 'last(data[\"train/reward\"]) > 0.2'", ""
    )
    assert project.run(recipe) == 0
    assert json.loads((project.folder() / "metrics.json").read_text()) == {
        "train/loss": {"1": 1.0, "2": 0.5, "3": pytest.approx(1 / 3), "4": 0.25}
    }


def test_a_file_that_changes_while_it_is_copied_is_noticed(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.copy2

    def edited_meanwhile(source: Path, target: Path, **options: Any) -> None:
        real(source, target, **options)
        project.write("trainer.py", "print('edited meanwhile')\n")

    monkeypatch.setattr(shutil, "copy2", edited_meanwhile)
    with pytest.raises(StateError, match="is not what was copied"):
        project.run(project.recipe())


def test_results_inside_the_repository_do_not_make_it_dirty(project: Any) -> None:
    project.run(project.recipe(), results=project.root / "results")
    assert project.git("status", "--porcelain") == ""


# -- run again, or not ------------------------------------------------------------------


def test_a_judged_training_is_not_run_again_and_keeps_its_exit_code(project: Any) -> None:
    assert project.run(project.recipe("nan")) == 1
    began = project.verdict()["started"], (project.folder() / "run/seen.json").stat().st_mtime_ns
    assert project.run(project.recipe("nan")) == 1
    assert (project.verdict()["started"], (project.folder() / "run/seen.json").stat().st_mtime_ns) == began
    assert any("skipped" in line for line in project.said)


def numbers_without_a_verdict_are_judged(project: Any) -> None:
    assert project.run(project.recipe("nan")) == 1
    (project.folder() / "verdict.json").unlink()
    assert project.run(project.recipe("nan")) == 1
    assert project.verdict()["status"] == "FAIL"
    assert any("judging" in line for line in project.said)


def test_numbers_at_the_last_step_without_a_verdict_are_judged_not_skipped(project: Any) -> None:
    numbers_without_a_verdict_are_judged(project)


def test_planted_skip_without_a_verdict_is_caught(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launcher that we learnt from does: at the last step, so all is well."""
    whole = {"status": "PASS", "steps_reached": 4, "max_steps": 4, "overrides": []}
    monkeypatch.setattr(run, "read_verdict", lambda trial: dict(whole))
    monkeypatch.setattr(plan, "same_training", lambda *_: True)
    with pytest.raises(AssertionError):
        numbers_without_a_verdict_are_judged(project)


def test_a_torn_verdict_is_no_verdict(project: Any) -> None:
    project.run(project.recipe())
    (project.folder() / "verdict.json").write_text('{"status": "PASS"')
    assert project.run(project.recipe()) == 0
    assert project.verdict()["checks"]


def test_other_checks_are_judged_on_the_same_numbers(project: Any) -> None:
    project.run(project.recipe())
    seen = (project.folder() / "run/seen.json").stat().st_mtime_ns
    changes = Overrides(relax=('max(data["train/loss"]) < 1.5=>max(data["train/loss"]) < 0.5',))
    assert project.run(project.recipe(), overrides=changes) == 1
    assert (project.folder() / "run/seen.json").stat().st_mtime_ns == seen


@pytest.mark.parametrize("change", ["code", "extra", "fresh", "steps"])
def test_anything_else_runs_afresh_and_keeps_the_former_run(project: Any, change: str) -> None:
    project.run(project.recipe())
    (project.folder() / "run/mark").write_text("first")
    if change == "code":
        project.write("trainer.py", (project.root / "trainer.py").read_text() + "# edited\n")
    recipe = project.recipe(steps=5 if change == "steps" else 4)
    assert project.run(recipe, extra=["x=1"] if change == "extra" else [], fresh=change == "fresh") == 0
    assert not (project.folder() / "run/mark").exists()
    assert (project.folder("one.previous") / "run/mark").read_text() == "first"


@pytest.mark.parametrize("mode", ["crash", "short", "silent", "late-crash"])
def test_a_training_that_did_not_get_there_runs_again(project: Any, mode: str) -> None:
    project.run(project.recipe(mode))
    (project.folder() / "verdict.json").unlink()
    (project.folder() / "run/mark").write_text("first")
    project.run(project.recipe(mode))
    assert not (project.folder() / "run/mark").exists()
    assert project.verdict()["status"] != "PASS"


def test_a_folder_that_is_not_ours_is_left_alone(project: Any) -> None:
    project.write("runs/suites/.gitignore", "*\n")
    project.write("runs/suites/try/one/thesis.txt", "years of work")
    with pytest.raises(StateError, match="not ours"):
        project.run(project.recipe())
    assert (project.folder() / "thesis.txt").read_text() == "years of work"


def test_two_at_once_are_refused(project: Any) -> None:
    with plan.only_one(project.root / "runs/suites", "try"):
        project.write("runs/suites/.gitignore", "*\n")
        with pytest.raises(StateError, match="is running"):
            project.run(project.recipe())


# -- where it is looked for, and where it goes ---------------------------------------------


def test_a_suite_may_be_named_by_its_file(project: Any, tmp_path: Path) -> None:
    project.suite("free_names = true\n" + project.recipe())
    inside = project.root / "suites"
    by_name = session.find_suite("try", None, project.root)
    assert session.find_suite("suites/try.toml", None, project.root) == by_name
    assert session.find_suite("./try.toml", None, inside).root == project.root
    assert session.find_suite(str(inside / "try.toml"), None, tmp_path) == by_name
    for name in ("suites/none.toml", "try.toml", "suites/", "suites/try"):
        with pytest.raises(ConfigError, match="is not a suite's file"):
            session.find_suite(name, None, project.root)
    with pytest.raises(ConfigError, match="drop one"):
        session.find_suite("suites/try.toml", inside, project.root)


def test_under_bisect_a_suite_runs_in_the_folder_of_its_commit(project: Any, tmp_path: Path) -> None:
    suite = project.suite("free_names = true\n" + project.recipe())
    told = {"SUREFOOT_BISECT_DIR": str(tmp_path / "commit")}

    def out(given: Path | None, environ: dict[str, str]) -> Path:
        return session.make_request(suite, [], Overrides(), [], "local", given, environ).out

    assert out(None, told) == tmp_path / "commit/suites"
    assert out(None, {}) == out(None, {"SUREFOOT_BISECT_DIR": ""}) == project.root / "runs/suites"
    assert out(tmp_path / "mine", told) == tmp_path / "mine", "who names a folder gets it"


# -- required, disabled, results -----------------------------------------------------------


def test_a_recipe_that_is_not_required_does_not_decide(project: Any) -> None:
    text = project.recipe() + project.recipe("crash", name="two", more="required = false")
    assert project.run(text) == 0
    assert project.verdict("two")["status"] == "ERROR"


def test_only_optional_recipes_prove_nothing(project: Any) -> None:
    assert project.run(project.recipe(more="required = false")) != 0


def test_a_disabled_recipe_is_left_out_unless_it_is_named(project: Any) -> None:
    text = project.recipe() + project.recipe("crash", name="two", more='disabled = "broken, being repaired"')
    assert project.run(text) == 0
    assert not project.folder("two").exists()
    assert project.run(text, recipes=["two"]) == 70


def test_a_result_folder_has_one_part_per_trial(project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "the student")
    text = project.recipe() + project.recipe("crash", name="two")
    assert project.run(text, results=tmp_path / "results") == 70
    parts = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results").glob("*.json")}
    assert {name: part["success"] for name, part in parts.items()} == {"one": True, "two": False}
    assert "[hidden] wrote FAIL" in parts["one"]["output"]
    assert "exit 3" in (tmp_path / "results/two.stderr.txt").read_text()
    with pytest.raises(StateError, match="already has one, two"):
        project.run(text, results=tmp_path / "results")


def test_a_denied_warning_turns_a_passing_part_red(project: Any, tmp_path: Path) -> None:
    source = (project.root / "trainer.py").read_text()
    project.write("trainer.py", source.replace("if mode ==", "print('WARNING kernels: fallback used')\nif mode ==", 1))
    assert project.run(project.recipe(), results=tmp_path / "results") == 1
    assert project.verdict()["status"] == "PASS"
    assert json.loads((tmp_path / "results/one.json").read_text())["verdict"] == "FAIL"
