"""Every example of a run is armed, or says in the same place why it is not."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from doc_blocks import Block, blocks
from example_runs import UnreadableError, shown_runs
from repo_tree import DOCS, PACKAGE, ROOT, relative

from surefoot.config import Config
from surefoot.config.load import load_config
from surefoot.config.schedule import Answered, answered_tasks, most_tasks
from surefoot.data.heldout import split_heldout
from surefoot.data.sources import load_tasks
from surefoot.errors import InputError
from surefoot.guards.arming import judge_arming
from surefoot.run.inputs import metric_spec, read_sets, watched_metric

ADMITTED = re.compile(r"^# guard: not armed: \S.{15,}$", flags=re.MULTILINE)
"""The line that an example carries which cannot be armed."""


def examples() -> list[tuple[str, str, str]]:
    """(name, page or file, text) of every complete config that people are shown."""
    files = [*sorted((ROOT / "configs").glob("*.toml")), PACKAGE / "assets" / "builtin.toml"]
    found = [(relative(path), "", path.read_text(encoding="utf-8")) for path in files]
    for page in DOCS:
        text = page.read_text(encoding="utf-8")
        found += [
            (f"{relative(page)}:{block.file or block.line}", text, block.text)
            for block in blocks(text)
            if block.language == "toml" and {"model", "tasks"} <= tomllib.loads(block.text).keys()
        ]
    return found


EXAMPLES = examples()


def read_config(text: str, folder: Path) -> Config:
    path = folder / "example.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path).config


def write_what_the_page_writes(page: str, name: str, folder: Path) -> None:
    """Files of tasks that a page shows, or makes with a few lines of Python that need nothing of ours."""
    for block in blocks(page):
        if block.file == name:
            (folder / name).write_text(block.content, encoding="utf-8")
        elif block.language == "python" and not block.file and name in block.text and "surefoot" not in block.text:
            subprocess.run([sys.executable, "-c", block.text], cwd=folder, check=True, timeout=60)


def held_out(config: Config, page: str, folder: Path) -> tuple[Answered, str]:
    """Tasks that one evaluation asks, and what the guard watches; by the config's numbers where tasks are not at hand."""
    for keys in config.eval_sets.values():
        write_what_the_page_writes(page, keys.tasks, folder)
    sets = {own.name: len(own.asked) for own in read_sets(config, folder)}
    count, metric = share(config, page, folder)
    watched = config.guard.metric if config.guard.metric.startswith("eval/") else metric
    if not count and sets:
        watched = f"eval/{next(iter(sets))}/accuracy"
    return answered_tasks(watched, count, sets), watched


def share(config: Config, page: str, folder: Path) -> tuple[int, str]:
    """The same for the part of the tasks that is held out."""
    expected = min(most_tasks(config), round(config.num_tasks * config.heldout_fraction))
    if config.heldout_fraction == 0:
        return 0, "eval_accuracy"
    if config.tasks.startswith("reasoning_gym:"):
        return expected, "eval_accuracy"
    if ":" not in config.tasks:
        write_what_the_page_writes(page, config.tasks, folder)
    try:
        tasks = load_tasks(config.tasks, base=folder, num_tasks=config.num_tasks, seed=config.seed)
    except InputError:  # a file that only its reader has
        return expected, "eval_accuracy"
    count = len(split_heldout(tasks.tasks, config.heldout_fraction)[1])
    return min(most_tasks(config), count), watched_metric(config, metric_spec(config.eval_metric, tasks) or None)


def problem(text: str, page: str, folder: Path) -> str:
    """What is wrong with an example; empty when it is armed, or says why not."""
    why = unarmed(read_config(text, folder), page, folder)
    admitted = ADMITTED.search(text) is not None
    if not why:
        return "it is armed, and says that it is not" if admitted else ""
    return "" if admitted else f"{why}; arm it, or say why not: # guard: not armed: ..."


def unarmed(config: Config, page: str, folder: Path) -> str:
    """Why the guard of a run is not armed; empty when it is."""
    heldout, metric = held_out(config, page, folder)
    found = judge_arming(config, heldout=heldout, metric=metric)
    if found is not None and found.armed:
        return ""
    return "nothing is held out, or the guard is off" if found is None else found.words()


def block_problem(block: Block, page: str, folder: Path) -> str:
    """The same for a block of shell lines or Python: each run in it is armed, or the block or its config says why not."""
    try:
        runs = shown_runs(page, block, folder)
    except UnreadableError as error:
        return str(error)
    if not runs:
        return ""
    told = [(run, unarmed(run.config, page, folder)) for run in runs]
    if ADMITTED.search(block.text):
        return "" if any(why for _, why in told) else "every run of it is armed, and it says that one is not"
    lost = [f"{run.words}: {why}" for run, why in told if why and not ADMITTED.search(run.text)]
    return "; ".join(lost) and f"{'; '.join(lost)}; arm it, or say why not: # guard: not armed: ..."


def test_there_are_examples_in_the_readme_in_the_docs_and_in_files() -> None:
    names = [name for name, _, _ in EXAMPLES]
    for wanted in ("README.md:my.toml", "configs/smollm2.toml", "src/surefoot/assets/builtin.toml", "docs/guards.md"):
        assert any(name.startswith(wanted) for name in names), f"{wanted} is not among {names}"


@pytest.mark.parametrize(("page", "text"), [(p, t) for _, p, t in EXAMPLES], ids=[name for name, _, _ in EXAMPLES])
def test_an_example_is_armed_or_says_why_not(page: str, text: str, tmp_path: Path) -> None:
    assert problem(text, page, tmp_path) == ""


TRAINS = re.compile(r"surefoot(?: |\.)train\b|import train\b")
BLOCKS = [
    (f"{relative(page)}:{block.line}", page.read_text(encoding="utf-8"), block)
    for page in DOCS
    for block in blocks(page.read_text(encoding="utf-8"))
    if block.language in ("sh", "text", "python") and TRAINS.search(block.text)
]


def test_there_are_runs_in_shell_lines_and_in_python(tmp_path: Path) -> None:
    found = {
        (name.partition(":")[0], block.language) for name, page, block in BLOCKS if shown_runs(page, block, tmp_path)
    }
    wanted = {("README.md", "sh"), ("README.md", "text"), ("README.md", "python"), ("docs/python.md", "python")}
    assert wanted | {("docs/agents.md", "python"), ("docs/reliability.md", "sh"), ("docs/report.md", "sh")} <= found


@pytest.mark.parametrize(("page", "block"), [(p, b) for _, p, b in BLOCKS], ids=[name for name, _, _ in BLOCKS])
def test_a_run_in_a_shell_line_or_in_python_is_armed_or_says_why_not(page: str, block: Block, tmp_path: Path) -> None:
    assert block_problem(block, page, tmp_path) == ""


SHORT = 'model = "pebble"\ntasks = "mine.jsonl"\nmax_steps = 5\n'
MADE = """
```python
from pathlib import Path
Path("mine.jsonl").write_text("".join('{"prompt": "%d", "answer": "1"}\\n' % n for n in range(ROWS)))
```
"""


def test_planted_examples_are_seen(tmp_path: Path) -> None:
    long = SHORT.replace("max_steps = 5", "max_steps = 100\ntasks_per_step = 16")
    few, many = MADE.replace("ROWS", "40"), MADE.replace("ROWS", "600")
    assert "not armed: with 6 evaluations" in problem(SHORT, few, tmp_path)
    assert problem(long, many, tmp_path) == ""
    assert "not armed: with" in problem(long, few, tmp_path), "the tasks that the page makes are counted"
    admits = "# guard: not armed: five steps only show how a run is started\n"
    assert problem(admits + SHORT, few, tmp_path) == ""
    assert "and says that it is not" in problem(admits + long, many, tmp_path)
    assert "nothing is held out" in problem(SHORT + "heldout_fraction = 0\n", few, tmp_path)


LONG = "max_steps=100, tasks_per_step=16"
ROWS = "import surefoot\nrows = [{'prompt': str(n), 'answer': '1'} for n in range(600)]\n"
SEEN = {
    "sh": ["surefoot train max_steps=2 output_dir=run", "SUREFOOT_FAILPOINTS=x surefoot train max_steps=2  # exits 137",
           "surefoot train my.toml guard.mode=off", "surefoot train my.toml heldout_fraction=0", "surefoot train $words"],
    "text": ["$ surefoot train max_steps=2", "surefoot train engine.kind=vllm max_steps=2"],
    "python": [ROWS + "surefoot.train('pebble', tasks=rows, max_steps=2)", ROWS + "surefoot.train('pebble', tasks=rows[:9])",
               ROWS + f"surefoot.train('pebble', tasks=rows, {LONG}, heldout_fraction=0)", ROWS + "surefoot.train(**keys)",
               ROWS + "from surefoot import train\ntrain('pebble', train_dataset=rows, max_steps=2)"],
}  # fmt: skip
"""Runs whose guard could not stop a collapse, or that nobody can judge."""
FINE = {
    "sh": ["surefoot train", "surefoot train my.toml output_dir=first", "surefoot train max_steps=2 --dry-run",
           "surefoot train --resume run max_steps=2", "surefoot train max_steps=2 wrong=1  # exits 2", "surefoot train theirs.toml"],
    "text": ["$ surefoot train", "[1/2] surefoot train hack.toml guard.mode=off"],
    "python": [ROWS + f"surefoot.train('pebble', tasks=rows, {LONG})", ROWS + "trainer.train()"],
}  # fmt: skip


@pytest.mark.parametrize("language", SEEN)
def test_planted_shell_lines_and_python_are_seen(language: str, tmp_path: Path) -> None:
    page = f"```toml\n# my.toml\n{SHORT.replace('max_steps = 5', LONG.replace(', ', chr(10)))}```\n{MADE.replace('ROWS', '600')}"
    for text in SEEN[language]:
        assert block_problem(Block(language, 1, text), page, tmp_path) != "", text
    for text in FINE[language]:
        assert block_problem(Block(language, 1, text), page, tmp_path) == "", text
    admits = "# guard: not armed: two steps only show how a run is started\n"
    assert block_problem(Block(language, 1, admits + SEEN[language][0]), page, tmp_path) == ""
    assert "says that one is not" in block_problem(Block(language, 1, admits + FINE[language][0]), page, tmp_path)
