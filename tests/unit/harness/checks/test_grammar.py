"""What can be written in a check, what is refused, and the counts that bound it."""

from __future__ import annotations

import pytest

from surefoot.errors import ConfigError
from surefoot.harness.checks import language, parse_check, run_checks
from surefoot.harness.checks.parser import tokenize
from surefoot.harness.series import Metrics, Series
from surefoot.records import Verdict

RISING = {step: 0.1 * step for step in range(1, 21)}  # 0.1 at step 1 ... 2.0 at step 20
METRICS = Metrics(
    {
        "train/gap": Series("train/gap", RISING),
        "train/pace": Series("train/pace", dict.fromkeys(range(1, 21), 3.0)),
        "held/score": Series("held/score", {0: 0.2, 10: 0.3, 20: 0.5}),
        "a<b>=c!=d": Series("a<b>=c!=d", {1: 7.0}),
        "it's": Series("it's", {1: 8.0}),
        'say "hi"': Series('say "hi"', {1: 9.0}),
        "quality": Series("quality", {0: 0.3}, single=True),
        "marked": Series("marked", {1: -1.0, 2: 0.5, 3: 0.25}),
    }
)

SHAPES = [  # every shape that is in use in public suites, in our own words and numbers; all of them hold on METRICS
    'data["train/gap"]["9"] < 1500',
    "data['train/gap']['20'] > 1.9",
    'data["train/gap"][9] < 1500',
    'data["train/gap"]["9"] > -1e-3 ',
    'data["quality"] >= 0.25',
    'data["held/score"]["20"] > data["held/score"]["0"] + 0.01',
    'data["held/score"]["0"] < 0.9 * data["held/score"]["20"]',
    'mean(data["train/gap"]) < 1.1',
    'mean(data["train/gap"], 2) > 1.0',
    'mean(data["train/gap"], -6, -1) < 1.8',
    'mean(data["train/gap"],-10,-1) < 1.8',
    'mean(data["train/gap"], range_start=-10) > 1.0',
    'mean(data["train/gap"], ignore_top_p=0.05) < 1.05',
    'mean(data["train/gap"], -6, -1, ignore_top_p=0.05) < 1.8',
    'mean(data["train/gap"], exclude_outliers=5) < 0.9',
    'mean(data["train/gap"], -5, -1) > 0.6 * data["train/gap"]["1"]',
    '(data["train/gap"]["20"] - mean(data["train/gap"], -6, -1)) / data["train/gap"]["20"] > 0.10',
    'median(data["train/gap"]) < 1.1',
    'abs(median(data["train/gap"])) < 2',
    'abs(data["train/gap"]["1"] - 0.1) < 0.0005',
    'ratio_above(data["train/gap"], 1.95) < 0.06',
    'min(data["train/gap"]) > 0',
    'max(data["train/gap"]) <= 2.0',
    'len(data["train/gap"]) == 20',
    'all_finite(data["train/gap"])',
    '"2" in data["train/gap"]',
    '"11" not in data["held/score"]',
    '"train/gap" in data',
    '"train/hap" not in data',
    'min({k: v for k, v in data["marked"].items() if v != -1.0}) > 0',
    "max({step: float(step) for step in data['train/gap']}) >= 20",
    'mean([data["train/gap"][str(s)] for s in range(16, 21)]) - mean([data["train/gap"][str(s)] for s in range(1, 6)]) > 1',
    'max({**data.get("no/such", {}), **data.get("train/pace", {})}) == 3',
    'set(data["train/gap"]) == set(map(str, range(1, 21)))',
    'data["a<b>=c!=d"]["1"] == 7',
    'data["it\'s"]["1"] == 8',
    "data['it\\'s']['1'] == 8",
    "data['say \"hi\"']['1'] == 9",
    '1.05 < max(data["train/gap"])',
    '0 < mean(data["train/gap"]) < 2 != 3',
    'not mean(data["train/gap"]) > 5 and (max(data["train/gap"]) > 5 or min(data["train/gap"]) < 1)',
    'percentile(data["train/gap"], 95) < 2',
    'last(data["train/gap"], 5) > last(data["train/gap"]) - 1',
    'slope(data["train/gap"]) > 0.05',
    'count(data["train/gap"], -6) == 6',
    'finite(data["train/gap"]) == True',
    'steps(data["held/score"]) != set(range(3))',
    'max(steps(data["held/score"])) == 20',
    '10 in steps(data["held/score"])',
    'within(last(data["train/gap"]), 2.0, 0.001)',
    'within(last(data["train/gap"]), 1.9, rel=0.1)',
    'mean(data["train/gap"], from_step=5, to_step=7) < 0.61',
    '7 // 2 == 3 and 7 % 4 == 3 and -2 - -3 == 1 and 2 + 3 * 4 == 14 and "train/gap" in data',
    ' \t data["train/gap"]["1"]\n<\n1',
]


@pytest.mark.parametrize("expression", SHAPES)
def test_every_shape_in_use_is_read_and_holds_where_it_should(expression: str) -> None:
    (row,) = run_checks(METRICS, [expression]).rows
    assert row.status is Verdict.PASS, row.message


REFUSED = {
    "": "ends too early",
    "   ": "ends too early",
    'min(data["x") > 0': ") is not expected",
    'min(data["x"]': "ends too early",
    'min(data["x"]) >': "ends too early",
    'min(data["x"]) > 0 0': "0 is not expected",
    "mean(5) < 3": "wanted is a series",
    'mean("x") < 3': "wanted is a series",
    'mean(data["x"], "a") < 3': "wanted is a number",
    'ratio_above(data["x"], "a") < 1': "wanted is a number",
    'ratio_above(data["x"]) < 1': "needs threshold",
    'mean(data["x"], 1, 2, 0.1, 9) < 3': "takes no further argument",
    'mean(data["x"], stop=3) < 3': "has no argument stop",
    'mean(data["x"], start=3, start=4) < 3': "given twice",
    'mean(data["x"], 1, start=3) < 3': "given twice",
    'mean(start=3, data["x"]) < 3': "cannot follow",
    'mean(data["x"], 1, from_step=3) < 3': "by position and one by step",
    'mean(data["x"], 0.5) < 3': "start is 0.5",
    'mean(data["x"], ignore_top_p=1.5) < 3': "ignore_top_p is 1.5",
    'mean(data["x"], ignore_top_p=-0.1) < 3': "ignore_top_p is -0.1",
    'percentile(data["x"], 101) < 3': "p is 101",
    'last(data["x"], 0) < 3': "k is 0",
    'within(last(data["x"]), 1)': "tolerance or rel",
    'within(last(data["x"]), 1, 2, rel=3)': "tolerance or rel",
    'maen(data["x"]) < 3': "did you mean mean",
    'sum(data["x"]) < 3': "unknown helper sum",
    'data["x"]["last"] < 3': "not a step",
    'data["x"][1.5] < 3': "not a step",
    'data["x"]["1"]["2"] < 3': "a point has no parts",
    'steps(data["x"]) > 3': "max(steps(x))",
    '"x" < 3': "wanted is a number",
    'mean(data["x"]) and True': "wanted is true or false",
    "not 3": "wanted is true or false",
    "data < 3": "wanted is a number",
    "x < 3": "unknown name x",
    "[1, 2, 3]": "lists and sets",
    "{1: 2}": "lists and sets",
    '{k: v for k in data["x"]}': "unknown name v",
    '[a for a in data["x"].items()]': "the for does not fit",
    '[[a for a in data["x"]] for b in data["x"]]': "a for inside a for",
    'within_baseline("x", stat="mode")': "stat is 'mode'",
    'data["x"]["1"] < "unclosed': "never closed",
    'data["x\\n"]["1"] < 1': "backslash",
    "1e999 < 2": "too large",
    "1" * 41 + " < 2": "a number of 41 characters",
    "2 ** 3 == 8": "no powers",
    "1 if True else 2": "if is not expected",
}


@pytest.mark.parametrize("expression", REFUSED)
def test_what_makes_no_sense_is_refused_with_its_place(expression: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_check(expression)
    text = str(caught.value)
    assert REFUSED[expression] in text, text
    assert "^" in text, "the place is marked"
    assert caught.value.exit_code == 2, "usage, not a FAIL of the run"


def test_the_caret_stands_under_the_place() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_check('min(data["x"]) > @')
    _, shown, caret = caught.value.what.split("\n")
    assert shown[caret.index("^")] == "@"


def test_one_bad_check_stops_all_of_them_before_any_is_judged() -> None:
    with pytest.raises(ConfigError):
        run_checks(METRICS, [SHAPES[0], "min("])


def test_no_check_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="no checks"):
        run_checks(METRICS, [])


def test_length_tokens_depth_strings_and_digits_are_bounded_by_named_counts() -> None:
    chain = "+1" * (language.MAX_TOKENS // 2 - 4)
    parse_check(f'1{chain} > 0 and "a" in data')  # long, flat and just inside
    at_limit = "(" * (language.MAX_DEPTH - 1) + "1" + ")" * (language.MAX_DEPTH - 1)
    parse_check(at_limit)
    too_much = {
        "characters": " " * language.MAX_LENGTH + "1",
        "tokens": "1" + "+1" * (language.MAX_TOKENS // 2),
        "deep": f"({at_limit})",
        "longer than": f'data["{"x" * (language.MAX_STRING + 1)}"]["1"] < 1',
        "a number of": "9" * (language.MAX_DIGITS + 1),
        "too large": "1e301",
    }
    for word, expression in too_much.items():
        with pytest.raises(ConfigError, match=word):
            parse_check(expression)


def test_work_is_bounded_by_the_points_that_are_named() -> None:
    free = language.MAX_OPERATIONS - 20
    run_checks(METRICS, [f'count(set(range({free}))) == {free} and "train/gap" in data'])
    with pytest.raises(ConfigError, match="too much work"):
        run_checks(METRICS, [f"count(set(range({language.MAX_OPERATIONS + 1}))) == 1"])
    bought = language.MAX_OPERATIONS + language.OPERATIONS_PER_POINT * len(RISING)
    with pytest.raises(ConfigError, match="too much work"):
        run_checks(METRICS, [f'len(data["train/gap"]) < count(set(range({bought})))'])


def test_a_long_series_is_not_too_much_work_for_a_plain_check() -> None:
    long = Metrics({"x": Series("x", dict.fromkeys(range(20_000), 1.0))})
    checks = ['mean(data["x"]) == 1', 'min({k: v for k, v in data["x"].items() if v > 0}) == 1']
    assert run_checks(long, checks).status is Verdict.PASS


def test_tokens_keep_their_place() -> None:
    assert [(token.text, token.at) for token in tokenize("a <= 1.5e-3")] == [
        ("a", 0),
        ("<=", 2),
        ("1.5e-3", 5),
        ("", 11),
    ]
