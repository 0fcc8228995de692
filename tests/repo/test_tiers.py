"""Test tiers: unit tests stay small, GPU tests are skipped in the open, integration folders exist."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from repo_tree import ROOT, Source, functions, imported, parse, run_python, sources
from slow_tests import day_lengths, measured, merged

NOT_IN_UNIT = {"ray", "vllm", "trl", "wandb", "tensorboard", "deepspeed"}


def heavy_imports(source: Source) -> Iterator[str]:
    for line, name in imported(source.tree):
        if name.split(".")[0] in NOT_IN_UNIT:
            yield f"{source.name}:{line}: {name}"


def test_no_unit_test_imports_a_cluster_or_a_peer() -> None:
    unit = sources(ROOT / "tests" / "unit")
    assert unit, "there are no unit tests"
    assert [finding for source in unit for finding in heavy_imports(source)] == []


def test_planted_ray_import_is_seen() -> None:
    assert list(heavy_imports(parse("def test_x():\n    from ray.util import queue\n"))) == ["planted.py:2: ray.util"]


def test_every_test_file_holds_a_test() -> None:
    files = [source for source in sources(ROOT / "tests") if Path(source.name).name.startswith("test_")]
    empty = [s.name for s in files if not any(name.split(".")[-1].startswith("test_") for name, _ in functions(s.tree))]
    assert empty == []


@pytest.mark.parametrize("tier", ["unit", "silent", "parity", "runs", "faults", "repo"])
def test_the_tier_has_tests(tier: str) -> None:
    assert list((ROOT / "tests" / tier).rglob("test_*.py")), f"tests/{tier} is empty"


@pytest.fixture
def inner(tmp_path: Path) -> Path:
    """A folder with our conftest and settings, for a pytest inside the pytest."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "conftest.py")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = -ra --strict-markers\nxfail_strict = true\nfilterwarnings = error\nmarkers =\n    gpu: x\n",
        encoding="utf-8",
    )
    return tmp_path


def test_a_gpu_test_is_skipped_with_a_counted_reason(inner: Path) -> None:
    (inner / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n", encoding="utf-8")
    (inner / "test_gpu.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\ndef test_a(): raise RuntimeError\ndef test_b(): raise RuntimeError\n",
        encoding="utf-8",
    )
    result = run_python("-m", "pytest", "-p", "no:cacheprovider", cwd=inner)
    assert result.returncode == 0, result.stdout
    assert "2 skipped" in result.stdout
    assert "skipped 2: needs a CUDA GPU, none is visible" in result.stdout


def test_the_network_is_out_of_reach_and_loopback_is_not(inner: Path) -> None:
    (inner / "test_net.py").write_text(
        "import socket, pytest\n"
        "def test_away():\n"
        "    with socket.socket() as s, pytest.raises(OSError, match='do not use the network'):\n"
        "        s.connect(('192.0.2.1', 80))\n"
        "def test_home():\n"
        "    with socket.create_server(('127.0.0.1', 0)) as server, socket.create_connection(server.getsockname()):\n"
        "        pass\n",
        encoding="utf-8",
    )
    result = run_python("-m", "pytest", "-p", "no:cacheprovider", cwd=inner)
    assert "2 passed" in result.stdout, result.stdout


FAMILY = (
    "import pytest\n@pytest.mark.turns(4)\n@pytest.mark.parametrize('n', range(10))\ndef test_x(n): pass\n"
    "def test_always(): pass\n"
)


def collected(inner: Path, *words: str, turn: int) -> set[str]:
    """Names of the tests that this day would run."""
    (inner / "pytest.ini").unlink(missing_ok=True)
    flags = ("-o", f"cache_dir={inner}/cache", "-c", str(ROOT / "pyproject.toml"), "--collect-only", "-q", *words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUREFOOT_TEST_TURN", str(turn))
        result = run_python("-m", "pytest", *flags, "test_it.py", cwd=inner)
    assert result.returncode == 0, result.stdout + result.stderr
    return {line.partition("::")[2] for line in result.stdout.splitlines() if "::" in line}


def test_a_family_takes_turns_and_nobody_is_left_out(inner: Path) -> None:
    """In as many days as it is cut into, every test of it was run once; at night all of them are."""
    (inner / "test_it.py").write_text(FAMILY, encoding="utf-8")
    days = [collected(inner, "-m", "not nightly", turn=turn) for turn in range(4)]
    assert all("test_always" in day for day in days)
    assert sorted(name for day in days for name in day - {"test_always"}) == [f"test_x[{n}]" for n in range(10)]
    assert collected(inner, turn=0) == {"test_always", *(f"test_x[{n}]" for n in range(10))}


def test_a_family_that_shares_one_training_comes_together(inner: Path) -> None:
    together = FAMILY.replace("turns(4)", "turns(4, together=True)")
    (inner / "test_it.py").write_text(together, encoding="utf-8")
    days = [collected(inner, "-m", "not nightly", turn=turn) - {"test_always"} for turn in range(4)]
    assert sorted(map(len, days)) == [0, 0, 0, 10]


def test_long_tests_come_every_second_fifth_or_tenth_day_unless_they_may_not_wait(inner: Path) -> None:
    names = ["short", "half", "one", "long", "kept"]
    (inner / "test_it.py").write_text(
        "import pytest\n" + "".join(f"def test_{name}(): pass\n" for name in names[:-1])
        + "@pytest.mark.every_day\ndef test_kept(): pass\n", encoding="utf-8"
    )  # fmt: skip
    long = {
        f"test_it.py::test_{name}": seconds for name, seconds in zip(names[1:], (0.5, 1.0, 40.0, 40.0), strict=True)
    }
    (inner / "times.json").write_text(json.dumps({"short": 0.1, "long": long}), encoding="utf-8")
    days = Counter(name for turn in range(10) for name in collected(inner, "-m", "not nightly", turn=turn))
    assert days == {"test_short": 10, "test_half": 5, "test_one": 2, "test_long": 1, "test_kept": 10}
    assert len(collected(inner, turn=3)) == 5, "at night all of them"


def test_no_day_is_longer_than_two_cores_have_time_for() -> None:
    """Ten minutes, of which a tenth goes to starting up; and no day carries what another could."""
    table = json.loads((ROOT / "tests" / "times.json").read_text(encoding="utf-8"))
    days = day_lengths(table)
    assert max(days) < 2 * 600 * 0.9, days
    assert max(days) - min(days) < 30, days
    assert len(table["long"]) > 100, "nothing was measured"


def test_what_was_measured_replaces_what_was_known_and_what_is_gone_goes(tmp_path: Path) -> None:
    here = "repo/test_tiers.py"
    cases = [
        (f"tests/{here}", "test_a", 3.04, ""),
        (here, "test_b", 0.4, ""),
        (here, "test_c", 9, '<property name="tier"/>'),
    ]
    cases.append((here, "test_d", 5, "<failure/>"))
    xml = "".join(f'<testcase file="{f}" name="{n}" time="{s}">{i}</testcase>' for f, n, s, i in cases)
    (tmp_path / "test.xml").write_text(f"<testsuite>{xml}</testsuite>", encoding="utf-8")
    old = {
        "short": 1.0,
        "long": {f"{here}::{n}": 7.0 for n in ("test_b", "test_c", "test_d", "test_e")} | {"gone.py::x": 2.0},
    }
    table = merged(old, measured([tmp_path / "test.xml"]))
    assert table == {"short": 9.4, "long": {f"{here}::test_a": 3.0, f"{here}::test_d": 7.0, f"{here}::test_e": 7.0}}


def test_a_test_that_is_named_after_a_set_is_refused(inner: Path) -> None:
    """Its name would differ from worker to worker, and none of them would begin."""
    (inner / "test_it.py").write_text(
        "import pytest\n@pytest.mark.parametrize('s', [{'a', 'b'}], ids=str)\ndef test_x(s): pass\n", encoding="utf-8"
    )
    result = run_python("-m", "pytest", "-p", "no:cacheprovider", "test_it.py", cwd=inner)
    assert result.returncode == 4, result.stdout
    assert "is named after a set" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("import warnings\ndef test_x(): warnings.warn('odd')\n", "1 failed"),
        ("import pytest\n@pytest.mark.xfail(reason='x')\ndef test_x(): pass\n", "1 failed"),
        ("import pytest\n@pytest.mark.gpuu\ndef test_x(): pass\n", "1 error"),
    ],
    ids=["a warning", "an unexpected pass", "an unknown marker"],
)
def test_what_others_let_pass_is_red_here(inner: Path, code: str, outcome: str) -> None:
    (inner / "test_it.py").write_text(code, encoding="utf-8")
    (inner / "pytest.ini").unlink()
    result = run_python(
        "-m", "pytest", "-o", f"cache_dir={inner}/cache", "-c", str(ROOT / "pyproject.toml"), "test_it.py", cwd=inner
    )
    assert outcome in result.stdout, result.stdout
