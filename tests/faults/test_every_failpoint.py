"""Every named crash point, in real runs: killed there, or told that the disk is full, the run still ends bit for bit.

A run that saves, prunes and looks on after every step passes nearly all of them; a resume that finds a torn journal
passes the others.
"""

from __future__ import annotations

import dataclasses
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
import kill_plants
import pytest
from kill_kit import Ended
from kill_runs import Bench, Case, Killed

from surefoot.storage import files

NAMES = {name: where for name, where in files.NAMES.items() if not name.startswith("memory.")}
"""Those of runs. A measurement of memory keeps nothing that could go on: tests/unit/run/test_memory.py ends it there."""
BUSY = Case("busy", {"save_steps": 0, "save_minutes": 1e-9, "eval_steps": 1, "max_steps": 3})
LONGER = "to be made longer"
"""A file beside a run that is resumed with max_steps=3."""
PIECES = (("small_pieces",), ("one_by_one",))
TORN = b"half a record, which a crash left"
DISK = tuple(
    n for n in NAMES if n.split(".")[0] in ("durable", "folder", "journal", "batches", "checkpoint", "retention")
)
TYPED = (74, 3)
"""What a run may say to a disk that says no: an I/O error, or that the state under it cannot be trusted any more."""


class Scene:
    """Somewhere to be killed: a fresh run, the resume of one whose journal is torn, or one that is made longer."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.killed, self.shorter = self._killed(), self._shorter()
        self.counts = {kind: Counter(self._pass(kind)) for kind in ("train", "resume", "longer")}

    def place(self, kind: str) -> Path:
        """A folder in which `go_on` is a fresh run, or such a resume."""
        if kind == "train":
            return self.bench.folder(BUSY)
        return self.killed.fresh() if kind == "resume" else self.shorter.fresh()

    def go_on(self, folder: Path, failpoints: str, **more: Any) -> Ended:
        words = ["max_steps=3"] if (folder / LONGER).exists() else []
        return self.bench.go_on(folder, *words, failpoints=failpoints, before=PIECES, **more).end()

    def hits(self, name: str) -> tuple[str, int]:
        """In which scene a failpoint is passed, and how often."""
        kind = next((kind for kind, counter in self.counts.items() if counter[name]), "train")
        return kind, self.counts[kind][name]

    def places(self, name: str) -> list[tuple[str, int]]:
        """The first, the middle and the last hit of a failpoint in each scene that passes it."""
        counts = {kind: counter[name] for kind, counter in self.counts.items() if counter[name]}
        assert counts, f"{name} is never passed"
        return [(kind, hit) for kind, hits in counts.items() for hit in sorted({1, (hits + 1) // 2, hits})]

    def _killed(self) -> Killed:
        """A run that died in its second step, with half a record at the end of its journal."""
        killed = self.bench.killed(BUSY, "loop.before_log=kill@2")
        with (killed.copy / "run" / "journal" / "ledger.journal").open("ab") as file:
            file.write(TORN)
        return killed

    def _shorter(self) -> Killed:
        """A run that is over after two steps, to be made longer."""
        folder = self.bench.folder(dataclasses.replace(BUSY, name="shorter", keys=BUSY.keys | {"max_steps": 2}))
        ended = self.bench.train(folder)
        assert ended.code == 0, ended.said
        (folder / LONGER).touch()
        copy = folder.with_name(f"{folder.name} copy")
        shutil.copytree(folder, copy, symlinks=True)
        return Killed(folder, copy)

    def _pass(self, kind: str) -> list[str]:
        folder = self.place(kind)
        trace = folder / "trace"
        words = ["max_steps=3"] if kind == "longer" else []
        ended = self.bench.go_on(folder, *words, before=[*PIECES, ("trace", trace)]).end()
        names = kill_plants.passed(trace)
        self.bench.check(BUSY, folder, ended)
        return names


@pytest.fixture(scope="session")
def scene(bench: Bench) -> Scene:
    return Scene(bench)


def note(record_property: Callable[[str, object], None], what: str, n: int, figure: str = "P1") -> None:
    figures.note(record_property, figure, what, n)


def test_forty_failpoints_and_more_and_every_one_is_passed_by_a_real_run(scene: Scene) -> None:
    passed = set().union(*scene.counts.values())
    assert sorted(NAMES.keys() - passed) == [], "never reached: a crash there is not tested"
    assert len(passed) >= 40


@pytest.mark.turns(12)
@pytest.mark.parametrize("name", NAMES)
def test_killed_at_this_failpoint_the_run_goes_on_bit_for_bit(
    scene: Scene, name: str, record_property: Callable[[str, object], None]
) -> None:
    """At one hit: the first for every other name, the last for the rest. All of both at night."""
    kind, hits = scene.hits(name)
    kill(scene, name, kind, 1 if list(NAMES).index(name) % 2 else hits)
    note(record_property, "kill -9 at a failpoint, then resumed: bit-equal", 1)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_killed_at_the_first_the_middle_and_the_last_hit_the_run_goes_on_bit_for_bit(
    scene: Scene, name: str, record_property: Callable[[str, object], None]
) -> None:
    places = scene.places(name)
    for kind, hit in places:
        kill(scene, name, kind, hit)
    note(record_property, "kill -9 at a failpoint, then resumed: bit-equal", len(places))


def kill(scene: Scene, name: str, kind: str, hit: int) -> None:
    folder = scene.place(kind)
    ended = scene.go_on(folder, f"{name}=kill@{hit}")
    assert ended.code == -signal.SIGKILL, f"{name} was not reached {hit} times: exit {ended.code}\n{ended.said}"
    assert scene.bench.warm.orphans() == []
    scene.bench.check(BUSY, folder, scene.go_on(folder, ""))


def went_on(names: list[str], name: str, hit: int) -> bool:
    """Whether a step or an evaluation began after this hit: a run that is asked in its last lines may finish them."""
    [*_, at] = [place for place, one in enumerate(names) if one == name][:hit]
    return any(one in ("loop.before_collect", "loop.before_learn", "loop.before_evaluate") for one in names[at + 1 :])


def ask_to_stop(scene: Scene, name: str, hit: int) -> int:
    folder = scene.place("train")
    trace = folder / "trace"
    asked = ("signal_at", name, hit, int(signal.SIGTERM))
    ended = scene.bench.train(folder, before=[*PIECES, asked, ("trace", trace)])
    over = ended.code == 0 and not went_on(kill_plants.passed(trace), name, hit)
    assert ended.code == 75 or over, f"SIGTERM at {name}, hit {hit}: exit {ended.code}\n{ended.said}"
    trace.unlink()
    assert ended.code == 0 or "--resume" in ended.said or name.startswith("lock."), ended.said
    assert scene.bench.warm.orphans() == []
    scene.bench.check(BUSY, folder, scene.go_on(folder, ""))
    return ended.code


@pytest.mark.turns(5)
@pytest.mark.parametrize("name", [name for name in NAMES if name.split(".")[0] in ("loop", "session", "learner")])
def test_asked_to_stop_at_this_failpoint_the_run_goes_on_bit_for_bit(
    scene: Scene, name: str, record_property: Callable[[str, object], None]
) -> None:
    hits = scene.counts["train"][name]
    code = ask_to_stop(scene, name, (hits + 1) // 2)
    assert code == 75 or name in ("session.before_verdict", "session.after_verdict"), "a run that was not over went on"
    note(record_property, "SIGTERM at a failpoint, then resumed: bit-equal", 1, figure="P11")


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_asked_to_stop_at_the_first_or_last_hit_of_any_failpoint_the_run_goes_on_bit_for_bit(
    scene: Scene, name: str, record_property: Callable[[str, object], None]
) -> None:
    places = sorted({1, scene.counts["train"][name]}) if scene.counts["train"][name] else []
    for hit in places:
        ask_to_stop(scene, name, hit)
    note(record_property, "SIGTERM at a failpoint, then resumed: bit-equal", len(places), figure="P11")


@pytest.mark.turns(12)
@pytest.mark.parametrize("name", DISK)
def test_a_full_disk_at_this_failpoint_ends_with_74_and_the_run_goes_on_bit_for_bit(
    scene: Scene, name: str, record_property: Callable[[str, object], None]
) -> None:
    kind, hits = scene.hits(name)
    refuse(scene, name, kind, (hits + 1) // 2, "ENOSPC")
    note(record_property, "a disk that says no at a failpoint, then resumed: bit-equal", 1, figure="P6")


@pytest.mark.nightly
@pytest.mark.parametrize("word", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("name", DISK)
def test_a_disk_that_says_no_at_any_hit_of_this_failpoint_costs_nothing(
    scene: Scene, name: str, word: str, record_property: Callable[[str, object], None]
) -> None:
    places = scene.places(name)
    for kind, hit in places:
        refuse(scene, name, kind, hit, word)
    note(record_property, "a disk that says no at a failpoint, then resumed: bit-equal", len(places), figure="P6")


def refuse(scene: Scene, name: str, kind: str, hit: int, word: str) -> None:
    folder = scene.place(kind)
    ended = scene.go_on(folder, f"{name}=errno:{word}@{hit}")
    if ended.code == 0:  # the seal of a journal that is closed: it only helps to see later damage
        assert name.startswith("journal."), f"{word} at {name} was not heard"
        assert hit == scene.counts[kind][name], f"{word} at {name}, hit {hit}, was not heard"
    else:
        assert ended.code in TYPED, f"{word} at {name}, hit {hit}: exit {ended.code}\n{ended.said}"
        assert "StorageError" in ended.said or ended.code == 3, ended.said
    assert scene.bench.warm.orphans() == []
    scene.bench.check(BUSY, folder, scene.go_on(folder, ""))
