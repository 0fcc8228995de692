"""The plugin in real sessions: which files appear, what is in them, and that nothing appears unasked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_kit import Nested, history, results

from surefoot.harness.baseline import Baselines
from surefoot.harness.checks.command import judge_source
from surefoot.harness.tracker.tracker import MetricTracker
from surefoot.harness.trend import read_history, trends

pytest_plugins = ["pytester", "plugin_kit"]

ENTRY_POINT = """[pytest11]
surefoot.harness.plugin = surefoot_harness.pytest_entry
"""

POLICY = """
    import pytest

    def test_lm_policy_generation(tracker):
        tracker.track("avg_prob_mult_error", 1.0625)

    @pytest.mark.parametrize("size", [1, 2])
    def test_sizes(tracker, size):
        tracker.track("size", size)

    def test_that_fails(tracker):
        tracker.track("before", 7)
        assert False
"""
JQ = '[.start_time, .git_commit, .metrics["test_hf_ray_policy::test_lm_policy_generation"].avg_prob_mult_error] | @tsv'


def test_results_have_every_field_and_parameters_are_kept_apart(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyfile(test_hf_ray_policy=POLICY)
    done = nested(fresh=True)
    done.assert_outcomes(passed=3, failed=1)
    done.stdout.fnmatch_lines(["surefoot: results: unit_results.json and unit_results/*.json in *"])
    found = results(pytester.path)
    assert found["exit_status"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", found["start_time"])
    assert found["metrics"]["test_hf_ray_policy::test_sizes[1]"]["size"] == 1
    assert found["metrics"]["test_hf_ray_policy::test_sizes[2]"]["size"] == 2
    failed = found["metrics"]["test_hf_ray_policy::test_that_fails"]
    assert failed["before"] == 7
    assert failed["_elapsed"] >= 0
    assert (found["coverage"], bool(found["coverage_reason"])) == (None, True)
    assert {"git_commit", "dirty", "gpu_types", "host", "packages", "pytest_args"} <= found.keys()
    assert history(pytester.path) == [found]
    assert not (pytester.path / ".unit_results_journal").exists()
    (name,) = [file.name for file in (pytester.path / "unit_results").glob("*.json")]
    assert re.fullmatch(r"\d{8}-\d{6}-\d{6}-\d+\.json", name), "microseconds and the process keep two runs apart"


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_the_known_jq_line_prints_its_three_columns(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyfile(test_hf_ray_policy=POLICY)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        name = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
        subprocess.run(["git", *name, *words], cwd=pytester.path, check=True)
    nested("-k", "generation")
    nested("-k", "generation")
    line = f"jq -r '{JQ}' unit_results/*"
    said = subprocess.run(["bash", "-c", line], cwd=pytester.path, check=True, capture_output=True, text=True).stdout
    rows = [row.split("\t") for row in said.splitlines()]
    assert len(rows) == 2
    for start, commit, error in rows:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", start)
        assert re.fullmatch(r"[0-9a-f]{40}", commit)
        assert error == "1.0625"


def test_a_project_that_tracks_nothing_gets_no_file(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyfile("def test_one(): pass")
    before = {path.name for path in pytester.path.iterdir()}
    nested(fresh=True).assert_outcomes(passed=1)
    of_pytester = {"__pycache__", "stdout", "stderr", "runpytest-0", "runpytest-current"}
    assert {path.name for path in pytester.path.iterdir()} - before - of_pytester == set()


def test_results_can_be_asked_for_and_put_elsewhere(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyfile("def test_one(): pass")
    pytester.makeini("[pytest]\nsurefoot_results_dir = out/results")
    nested("--unit-results").assert_outcomes(passed=1)
    found = results(pytester.path / "out" / "results")
    assert (found["exit_status"], found["metrics"]) == (0, {})


def test_a_later_session_without_trackers_does_not_leave_an_old_success(
    pytester: pytest.Pytester, nested: Nested
) -> None:
    pytester.makepyfile(
        "def test_good(tracker): tracker.track('x', 1)\ndef test_bad(): assert False", "def test_list_only(): pass"
    )
    nested("-k", "good")
    assert results(pytester.path)["exit_status"] == 0
    nested("--collect-only")
    assert results(pytester.path)["exit_status"] == 0, "looking is not running"
    nested("-k", "bad")
    assert results(pytester.path)["exit_status"] == 1
    assert len(history(pytester.path)) == 2


def test_two_workers_are_merged(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyfile(
        """
        import os, pytest

        @pytest.mark.parametrize("i", range(6))
        def test_one(tracker, i):
            tracker.track("square", i * i)
            tracker.track("worker", os.environ["PYTEST_XDIST_WORKER"])
        """
    )
    nested("-n", "2", plugins=("xdist.plugin",)).assert_outcomes(passed=6)
    found = results(pytester.path)
    squares = [values["square"] for values in found["metrics"].values()]
    assert sorted(squares) == [i * i for i in range(6)]
    assert {values["worker"] for values in found["metrics"].values()} == {"gw0", "gw1"}
    assert found["exit_status"] == 0
    assert not (pytester.path / ".unit_results_journal").exists()


def test_a_users_own_monitor_and_coverage_total_are_used(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makeconftest(
        """
        import pytest
        from surefoot.harness.tracker.memory import Reading

        class Cov:
            cov_total = 12.5

        def pytest_configure(config):
            config.pluginmanager.register(Cov(), "_cov")

        @pytest.fixture(scope="session")
        def memory_monitor():
            class Fake:
                def read(self):
                    return Reading("fake", {"node0.gpu0": 10.0, "node1.gpu0": 30.0})
            return Fake()
        """
    )
    pytester.makepyfile("def test_one(tracker): tracker.log_max_mem('mem')")
    nested().assert_outcomes(passed=1)
    found = results(pytester.path)
    (values,) = found["metrics"].values()
    assert (values["mem"], values["_mem_source"]) == (30.0, "fake")
    assert (found["coverage"], found["coverage_reason"]) == (12.5, None)


def test_two_files_of_one_name_are_both_kept(pytester: pytest.Pytester, nested: Nested) -> None:
    for folder in ("a", "b"):
        pytester.mkpydir(folder).joinpath("test_x.py").write_text(
            f"def test_f(tracker): tracker.track('v', '{folder}')"
        )
    done = nested()
    done.stdout.fnmatch_lines(["surefoot: test_x names 2 files*"])
    found = results(pytester.path)["metrics"]
    assert {key: values["v"] for key, values in found.items()} == {"a.test_x::test_f": "a", "b.test_x::test_f": "b"}


def test_loading_the_plugin_imports_nothing_heavy(repo: Path) -> None:
    path = os.pathsep.join([str(repo / "src"), str(repo / "harness" / "src")])

    def loaded(name: str) -> list[str]:
        code = f"import pytest, sys; before = set(sys.modules); import {name}; print(*(set(sys.modules) - before))"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=True)
        return sorted(done.stdout.split())

    assert loaded("surefoot_harness.plugin") == ["surefoot_harness", "surefoot_harness.plugin"]
    assert loaded("surefoot_harness.pytest_entry") == ["surefoot_harness", "surefoot_harness.pytest_entry"]
    said = loaded("surefoot.harness.plugin")
    assert [name for name in said if name.startswith("surefoot.") or name == "surefoot"] == [
        "surefoot", "surefoot.harness", "surefoot.harness.plugin", "surefoot.moved_names",
    ]  # fmt: skip
    assert [name for name in said if name.startswith("surefoot_harness.")] == ["surefoot_harness.pytest_entry"]


def test_the_plugin_can_be_named_although_it_is_installed(
    pytester: pytest.Pytester, nested: Nested, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever name it is called by, and however many distributions bring it: it is there once, or not at all."""
    for name in ("surefoot", "surefoot_harness"):  # both, as in their two pyproject.toml
        info = pytester.mkdir(f"{name}-1.dist-info")
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        info.joinpath("entry_points.txt").write_text(ENTRY_POINT)
    pytester.makepyfile(
        "def test_it(pytestconfig):\n"
        "    named = [type(plugin).__name__ for plugin in pytestconfig.pluginmanager.get_plugins()]\n"
        "    assert named.count('ResultsPlugin') == 1"
    )
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
    others = ("-p", "no:xdist", "-p", "no:hypothesispytest", "-p", "no:cacheprovider")
    for name in ("surefoot.harness.plugin", "surefoot_harness.plugin", "no:other"):
        pytester.runpytest_subprocess(*others, "-p", name, timeout=60).assert_outcomes(passed=1)
    for name in ("surefoot.harness.plugin", "surefoot_harness.plugin"):
        pytester.runpytest_subprocess(*others, "-p", f"no:{name}", timeout=60).assert_outcomes(failed=1)


KNOWN_EXAMPLE = """
def test_exponentiate(tracker):
    starting_mem = tracker.get_max_mem()
    base = 2
    exponent = 4
    result = base ** exponent
    tracker.track("result", result)
    tracker.log_max_mem("memory_after_exponentiating")
    change_in_mem = tracker.get_max_mem() - starting_mem
    tracker.track("change_in_mem", change_in_mem)
    assert result == 16
"""
"""The example that NeMo RL's guide prints for this fixture, word for word."""


def known_example_passes(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyfile(test_known=KNOWN_EXAMPLE)
    nested().assert_outcomes(passed=1)
    found = results(pytester.path)["metrics"]["test_known::test_exponentiate"]
    assert found.pop("_elapsed") >= 0
    assert found == {"result": 16, "memory_after_exponentiating": "unavailable", "change_in_mem": "unavailable"}


@pytest.fixture
def _no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("surefoot.harness.tracker.memory.DefaultMonitor.read", lambda self: None)


@pytest.mark.usefixtures("_no_device")
def test_the_known_example_passes_without_a_gpu_and_nothing_it_could_not_measure_becomes_a_number(
    pytester: pytest.Pytester, nested: Nested
) -> None:
    known_example_passes(pytester, nested)
    source = pytester.path / "unit_results.json"

    def code(*checks: str) -> int:
        return judge_source(source, checks, None, Baselines(pytester.path))[0].exit_code

    name = 'data["test_known::test_exponentiate/change_in_mem"]'
    good = 'data["test_known::test_exponentiate/result"] == 16'
    assert code(good) == 0
    for check in (f"{name} < 5", f"{name} >= 0", f"not finite({name})", f"count({name}) == 1", f"not ({name} > 5)"):
        assert code(check) == code(good, check) == 3, check
    assert code(good.replace("16", "17"), f"{name} < 5") == 1, "a check that failed is still a FAIL"
    (trend,) = trends(read_history(pytester.path / "unit_results"), "change_in_mem")
    assert (trend.status, trend.message) == ("INCOMPLETE", "the newest value is unavailable: nobody measured it")


@pytest.mark.usefixtures("_no_device")
@pytest.mark.parametrize("plant", ["none", "zero"])
def test_planted_memory_of_none_or_of_zero_is_caught(
    pytester: pytest.Pytester, nested: Nested, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    monkeypatch.setattr(MetricTracker, "get_max_mem", lambda self: None if plant == "none" else 0.0)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        known_example_passes(pytester, nested)
