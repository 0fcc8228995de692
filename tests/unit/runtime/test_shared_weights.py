"""Weights that cross to another process on the same machine: whole, in the right version, and never left behind."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.errors import EngineError, StateError, StorageError
from surefoot.maths.checksums import checksums
from surefoot.runtime import shared_weights
from surefoot.runtime.shared_weights import (
    SharedWeights,
    StagedWeights,
    TensorLocation,
    attach,
    specs_of,
    sweep_segments,
)

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory to share on this system")


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Odd sizes, several dtypes, a name that is not ASCII, a scalar and nothing at all."""
    g = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(17, 5, generator=g),
        "half": torch.randn(3, 7, generator=g).bfloat16(),
        "größe μ": torch.randn(1, generator=g),
        "scalar": torch.randn((), generator=g),
        "bytes": torch.randint(0, 255, (13,), generator=g, dtype=torch.uint8),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of our own in memory, so that no other test's segments are in it."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="surefoot-test-") as name:
        yield Path(name)


@pytest.fixture
def shared(folder: Path) -> Iterator[SharedWeights]:
    with SharedWeights.create(specs_of(weights()), folder) as made:
        yield made


def child(code: str, *words: str, wait: bool = True) -> Any:
    """Another process, with our package; its output, or the process itself once it has said a line."""
    script = textwrap.dedent(code)
    source = str(Path(shared_weights.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source}
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    if wait:
        out, _ = process.communicate()
        assert process.returncode == 0
        return out.strip()
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def end(process: Any, *, kill: bool = False) -> None:
    if kill:
        process.send_signal(signal.SIGKILL)
    process.stdin.close()
    process.wait()
    process.stdout.close()


def test_what_was_written_is_read_bit_for_bit(shared: SharedWeights) -> None:
    staged = shared.write(weights(), 3)
    read = attach(pickle.loads(pickle.dumps(staged)))
    assert checksums(read) == checksums(weights()) == dict(staged.sums)
    assert {name: tensor.dtype for name, tensor in read.items()} == {n: t.dtype for n, t in weights().items()}
    assert (staged.version, staged.nbytes) == (3, sum(t.nbytes for t in weights().values()))


def test_views_are_where_the_writer_wrote(shared: SharedWeights) -> None:
    first = attach(shared.write(weights(0), 0))
    second = attach(shared.write(weights(1), 1))
    assert checksums(first) == checksums(weights(0)), "the second version went into the other slot"
    assert checksums(second) == checksums(weights(1))


def test_a_reader_cannot_change_what_others_read(shared: SharedWeights) -> None:
    staged = shared.write(weights(), 0)
    one, two = attach(staged), attach(staged)
    one["model.embed.weight"].fill_(7.0)
    assert checksums(two) == checksums(weights())


def test_a_slot_that_is_read_is_never_written_into(shared: SharedWeights) -> None:
    read = attach(shared.write(weights(0), 0))
    shared.write(weights(1), 1)
    with pytest.raises(EngineError, match=r"version 2 cannot be written: .* is still read"):
        shared.write(weights(2), 2)
    assert checksums(read) == checksums(weights(0))
    last = read["scalar"]
    del read
    with pytest.raises(EngineError, match="is still read"):
        shared.write(weights(2), 2)
    del last
    gc.collect()
    assert checksums(attach(shared.write(weights(2), 2))) == checksums(weights(2))


READER = """
    import sys, pickle, gc
    from surefoot.runtime.shared_weights import attach
    staged = pickle.loads(bytes.fromhex(sys.argv[1]))
    views = attach(staged)
    print(float(views["scalar"]), flush=True)
    sys.stdin.readline()
"""


def test_another_process_reads_and_is_named_while_it_does(shared: SharedWeights) -> None:
    reader = child(READER, pickle.dumps(shared.write(weights(), 0)).hex(), wait=False)
    shared.write(weights(1), 1)
    with pytest.raises(EngineError, match=rf"is still read \(process {reader.pid}\)"):
        shared.write(weights(2), 2)
    end(reader, kill=True)
    assert shared.write(weights(2), 2).version == 2, "the lock died with the reader"


def test_a_handle_that_was_overtaken_is_refused(shared: SharedWeights) -> None:
    staged = shared.write(weights(0), 0)
    shared.write(weights(1), 1)
    shared.write(weights(2), 2)
    with pytest.raises(EngineError, match=r"version 0 is not in shared memory .* another version was written over it"):
        attach(staged)


def test_a_torn_write_is_no_version(shared: SharedWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = shared.write(weights(0), 0)
    shared.write(weights(1), 1)
    broken = weights(2)
    monkeypatch.setattr(shared._slots[0].views["scalar"].__class__, "copy_", _interrupt, raising=True)
    with pytest.raises(KeyboardInterrupt):
        shared.write(broken, 2)
    monkeypatch.undo()
    with pytest.raises(EngineError, match="another version was written over it"):
        attach(staged)
    assert checksums(attach(shared.write(weights(3), 3))) == checksums(weights(3)), "the slot can be used again"


def _interrupt(self: Tensor, other: Tensor) -> Tensor:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("half"), "first half: missing"),
        (lambda w: w.update(more=torch.ones(1)), "first more"),
        (lambda w: w.update(half=w["half"].float()), "float32.*instead of.*bfloat16"),
        (lambda w: w.update(half=w["half"].T.contiguous()), r"\(7, 3\).*instead of.*\(3, 7\)"),
    ],
    ids=["missing", "unknown", "other dtype", "other shape"],
)
def test_only_what_was_announced_is_taken(shared: SharedWeights, change: Any, said: str) -> None:
    given = weights()
    change(given)
    with pytest.raises(EngineError, match=said):
        shared.write(given, 0)


def test_the_files_are_private_and_gone_after_close(folder: Path) -> None:
    old = os.umask(0)
    try:
        shared = SharedWeights.create(specs_of(weights()), folder)
    finally:
        os.umask(old)
    files = list(folder.iterdir())
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
    read = attach(shared.write(weights(), 0))
    shared.close()
    shared.close()
    assert list(folder.iterdir()) == []
    assert checksums(read) == checksums(weights()), "who has mapped it keeps it"
    with pytest.raises(StateError, match="closed"):
        shared.write(weights(), 1)


def test_a_writer_that_is_forgotten_leaves_nothing(folder: Path) -> None:
    shared = SharedWeights.create(specs_of(weights()), folder)
    assert len(list(folder.iterdir())) == 2
    del shared
    gc.collect()
    assert list(folder.iterdir()) == []


WRITER = """
    import sys, torch
    from pathlib import Path
    from surefoot.runtime.shared_weights import SharedWeights
    shared = SharedWeights.create({"w": ((4,), torch.float32)}, Path(sys.argv[1]))
    staged = shared.write({"w": torch.ones(4)}, 5)
    print(staged.segment, flush=True)
    if len(sys.argv) > 2: sys.stdin.readline()
"""


def test_a_process_that_ends_leaves_nothing_and_says_nothing(folder: Path) -> None:
    assert child(WRITER, str(folder)).startswith("surefoot-weights-")
    assert list(folder.iterdir()) == []


def test_what_a_killed_writer_left_is_swept_and_nobody_elses(folder: Path) -> None:
    living, doomed = (child(WRITER, str(folder), "wait", wait=False) for _ in "ab")
    (folder / "surefoot-weights-of-a-stranger").touch()
    assert len(list(folder.iterdir())) == 5
    end(doomed, kill=True)
    swept = sweep_segments(folder)
    assert len(swept) == 2
    assert all(f"-{doomed.pid}-" in name for name in swept)
    assert len(list(folder.iterdir())) == 3
    end(living)
    assert [path.name for path in folder.iterdir()] == ["surefoot-weights-of-a-stranger"]


def test_a_dead_writers_segment_stays_while_it_is_read(folder: Path) -> None:
    writer = child(WRITER, str(folder), "wait", wait=False)
    name = sorted(path.name for path in folder.iterdir())[0]
    descriptor, memory = shared_weights.open_segment(folder / name, 4096)
    end(writer, kill=True)
    assert sweep_segments(folder) == [name[:-1] + "1"], "the one that nobody reads"
    os.close(descriptor)
    del memory
    assert sweep_segments(folder) == [name]


def test_a_recycled_process_number_is_not_mistaken_for_the_writer(folder: Path) -> None:
    name = f"surefoot-weights-{os.getpid()}-12345-{'0' * 16}-0"
    (folder / name).touch()
    assert sweep_segments(folder) == [name]


def test_planted_sweep_by_name_alone_takes_what_a_living_process_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teeth: whoever looks at the number only is fooled by a writer that it cannot see, as in another container."""
    with SharedWeights.create(specs_of(weights()), folder) as shared:
        monkeypatch.setattr(shared_weights, "_started_at", lambda pid: 0)
        assert sweep_segments(folder) == [], "its lock says that it lives"
        monkeypatch.setattr(shared_weights.fcntl, "flock", lambda descriptor, kind: None)
        assert len(sweep_segments(folder)) == 2
        monkeypatch.undo()
        with pytest.raises(EngineError, match="No such file"):
            attach(shared.write(weights(), 0))


def test_no_room_is_an_error_with_a_remedy_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.posix_fallocate, []

    def full(descriptor: int, start: int, size: int) -> None:
        calls.append(size)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match="No space left on device"):
        SharedWeights.create(specs_of(weights()), folder)
    gc.collect()
    assert list(folder.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def hostile(staged: StagedWeights, folder: Path) -> list[tuple[StagedWeights, str]]:
    (folder / "victim").write_text("x" * 9000)
    link = f"surefoot-weights-1-1-{'a' * 16}-0"
    (folder / link).symlink_to(folder / "victim")
    huge = {"w": TensorLocation(4096, (10**6,), "float32")}
    return [
        (replace(staged, segment="../victim"), "no segment of ours"),
        (replace(staged, segment="victim"), "no segment of ours"),
        (replace(staged, segment=link), "symbolic links|loop"),
        (replace(staged, places=huge), "bytes of"),
        (replace(staged, places={"w": TensorLocation(4096, (1,), "os")}), "no dtype"),
        (replace(staged, segment=staged.segment[:-1] + "1", stamp="0" * 32), "another version"),
    ]


@pytest.mark.parametrize("case", range(6))
def test_handles_that_were_tampered_with_are_refused(shared: SharedWeights, folder: Path, case: int) -> None:
    staged, said = hostile(shared.write(weights(), 0), folder)[case]
    with pytest.raises(EngineError, match=said):
        attach(staged)


def test_a_refused_attach_holds_no_lock(shared: SharedWeights, folder: Path) -> None:
    staged = shared.write(weights(0), 0)
    for bad, _ in hostile(staged, folder):
        with pytest.raises(EngineError):
            attach(bad)
    gc.collect()
    shared.write(weights(1), 1)
    assert shared.write(weights(2), 2).version == 2


def test_a_forked_child_does_not_take_the_memory_with_it(folder: Path) -> None:
    code = """
        import os, sys, torch
        from pathlib import Path
        from surefoot.runtime.shared_weights import SharedWeights
        shared = SharedWeights.create({"w": ((4,), torch.float32)}, Path(sys.argv[1]))
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # runs every clean-up that was inherited
        os.waitpid(pid, 0)
        print(len(os.listdir(sys.argv[1])))
    """
    assert child(code, str(folder)) == "2"
