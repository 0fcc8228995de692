"""The timeline keeps the last steps and the slowest, whatever is thrown at it, and stops nobody."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from surefoot.tracking import live as module
from surefoot.tracking.live import MAX_OF_TRACK, MAX_SPANS, Timeline, add, read_timeline, span


class Clock:
    """A clock that moves when it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def steps(durations: list[float], **options: int) -> tuple[Timeline, Clock]:
    clock = Clock()
    timeline = Timeline(clock=clock, **options)
    for number, seconds in enumerate(durations, 1):
        begin = clock.now
        clock.now += seconds
        timeline.add("learn", "loop", begin, clock.now)
        timeline.step_done(number)
    return timeline, clock


def test_the_last_steps_and_the_slowest_are_kept_and_no_other() -> None:
    timeline, _ = steps([9.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0], keep=3)
    assert [(w.step, w.slowest) for w in timeline.windows()] == [(3, True), (5, False), (6, False), (7, False)]


def test_the_first_step_is_no_example_of_a_slow_one_unless_it_is_the_only_one() -> None:
    assert [w.slowest for w in steps([9.0])[0].windows()] == [True]
    assert [w.slowest for w in steps([9.0, 1.0])[0].windows()] == [False, True]


def test_loading_is_no_part_of_the_first_step() -> None:
    clock = Clock()
    timeline = Timeline(clock=clock)
    clock.now += 70.0
    timeline.add("collect", "loop", clock.now, clock.now + 1)
    clock.now += 2.0
    timeline.step_done(1)
    assert [(w.start, w.end) for w in timeline.windows()] == [(70.0, 72.0)]


def test_a_span_is_in_every_step_that_it_touches_even_when_it_is_told_of_late() -> None:
    timeline, clock = steps([1.0, 1.0, 1.0])
    timeline.add("group", "worker-0", 100.5, 102.5)  # steps 1, 2 and 3, told of after they ended
    clock.now += 1.0
    timeline.add("group", "worker-1", 102.9, 103.5)  # step 3, and the one under way
    timeline.step_done(4)
    found = {w.step: [s.track for s in w.spans if s.name == "group"] for w in timeline.windows()}
    assert found == {1: ["worker-0"], 2: ["worker-0"], 3: ["worker-0", "worker-1"], 4: ["worker-1"]}


def test_memory_is_bounded_and_what_was_left_out_is_counted() -> None:
    timeline = Timeline(clock=Clock())
    tracks = 2 * MAX_SPANS // MAX_OF_TRACK
    for track in range(tracks):
        for _ in range(MAX_OF_TRACK + 3):
            timeline.add("group", f"worker-{track}", 100.0, 100.0)
    timeline.add("learn", "loop", 100.0, 100.0)  # comes last, and is not crowded out
    timeline.step_done(1)
    (window,) = timeline.windows()
    assert len(window.spans) <= MAX_SPANS + 1
    assert len(window.spans) + window.left_out == tracks * (MAX_OF_TRACK + 3) + 1
    assert window.spans[-1].name == "learn"


def test_many_threads_lose_nothing() -> None:
    timeline = Timeline()
    threads = [
        threading.Thread(target=lambda n=n: [timeline.add("x", f"t{n}", 0.0, 1e12) for _ in range(50)])
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.step_done(1)
    (window,) = timeline.windows()
    assert (len(window.spans), window.left_out) == (400, 0)


def test_the_file_reads_back_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    timeline = Timeline(path)
    with timeline.span("learn", track="learner"):
        pass
    timeline.step_done(7)
    timeline.close()
    (window,), odd = read_timeline(path.read_bytes())
    assert (window.step, window.spans[0].name, window.spans[0].track, odd) == (7, "learn", "learner", 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["timeline.jsonl"]


def test_the_file_is_written_while_the_run_goes_on(tmp_path: Path) -> None:
    clock = Clock()
    timeline = Timeline(tmp_path / "timeline.jsonl", clock=clock)
    timeline.step_done(1)
    assert not timeline.path.exists()  # type: ignore[union-attr]
    clock.now += module.SAVE_EVERY_S
    timeline.step_done(2)
    assert len(read_timeline((tmp_path / "timeline.jsonl").read_bytes())[0]) == 2


def test_a_disk_that_refuses_the_file_stops_nobody_and_is_noted(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "gone" / "timeline.jsonl")
    timeline.step_done(1)
    timeline.close()
    assert timeline.problem is not None
    assert "could not be written" in timeline.problem


def test_module_functions_speak_to_who_listens_and_to_nobody_else() -> None:
    with span("nobody hears this"):
        add("nor this", "loop", 0.0, 1.0)
    timeline = Timeline()
    with timeline.listening():
        with pytest.raises(KeyError), span("publish", track="sync"):
            raise KeyError
    with span("too late"):
        pass
    timeline.step_done(1)
    assert [(s.name, s.track) for s in timeline.windows()[0].spans] == [("publish", "sync")]


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"null", b'{"step": 1}', b"\xff\xfe", b"[" * 100_000,
     b'{"step":1,"start":2,"end":1,"slowest":false,"left_out":0,"spans":[]}',
     b'{"step":1,"start":NaN,"end":1,"slowest":false,"left_out":0,"spans":[]}',
     b'{"step":1,"start":0,"end":1,"slowest":false,"left_out":0,"spans":[["a","b",0,Infinity]]}'],
    ids=range(9),
)  # fmt: skip
def test_a_torn_or_odd_line_is_counted_and_costs_only_itself(line: bytes) -> None:
    good = b'{"step":2,"start":0,"end":1,"slowest":true,"left_out":0,"spans":[["a","b",0,1]]}'
    windows, odd = read_timeline(line + b"\n" + good + b"\n")
    assert ([w.step for w in windows], odd) == ([2], 1)


def test_planted_unbounded_window_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Window, "offer", lambda self, span: self.spans.append(span))
    with pytest.raises(AssertionError):
        test_memory_is_bounded_and_what_was_left_out_is_counted()
