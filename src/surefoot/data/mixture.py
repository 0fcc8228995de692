"""Tasks of several data sets in one run: which there are, and how each is looked at.

Owns       the names of a run's data sets (`Task.dataset`), their words in metrics, and tasks of each to look at.
Promises   the same tasks and seed give the same answer, so that a resumed run has the same names; never more than
           `MOST` of them, the largest; a run with one data set has no mixture, and nothing is done for it.

Read next: `runtime/dataset_check.py`, what is asked of each before step 1.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from surefoot.errors import ConfigError
from surefoot.records import Task

MOST = 16
"""Data sets that have numbers of their own; the largest."""
EACH = 64
"""Tasks of each that may be looked at before step 1."""
_NOT_A_WORD = re.compile(r"[/\s{}]+")


@dataclass(frozen=True)
class Mixture:
    """The data sets of a run's training tasks."""

    tasks: Mapping[str, Sequence[Task]] = field(default_factory=dict)
    """Name -> some of its tasks, in the order in which the run would visit them; empty with one data set."""
    total: int = 1
    """How many there are."""

    @property
    def words(self) -> dict[str, str]:
        """Name -> what it is called in metrics."""
        return metric_words(self.tasks)

    def first(self, n: int) -> list[Task]:
        """(n,) tasks in turn from each, or as many as there are data sets if that is more."""
        turns = chain.from_iterable(zip_longest(*self.tasks.values()))
        return [task for task in turns if task is not None][: max(n, len(self.tasks))]


def mixture_of(visited: Sequence[Task]) -> Mixture:
    """The data sets among `visited`, tasks in the order in which a run visits them.

    Example:
        >>> found = mixture_of([Task(id=str(i), prompt="?", dataset="ab"[i % 3 == 0]) for i in range(6)])
        >>> {name: [task.id for task in tasks] for name, tasks in found.tasks.items()}
        {'a': ['1', '2', '4', '5'], 'b': ['0', '3']}
        >>> [task.id for task in found.first(3)], mixture_of([Task(id="1", prompt="?")]).tasks
        (['1', '0', '2'], {})
    """
    counts = Counter(task.dataset for task in visited)
    if len(counts) < 2:
        return Mixture()
    names = [name for name, _ in sorted(counts.items(), key=lambda found: (-found[1], found[0]))][:MOST]
    kept: dict[str, list[Task]] = {name: [] for name in names}
    for task in visited:
        if task.dataset in kept and len(kept[task.dataset]) < EACH:
            kept[task.dataset].append(task)
    return Mixture(kept, len(counts))


def metric_words(names: Iterable[str]) -> dict[str, str]:
    """One word for each name, no two the same: a metric's name has no spaces, and a slash parts its words.

    Example:
        >>> metric_words(["openai/gsm8k", "openai gsm8k", ""])
        {'openai/gsm8k': 'openai_gsm8k', 'openai gsm8k': 'openai_gsm8k-2', '': 'unnamed'}
    """
    words: dict[str, str] = {}
    for name in names:
        word = _NOT_A_WORD.sub("_", name)[:60] or "unnamed"
        again = sum(other == word or other.startswith(f"{word}-") for other in words.values())
        words[name] = word if word not in words.values() else f"{word}-{again + 1}"
    return words


def refuse_unknown(allowed: Sequence[str], tasks: Iterable[Task]) -> None:
    """Raise if `preflight_allow` names a data set that no training task belongs to."""
    wanted, known = set(allowed), set[str]()
    if not wanted:
        return
    for task in tasks:
        known.add(task.dataset)
        if wanted <= known:
            return
    unknown = sorted(wanted - known)[0]
    near = difflib.get_close_matches(unknown, known, n=3, cutoff=0.5) or sorted(known)[:5]
    raise ConfigError(
        f"preflight_allow names a data set {unknown!r} that no training task belongs to",
        "a misspelt name would admit nothing, or what it was meant for would be refused",
        f"there is {', '.join(map(repr, near))}: the column dataset, or data_source, or the file's name",
    )
