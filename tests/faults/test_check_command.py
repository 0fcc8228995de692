"""`surefoot check`, `dump` and `baseline` through the real command line: exit codes, output, files."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from command import Ran, surefoot

ROWS = [{"step": step, "loss": 1.0 / step, "reward": 0.1 * step} for step in range(1, 11)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "my run" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def check(source: Path, *words: str) -> Ran:
    return surefoot("check", str(source), *words, cwd=source.parent)


def test_exit_0_when_all_pass_and_the_table_is_whole(source: Path) -> None:
    long = " and ".join(["min(data['reward']) > 0"] * 20)
    ran = check(source, 'data["train/loss"]["9"] < 1500', long)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == "Metric Checks"
    assert lines[1].split() == ["Status", "Check", "Value", "Message"]
    assert lines[3].startswith('PASS    data["train/loss"]["9"] < 1500 ')
    assert "train/loss is recorded as loss" in lines[3]
    assert long in lines[4], "off a terminal nothing is cut"


def test_exit_1_when_one_fails(source: Path) -> None:
    ran = check(source, 'max(data["loss"]) < 2', 'max(data["loss"]) < 0.5')
    assert ran.code == 1
    assert 'FAIL    max(data["loss"]) < 0.5  1.0    1.0 < 0.5 is false' in ran.out


@pytest.mark.parametrize(
    "words", [["min("], ["sum(data['loss']) < 1"], ["mean(data['loss'], 'x') < 1"], ["min(data['loss']) > 0", "]"]]
)
def test_exit_2_for_what_cannot_be_read_and_nothing_is_judged(source: Path, words: list[str]) -> None:
    ran = check(source, *words)
    assert (ran.code, ran.out) == (2, "")
    assert "why:" in ran.err
    assert "fix:" in ran.err


def test_without_a_check_the_metrics_are_listed_and_that_is_no_evidence(source: Path) -> None:
    ran = check(source)
    assert ran.code == 2, "to have looked is not to have judged"
    assert [line.split() for line in ran.out.splitlines()[3:]] == [
        ['data["loss"]', "10", "1", "to", "10", "0.1"],
        ['data["reward"]', "10", "1", "to", "10", "1.0"],
    ]
    assert "no checks were given" in ran.err
    offered = ran.err.partition("such as '")[2].partition("'")[0]
    assert check(source, offered).code == 0, "the expression that is offered can be followed"
    listed = check(source, "--json")
    assert (listed.code, list(json.loads(listed.out)["metrics"])) == (2, ["loss", "reward"])
    (empty := source.parent / "none.txt").write_text("# nothing\n")
    assert check(source, "--checks-file", str(empty)).code == 2
    assert check(source.parent / "no such").code == 3


def test_exit_3_for_a_missing_empty_or_unreadable_source(source: Path) -> None:
    empty = source.parent / "empty.jsonl"
    empty.write_text("")
    for bad in (source.parent / "no such", empty, source.parent.parent):
        ran = surefoot("check", str(bad), "1 < 2", cwd=source.parent)
        assert (ran.code, ran.out) == (3, ""), bad


def test_json_is_all_of_stdout_in_the_order_given(source: Path) -> None:
    expressions = ['max(data["loss"]) < 0.5', 'min(data["reward"]) > 0', 'max(data["nope"]) < 1']
    ran = check(source, *expressions, "--json")
    content = json.loads(ran.out)
    assert ran.code == 1
    assert list(content) == ["checks", "status"]
    assert [(row["check"], row["status"], row["value"]) for row in content["checks"]] == [
        (expressions[0], "FAIL", 1.0),
        (expressions[1], "PASS", 0.1),
        (expressions[2], "FAIL", None),
    ]
    assert "key not found" in content["checks"][2]["message"]


def test_junit_and_a_file_of_checks(source: Path) -> None:
    checks = source.parent / "checks.txt"
    checks.write_text("# what must hold\n\nmin(data['reward']) > 0\n  max(data['loss']) < 0.5  \n")
    report = source.parent / "new folder" / "report.xml"
    ran = check(source, "--checks-file", str(checks), "--junit", str(report))
    assert ran.code == 1
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert check(source, "--checks-file", str(source.parent / "none.txt")).code == 3
    assert check(source, "1 < 2", "--junit", str(source / "x" / "report.xml")).code == 3


def test_a_run_folder_whose_writer_was_killed_is_read_with_a_note_on_stderr(source: Path) -> None:
    with source.open("a") as file:
        file.write('{"step": 11, "lo')
    ran = check(source.parent, 'len(data["loss"]) == 10', "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["status"] == "PASS"
    assert "row 11 is torn" in ran.err


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps({"a\x1b[31m": {"1": 1.0}}))
    ran = check(path, 'max(data["a"]) < 2')
    assert ran.code == 1
    assert "\x1b" not in ran.out
    assert "a\\x1b[31m" in ran.out


def test_a_baseline_from_the_first_run_to_the_loosened_band(source: Path, tmp_path: Path) -> None:
    def run(number: int, shift: float) -> str:
        folder = tmp_path / f"run {number}"
        folder.mkdir()
        rows = [{"step": step, "reward": 0.1 * step + shift} for step in range(1, 11)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder)

    def baseline(*words: str) -> Ran:
        return surefoot("baseline", *words, cwd=tmp_path)

    judge = ("check", "run 9", 'within_baseline("train/reward")')
    assert "no baselines" in baseline("list").out
    assert surefoot("check", str(source), 'within_baseline("reward")', cwd=tmp_path).code == 1
    for number, shift in enumerate((0.0, 0.01, -0.01)):
        assert baseline("add", run(number, shift)).code == 0
    assert baseline("add", "run 0").code == 3, "the same run twice"
    run(9, 0.08)
    assert surefoot(*judge, cwd=tmp_path).code == 0
    assert surefoot(*judge, "--baseline", "other", cwd=tmp_path).code == 3
    shutil.rmtree(tmp_path / "run 9")
    run(9, 0.25)
    failed = surefoot(*judge, cwd=tmp_path)
    assert failed.code == 1
    assert "3 runs, false alarm rate 0.01" in failed.out
    assert baseline("loosen", "main", "train/reward", "--factor", "3").code == 2, "a reason is required"
    assert baseline("loosen", "main", "train/reward", "--factor", "3", "--reason", "new data").code == 0
    assert "loosened 3 times: new data" in surefoot(*judge, cwd=tmp_path).out
    shown = baseline("show").out
    assert "Runs of main" in shown
    assert "new data" in shown
    assert "main" in baseline("list").out
    assert str(tmp_path) not in (tmp_path / "surefoot-baselines" / "main.json").read_text()


def test_dump_without_events_is_exit_3_and_writes_nothing(tmp_path: Path) -> None:
    ran = surefoot("dump", str(tmp_path), "-o", "metrics.json", cwd=tmp_path)
    assert ran.code == 3
    assert not (tmp_path / "metrics.json").exists()


def test_dump_then_check(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the tensorboard extra")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "logs"))
    for step in range(3):
        event = Event(wall_time=step, step=step)
        event.summary.value.add(tag="train/loss", simple_value=1.0 - 0.25 * step)
        writer.add_event(event)
    writer.close()
    ran = surefoot("dump", "logs", "-o", "metrics.json", cwd=tmp_path)
    assert (ran.code, ran.out) == (0, "train/loss: 3 points, steps 0 to 2, min 0.5, max 1, last 0.5\n")
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"train/loss": {"0": 1.0, "1": 0.75, "2": 0.5}}
    for place in ("metrics.json", "logs"):
        assert surefoot("check", place, 'mean(data["train/loss"]) == 0.75', cwd=tmp_path).code == 0
    assert surefoot("dump", "logs", "-o", "x.json", "--require-tag-prefix", "gen/", cwd=tmp_path).code == 3
