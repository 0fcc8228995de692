"""`scripts/mutants.py`: its edits can be compiled, cut wires, and are met with the tests that `--affected` chooses."""

from __future__ import annotations

import ast
import json
import subprocess
from argparse import Namespace
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


@pytest.mark.usefixtures("tools")
def test_the_seed_alone_decides_which() -> None:
    from mutants import wiring
    from mutation import sample

    files = wiring(ROOT, [])
    assert len(files) > 30
    first, again, other = (sample(ROOT, files, 20, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(sample(ROOT, files, 10**6, 1)) > 3000
    with pytest.raises(SystemExit, match="no such file"):
        wiring(ROOT, ["src/surefoot/gone.py"])


@pytest.mark.usefixtures("tools")
@pytest.mark.turns(5)
@pytest.mark.parametrize(("tests", "survives"), [(WATCHED, False), (ASLEEP, True)], ids=["watched", "asleep"])
def test_a_test_that_asserts_nothing_lets_a_cut_wire_survive(tmp_path: Path, tests: str, survives: bool) -> None:
    """The real way: a copy, a recorded run, our own selection, a real pytest. Code that no test runs survives, too."""
    from mutants import Copy
    from mutation import mutants_of

    source = tmp_path / "source"
    (source / "src").mkdir(parents=True)
    for name, text in {
        "src/shop.py": SHOP,
        "test_shop.py": tests,
        "pytest.ini": "[pytest]\npythonpath = src\n",
    }.items():
        (source / name).write_text(text, encoding="utf-8")
    (source / "scripts").mkdir()
    for script in ("mutants.py", "mutation.py"):
        (source / "scripts" / script).write_text((ROOT / "scripts" / script).read_text(encoding="utf-8"))
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=source, check=True)
    copy = Copy.of(source, tmp_path / "copy")
    copy.record(["test_shop.py"])
    mutants = {mutant.name: mutant for mutant in mutants_of("src/shop.py", SHOP)}
    cut = copy.try_out(mutants["src/shop.py total: price without tax="], 60)
    assert (cut.killed, cut.chosen) == (not survives, 1), cut
    assert ("test_total" in cut.how) is not survives
    idle = copy.try_out(mutants["src/shop.py unused: x * 2 -> (x // 2)"], 60)
    assert not idle.killed
    assert idle.how in ("no test depends on it", "every chosen test was green")
    assert (copy.root / "src/shop.py").read_text(encoding="utf-8") == SHOP, "the mutant was taken back"


@pytest.mark.usefixtures("tools")
def test_what_survives_is_listed_and_keeps_its_reason(tmp_path: Path) -> None:
    from mutants import Outcome, report, summary, write
    from mutation import mutants_of

    one, two = mutants_of("shop.py", SHOP)[:2]
    outcomes = [Outcome(one, True, "FAILED t", 3, 1.0), Outcome(two, False, "every chosen test was green", 2, 1.0)]
    found = report(outcomes, Namespace(seed=4, count=2), {two.name: "equal | by arithmetic"}, "abc")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "mutants.md"
    page.write_text("# Page\n\n<!-- mutants -->\nold\n<!-- /mutants -->\nafter\n", encoding="utf-8")
    write(tmp_path, found)
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert text.endswith("<!-- /mutants -->\nafter\n")
    assert summary(found) in text
    assert "1 of 2 killed (50.0%; 95% wanted), seed 4, commit abc" in text
    assert "equal \\| by arithmetic" in text
    assert json.loads((tmp_path / "docs" / "mutants.json").read_text(encoding="utf-8")) == found
