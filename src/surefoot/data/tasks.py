"""Tasks: sets of them, the endless stream that deals them out, and what two of them have in common.

Owns       the order in which tasks are visited; the normalised view of what a task asks, and its hash.
Promises   every task exactly once per epoch; no task twice in one `take`; the order is a
           function of (seed, epoch, ids) alone; a restored stream goes on where it stopped;
           a task that the border names is refused, on the way in and on the way out.
Never      loses a task at an epoch's border, uses a global random state, or Python's `hash()`.

Read next: `sources.py`, where task sets come from.
"""

from __future__ import annotations

import difflib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, Literal, Protocol

from surefoot.errors import ConfigError, StateError, TaskError
from surefoot.records import Task
from surefoot.system.files import sha256_bytes, sha256_of

Scorer = Literal["exact", "reasoning_gym", "verifier"]


class HeldoutGate(Protocol):
    """Knows what must never be trained on; `heldout.HeldoutSplit` is one."""

    def refuse(self, tasks: Iterable[Any], *, near: bool = True) -> None:
        """Raise if any of `tasks` is held out; `near` also looks for near-duplicates."""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks from one source, with the scorer that belongs to them.

    Example:
        >>> one = TaskSet.of("sums", [Task(id="sums/1+1", prompt="1+1=", columns={"answer": "2"})], "exact")
        >>> len(one.tasks), one.scorer, len(one.fingerprint)
        (1, 'exact', 64)
    """

    name: str
    tasks: Sequence[Task]
    scorer: Scorer | None
    """Who judges answers when no reward function is named; None where the source has no judge."""
    fingerprint: str
    """SHA-256 over every id, prompt and column, in order."""

    @classmethod
    def of(cls, name: str, tasks: Iterable[Task], scorer: Scorer | None) -> TaskSet:
        """Build a set; an empty one and repeated ids are refused."""
        fixed = tuple(tasks)
        refuse_empty_or_repeated(fixed, name)
        return cls(name, fixed, scorer, fingerprint(fixed))


def canonical(value: object) -> str:
    """JSON with sorted keys; what JSON does not know (dates, bytes) is written with its type."""
    return _ENCODER.encode(value)


def _tagged(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return [type(value).__name__, repr(value)]


_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_tagged)


def fingerprint(tasks: Sequence[Task]) -> str:
    """SHA-256 over the contents of the tasks, in order."""
    return sha256_of(map(task_bytes, tasks))


def task_bytes(task: Task) -> bytes:
    """Everything that a task is, as one line: what fingerprints are made of."""
    return canonical([task.id, task.prompt, dict(task.columns), task.dataset]).encode() + b"\n"


def refuse_empty_or_repeated(tasks: Sequence[Task], name: str) -> None:
    """Raise unless there is at least one task and every id is there once."""
    if not tasks:
        raise TaskError(f"{name} has no tasks", "there is nothing to train on", "bring at least one task")
    repeated = [task_id for task_id, count in Counter(task.id for task in tasks).items() if count > 1]
    if repeated:
        raise TaskError(
            f"{name} has {len(repeated)} id(s) more than once: {', '.join(map(repr, repeated[:5]))}",
            "groups, the held-out split and the accounts go by id",
            "make the ids unique, or leave them out to have them derived from the contents",
        )


class TaskStream:
    """Deals tasks without end, one permutation per epoch.

    A take that crosses an epoch's border first empties the old epoch. Tasks it already
    holds are then moved back in the new one, behind the tasks this take still needs, so
    none comes twice in the take and none is missing from the epoch.

    Example:
        >>> stream = TaskStream([Task(id=str(i), prompt="?") for i in range(3)], seed=0)
        >>> sorted(task.id for task in stream.take(3)), stream.epoch
        (['0', '1', '2'], 0)
    """

    def __init__(self, tasks: Sequence[Task], seed: int, *, heldout: HeldoutGate | None = None) -> None:
        refuse_empty_or_repeated(tasks, "the task stream")
        self._heldout = heldout
        self._refuse_heldout(tasks)
        self._tasks = {task.id: task for task in tasks}
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._held: tuple[str, ...] = ()
        """Ids that the take which opened this epoch had brought along from the one before."""
        self._needed = 0
        """How many tasks that take still had to draw from this epoch."""
        self._order = self._arrange()

    @property
    def epoch(self) -> int:
        """The pass over the tasks that the last dealt task belongs to, from 0."""
        return self._epoch

    def take(self, n: int) -> list[Task]:
        """(n,) the next tasks, all different."""
        refuse_take(n, len(self._tasks))
        taken = self._draw(n)
        if len(taken) < n:
            self._open_next_epoch(held=tuple(taken), needed=n - len(taken))
            taken += self._draw(n - len(taken))
        dealt = [self._tasks[task_id] for task_id in taken]
        self._refuse_heldout(dealt)
        return dealt

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain JSON data."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "held": list(self._held),
            "needed": self._needed,
            "tasks": self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; a state of other tasks or another seed is refused."""
        found = read_position(state, self.state_dict(), len(self._tasks), self._is_known)
        self._epoch, self._position, self._needed, self._held = found
        self._order = self._arrange()

    def _is_known(self, held: Any) -> bool:
        return isinstance(held, str) and held in self._tasks

    def _refuse_heldout(self, tasks: Sequence[Task]) -> None:
        """By id and by content. Asked again for every take: the split was checked once, the pool lives on."""
        if self._heldout is not None:
            self._heldout.refuse(tasks, near=False)

    def _draw(self, n: int) -> list[str]:
        """Up to n ids from what is left of this epoch."""
        drawn = self._order[self._position : self._position + n]
        self._position += len(drawn)
        return drawn

    def _open_next_epoch(self, *, held: tuple[str, ...], needed: int) -> None:
        self._epoch, self._position, self._held, self._needed = self._epoch + 1, 0, held, needed
        self._order = self._arrange()

    def _arrange(self) -> list[str]:
        return epoch_order(self._tasks, self._seed, self._epoch, held=self._held, needed=self._needed)

    def _identity(self) -> str:
        """SHA-256 over the ids, whatever their order."""
        return sha256_of(canonical(sorted(self._tasks)))


def epoch_order(ids: Iterable[str], seed: int, epoch: int, *, held: Iterable[str] = (), needed: int = 0) -> list[str]:
    """One epoch's permutation: sorted by hash of (seed, epoch, id).

    Args:
        held: ids that a batch brings along from the epoch before; they are not among the first `needed` of this one,
            so that no batch over the border holds a task twice.
    """
    order = sorted(ids, key=lambda task_id: sha256_bytes(f"{seed}/{epoch}/{task_id}"))
    elsewhere = set(held)
    first = [task_id for task_id in order if task_id not in elsewhere][:needed]
    chosen = set(first)
    return first + [task_id for task_id in order if task_id not in chosen]


def refuse_take(n: int, there: int) -> None:
    """Refuse to deal `n` different tasks where that is none, or more than there are."""
    if n < 1:
        raise ConfigError(f"take({n})", "a step needs at least one task", "set tasks_per_step to 1 or more")
    if n > there:
        raise TaskError(
            f"{n} different tasks were asked for and there are {there}",
            "one step would visit a task twice and count it as two",
            "lower tasks_per_step, or bring more tasks",
        )


def read_position(
    state: Mapping[str, Any], mine: Mapping[str, Any], there: int, is_known: Callable[[Any], bool]
) -> tuple[int, int, int, tuple[Any, ...]]:
    """Epoch, position, how many are needed and what is held, from the saved state of an order.

    Args:
        mine: the state of the order that is to go on; all but those four has to be the same.
        there: how many an epoch has.
        is_known: whether something may be held.
    """
    if set(state) != set(mine):
        raise foreign_state(f"keys {sorted(state)} instead of {sorted(mine)}")
    moving = ("epoch", "position", "needed", "held")
    for name in mine:
        if name not in moving and state[name] != mine[name]:
            raise foreign_state(f"{name} {state[name]!r} instead of {mine[name]!r}")
    epoch, position, needed, held = (state[name] for name in moving)
    counts_fit = all(type(x) is int and x >= 0 for x in (epoch, position, needed)) and position <= there
    known = isinstance(held, list) and all(map(is_known, held)) and len(set(held)) == len(held)
    if not counts_fit or not known or len(held) + needed > there:
        raise foreign_state(f"epoch {epoch}, position {position}, needed {needed}, held {held}")
    return epoch, position, needed, tuple(held)


def foreign_state(difference: str) -> StateError:
    """A saved position that belongs to other tasks."""
    return StateError(
        f"the saved task position does not fit these tasks: {difference}",
        "going on would repeat or skip tasks without a trace",
        "resume with the tasks and the seed of the saved run, or start a new run",
    )


# -- Tasks of several data sets in one run: which there are, and how each is looked at ------------
# Owns       the names of a run's data sets (`Task.dataset`), their words in metrics, and tasks of each to look at.
# Promises   the same tasks and seed give the same answer, so that a resumed run has the same names; never more than
# `MOST` of them, the largest; a run with one data set has no mixture, and nothing is done for it.


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


# -- What a task asks, normalised: the same content gives the same hash, whatever its id -----------
# Promises   the same view in every process; what only looks different (case, white space, Unicode form, the order of a
#            target list) is the same, and what only looks the same (2² and 22) is different.
# Never      decides what happens to a task that repeats another.
#
# The view: text after Unicode NFKC (superscripts become ^n and subscripts _n first), case fold, removal of invisible
# characters, and every run of white space as one space. Targets are the columns in `TARGET_COLUMNS`, normalised in the
# same way; their names and their order do not matter.


TARGET_COLUMNS = ("answer", "answers", "ground_truth", "label", "labels", "solution", "target", "targets", "tests")

_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_RAISED = {ord(mark): f"^{digit}" for digit, mark in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
_LOWERED = {ord(mark): f"_{digit}" for digit, mark in enumerate("₀₁₂₃₄₅₆₇₈₉")}


@dataclass(frozen=True, slots=True)
class Content:
    """What a task asks and what counts as right, normalised.

    Example:
        >>> Content.of("What is  1+1?", ["2"]) == Content.of("WHAT IS 1+1?", 2)
        True
    """

    prompt: tuple[tuple[str, str], ...]
    """(role, text) of every message."""
    targets: tuple[str, ...]
    """Sorted; empty when the task names none."""

    @classmethod
    def of(cls, prompt: object, *targets: object) -> Content:
        """From a text or a list of messages, and any number of targets or lists of targets."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, list | tuple) or not all(isinstance(one, Mapping) for one in messages):
            raise TaskError(
                f"a prompt is {type(prompt).__name__}",
                "tasks are compared by the text that they ask",
                "use text or a list of messages, or pass content=None to compare ids alone",
            )
        return cls(tuple(map(_message, messages)), tuple(sorted(chain.from_iterable(map(_targets, targets)))))

    @property
    def prompt_hash(self) -> str:
        """SHA-256 of the prompt alone."""
        return _sha256(self.prompt)

    @property
    def targets_hash(self) -> str:
        """SHA-256 of the targets; empty where there are none."""
        return _sha256(self.targets) if self.targets else ""


def task_content(item: object) -> Content | None:
    """The view of a `Task`, a row (a mapping), or an object with a `prompt`; None for a bare id."""
    if isinstance(item, Task):
        return Content.of(item.messages(), *(item.columns.get(name) for name in TARGET_COLUMNS))
    prompt = field_of(item, "prompt")
    return None if prompt is None else Content.of(prompt, *(field_of(item, name) for name in TARGET_COLUMNS))


def field_of(item: object, name: str) -> Any:
    """A row's column or an object's attribute; None where there is none."""
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def normal_text(text: str) -> str:
    """One text under the rule above."""
    if not text.isascii():
        marked = text.translate(_RAISED | _LOWERED)
        folded = unicodedata.normalize("NFKC", marked).casefold()
        text = _INVISIBLE.sub("", unicodedata.normalize("NFKC", folded))
    return " ".join(text.casefold().split())


def _message(message: Mapping[str, Any]) -> tuple[str, str]:
    content, calls = message.get("content"), message.get("tool_calls")
    text = normal_text(content) if isinstance(content, str) else "" if content is None else canonical(_normal(content))
    return str(message.get("role", "")), text + (canonical(_normal(calls)) if calls else "")


def _targets(value: object) -> list[str]:
    if value is None:
        return []
    members = list(value) if isinstance(value, list | tuple | set | frozenset) else [value]
    return [canonical(_normal(member)) for member in members]


def _normal(value: object) -> object:
    """Plain data in which 42, 42.0 and "42" are the same."""
    if isinstance(value, str):
        return normal_text(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if isinstance(value, Mapping):
        return {str(key): _normal(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_normal(member) for member in value]
    return value


def _sha256(value: object) -> str:
    return sha256_of(canonical(value), errors="surrogatepass")
