"""Where tasks come from: a file, a generator package, or the built-in sums.

Owns       the meaning of the config key `tasks`; the 10,000 sums a+b with a and b from 0 to 99.
Promises   one task set, or one typed error that names what was found and what is near it.
Never      downloads; never imports a generator that was not asked for.

    builtin:sums            two-digit addition, scored by exact match
    builtin:errands         products and numbers to read backwards, for a calculator tool, scored by exact match
    reasoning_gym:NAME      procedural tasks of that package, scored by its own function
    FILE.jsonl|json|parquet rows of a file, scored by your reward function

Read next: `files.py`, the row format.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.data.files import SUFFIXES, of_known_kind, read_task_file
from surefoot.data.tasks import Scorer, TaskSet
from surefoot.errors import TaskError
from surefoot.records import Task
from surefoot.system.files import sha256_bytes, sha256_of

# -- The built-in tasks: two-digit addition and errands, every answer exact ------------------------
# Promises   the same (n, seed) gives the same tasks everywhere; no task twice; a smaller n is a prefix of a larger one.
# Never      reads a file, the clock, or a global random state.


SUMS_LIMIT = 100
"""Both numbers lie in range(LIMIT)."""

SUMS = "sums"


def sum_task(a: int, b: int) -> Task:
    """One addition as a task.

    Example:
        >>> task = sum_task(47, 85)
        >>> task.id, task.prompt, task.columns["answer"]
        ('sums/47+85', '47+85=', '132')
    """
    return Task(id=f"{SUMS}/{a}+{b}", prompt=f"{a}+{b}=", columns={"answer": str(a + b)}, dataset=SUMS)


def sums_tasks(n: int, seed: int) -> tuple[Task, ...]:
    """(n,) distinct tasks, in an order that only the seed decides."""
    total = SUMS_LIMIT * SUMS_LIMIT
    if not 1 <= n <= total:
        raise TaskError(
            f"builtin:sums was asked for {n} tasks and has {total}",
            "a task that comes twice would be counted as two",
            f"set num_tasks between 1 and {total}",
        )
    tasks = (sum_task(a, b) for a in range(SUMS_LIMIT) for b in range(SUMS_LIMIT))
    return tuple(sorted(tasks, key=lambda task: _rank(task.id, seed))[:n])


def _rank(task_id: str, seed: int) -> bytes:
    """A position that depends on the seed and the id alone, on every platform."""
    return sha256_bytes(f"{seed}/{task_id}")


# -- The built-in tasks for tool use: some that a calculator answers, some that it only delays ----
# Owns       10,000 products (`347*86=`) and 10,000 numbers to read backwards (`turn 4821=`).
# Promises   the same (n, seed) gives the same tasks everywhere; no task twice; a smaller n is a
# prefix of a larger one; the two kinds alternate, so every even n is half and half.
# Never      reads a file, the clock, or a global random state.
#
# times   three digits times two: the built-in model cannot do it in its head, a call pays
# turn    four digits backwards: the model can, the calculator cannot, a call only costs


ERRANDS = "errands"
KINDS = ("times", "turn")
PER_KIND = 10_000
TOTAL = PER_KIND * len(KINDS)

LEFT, RIGHT = range(100, 1000), range(12, 100)
"""The two factors of a product; of all pairs the seed picks `PER_KIND`."""

DIGITS = 4
"""How long a number to be read backwards is; zeros in front count."""

CALCULATOR = "calculator__evaluate"
"""The tool that pays for one kind: tool `evaluate` of a server called `calculator`; argument `expression`."""


def multiplication_task(a: int, b: int) -> Task:
    """One product as a task.

    Example:
        >>> task = times_task(347, 86)
        >>> task.id, task.prompt, task.columns["answer"]
        ('times/347*86', '347*86=', '29842')
    """
    return _task("times", f"{a}*{b}", f"{a}*{b}=", str(a * b))


def reversal_task(digits: str) -> Task:
    """One number to read backwards.

    Example:
        >>> task = turn_task("4821")
        >>> task.id, task.prompt, task.columns["answer"], task.columns["kind"]
        ('turn/4821', 'turn 4821=', '1284', 'turn')
    """
    return _task("turn", digits, f"turn {digits}=", digits[::-1])


def errands_tasks(n: int, seed: int) -> tuple[Task, ...]:
    """(n,) distinct tasks, times and turn by turns, in an order that only the seed decides."""
    if not 1 <= n <= TOTAL:
        raise TaskError(
            f"builtin:{ERRANDS} was asked for {n} tasks and has {TOTAL}",
            "a task that comes twice would be counted as two",
            f"set num_tasks between 1 and {TOTAL}",
        )
    products = _first((f"{a}*{b}" for a in LEFT for b in RIGHT), "times", seed, (n + 1) // 2)
    numbers = _first((f"{number:0{DIGITS}d}" for number in range(10**DIGITS)), "turn", seed, n // 2)
    times = [multiplication_task(*map(int, product.split("*"))) for product in products]
    turn = [reversal_task(digits) for digits in numbers]
    return tuple((times, turn)[i % 2][i // 2] for i in range(n))


def _task(kind: str, subject: str, prompt: str, answer: str) -> Task:
    return Task(id=f"{kind}/{subject}", prompt=prompt, columns={"answer": answer, "kind": kind}, dataset=ERRANDS)


def _first(subjects: Iterable[str], kind: str, seed: int, n: int) -> list[str]:
    """(n,) subjects with the lowest rank, which depends on the seed and the id alone, on every platform."""
    return sorted(subjects, key=lambda subject: sha256_bytes(f"{seed}/{kind}/{subject}"))[:n]


# -- What `tasks` names ----------------------------------------------------------------------------


BUILTIN, GYM = "builtin:", "reasoning_gym:"
BUILTIN_TASKS = {"sums": sums_tasks, "errands": errands_tasks}
DRAWS_PER_TASK = 4
"""How often a generator may be asked, per task wanted, before its repetitions count as exhaustion."""


def is_generated(source: str) -> bool:
    """Whether nobody wrote these tasks: a program makes them, and may make nearly the same one twice."""
    return source.startswith((BUILTIN, GYM))


def load_tasks(source: str, *, base: Path, num_tasks: int, seed: int) -> TaskSet:
    """The task set that `source` names; a file is looked for relative to `base` and read whole."""
    if source.startswith(BUILTIN):
        return _builtin(source.removeprefix(BUILTIN), num_tasks, seed)
    if source.startswith(GYM):
        name = source.removeprefix(GYM)
        return TaskSet.of(source, _gym_tasks(name, num_tasks, seed), "reasoning_gym")
    path = _existing_file(source, base)
    try:
        tasks = read_task_file(path)
        return TaskSet.of(path.stem, tasks, scorer_of(tasks))
    except OSError as error:
        raise TaskError(
            f"{source} cannot be read: {error.strerror or error}",
            "the file is there, but the system refuses to hand it over",
            "check the file's permissions and that it is not a link to nowhere",
        ) from error


def _builtin(name: str, num_tasks: int, seed: int) -> TaskSet:
    if name not in BUILTIN_TASKS:
        raise TaskError(
            f"there are no built-in tasks {name!r}{_near(name, BUILTIN_TASKS)}",
            f"surefoot comes with {len(BUILTIN_TASKS)} task sets",
            "use " + " or ".join(f'tasks = "{BUILTIN}{known}"' for known in BUILTIN_TASKS),
        )
    return TaskSet.of(f"{BUILTIN}{name}", BUILTIN_TASKS[name](num_tasks, seed), "exact")


# -- files --------------------------------------------------------------------


def _existing_file(source: str, base: Path) -> Path:
    path = base / source
    if not source or not path.is_file():
        raise _not_a_file(source, path)
    return of_known_kind(path, source)


def _not_a_file(source: str, path: Path) -> TaskError:
    state = "is a folder" if path.is_dir() else "does not exist"
    folder = path if path.is_dir() else path.parent
    there = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, there, n=3) or there[:3]
    hint = f"; near it: {', '.join(near)}" if near else ""
    return TaskError(
        f"tasks = {source!r} {state}{hint}",
        f"it was looked for as {path}",
        f'use a {", ".join(SUFFIXES)} file, "{BUILTIN}sums" or "{GYM}NAME"',
    )


# -- reasoning-gym ------------------------------------------------------------


def scorer_of(tasks: Sequence[Task]) -> Scorer | None:
    """Who judges tasks that come as rows: a verifier when they name one, else nobody."""
    return "verifier" if any(_names_verifier(task.columns) for task in tasks) else None


def _names_verifier(columns: Mapping[str, Any]) -> bool:
    nested = [columns.get(name) for name in ("reward_spec", "reward_model")]
    return any("verifier_type" in table for table in (columns, *nested) if isinstance(table, Mapping))


def _gym_tasks(name: str, num_tasks: int, seed: int) -> tuple[Task, ...]:
    """Exactly `num_tasks` different questions; generators repeat themselves, so some are drawn again."""
    tasks: dict[str, Task] = {}
    draws = DRAWS_PER_TASK * num_tasks
    for entry in _gym_entries(name, draws, seed):
        task = _gym_task(name, entry)
        tasks.setdefault(task.id, task)
        if len(tasks) == num_tasks:
            return tuple(tasks.values())
    raise TaskError(
        f"{GYM}{name} gave {len(tasks)} different tasks in {draws} draws; num_tasks = {num_tasks}",
        "a question that comes twice would be counted as two, or sit on both sides of the held-out split",
        f"set num_tasks = {len(tasks)} or less",
    )


def _gym_entries(name: str, draws: int, seed: int) -> Iterable[dict[str, Any]]:
    gym, known = _import_gym()
    if name not in known:
        raise TaskError(
            f"reasoning_gym has no dataset {name!r}{_near(name, known)}",
            f"the installed version knows {len(known)} names",
            "use one of them as reasoning_gym:NAME",
        )
    try:
        dataset = gym.create_dataset(name, size=draws, seed=seed)
        for index in range(draws):
            yield dataset[index]
    except Exception as error:  # whatever a generator of somebody else's raises, the tasks are what failed
        raise TaskError(
            f"reasoning_gym could not make {name!r}: {type(error).__name__}: {error}",
            "some of its datasets need settings that a name alone does not give",
            "choose another dataset, or write the tasks to a .jsonl file yourself",
        ) from error


def _import_gym() -> tuple[Any, list[str]]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise TaskError(
            "reasoning_gym is not installed",
            f"tasks that start with {GYM} are generated by that package",
            "pip install surefoot[tasks]",
        ) from error
    return reasoning_gym, sorted(DATASETS)


def _gym_task(name: str, entry: Mapping[str, Any]) -> Task:
    """The entry stays as it is: some scorers compare tuples, which a trip through JSON would turn into lists."""
    question = entry.get("question")
    if not isinstance(question, str) or not question.strip():
        raise TaskError(
            f"reasoning_gym:{name} gave an entry without a question",
            "there is nothing to ask",
            "choose another dataset",
        )
    try:
        json.dumps(entry)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"reasoning_gym:{name} gave an entry that is not plain data: {error}",
            "tasks are written to the run folder and handed to other processes",
            "choose another dataset",
        ) from error
    digest = sha256_of(question)[:16]
    columns = {"answer": entry["answer"], "reasoning_gym": name, "entry": dict(entry)}
    return Task(id=f"{name}/{digest}", prompt=question, columns=columns, dataset=name)


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(near)}?" if near else ""
