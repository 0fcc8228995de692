"""The documentation can be read in order: links lead to headings, every page is reached, tables agree, pages stay short."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from doc_map import (
    RATIOS,
    SUBJECT,
    SYMPTOMS,
    anchors,
    broken_chain,
    claims,
    dead_links,
    entries,
    misnumbered,
    prose,
    ratios_left_out,
    symptoms_left_out,
    table,
    unlinked_subjects,
    unreached,
)
from exceptions import UNLINKED_SUBJECTS
from repo_tree import DOCS, PACKAGE, ROOT, python_files, relative

import surefoot.errors
from surefoot.errors import SurefootError

FOLDER = ROOT / "docs"
ALSO = [
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(ROOT / name / "README.md" for name in ("tests", "benchmarks", "examples/servers")),
]
ORDER = (
    "first_run.md rewards.md verdict.md heldout.md agents.md scaling.md "
    "reliability.md report.md maths.md failures.md sandbox.md architecture.md"
).split()
INDEX = {
    "Documentation, in reading order": ORDER,
    "For TRL users": ["guards_trl.md"],
    "The harness: testing training code, whatever the trainer": ["testing.md", "tracker.md", "bisect.md"],
}
README_BYTES = 10_800
"""Two thirds of what it had before there was an index."""
ARCHITECTURE_LINES, ARCHITECTURE_BYTES = 120, 9_000
"""Two screens."""


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


# -- links and the index ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*DOCS, *ALSO], ids=relative)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert dead_links(page) == []


def test_every_page_is_reached_from_the_index() -> None:
    assert unreached(FOLDER / "index.md") == [], "name it in docs/index.md, or on a page that the index leads to"


def test_the_readme_leads_to_the_index() -> None:
    assert "](docs/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_index_is_numbered_in_reading_order() -> None:
    assert misnumbered(text_of("index.md"), INDEX) == []


def test_each_page_ends_with_the_way_to_the_next() -> None:
    assert broken_chain(FOLDER, ORDER) == []


def test_planted_dead_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# B\n\n## The `key`: a story, told\n\n## Twice\n\n## Twice\n")
    good = "[1](b.md) [2](b.md#the-key-a-story-told) [3](#a) [4](b.md#twice-1) [5](https://x.org/#y) `[6](no.md)`\n"
    page = tmp_path / "a.md"
    page.write_text(f"# A\n\n{good}\n```text\n[7](no.md)\n```\n")
    assert dead_links(page) == []
    planted = {"no.md": "no file no.md", "b.md#the-story": "no heading b.md#the-story", "#b": "no heading #b"}
    for target, complaint in planted.items():
        page.write_text(f"# A\n\n{good}[8]({target})\n")
        assert dead_links(page) == [f"a.md: {complaint}"]


def test_a_heading_inside_a_block_is_no_anchor() -> None:
    assert anchors("# One\n\n```sh\n# two\n```\n") == {"one"}


def test_planted_page_that_nothing_leads_to_is_seen(tmp_path: Path) -> None:
    (tmp_path / "decisions").mkdir()
    pages = {"index.md": "[a](a.md) [d](decisions/)", "a.md": "[b](b.md#x)", "b.md": "# X", "decisions/1.md": "# 1"}
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    assert unreached(tmp_path / "index.md") == []
    (tmp_path / "alone.md").write_text("[index](index.md)")
    assert unreached(tmp_path / "index.md") == ["alone.md"]
    (tmp_path / "a.md").write_text("no link")
    assert unreached(tmp_path / "index.md") == ["alone.md", "b.md"]


def test_planted_disorder_in_the_index_is_seen() -> None:
    text = text_of("index.md")
    assert [len(listed) for listed in entries(text).values()] == [12, 1, 3]
    for broken in (
        text.replace("\n3. [Reading", "\n4. [Reading"),
        text.replace("\n2. [Your tasks and rewards](rewards.md)", "\n2. [Your tasks and rewards](verdict.md)"),
        text.replace("\n11. [Sandbox](sandbox.md)", "\n- [Sandbox](sandbox.md)"),
        text + "\n1. [One more](python.md)\n",
    ):
        assert broken != text
        assert len(misnumbered(broken, INDEX)) == 1


def test_planted_page_that_leads_astray_is_seen(tmp_path: Path) -> None:
    ends = {"a.md": "Next: [2. B](b.md)", "b.md": "Next: [3. C](c.md)", "c.md": "Back to [the index](index.md)"}
    for name, line in ends.items():
        (tmp_path / name).write_text(f"# {name}\n\n{line}\n")
    assert broken_chain(tmp_path, list(ends)) == []
    for name, line in {"a.md": "Next: [2. C](c.md)", "b.md": "Next: [4. C](c.md)", "c.md": "The end."}.items():
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before + line + "\n")
        assert [found.split()[0] for found in broken_chain(tmp_path, list(ends))] == [name]
        (tmp_path / name).write_text(before)


# -- sizes --------------------------------------------------------------------------------------------------


def too_long(text: str, *, most_bytes: int, most_lines: int = 10_000) -> str:
    size, lines = len(text.encode()), text.count("\n")
    return "" if size <= most_bytes and lines <= most_lines else f"{size} bytes in {lines} lines"


def test_the_readme_is_short() -> None:
    assert too_long((ROOT / "README.md").read_text(encoding="utf-8"), most_bytes=README_BYTES) == ""


def test_the_architecture_fits_on_two_screens() -> None:
    text = text_of("architecture.md")
    assert too_long(text, most_bytes=ARCHITECTURE_BYTES, most_lines=ARCHITECTURE_LINES) == ""
    assert max(map(len, text.splitlines())) <= 180, "a line that no screen holds is no short page"


def test_planted_growth_is_seen() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert too_long(readme + "x" * README_BYTES, most_bytes=README_BYTES).startswith(str(len(readme.encode()) + 10_800))
    page = text_of("architecture.md")
    assert too_long(page + "\n" * 120, most_bytes=ARCHITECTURE_BYTES, most_lines=ARCHITECTURE_LINES)


# -- exit codes ---------------------------------------------------------------------------------------------

CODES = "| code | meaning | code | meaning |"


def all_codes() -> set[int]:
    """Every exit code of an error of ours, and the two that no error has."""
    kinds = [each for each in vars(surefoot.errors).values() if isinstance(each, type)]
    return {0, 125} | {each.exit_code for each in kinds if issubclass(each, SurefootError)}


def codes_missing(page: str, wanted: set[int]) -> set[int]:
    """Codes that are in one of the two and not in the other."""
    listed = [int(cell) for row in table(page, CODES).rows for cell in row[::2]]
    assert len(listed) == len(set(listed)), "a code stands once"
    return set(listed) ^ wanted


def test_the_table_of_exit_codes_is_true_and_complete() -> None:
    assert codes_missing(text_of("architecture.md"), all_codes()) == set()


def test_the_readme_names_every_code_of_a_run() -> None:
    (line,) = re.findall(
        r"^Exit codes: (.*?)\.$", (ROOT / "README.md").read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    assert {int(each.split()[0]) for each in line.split("·")} == all_codes() - {125}


def test_planted_codes_are_seen() -> None:
    page = text_of("architecture.md")
    assert codes_missing(page.replace("| 5 | refused", "| 6 | refused"), all_codes()) == {5, 6}
    assert codes_missing(page, all_codes() | {80}) == {80}


# -- processes ----------------------------------------------------------------------------------------------

STARTERS = {
    "rewards/workers.py": "fork server and reward workers",
    "rewards/pool.py": "fork server and reward workers",
    "run/watchdog.py": "guardian",
    "sandbox/process.py": "sandbox keeper, sandboxes",
    "sandbox/unsafe.py": "sandbox keeper, sandboxes",
    "tools/mcp/process.py": "tool servers",
    "tools/python/foreign.py": "environments in another Python",
    "learner/rendering.py": "a child for chat templates",
    "learner/precision.py": "a child for one product in bfloat16",
    "tracking/sinks.py": "one per sink",
    "runtime/learner_ranks.py": "further ranks of the learner",
    "runtime/ray/cluster.py": "on Ray: engines",
    "demo/hack.py": "`surefoot demo hack`",
    "run/memory_profile.py": "one per row of `surefoot memory`",
}
"""Every module outside the harness that starts processes, and what the page on the architecture calls them."""


def starters(texts: Mapping[str, str]) -> set[str]:
    """Modules that import what starts a process."""
    return {
        name
        for name, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        and node.module == "surefoot.system.process"
        and "Child" in {each.name for each in node.names}
    }


def package_texts() -> dict[str, str]:
    paths = [path for path in python_files(PACKAGE) if path.relative_to(PACKAGE).parts[0] not in ("harness", "system")]
    return {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_every_kind_of_process_is_on_the_page() -> None:
    assert starters(package_texts()) == set(STARTERS)
    page = text_of("architecture.md")
    assert [words for words in STARTERS.values() if words not in page] == []


def test_planted_process_that_the_page_does_not_know_is_seen() -> None:
    planted = {"data/files.py": "from surefoot.system.process import Child, title\n"}
    assert starters(package_texts() | planted) - set(STARTERS) == {"data/files.py"}
    assert starters({"data/files.py": "from surefoot.system.process import title\n"}) == set()


# -- tables that have to agree -----------------------------------------------------------------------------


def test_a_symptom_leads_to_every_silent_failure() -> None:
    assert symptoms_left_out(text_of("failures.md")) == []


def test_planted_gap_among_the_symptoms_is_seen() -> None:
    page = text_of("failures.md")
    entry = "[29](#29-the-version-is-stamped-too-late)"
    assert symptoms_left_out(page.replace(f" {entry}", "")) == ["no symptom leads to 29"]
    assert symptoms_left_out(page.replace(entry, entry.replace("[29]", "[28]", 1))) != []
    row = f"{SYMPTOMS}\n|---|---|\n"
    assert symptoms_left_out(page.replace(row, f"{row}| it is slow | |\n")) == ["'it is slow' leads nowhere"]


def test_the_first_table_of_ratios_repeats_what_stands_below_and_leaves_no_losing_row_out() -> None:
    page = text_of("benchmarks.md")
    assert ratios_left_out(page) == []
    assert page.index(RATIOS) < page.index("## Method"), "it comes first"
    assert len(table(page, RATIOS).rows) >= 30


def test_planted_ratio_and_planted_silence_about_a_loss_are_seen() -> None:
    page = text_of("benchmarks.md")
    head, mark, rest = page.partition("## Method")
    better = head.replace("2.23x [1.99, 2.32]", "3.23x [2.99, 3.32]") + mark + rest
    found = ratios_left_out(better)
    assert [each.split(":")[0] for each in found] == ["'3.23x [2.99, 3.32]' of training step, 1 task, 64 tokens stands in no table below", "left out"]  # fmt: skip
    (line,) = [line for line in head.splitlines() if "1.39 (1.25 to 1.53)" in line]
    assert len(ratios_left_out(page.replace(line + "\n", ""))) == 1
    assert len(ratios_left_out(head.replace("| **no** | 2 cores | 2026-11-15 33464a0 |", "| yes | 2 cores | x |") + mark + rest)) == 2  # fmt: skip


# -- what was never shown -----------------------------------------------------------------------------------

NEVER = ("vLLM on a GPU", "between GPUs", "NCCL", "mps", "KubeRay", "Kubernetes", "Slurm", "Docker")
SPEAKING = [page for page in [*DOCS, *ALSO] if re.search(SUBJECT, prose(page.read_text(encoding="utf-8")))]


def test_the_list_of_what_was_never_shown_has_everything() -> None:
    rows = table(text_of("not_shown.md"), "| never shown | what is shown instead | pages |").rows
    said = "\n".join(row[0] for row in rows)
    assert [subject for subject in NEVER if subject not in said] == []
    assert all(len(row) == 3 and row[1] for row in rows)


@pytest.mark.parametrize("page", SPEAKING, ids=relative)
def test_a_page_that_speaks_of_it_links_the_list_and_claims_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if relative(page) not in UNLINKED_SUBJECTS and page.name != "not_shown.md":
        assert unlinked_subjects(page.name, text) == []
    assert list(claims(page.name, text)) == []


def test_every_page_that_need_not_link_it_still_speaks_of_it_and_has_a_reason() -> None:
    names = {relative(page) for page in SPEAKING}
    assert sorted(set(UNLINKED_SUBJECTS) - names) == [], "it does not speak of it any more"
    assert all(len(reason.split()) >= 4 for reason in UNLINKED_SUBJECTS.values())


def test_planted_claims_are_seen() -> None:
    assert unlinked_subjects("x.md", "Submit it to Slurm.") == ["x.md: Slurm without a link to not_shown.md"]
    assert unlinked_subjects("x.md", "Submit it to Slurm ([list](../docs/not_shown.md)).") == []
    assert unlinked_subjects("x.md", "```text\nSlurm\n```\n") == []
    for claim in (
        "Measured on a Slurm cluster of four nodes.",
        "The sync was tested\nover NCCL between eight ranks.",
        "A run of a week was tried in Kubernetes.",
    ):
        assert len(list(claims("x.md", f"First.\n\n{claim}\n"))) == 1, claim
    for honest in (
        "It was never measured on Slurm.",
        "Tested with a stand-in for Docker.",
        "It starts a job on Slurm.",
    ):
        assert list(claims("x.md", honest)) == [], honest
