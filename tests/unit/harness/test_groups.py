"""Marker groups: the truth table, and that nothing is left out silently."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from plugin_kit import Nested

from surefoot.errors import ConfigError
from surefoot.harness import selection
from surefoot.harness.project import Project, find_project, read_project
from surefoot.harness.selection import GroupChoice, MarkerGroup, ask, conflict, read_groups

pytest_plugins = ["pytester", "plugin_kit"]

GROUPS = {
    "hf_gated": MarkerGroup("hf_gated", "gate", env=("HF_TOKEN",)),
    "mcore": MarkerGroup("mcore", "backend"),
    "vllm": MarkerGroup("vllm", "backend"),
    "nightly": MarkerGroup("nightly", "plain"),
}
DECLARED = """
[tool.surefoot.groups.hf_gated]
kind = "gate"
env = "MY_TEST_TOKEN"
description = "needs an account at the hub"
[tool.surefoot.groups.mcore]
kind = "backend"
[tool.surefoot.groups.vllm]
kind = "backend"
requires = "no_such_module_anywhere"
install = "pip install the-backend"
"""
TESTS = """
    import pytest

    def test_plain(): pass

    @pytest.mark.hf_gated
    def test_gated(): pass

    @pytest.mark.mcore
    def test_mcore(): pass

    @pytest.mark.mcore
    @pytest.mark.hf_gated
    def test_gated_mcore(): pass
"""
TABLE = {
    # flags                          plain gated mcore both
    (): "1000",
    ("--hf-gated",): "1100",
    ("--mcore",): "1010",
    ("--mcore-only",): "0010",
    ("--mcore-only", "--hf-gated"): "0011",
    ("--mcore", "--hf-gated"): "1111",
    ("--hf-gated-only",): "0100",
    ("--hf-gated-only", "--mcore"): "0101",
}


def wanted(words: tuple[str, ...]) -> GroupChoice:
    only = [word[2:-5].replace("-", "_") for word in words if word.endswith("-only")]
    return ask([word[2:].replace("-", "_") for word in words if not word.endswith("-only")], only, GROUPS)


@pytest.mark.parametrize(("words", "expected"), TABLE.items(), ids=lambda value: " ".join(value) or "no flag")
def test_the_truth_table_of_marks_and_flags(words: tuple[str, ...], expected: str) -> None:
    marks = [[], ["hf_gated"], ["mcore"], ["mcore", "hf_gated"]]
    found = "".join("1" if wanted(words).reason_against(own, GROUPS) is None else "0" for own in marks)
    assert found == expected


def test_every_combination_follows_the_one_rule() -> None:
    """All marks x all flags, against the rule said another way: nothing unasked in it, and the only one in it."""
    names = list(GROUPS)
    powerset = [set(c) for n in range(5) for c in itertools.combinations(names, n)]
    for marks, included, only in itertools.product(powerset, powerset, [None, *names]):
        asked = GroupChoice(frozenset(included), only)
        runs = marks - included - {only} == set() and (only is None or only in marks)
        assert (asked.reason_against(marks, GROUPS) is None) == runs, (marks, included, only)


def test_a_real_session_follows_the_table_and_reports_what_it_left_out(
    pytester: pytest.Pytester, nested: Nested, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TEST_TOKEN", "secret")
    pytester.makepyprojecttoml(DECLARED)
    pytester.makepyfile(TESTS)
    for words in [(), ("--hf-gated",), ("--mcore-only",), ("--mcore-only", "--hf-gated")]:
        done = nested("--strict-markers", *words)
        done.assert_outcomes(passed=TABLE[words].count("1"), deselected=TABLE[words].count("0"))
        assert "secret" not in done.stdout.str()


def left_out_tests_are_reported(nested: Nested) -> None:
    done = nested(fresh=True)
    text = done.stdout.str()
    assert "surefoot: 2 deselected: group hf_gated was not asked for (--hf-gated)" in text, "left out, and not a word"
    assert "surefoot: 1 deselected: group mcore was not asked for (--mcore)" in text
    assert "3 deselected" in text


def test_every_test_left_out_is_reported_with_reason_and_count(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyprojecttoml(DECLARED)
    pytester.makepyfile(TESTS)
    left_out_tests_are_reported(nested)


def test_planted_filter_without_report_is_caught(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyprojecttoml(DECLARED)
    pytester.makepyfile(TESTS)
    pytester.makeconftest(
        "from surefoot.harness.plugin_hooks import Selection\nSelection.pytest_terminal_summary = lambda self: None\n"
    )
    with pytest.raises(AssertionError, match="not a word"):
        left_out_tests_are_reported(nested)


def test_workers_leave_out_the_same_tests_and_the_controller_says_so(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyprojecttoml(DECLARED)
    pytester.makepyfile(TESTS)
    done = nested("-n", "2", plugins=("xdist.plugin",))
    assert done.parseoutcomes()["passed"] == 1
    done.stdout.fnmatch_lines(["surefoot: 2 deselected: group hf_gated was not asked for (--hf-gated)"])


def test_two_only_flags_are_a_usage_error(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyprojecttoml(DECLARED)
    done = nested("--mcore-only", "--hf-gated-only")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*--hf-gated-only and --mcore-only exclude each other*"])


def test_a_missing_backend_is_named_with_its_install_command(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyprojecttoml(DECLARED)
    done = nested("--vllm-only")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*--vllm-only needs the module no_such_module_anywhere*", "*pip install the-backend*"])


def test_an_explicit_mark_expression_turns_the_filter_off(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyprojecttoml(DECLARED)
    pytester.makepyfile(TESTS)
    nested("-m", "mcore and not hf_gated").assert_outcomes(passed=1, deselected=3)


def test_a_gate_without_token_skips_and_in_strict_mode_fails(
    pytester: pytest.Pytester, nested: Nested, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TEST_TOKEN", "")
    pytester.makepyprojecttoml(DECLARED)
    pytester.makepyfile(TESTS)
    done = nested("--hf-gated", "-rs")
    done.assert_outcomes(passed=1, skipped=1, deselected=2)
    done.stdout.fnmatch_lines(["SKIPPED*no token: set MY_TEST_TOKEN (group hf_gated)"])
    strict = nested("--hf-gated", "--strict-gates")
    strict.assert_outcomes(passed=1, errors=1, deselected=2)
    assert strict.ret == pytest.ExitCode.TESTS_FAILED


def test_a_test_in_two_backends_is_a_collection_error(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyprojecttoml(DECLARED)
    pytester.makepyfile(
        "import pytest\n@pytest.mark.mcore\n@pytest.mark.vllm\ndef test_both(): pass\ndef test_ok(): pass"
    )
    done = nested()
    assert done.ret == pytest.ExitCode.INTERRUPTED
    done.stdout.fnmatch_lines(["*test_both*two backends, mcore and vllm*"])
    spread = nested("-n", "1", plugins=("xdist.plugin",))
    assert spread.ret != 0
    spread.stdout.fnmatch_lines(["*test_both*two backends, mcore and vllm*"])


@pytest.mark.parametrize(
    ("words", "code"),
    [(["-k", "mcore"], 5), (["-k", "nothing_has_this_name"], 5), (["--hf-gated-only"], 5), (["-k", "mcore", "--allow-empty"], 0)],
)  # fmt: skip
def test_a_run_that_runs_nothing_is_not_a_pass_unless_allowed(
    pytester: pytest.Pytester, nested: Nested, words: list[str], code: int
) -> None:
    pytester.makepyprojecttoml(DECLARED)
    pytester.makepyfile(TESTS)
    assert nested(*words).ret == code


def test_run_first_runs_first_and_keeps_the_order_of_the_rest(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyfile(
        "import pytest\ndef test_a(): pass\ndef test_b(): pass\n"
        "@pytest.mark.run_first\ndef test_c(): pass\n@pytest.mark.run_first\ndef test_d(): pass"
    )
    lines = [
        line.split("::")[1] for line in nested("--collect-only", "-q", "--strict-markers").outlines if "::" in line
    ]
    assert lines == ["test_c", "test_d", "test_a", "test_b"]


# -- declarations ---------------------------------------------------------------------


def declare(text: str, tmp_path: Path) -> dict[str, MarkerGroup]:
    (tmp_path / "pyproject.toml").write_text(text)
    project = read_project(tmp_path / "pyproject.toml")
    assert project is not None
    return read_groups(project)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[tool.surefoot.groups.x]\nknd = 'gate'", "did you mean kind"),
        ("[tool.surefoot.groups.x]\nkind = 'door'", 'expected "gate"'),
        ("[tool.surefoot.groups.x]\nkind = 'gate'", "needs env"),
        ("[tool.surefoot.groups.x]\nenv = 3", "list of strings"),
        ("[tool.surefoot.groups.x]\nrequires = ['']", "list of strings"),
        ("[tool.surefoot.groups.x]\ndescription = 1", "expected text"),
        ("[tool.surefoot.groups.HF-gated]", "lower case"),
        ("[tool.surefoot]\ngroups = 3", "expected a table"),
        ("[tool.surefoot.groups]\nx = 3", "expected a table"),
        ("[tool]\nsurefoot = 3", "expected a table"),
        ("surefoot = [", "not valid TOML"),
    ],
)
def test_a_malformed_declaration_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        declare(text, tmp_path)


def test_a_malformed_declaration_is_a_usage_error_of_pytest(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyprojecttoml("[tool.surefoot.groups.x]\nknd = 'gate'")
    done = nested()
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*unknown key tool.surefoot.groups.x.knd; did you mean kind?*"])


def test_a_group_whose_option_is_taken_is_refused(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyprojecttoml("[tool.surefoot.groups.verbose]")
    done = nested()
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert "groups.verbose" in done.stderr.str()


def test_the_nearest_file_with_the_table_counts(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.surefoot]\nslow_tests = ['a']")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text("[tool.other]\nx = 'surefoot'")
    found = find_project(inner)
    assert found is not None
    assert found.root == tmp_path
    assert found.words("slow_tests") == ("a",)


def test_any_of_several_tokens_opens_a_gate_and_an_empty_one_does_not() -> None:
    gate = MarkerGroup("g", "gate", env=("A", "B"))
    assert gate.missing_token({"B": "x"}) is None
    assert gate.missing_token({"A": "", "C": "x"}) == "no token: set A or B (group g)"


def test_required_modules_are_looked_for_without_importing_them() -> None:
    assert MarkerGroup("g", requires=("json", "email.mime")).missing_module() is None
    assert MarkerGroup("g", requires=("json", "no_such_thing.deeper")).missing_module() == "no_such_thing.deeper"


def test_only_two_backends_conflict() -> None:
    assert conflict(["mcore", "nightly", "hf_gated"], GROUPS) is None
    assert "mcore and vllm" in str(conflict(["vllm", "mcore"], GROUPS))


def test_planted_rule_that_forgets_gates_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GroupChoice.reason_against

    def forgetful(self: GroupChoice, marks: list[str], groups: dict[str, MarkerGroup]) -> str | None:
        return whole(GroupChoice(self.included | {"hf_gated"}, self.only), marks, groups)

    monkeypatch.setattr(selection.GroupChoice, "reason_against", forgetful)
    with pytest.raises(AssertionError):
        test_every_combination_follows_the_one_rule()


def test_a_project_without_declarations_is_empty() -> None:
    assert read_groups(Project(Path(), Path("pyproject.toml"))) == {}


# -- GPUs and modules --------------------------------------------------------------------------

TWO_GPUS = """
[tool.surefoot.groups.pair]
requires = "json"
gpus = 2
"""
PAIR = """
    import pytest

    def test_plain(): pass

    @pytest.mark.pair
    def test_pair(): pass
"""


def machine(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("surefoot.harness.tracker.memory.gpu_names", lambda: ["some GPU"] * count)
    for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("there", "environ", "enough"),
    [
        (0, {}, False), (1, {}, False), (2, {}, True), (8, {}, True),
        (8, {"CUDA_VISIBLE_DEVICES": ""}, False), (8, {"CUDA_VISIBLE_DEVICES": "3"}, False),
        (8, {"CUDA_VISIBLE_DEVICES": "3,5"}, True), (1, {"CUDA_VISIBLE_DEVICES": "0,1"}, False),
        (0, {"RAY_ADDRESS": "10.0.0.1:6379"}, True),
    ],
)  # fmt: skip
def test_the_gpus_that_a_group_needs_are_counted(
    monkeypatch: pytest.MonkeyPatch, there: int, environ: dict[str, str], enough: bool
) -> None:
    machine(monkeypatch, there)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert (MarkerGroup("pair", gpus=2).missing_gpus() is None) is enough
    assert MarkerGroup("none").missing_gpus() is None


def test_too_few_gpus_are_a_usage_error_with_both_numbers_or_a_skip_that_is_counted(
    pytester: pytest.Pytester, nested: Nested, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_pair=PAIR)
    pytester.makepyprojecttoml(TWO_GPUS)
    machine(monkeypatch, 1)
    for flag in ("--pair", "--pair-only"):
        done = nested(flag)
        assert done.ret == 4
        done.stderr.fnmatch_lines([f"*{flag} needs 2 GPUs, and 1 can be seen here*", "*machine with 2 GPUs*"])
    done = nested("-m", "pair or not pair", "-ra")  # the filter is off: what cannot run is held back
    done.assert_outcomes(passed=1, skipped=1)
    done.stdout.fnmatch_lines(["SKIPPED*no GPUs: needs 2 GPUs, and 1 can be seen here (group pair)"])
    assert nested("-m", "pair").ret == pytest.ExitCode.NO_TESTS_COLLECTED, "nothing ran, and that is no pass"
    machine(monkeypatch, 2)
    nested("--pair-only").assert_outcomes(passed=1, deselected=1)


def test_a_module_that_is_not_installed_holds_its_tests_back_where_the_filter_is_off(
    pytester: pytest.Pytester, nested: Nested
) -> None:
    pytester.makepyfile(test_pair=PAIR.replace("pair", "vllm"))
    pytester.makepyprojecttoml(DECLARED)
    done = nested("-m", "vllm or not vllm", "-ra")
    done.assert_outcomes(passed=1, skipped=1)
    done.stdout.fnmatch_lines(["SKIPPED*no module: no_such_module_anywhere: pip install the-backend (group vllm)"])
    nested("-m", "vllm or not vllm", "--strict-gates").assert_outcomes(passed=1, errors=1)


@pytest.mark.parametrize("value", ["-1", "true", "1.5", '"two"'])
def test_a_number_of_gpus_is_a_whole_number(tmp_path: Path, value: str) -> None:
    (tmp_path / "pyproject.toml").write_text(TWO_GPUS.replace("gpus = 2", f"gpus = {value}"))
    project = read_project(tmp_path / "pyproject.toml")
    assert project is not None
    with pytest.raises(ConfigError, match="expected a whole number from 0"):
        read_groups(project)
