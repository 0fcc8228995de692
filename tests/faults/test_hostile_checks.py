"""Hostile expressions have no effect: a refusal or a FAIL, nothing run, nothing written, no crash."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from command import surefoot
from figures import Record, note

from surefoot.errors import ConfigError
from surefoot.harness.checks import language, run_checks
from surefoot.harness.checks.evaluate import Evaluator
from surefoot.harness.series import Metrics, Series
from surefoot.records import Verdict

METRICS = Metrics({"x": Series("x", {step: 1.0 / step for step in range(1, 21)}), "y": Series("y", {0: 1.0, 7: 2.0})})
ESCAPES = [
    "__import__('os').system('touch HACKED')",
    "().__class__.__bases__[0].__subclasses__()",
    "data.__class__.__mro__[-1].__subclasses__() != 0",
    "data['x'].__class__ == 1",
    "data.get.__globals__['__builtins__'] == 1",
    "data.get('x').__init__ == 1",
    "(lambda: 1)() == 1",
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen']",
    "{k: __import__('os') for k, v in data['x'].items()}",
    "{k: v for k, v in data.__dict__.items()}",
    "[s for s in data['x'].__iter__()]",
    "[open('HACKED', 'w') for s in range(3)]",
    "f'{__import__(\"os\")}' == 1",
    "'{0.__class__}'.format(data) == 1",
    "'%s' % data == 1",
    "`touch HACKED` == 1",
    "$(touch HACKED) == 1",
    "(x := 1) == 1",
    "data['x']['1'] if __import__('os') else 1",
    "exec('import os') == 1",
    "eval('1') == 1",
    "open('/etc/passwd') == 1",
    "getattr(data, 'x') == 1",
    "breakpoint() == 1",
    "print(data) == 1",
    "globals() == 1",
    "mean(*data['x']) < 1",
    "mean(**data['x']) < 1",
    "await data['x']",
    "yield 1",
    "import os",
    "x = 1",
    "1; 2",
    "1 # comment",
    "data['x'][1:2] < 3",
    "data[...] < 1",
    "data['x']['1'] < 1j",
    "0x10 < 1",
    "1_000 < 1",
    "b'x' in data",
    "r'x' in data",
    "'''x''' in data",
    "ｄata['x']['1'] < 1",
    "data['x']['１'] < 1",
    "data['x']['1'] ＜ 1",
    "ｍin(data['x']) < 1",
    "data['x']['1'] < 1\u200b",
    "data['x\x00']['1'] < 1",
    "\x00",
    "\ud800",
    "💥" * 100,
    "9**9**9",
    "9**9**9 < 1",
    "1e308 * 1e308 < 1",
    "'a' * 999999999 == 1",
    "set(range(10 * 10 * 10 * 10 * 10 * 10 * 10 * 10 * 10)) == set(data['x'])",
    "[s for s in range(1000000000000)]",
    "max([s for s in range(99999999)]) < 1",
    "max({**data['x'], **data['x'], **data['x']}) < 0",
    "within_baseline('../../etc/passwd')",
    "within_baseline('x', baseline='../../../etc/passwd')",
]
SEED = 31337
LIMIT_S = 0.01
HUGE = {
    "10^5 (": "(" * 100_000,
    "10^5 [": "[" * 100_000,
    "10^5 {": "{" * 100_000,
    "10^5 not": "not " * 100_000,
    "10^5 -": "-" * 100_000 + "1",
    "999 (": "(" * 999,
    "999 [": "[" * 999,
    "999 {": "{" * 999,
    "999 not": "not " * 999 + "True",
    "999 -": "-" * 990 + "1 < 2",
    "999 calls": "abs(" * 300,
    "nested points": "data['x'][" * 150,
    "nested loops": "[" * 40 + "s" + " for s in data['x']]" * 40,
    "nested comparisons": "(" * 39 + "1 == 1" + ") == True" * 39,
    "10 MB name": f"data['{'a' * 10_000_000}']['1'] < 1",
    "10 MB word": "a" * 10_000_000,
    "10 MB number": "9" * 10_000_000,
    "10 MB spaces": " " * 10_000_000,
    "10 MB unclosed": '"' + "a" * 10_000_000,
    "long chain": "1" + "<2" * 490,
    "many helpers": " + ".join(["mean(data['x'])"] * 100) + " < 0",
}


def harmless(expression: str) -> str:
    """Refused or FAIL; anything else (another exception, a PASS) ends the test here."""
    try:
        (row,) = run_checks(METRICS, [expression]).rows
    except ConfigError as error:
        assert len(str(error)) < 2000, "the message does not repeat a huge expression"
        return "refused"
    assert row.status is Verdict.FAIL, f"{expression[:200]!r} passed"
    return "FAIL"


@pytest.mark.parametrize("expression", ESCAPES)
def test_known_escapes_have_no_effect(expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    harmless(expression)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", HUGE)
def test_huge_and_deep_expressions_are_bounded(name: str) -> None:
    harmless(HUGE[name])


PIECES = [
    "data", "data['x']", "data['y']['7']", "data.get('z', {})", "mean(", "min(", "last(", "count(", "set(", "range(", "map(",
    "within(", "slope(", "str(", "abs(", ")", "(", "[", "]", "{", "}", "**", "*", "+", "-", "/", "//", "%", "<", "<=", ">",
    "==", "!=", "and", "or", "not", "in", "for", "if", "k", "v", "s", ",", ":", "=", ".", "items()", "get", "start=", "'1'",
    '"x"', "1", "0", "-6", "0.5", "1e9", "True", "False", " ", "__class__", "'", '"', "\\", "\n", "é", "lambda", ".5", "5.",
]  # fmt: skip


def grown(stream: random.Random, depth: int = 0) -> str:
    """A number written in the language, which makes sense or nearly so."""
    leaves = ["1", "-6", "0", "2.5", "1e300", "data['y']['7']", "data['x'][3]", "data['x'][99]", "last(data['z'])"]
    if depth > 4 or stream.random() < 0.2:
        return stream.choice(leaves)
    one, two = grown(stream, depth + 1), grown(stream, depth + 1)
    sign = stream.choice(["+", "-", "*", "/", "//", "%"])
    helper = stream.choice(["mean", "median", "slope", "count", "percentile", "ratio_above", "last"])
    return stream.choice([f"({one} {sign} {two})", f"-{one}", f"abs({one})", f"{helper}(data['x'], {one})"])


def fuzzed(stream: random.Random) -> str:
    """Pieces of the language in a random order, a check that grew by its rules, or a valid one with a random wound."""
    kind = stream.random()
    if kind < 0.2:
        words = [
            f"{grown(stream)} {stream.choice(['<', '>', '==', '!='])} {grown(stream)}"
            for _ in range(stream.randint(1, 3))
        ]
        return stream.choice([" and ", " or ", " == "]).join(f"({word})" for word in words)
    if kind < 0.6:
        return "".join(stream.choice(PIECES) + stream.choice(["", " "]) for _ in range(stream.randint(1, 25)))
    text = stream.choice(
        [
            "mean(data['x'], -6, -1, ignore_top_p=0.05) < 0.01",
            "min({k: v for k, v in data['x'].items() if v != 1.0}) > 9",
            "max([data['x'][str(s)] for s in range(1, 6)]) - last(data['x']) > 9 and not finite(data['y'])",
            "set(data['y']) == set(map(str, range(1, 21))) or data['y'][7] < 0 <= 3 != 4",
        ]
    )
    for _ in range(stream.randint(1, 4)):
        at = stream.randrange(len(text))
        cut = at + stream.choice([0, 0, 1, 3])
        text = text[:at] + stream.choice([*PIECES, chr(stream.randrange(0x250)), ""]) + text[cut:]
    return text


def test_ten_thousand_fuzzed_expressions_do_no_harm(record_property: Record) -> None:
    stream = random.Random(SEED)
    answers, slowest = {"refused": 0, "judged": 0}, 0.0
    for _ in range(10_000):
        expression, began = fuzzed(stream), time.process_time()
        try:
            rows = run_checks(METRICS, [expression]).rows
        except ConfigError:
            answers["refused"] += 1
        else:
            assert rows[0].status in (Verdict.PASS, Verdict.FAIL)
            answers["judged"] += 1
        slowest = max(slowest, time.process_time() - began)
    assert min(answers.values()) > 200, f"the fuzzer reaches both sides: {answers}"
    detail = f"{answers['refused']:,} refused; {len(ESCAPES)} known escapes have no effect either"
    note(record_property, "P19", "fuzzed expression of a check: no effect", 10_000, detail, seeds=range(SEED, SEED + 1))
    note(record_property, "P19", "CPU time of the slowest of these", 10_000, seconds=[slowest], limit_s=LIMIT_S)


def test_no_check_spends_more_than_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is counted, so it is the same everywhere: what was spent never exceeds the limit by more than one call."""
    spent: list[tuple[int, int]] = []
    real = Evaluator.spend

    def spend(self: Evaluator, node: object, amount: int = 1) -> None:
        spent.append((self.operations, self.limit))
        real(self, node, amount)  # type: ignore[arg-type]

    monkeypatch.setattr(Evaluator, "spend", spend)
    for expression in (*ESCAPES, *HUGE.values()):
        harmless(expression)
    points = sum(len(series) for series in METRICS.values())
    most = language.MAX_OPERATIONS + language.OPERATIONS_PER_POINT * points
    assert spent
    assert all(used <= limit <= most for used, limit in spent)


def test_planted_evaluator_without_a_count_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: with the count taken out, a loop over a range is simply run."""
    heavy = "max([s for s in range(20000)]) < 1 and 'x' in data"
    with pytest.raises(ConfigError, match="too much work"):
        run_checks(METRICS, [heavy])
    monkeypatch.setattr(Evaluator, "spend", lambda self, node, amount=1: None)
    assert run_checks(METRICS, [heavy]).rows[0].value == 19999.0


def test_the_command_line_survives_the_same(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"x": {"1": 1.0}}')
    for expression in (ESCAPES[0], "(" * 100_000, "9**9**9", "💥", "data['x']['1'] < 1; import os"):
        ran = surefoot("check", "metrics.json", expression, cwd=tmp_path)
        assert (ran.code, ran.out) == (2, "")
        assert "Traceback" not in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
