"""Record and replay: what was said comes back to the letter, or the run hears that it does not."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cassette_kit import CALL, TASK, Kit, Told, never, play
from frame_kit import payloads, pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import ConfigError, StateError, StorageError, ToolError, ToolFailedError
from surefoot.records import Task
from surefoot.system import journal
from surefoot.tools import recording, recording_file
from surefoot.tools.python.environments import EnvironmentToolkit
from surefoot.tools.recording import RecordingToolkit, canonical
from surefoot.tools.session import tools_of

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "tell"]), st.fixed_dictionaries({"z": VALUES, "a": st.sampled_from([1, 404, 666])})
    ),
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from([f"train/{s}/0/{i}" for s in range(3) for i in range(2)]), CALLS, min_size=1))
def test_a_replay_is_the_recording_to_the_letter_and_starts_nothing(
    tmp_path_factory: pytest.TempPathFactory, rollouts: dict[str, list[CALL]]
) -> None:
    path = tmp_path_factory.mktemp("c") / "a cassette.jsonl"
    record = RecordingToolkit(Kit(), path)
    told = {rollout: play(record, rollout, calls) for rollout, calls in rollouts.items()}
    record.close()
    replay = RecordingToolkit(never, path, mode="replay")
    again = {rollout: play(replay, rollout, calls) for rollout, calls in reversed(rollouts.items())}
    assert again == told
    assert [(s.name, s.description, json.dumps(s.parameters)) for s in replay.specs] == [
        (s.name, s.description, json.dumps(s.parameters)) for s in Kit().specs
    ], "in the order in which the model saw it"
    assert replay.misses == 0
    replay.close()


def test_every_record_is_json_and_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kinds = [record["kind"] for record in payloads(path)]
    assert kinds == ["cassette", "life", "open", "call", "call", "reward", "close"]


def test_half_a_surrogate_pair_and_control_characters_come_back(tmp_path: Path) -> None:
    calls: list[CALL] = [("ask", {"z": "\ud800 \x00 \u2028 \n"})]
    record = RecordingToolkit(Kit(), tmp_path / "c")
    told = play(record, "r", calls)
    record.close()
    replay = RecordingToolkit(None, tmp_path / "c", mode="replay")
    assert play(replay, "r", calls) == told
    replay.close()


def recorded(folder: Path, *extra: str) -> Path:
    record = RecordingToolkit(Kit(), folder / "c")
    for rollout in ("train/0/0/0", *extra):
        play(record, rollout, [("ask", {"z": "x", "a": 1}), ("tell", {"z": "y"})])
    record.close()
    return folder / "c"


# -- misses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([("ask", {"z": "x", "a": 2})], r'train/0/0/0 call 0 is ask {"a":2,"z":"x"}; the nearest is call 0: ask {"a":1,"z":"x"}'),
        ([("tell", {"z": "y"})], r'call 0 is tell .* the nearest is call 1: tell {"z":"y"}'),
        ([("ask", {"a": 1, "z": "x"}), ("tell", {"z": "Y"})], "call 1 is tell"),
        ([("ask", {"a": 1, "z": "x"}), ("tell", {"z": "y"}), ("tell", {"z": "y"})], "call 2 is tell"),
        ([("ask", {"a": 1, "z": "x"})], "its reward was asked after 1 of 2 recorded calls"),
        ([("ask", {"a": 1.0, "z": "x"})], "call 0"),
        ([("ask", {"a": True, "z": "x"})], "call 0"),
    ],
)  # fmt: skip
def test_a_call_that_was_not_recorded_ends_the_run_and_names_the_nearest(
    tmp_path: Path, calls: list[CALL], words: str
) -> None:
    replay = RecordingToolkit(never, recorded(tmp_path), mode="replay")
    with pytest.raises(ToolError, match=words) as missed:
        play(replay, "train/0/0/0", calls)
    assert not isinstance(missed.value, ToolFailedError), "it ends the run, and is not one lost rollout more"
    assert replay.misses == 1
    replay.close()


def test_the_order_of_names_does_not_matter_and_that_of_a_list_does(tmp_path: Path) -> None:
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
    assert canonical({"a": [1, 2]}) != canonical({"a": [2, 1]})


def test_an_unknown_rollout_another_task_and_another_seed_are_misses(tmp_path: Path) -> None:
    replay = RecordingToolkit(None, recorded(tmp_path), mode="replay")
    with pytest.raises(ToolError, match="train/9/9/9 its tools were never opened"):
        replay.open(TASK, "train/9/9/9", 1)
    with pytest.raises(ToolError, match="task other with seed 1; recorded was t"):
        replay.open(Task(id="other", prompt="?"), "train/0/0/0", 1)
    replay.close()
    replay = RecordingToolkit(None, tmp_path / "c", mode="replay")
    with pytest.raises(ToolError, match="seed 2"):
        replay.open(TASK, "train/0/0/0", 2)
    replay.close()


def test_planted_replay_that_takes_any_arguments_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path)
    monkeypatch.setattr(recording, "canonical", lambda arguments: '{"a":1,"z":"x"}')
    replay = RecordingToolkit(None, path, mode="replay")
    answer = replay.open(TASK, "train/0/0/0", 1).call("ask", {"z": "something else"}, 5)
    assert answer.text == "said train/0/0/0 1 x", "the tests above would have seen this answer"
    replay.close()


def test_a_miss_may_be_asked_of_the_real_tools_brought_to_the_same_state(tmp_path: Path) -> None:
    kits: list[Kit] = []

    def start() -> Kit:
        kits.append(Kit())
        return kits[-1]

    replay = RecordingToolkit(start, recorded(tmp_path), mode="replay", miss="live")
    box = replay.open(TASK, "train/0/0/0", 1)
    assert box.call("ask", {"z": "x", "a": 1}, 5).text == "said train/0/0/0 1 x"
    assert kits == [], "what is recorded is not asked"
    assert box.call("tell", {"z": "new"}, 5).text == "said train/0/0/0 2 new", "the second call of this world"
    assert [name for _, name, _ in kits[0].asked] == ["ask", "tell"]
    assert (box.reward(), replay.misses, replay.replayed) == (2.1, 1, 2)
    box.close()
    assert play(replay, "train/5/5/5", [("ask", {"z": "q"})])[0] == "opening of train/5/5/5"
    assert len(kits) == 1
    replay.close()
    assert (kits[0].closed, kits[0].ended) == (2, True)


def test_real_tools_that_answer_otherwise_than_recorded_are_a_failure(tmp_path: Path) -> None:
    replay = RecordingToolkit(Kit("changed"), recorded(tmp_path), mode="replay", miss="live")
    box = replay.open(TASK, "train/0/0/0", 1)
    box.call("ask", {"z": "x", "a": 1}, 5)
    with pytest.raises(ToolFailedError, match="answered changed") as failed:
        box.call("ask", {"z": "new"}, 5)
    assert failed.value.reason == "cassette_drift"
    replay.close()


def test_planted_live_answer_without_the_calls_before_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def straight(self: Any, deadline_s: float = 60.0) -> Any:
        self._live = self._cassette.inner().open(self._task, self._rollout, self._seed)
        return self._live

    monkeypatch.setattr(recording.ReplayTools, "_go_live", straight)
    with pytest.raises(AssertionError, match="second call"):
        test_a_miss_may_be_asked_of_the_real_tools_brought_to_the_same_state(tmp_path)


def test_tools_that_changed_are_refused_by_name_whoever_starts_them(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    for mode, miss in (("record", "fail"), ("replay", "live")):
        other = Kit(names=("ask", "shout"))
        with pytest.raises(StateError, match="recorded with other tools: shout, tell"):
            RecordingToolkit(other, path, mode=mode, miss=miss)
        assert other.ended, "what was started is ended"
    late = RecordingToolkit(lambda: Kit(names=("ask",)), path, mode="replay", miss="live")
    with pytest.raises(StateError, match="other tools"):
        late.open(TASK, "train/9/9/9", 1)
    late.close()


def test_a_closed_mind_about_modes(tmp_path: Path) -> None:
    for words in ({"mode": "live"}, {"miss": "maybe"}):
        with pytest.raises(ConfigError):
            RecordingToolkit(Kit(), tmp_path / "c", **words)


# -- going on after a crash -----------------------------------------------------------------


def lives(path: Path, *words: str, whole: bool = True) -> None:
    """One more session that records rollout `r`; when not `whole`, it stops in the middle."""
    for word in words:
        record = RecordingToolkit(Kit(word), path)
        box = record.open(TASK, "r", 1)
        box.call("ask", {"z": "x"}, 5)
        if whole:
            box.reward()
            box.close()
        record.close()


def said(path: Path) -> str:
    replay = RecordingToolkit(None, path, mode="replay")
    try:
        return replay.open(TASK, "r", 1).call("ask", {"z": "x"}, 5).text.split()[0]
    finally:
        replay.close()


def test_of_a_rollout_that_was_played_again_the_last_whole_recording_counts(tmp_path: Path) -> None:
    path = tmp_path / "c"
    lives(path, "first", whole=False)
    assert said(path) == "first", "a part is better than nothing"
    lives(path, "second", "third")
    assert said(path) == "third"
    lives(path, "torn", whole=False)
    assert said(path) == "third"


def test_tools_that_could_not_be_opened_at_once_are_replayed_attempt_by_attempt(tmp_path: Path) -> None:
    kit = Kit(broken=2)
    record = RecordingToolkit(kit, tmp_path / "c")
    told = [play(record, "r", [("ask", {"z": "x"})]) for _ in range(3)]
    record.close()
    replay = RecordingToolkit(None, tmp_path / "c", mode="replay")
    assert [play(replay, "r", [("ask", {"z": "x"})]) for _ in range(3)] == told
    assert [len(each) for each in told] == [2, 2, 3]
    with pytest.raises(ToolError, match="never opened"):
        replay.open(TASK, "r", 1)
    replay.close()


def test_a_torn_last_record_is_left_out_of_a_replay_and_cut_when_recording_goes_on(tmp_path: Path) -> None:
    frames = pieces(recorded(tmp_path).read_bytes())[:-1]  # a recorder that is killed leaves no seal
    path = tmp_path / "torn"
    for kept in range(1, len(frames[-1])):
        path.write_bytes(b"".join(frames[:-1]) + frames[-1][:kept])
        RecordingToolkit(None, path, mode="replay").close()
    before = path.read_bytes()
    RecordingToolkit(None, path, mode="replay").close()
    assert path.read_bytes() == before, "a replay changes nothing"
    record = RecordingToolkit(Kit(), path)
    play(record, "later", [])
    record.close()
    replay = RecordingToolkit(None, path, mode="replay")
    assert play(replay, "later", [])[0] == "opening of later"
    replay.close()


def test_planted_recording_that_goes_on_behind_a_torn_record_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = journal.FramedJournal._look_through

    def uncut(self: journal.FramedJournal) -> None:
        readonly, self.readonly = self.readonly, True
        real(self)
        self.readonly = readonly
        self._end = self._end if readonly else self._file.size()

    monkeypatch.setattr(journal.FramedJournal, "_look_through", uncut)
    with pytest.raises((AssertionError, StateError, ToolError)):
        test_a_torn_last_record_is_left_out_of_a_replay_and_cut_when_recording_goes_on(tmp_path)


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_no_damage_in_the_middle_is_taken_for_a_recording(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("d")
    path = recorded(folder, "train/0/0/1")
    whole = path.read_bytes()
    lines = pieces(whole)
    where = data.draw(st.integers(0, len(lines) - 2))  # not the seal, which holds no record
    damaged = data.draw(
        st.sampled_from(["flip", "drop", "double", "swap", "blank", "foreign", "cut"]), label="damage"
    )  # fmt: skip
    spoilt = list(lines)
    if damaged == "flip":
        spoilt[where] = _flipped(lines[where], data.draw(st.integers(0, len(lines[where]) - 2)))
    elif damaged == "drop":
        del spoilt[where]
    elif damaged == "double":
        spoilt.insert(where, lines[where])
    elif damaged == "swap":
        spoilt[where], spoilt[where + 1] = spoilt[where + 1], spoilt[where]
    elif damaged == "blank":
        spoilt[where] = b"\n"
    elif damaged == "cut":
        spoilt[where] = lines[where][: data.draw(st.integers(0, len(lines[where]) - 2))]
    else:
        (folder / "other").mkdir()
        spoilt[where] = recorded(folder / "other", "train/0/0/1").read_bytes()
        spoilt[where] = pieces(spoilt[where])[where]
    path.write_bytes(b"".join(spoilt))
    for mode in ("replay", "record"):
        with pytest.raises(StateError, match="not a cassette that can be used") as refused:
            RecordingToolkit(Kit(), path, mode=mode)
        assert refused.value.exit_code == 3
    assert path.read_bytes() == b"".join(spoilt), "what is refused is left as it is"


def killed_recorder(folder: Path) -> list[bytes]:
    """The pieces of a cassette whose recorder died: nothing was synced since it began, and no seal protects it."""
    record = RecordingToolkit(Kit(), folder / "killed")
    for rollout in ("train/0/0/0", "train/0/0/1"):
        play(record, rollout, [("ask", {"z": "x", "a": 1})])
    return pieces((folder / "killed").read_bytes())


def damage_is_refused_and_left(folder: Path) -> None:
    frames = killed_recorder(folder)
    for where in range(1, len(frames) - 1):
        broken = [*frames[:where], _flipped(frames[where], len(frames[where]) // 2), *frames[where + 1 :]]
        (folder / "spoilt").write_bytes(b"".join(broken))
        for mode in ("replay", "record"):
            with pytest.raises(StateError, match="not a cassette that can be used"):
                RecordingToolkit(Kit(), folder / "spoilt", mode=mode)
        assert (folder / "spoilt").read_bytes() == b"".join(broken), "answers behind the damage are still there"


def test_damage_that_no_sync_protects_is_refused_all_the_same(tmp_path: Path) -> None:
    damage_is_refused_and_left(tmp_path)


def test_planted_cassette_that_takes_it_for_a_torn_tail_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_file.CassetteJournal, "strict", False)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        damage_is_refused_and_left(tmp_path)


def test_planted_reader_without_checksums_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"said train", b"SAID train"))
    with pytest.raises(StateError):
        RecordingToolkit(None, path, mode="replay")
    monkeypatch.setattr(journal, "payload_fits", lambda payload, head, seed: len(payload) == head.length)
    replay = RecordingToolkit(None, path, mode="replay")
    answer = replay.open(TASK, "train/0/0/0", 1).call("ask", {"z": "x", "a": 1}, 5)
    assert answer.text.startswith("SAID"), "only the checksum stands between this and a run"
    replay.close()


@pytest.mark.parametrize("kept", [0, 1, 10, 32, 33, 63, 64, 65, -1])
def test_a_recording_that_died_in_its_first_write_begins_again_and_a_replay_of_it_is_refused(
    tmp_path: Path, kept: int
) -> None:
    path = recorded(tmp_path)
    path.write_bytes(b"".join(pieces(path.read_bytes())[:2])[:kept])
    with pytest.raises(StateError, match="no whole first record"):
        RecordingToolkit(None, path, mode="replay")
    record = RecordingToolkit(Kit(), path)
    told = play(record, "r", [])
    record.close()
    replay = RecordingToolkit(None, path, mode="replay")
    assert play(replay, "r", []) == told
    replay.close()


@pytest.mark.parametrize(
    "content", [b"my diary, without an end", b'{"prompt": "a task"}\n', b"\x89PNG", b"\n", b"{}", b'{"crc":"00']
)
def test_a_file_that_is_something_else_is_never_written_to(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c"
    path.write_bytes(content)
    for mode in ("record", "replay"):
        with pytest.raises(StateError):
            RecordingToolkit(Kit(), path, mode=mode)
    assert path.read_bytes() == content


def test_links_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(recorded(tmp_path))
    for name in ("link", "missing", "."):
        with pytest.raises(StateError):
            RecordingToolkit(None, tmp_path / name, mode="replay")
    with pytest.raises(StateError):
        RecordingToolkit(Kit(), tmp_path / "no" / "folder")


def test_two_recordings_to_one_file_are_refused_and_a_replay_beside_one_is_not(tmp_path: Path) -> None:
    first = RecordingToolkit(Kit(), tmp_path / "c")
    with pytest.raises(StateError, match="being recorded"):
        RecordingToolkit(Kit(), tmp_path / "c")
    RecordingToolkit(None, tmp_path / "c", mode="replay").close()
    first.close()
    RecordingToolkit(Kit(), tmp_path / "c").close()


def test_after_a_write_that_failed_nothing_more_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RecordingToolkit(Kit(), tmp_path / "c")
    box = record.open(TASK, "r", 1)
    real, budget = os.pwrite, [30]

    def full(file: int, data: Any, offset: int) -> int:
        if budget[0] == 0:
            raise OSError(28, "No space left on device")
        written = real(file, bytes(data)[: budget[0]], offset)
        budget[0] -= written
        return written

    monkeypatch.setattr(journal.os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left") as full_disk:
        box.call("ask", {"z": "x"}, 5)
    assert full_disk.value.exit_code == 74
    monkeypatch.setattr(journal.os, "pwrite", real)
    with pytest.raises(StorageError):
        box.call("ask", {"z": "y"}, 5)
    size = (tmp_path / "c").stat().st_size
    with pytest.raises(StorageError):
        box.close()
    assert (tmp_path / "c").stat().st_size == size
    record.file.close()
    RecordingToolkit(Kit(), tmp_path / "c").close()


def test_planted_file_that_writes_on_after_a_failure_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(recording_file.RecordingFile):
        _broken = property(lambda self: None, lambda self, value: None)  # type: ignore[assignment]

    monkeypatch.setattr("surefoot.tools.recording.RecordingFile", Forgetful)
    with pytest.raises((AssertionError, TypeError, pytest.fail.Exception)):
        test_after_a_write_that_failed_nothing_more_is_written(tmp_path, monkeypatch)


def test_many_threads_record_and_replay_at_once(tmp_path: Path) -> None:
    calls: list[CALL] = [("ask", {"z": str(i)}) for i in range(10)]
    start = threading.Barrier(8)

    def each(kit: RecordingToolkit) -> Callable[[int], Told]:
        def run(number: int) -> Told:
            if number < 8:
                start.wait(10)
            return play(kit, f"train/0/0/{number}", calls)

        return run

    record = RecordingToolkit(Kit(), tmp_path / "c")
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(each(record), range(40)))
    record.close()
    replay = RecordingToolkit(None, tmp_path / "c", mode="replay")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(each(replay), range(40))) == told
    replay.close()


def test_routes_of_several_environments_are_kept(tmp_path: Path) -> None:
    class One:
        def reset(self, **row: Any) -> None: ...
        def act(self) -> str:
            """Act."""
            return "done"

    class Two(One):
        def wait(self) -> str:
            """Wait."""
            return "waited"

    record = RecordingToolkit(EnvironmentToolkit({"one": One, "two": Two}), tmp_path / "c")
    task = Task(id="t", prompt="?", columns={"environment": "one"})
    record.open(task, "r", 0).close()
    record.close()
    replay = RecordingToolkit(None, tmp_path / "c", mode="replay")
    assert list(tools_of(task, replay.routes) or ()) == ["act"]
    assert [spec.name for spec in replay.specs] == ["act", "wait"]
    replay.close()


def test_no_opinion_stays_no_opinion(tmp_path: Path) -> None:
    record = RecordingToolkit(Kit("silent"), tmp_path / "c")
    assert play(record, "r", [])[-1] is None
    record.close()
    replay = RecordingToolkit(None, tmp_path / "c", mode="replay")
    assert play(replay, "r", [])[-1] is None
    replay.close()
