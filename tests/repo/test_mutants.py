"""`scripts/mutants.py`: its edits can be compiled, cut wires, and are met with the tests that `--affected` chooses."""

from __future__ import annotations

import ast
import json
import subprocess
import time
from pathlib import Path

import pytest
from repo_tree import ROOT

SHOP = """\
\"\"\"Prices.\"\"\"


def price(x, *, tax=0):
    if x < 0:
        raise ValueError("a price below nothing")
    return x + tax


def total(xs):
    return sum(price(x, tax=1) for x in xs)


def unused(x):
    return x * 2
"""
WATCHED = "import shop\n\ndef test_total():\n    assert shop.total([1, 2]) == 5\n"
ASLEEP = "import shop\n\ndef test_total():\n    shop.total([1, 2])\n"
SPOILED = "import os, shop\n\ndef test_total():\n    shop.total([1, 2])\n    assert 'SPOILED' not in os.environ\n"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def named(names: list[str], words: str) -> str:
    (found,) = [name for name in names if words in name]
    return found


@pytest.mark.usefixtures("tools")
def test_an_edit_changes_one_place_and_nothing_else() -> None:
    from mutation import mutants_of

    found = mutants_of("shop.py", SHOP)
    assert len(found) > 8
    for mutant in found:
        text = mutant.applied(SHOP)
        ast.parse(text)
        assert text != SHOP
        assert text[: mutant.start] == SHOP[: mutant.start]
        assert text.endswith(SHOP[mutant.end :])


@pytest.mark.usefixtures("tools")
def test_wires_are_cut_and_words_are_left_alone() -> None:
    from mutation import mutants_of

    names = [mutant.name for mutant in mutants_of("shop.py", SHOP)]
    assert "shop.py total: price without tax=" in names
    assert named(names, "x < 0 -> False").startswith("shop.py price:")
    assert named(names, "no raise ValueError").startswith("shop.py price:")
    assert not [name for name in names if "Prices" in name or "below nothing ->" in name]
    quiet = 'def f():\n    """Words."""\n    failpoint("here")\n\n\n__all__ = ["f"]\n'
    assert mutants_of("quiet.py", quiet) == []
    assert [each.now for each in mutants_of("numbers.py", "x = 1e100, 2.0, True\n")] == ["3.0", "False"]


@pytest.mark.usefixtures("tools")
def test_the_seed_alone_decides_which() -> None:
    from mutants import wiring
    from mutation import sample

    files = wiring(ROOT, [])
    assert len(files) > 30
    few = files[:3]
    first, again, other = (sample(ROOT, few, 20, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(sample(ROOT, few, 10**6, 1)) > len(first)
    with pytest.raises(SystemExit, match="no such file"):
        wiring(ROOT, ["src/surefoot/gone.py"])


def shop(folder: Path, tests: str) -> Path:
    """A small project under git, with the scripts that look at it."""
    (folder / "src" / "surefoot").mkdir(parents=True)
    (folder / "docs").mkdir()
    (folder / "docs" / "mutants.md").write_text("# Page\n\n<!-- mutants -->\nold\n<!-- /mutants -->\nafter\n")
    for name, text in {
        "src/shop.py": SHOP,
        "test_shop.py": tests,
        "pytest.ini": "[pytest]\npythonpath = src\nmarkers = nightly\n",
        ".gitignore": ".cache/\n.surefoot/\n",
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


@pytest.mark.usefixtures("tools")
@pytest.mark.turns(5)
@pytest.mark.parametrize(
    ("tests", "kills"), [(WATCHED, True), (ASLEEP, False), (SPOILED, False)], ids=["watched", "asleep", "spoiled"]
)
def test_a_cut_wire_is_killed_by_a_test_that_is_green_without_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tests: str, kills: bool
) -> None:
    """The real way: a copy, a recorded run, our own selection, a real pytest. Code that no test runs survives, too."""
    from mutant_copy import Copy
    from mutation import mutants_of

    source = shop(tmp_path / "source", tests)
    with Copy.of(source, tmp_path / "copy", ["src/shop.py", "test_shop.py", "pytest.ini"]) as copy:
        assert copy.record(["test_shop.py"], time.monotonic() + 60), "one small file is recorded in a minute"
        known = copy.recorded()
        assert list(known.tests) == ["test_shop.py::test_total"]
        monkeypatch.setenv("SPOILED", "from now on")
        mutants = {mutant.name: mutant for mutant in mutants_of("src/shop.py", SHOP)}
        cut = copy.try_out(mutants["src/shop.py total: price without tax="], 60, known)
        assert (cut.killed, cut.chosen, cut.ran) == (kills, 1, 1), cut
        assert (
            cut.how
            == {
                WATCHED: "FAILED test_shop.py::test_total",
                ASLEEP: "every chosen test was green",
                SPOILED: "no chosen test is green without it",
            }[tests]
        )
        assert copy.unsound == (set(known.tests) if tests == SPOILED else set())
        idle = copy.try_out(mutants["src/shop.py unused: x * 2 -> (x // 2)"], 60, known)
        assert not idle.killed, "no test runs it"
    assert (tmp_path / "copy" / "src/shop.py").read_text(encoding="utf-8") == SHOP, "the mutant was taken back"


@pytest.mark.usefixtures("tools")
def test_what_was_red_is_found_by_its_whole_name() -> None:
    from mutant_copy import first_red

    asked = ["t.py::a[x]", "t.py::a[x - y]", "u.py::b"]
    assert first_red("...\nFAILED t.py::a[x - y] - assert 1 == 2\n", asked)[0] == ["t.py::a[x - y]"]
    assert first_red("ERROR t.py - ImportError: no\n", asked) == (asked[:2], "ERROR t.py")
    assert first_red("Fatal Python error: Segmentation fault\n", asked) == (asked, ""), "then all of them are asked"


@pytest.mark.usefixtures("tools")
@pytest.mark.nightly  # each call loads what our commands load, for its forks
def test_a_call_that_was_cut_off_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two calls try what one would have tried, in forks; the third has nothing to do; a new test wakes a survivor."""
    import mutants

    source = shop(tmp_path / "source", ASLEEP)
    words = ["--only", "src/shop.py", "--tests", "test_shop.py", "--copies", "1", "--write", "--seed", "1"]
    few = mutants.main([*words, "--count", "4"], root=source)
    assert few == 1, "what survives is said by the exit code"
    kept = json.loads((source / "docs/mutants.json").read_text(encoding="utf-8"))
    assert [len(kept["tried"]), kept["planned"]] == [4, 4]
    capsys.readouterr()
    mutants.main([*words, "--count", "8"], root=source)
    said = capsys.readouterr().out
    assert said.count(" s  src/shop.py") == 4, said
    mutants.main([*words, "--count", "8"], root=source)
    assert " s  src/shop.py" not in capsys.readouterr().out, "nothing is tried twice"
    (source / "test_shop.py").write_text(WATCHED, encoding="utf-8")
    before = sum(not row["killed"] for row in json.loads((source / "docs/mutants.json").read_text())["tried"])
    mutants.main([*words, "--count", "8", "--again"], root=source)
    after = sum(not row["killed"] for row in json.loads((source / "docs/mutants.json").read_text())["tried"])
    assert 0 < after < before, "an assertion sees what a call alone did not"


@pytest.mark.usefixtures("tools")
def test_a_result_counts_while_its_function_is_the_same_and_a_partial_one_stays_open(tmp_path: Path) -> None:
    from mutant_copy import GREEN, Outcome
    from mutants import arguments, is_open, known, row_of
    from mutation import mutants_of

    one, two, three, *_ = mutants_of("shop.py", SHOP)
    rows = [
        row_of(Outcome(one, True, "FAILED t", 3, 1, 1.0), "abc"),
        row_of(Outcome(two, False, "the first 1 of 3 chosen tests were green", 3, 1, 1.0), "abc"),
        row_of(Outcome(three, False, GREEN, 3, 3, 1.0), "abc"),
    ]
    file = tmp_path / "found.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"mutant": "torn', encoding="utf-8")
    found = known([file, tmp_path / "missing.jsonl"])
    assert len(found) == 3
    near, whole, again = (arguments(words) for words in (["--near", "5"], [], ["--again"]))
    assert [is_open(each, found, near) for each in (one, two, three)] == [False, False, False]
    assert [is_open(each, found, whole) for each in (one, two, three)] == [False, True, False]
    assert [is_open(each, found, again) for each in (one, two, three)] == [False, True, True]
    assert is_open(one._replace(around="other"), found, whole), "the function is another one now"


@pytest.mark.usefixtures("tools")
def test_near_bounds_the_seconds_of_what_is_asked() -> None:
    from mutant_copy import within

    seconds = {"quick": 0.1, "middle": 4.0, "slow": 30.0}
    assert within(list(seconds), seconds, None) == ["quick", "middle", "slow"]
    assert within(list(seconds), seconds, 5.0) == ["quick", "middle"]
    assert within(["slow"], seconds, 5.0) == ["slow"], "one is asked, whatever it takes"


@pytest.mark.usefixtures("tools")
def test_a_test_that_ran_the_changed_place_comes_first_and_then_the_cheapest() -> None:
    from mutant_copy import nearest

    from surefoot_harness.affected.records import AffectedState, Dependency, TestRecord

    keys = [
        Dependency("body", "a.py", "f", "old"),
        Dependency("body", "a.py", "g", "-"),
        Dependency("body", "b.py", "h", "-"),
    ]
    tests = {
        "ran it, slow": TestRecord("passed", keys=[0], seconds=9.0),
        "ran it": TestRecord("passed", keys=[0, 2], seconds=2.0),
        "ran its file": TestRecord("passed", keys=[1], inherited=[0], seconds=1.0),
        "heard of it": TestRecord("passed", keys=[2], inherited=[0], seconds=0.1),
    }

    class View:
        def hash_of(self, kind: str, path: str, name: str) -> str:
            return "new" if name == "f" else "-"

    found = nearest(AffectedState(keys=keys, tests=tests), View(), set(tests))
    assert found == ["ran it", "ran it, slow", "ran its file", "heard of it"]


@pytest.mark.usefixtures("tools")
def test_what_survives_is_listed_and_keeps_its_reason(tmp_path: Path) -> None:
    from mutant_copy import GREEN, Outcome
    from mutants import _with_reasons, known, report, row_of, summary, write
    from mutation import mutants_of

    one, two, three, *_ = mutants_of("shop.py", SHOP)
    rows = [
        row_of(Outcome(one, True, "FAILED t", 3, 2, 1.0), "abc"),
        row_of(Outcome(two, False, GREEN, 2, 2, 1.0), "d"),
    ]
    found = {(row["mutant"], row["around"]): row for row in rows}
    explained = {**found, (two.name, two.around): {**rows[1], "reason": "equal | by arithmetic"}}
    kept = report([one, two, three], _with_reasons(found, explained), 4, "To be asked were 5 tests.")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "mutants.md"
    page.write_text("# Page\n\n<!-- mutants -->\nold\n<!-- /mutants -->\nafter\n", encoding="utf-8")
    write(tmp_path, kept)
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert text.endswith("<!-- /mutants -->\nafter\n")
    assert summary(kept) in text
    assert "1 of 2 killed (50.0%; 95% wanted); 2 of the 3 were tried; seed 4" in text
    assert "commits abc, d" in text
    assert "equal \\| by arithmetic" in text
    file = tmp_path / "docs" / "mutants.json"
    assert json.loads(file.read_text(encoding="utf-8")) == kept
    assert known([file])[two.name, two.around]["reason"] == "equal | by arithmetic"


@pytest.mark.usefixtures("tools")
def test_the_page_is_made_from_the_record() -> None:
    """What `docs/mutants.md` says was measured is what `docs/mutants.json` holds, by the script that made both."""
    from mutants import BEGIN, END, table

    file = ROOT / "docs" / "mutants.json"
    page = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")
    shown = page.partition(BEGIN)[2].partition(END)[0].strip()
    if file.exists():
        assert shown == table(json.loads(file.read_text(encoding="utf-8"))), "python scripts/mutants.py --write"
    else:
        assert shown.startswith("The 300 have not been run yet"), "nothing is shown that was not run"
