"""The table, the JSON and the JUnit file say the same, whole, in the order given."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from surefoot.harness.checks import CheckReport, CheckRow, run_checks
from surefoot.harness.series import Metrics, Series
from surefoot.records import Verdict

METRICS = Metrics({"loss": Series("loss", {1: 0.9, 2: 0.5}), "a>b": Series("a>b", {1: 4.0})})


def value(expression: str) -> object:
    return run_checks(METRICS, [expression]).rows[0].value


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ('data["loss"]["1"] < 2', 0.9),
        ('2 > data["loss"]["1"]', 0.9),  # the side that depends on the source
        ('data["a>b"]["1"] < 2', 4.0),  # a sign inside the name changes nothing
        ('0.1 < last(data["loss"]) < 0.4', 0.5),
        ('min(data["loss"]) > 0 and max(data["loss"]) < 0.6', 0.9),  # the one that fails
        ('min(data["loss"]) > 0 and max(data["loss"]) < 1', 0.5),  # else the first
        ('min(data["loss"]) > 9 or max(data["loss"]) < 1', 0.5),
        ('data["loss"]["1"] - data["loss"]["2"] < 1', 0.4),
        ('min({k: v for k, v in data["loss"].items() if v > 0.6}) > 0', 0.9),  # not the loop's own comparison
        ('"1" in data["loss"]', "2 steps, 1 to 2"),
        ('finite(data["loss"])', True),
        ('max(data["no"]) < 1', None),
    ],
)
def test_the_value_is_the_side_that_comes_from_the_source(expression: str, wanted: object) -> None:
    assert value(expression) == wanted


def test_a_false_comparison_says_both_sides() -> None:
    assert run_checks(METRICS, ['max(data["loss"]) < 0.6']).rows[0].message == "0.9 < 0.6 is false"


def test_the_table_at_a_fixed_width() -> None:
    report = run_checks(METRICS, ['data["train/loss"]["1"] < 2', 'max(data["loss"]) < 0.6'])
    assert report.as_table() == (
        "Metric Checks\n"
        "Status  Check                        Value  Message\n"
        "------  ---------------------------  -----  ------------------------------\n"
        'PASS    data["train/loss"]["1"] < 2  0.9    train/loss is recorded as loss\n'
        'FAIL    max(data["loss"]) < 0.6      0.9    0.9 < 0.6 is false'
    )


def test_off_a_terminal_nothing_is_cut() -> None:
    name = "n" * 450
    report = run_checks(METRICS, [f'"{name}" in data'])
    assert name in report.as_table().splitlines()[3]


def test_json_has_exactly_these_keys_in_the_order_given() -> None:
    expressions = ['max(data["loss"]) < 0.6', 'data["loss"]["1"] < 2', 'max(data["no"]) < 1']
    content = json.loads(run_checks(METRICS, expressions).as_json())
    assert list(content) == ["checks", "status"]
    assert [list(row) for row in content["checks"]] == [["check", "status", "value", "message"]] * 3
    assert [row["check"] for row in content["checks"]] == expressions
    assert [row["status"] for row in content["checks"]] == ["FAIL", "PASS", "FAIL"]
    assert content["checks"][2]["value"] is None
    assert content["status"] == "FAIL"


def test_no_rows_are_not_a_pass() -> None:
    assert CheckReport(()).status is Verdict.FAIL


def test_a_value_that_is_not_finite_is_null_in_json() -> None:
    report = CheckReport((CheckRow("x", Verdict.FAIL, float("nan"), "x is NaN"),))
    assert json.loads(report.as_json())["checks"][0]["value"] is None


def test_junit_is_valid_xml_whatever_the_names_hold() -> None:
    strange = 'x" <&> \x00\x1b\ud800 ]]>'
    report = CheckReport((CheckRow(strange, Verdict.FAIL, 1.0, strange), CheckRow("fine", Verdict.PASS, 2.0, "")))
    root = ElementTree.fromstring(report.as_junit().encode("utf-8"))
    suite = root.find("testsuite")
    assert suite is not None
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == ("Metric Checks", "2", "1")
    first, second = suite.findall("testcase")
    assert "<&>" in str(first.get("name"))
    assert first.find("failure") is not None
    assert second.find("failure") is None


def test_flat_names_stand_in_only_when_the_other_one_is_missing() -> None:
    both = Metrics({"loss": Series("loss", {1: 1.0}), "train/loss": Series("train/loss", {1: 2.0})})
    flat = Metrics({"loss": Series("loss", {1: 1.0}), "eval_loss": Series("eval_loss", {1: 3.0})})
    (row,) = run_checks(both, ['data["train/loss"]["1"] == 2']).rows
    assert (row.status, row.message) == (Verdict.PASS, "")
    train, held_out, present = run_checks(
        flat, ['data["train/loss"]["1"] == 1', 'data["eval/loss"]["1"] == 3', '"train/loss" in data']
    ).rows
    assert (train.status, train.message) == (Verdict.PASS, "train/loss is recorded as loss")
    assert (held_out.status, held_out.message) == (Verdict.PASS, "eval/loss is recorded as eval_loss")
    assert present.status is Verdict.PASS
    assert run_checks(flat, ['data["test/loss"]["1"] == 1']).status is Verdict.FAIL
