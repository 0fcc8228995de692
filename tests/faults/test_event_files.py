"""TensorBoard event files: merged by the events' own clock, torn ends used, damage refused. Files are written here."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError, StateError
from surefoot.harness.sources import dump, event_files, load_metrics, read_events

pytest.importorskip("tensorboard", reason="needs the tensorboard extra")


def framed(event: Any) -> bytes:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def scalar(tag: str, step: int, value: float, wall_time: float, *, tensor: str = "") -> bytes:
    """One event; with `tensor`, as TensorFlow 2 and torch's new style write it: `content`, `float` or `double`."""
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event(wall_time=wall_time, step=step)
    item = event.summary.value.add(tag=tag)
    if not tensor:
        item.simple_value = value
        return framed(event)
    item.metadata.plugin_data.plugin_name = "scalars"
    item.tensor.dtype = 2 if tensor == "double" else 1
    if tensor == "content":
        item.tensor.tensor_content = struct.pack("<f", value)
    else:
        (item.tensor.double_val if tensor == "double" else item.tensor.float_val).append(value)
    return framed(event)


def write(folder: Path, name: str, *records: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"events.out.tfevents.{name}"
    path.write_bytes(b"".join(records))
    return path


def test_a_resumed_run_is_merged_by_event_time_and_not_by_file_time(tmp_path: Path) -> None:
    old = write(tmp_path / "z", "1.host", *(scalar("loss", step, 1.0, 100 + step) for step in range(5)))
    new = write(tmp_path / "a", "2.host", *(scalar("loss", step, 2.0, 200 + step) for step in range(3, 8)))
    for first, second in ((old, new), (new, old)):  # copying scrambles these times
        os.utime(first, (10, 10))
        os.utime(second, (99, 99))
        events = read_events(tmp_path)
        assert dict(events.metrics()["loss"]) == {0: 1, 1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2, 7: 2}
        assert len(events.conflicts) == 2


def test_conflicts_name_both_files_and_can_be_refused(tmp_path: Path) -> None:
    write(tmp_path, "1.a", scalar("loss", 1, 1.0, 100), scalar("same", 1, 1.0, 100))
    write(tmp_path, "2.b", scalar("loss", 1, 2.0, 200), scalar("same", 1, 1.0, 200))
    with pytest.raises(StateError) as caught:
        dump(tmp_path, tmp_path / "out.json", error_on_conflicts=True)
    assert "1 steps have two values" in caught.value.what
    assert "loss step 1 in events.out.tfevents.1.a and events.out.tfevents.2.b" in caught.value.what
    assert not (tmp_path / "out.json").exists()
    assert "the later counts" in dump(tmp_path, tmp_path / "out.json")[-1]


@pytest.mark.parametrize("tensor", ["", "content", "float", "double"])
def test_scalars_are_read_in_all_their_spellings(tmp_path: Path, tensor: str) -> None:
    write(tmp_path, "1", scalar("train/loss", 3, 0.25, 1.0, tensor=tensor))
    assert dict(load_metrics(tmp_path)["train/loss"]) == {3: 0.25}


def test_images_and_text_are_not_scalars(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event(wall_time=1.0, step=1)
    event.summary.value.add(tag="picture").image.height = 3
    words = event.summary.value.add(tag="words")
    words.metadata.plugin_data.plugin_name = "text"
    words.tensor.dtype = 7
    words.tensor.string_val.append(b"hello")
    write(tmp_path, "1", framed(event), scalar("loss", 1, 0.5, 1.0))
    assert list(load_metrics(tmp_path)) == ["loss"]


def test_of_a_torn_file_every_whole_event_is_used_and_the_loss_is_told(tmp_path: Path) -> None:
    whole, last = scalar("loss", 1, 0.5, 1.0), scalar("loss", 2, 0.4, 2.0)
    for cut in range(1, len(last)):
        write(tmp_path, "1", whole, last[:cut])
        metrics = load_metrics(tmp_path)
        assert dict(metrics["loss"]) == {1: 0.5}
        assert metrics.notes == [
            f"events.out.tfevents.1 ends in the middle of an event: the {cut} bytes at its end are left out"
        ]


def test_damage_in_the_middle_is_refused(tmp_path: Path) -> None:
    first, second = scalar("loss", 1, 0.5, 1.0), scalar("loss", 2, 0.4, 2.0)
    for place in range(len(first)):
        damaged = bytearray(first)
        damaged[place] ^= 0x40
        write(tmp_path, "1", bytes(damaged), second)
        with pytest.raises(StateError, match="checksum"):
            load_metrics(tmp_path)


def test_nan_is_written_as_text_and_read_back_as_nan(tmp_path: Path) -> None:
    write(
        tmp_path, "1", scalar("loss", 1, math.nan, 1.0), scalar("loss", 2, -math.inf, 1.0), scalar("loss", 3, 1.0, 1.0)
    )
    told = dump(tmp_path, tmp_path / "metrics.json")
    assert told == ["loss: 3 points, steps 1 to 3, min 1, max 1, last 1, 2 not finite"]
    content = json.loads((tmp_path / "metrics.json").read_text())
    assert content == {"loss": {"1": "NaN", "2": "-Infinity", "3": 1.0}}
    back = load_metrics(tmp_path / "metrics.json")["loss"]
    assert math.isnan(back[1])
    assert back[2] == -math.inf


def test_a_required_prefix_that_nothing_has_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "1", scalar("train/loss", 1, 0.5, 1.0))
    dump(tmp_path, tmp_path / "metrics.json", required=("train/",))
    with pytest.raises(StateError, match="generation/"):
        dump(tmp_path, tmp_path / "other.json", required=("train/", "generation/"))
    assert not (tmp_path / "other.json").exists()


def test_no_event_files_or_no_scalars_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no TensorBoard event files"):
        dump(tmp_path, tmp_path / "metrics.json")
    write(tmp_path, "1", b"")
    with pytest.raises(StateError, match="no scalars"):
        dump(tmp_path, tmp_path / "metrics.json")


def test_without_tensorboard_the_install_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "1", scalar("loss", 1, 0.5, 1.0))
    for name in ("tensorboard.compat.proto.event_pb2", "tensorboard.compat.tensorflow_stub.pywrap_tensorflow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"fix: pip install tensorboard$"):
        load_metrics(tmp_path)


def test_event_files_are_found_at_any_depth(tmp_path: Path) -> None:
    write(tmp_path / "a b" / "ü", "1", scalar("loss", 1, 0.5, 1.0))
    write(tmp_path, "2", scalar("loss", 2, 0.5, 1.0))
    (tmp_path / "notes.txt").write_text("no events")
    assert len(event_files(tmp_path)) == 2
    assert load_metrics(tmp_path)["loss"].steps == (1, 2)
