"""One side of `streaming.py`: a fresh process that opens a task file, draws, resumes, and tells what that cost.

    python benchmarks/side_streaming.py SIDE FILE COUNT SCRATCH

Sides: `ours`, `floor` (one seek and one parse, nothing else), `list` (every line parsed into memory), `map` (a
`datasets.Dataset` with a shuffled index), `iterable` (a streamed `IterableDataset`, `skip`) and `state` (the same,
`load_state_dict`). Every side proves each task that it was dealt: the answer has to belong to the id. What a side
prepares once (an index, an Arrow file) is made before and told as `build_s`; imports are not counted.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

DRAWS, BATCH, SHUFFLED = 1000, 8, 20_000
TEXT = "What is {i} plus {i}? Use the calculator, then answer with the number alone. Case {i:09d} of the collection."


def row(i: int) -> dict[str, Any]:
    """Task i."""
    return {
        "task_metadata": {"task_id": f"t{i:09d}"},
        "prompt": [{"role": "user", "content": TEXT.format(i=i)}],
        "reward_spec": {"ground_truth": str(2 * i), "verifier_type": "exact"},
        "complexity": ("easy", "medium", "hard")[i % 3],
        "category": f"c{i % 7}",
    }


def number_of(task: Any) -> int:
    """Which task this is; raises unless its answer belongs to it."""
    columns = task if isinstance(task, Mapping) else task.columns
    number = int(columns["task_metadata"]["task_id"][1:])
    if columns["reward_spec"]["ground_truth"] != str(2 * number):
        raise RuntimeError(f"task {number} came with the answer of another")
    return number


def memory() -> int:
    """Resident bytes now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Side:
    """What every side can do; times are taken around these."""

    def __init__(self, path: Path, count: int, scratch: Path) -> None:
        self.path, self.count, self.scratch = path, count, scratch

    def build(self) -> None:
        """Prepare what is prepared once."""

    def deal(self) -> Iterator[Any]:
        """Open, and deal tasks from the beginning."""
        raise NotImplementedError

    def resume(self) -> Iterator[Any]:
        """Open, and go on at 90 %."""
        raise NotImplementedError

    @property
    def late(self) -> int:
        return self.count * 9 // 10


class Ours(Side):
    def build(self) -> None:
        from surefoot.data.on_disk.dataset import StreamingDataset

        StreamingDataset(self.path, cache_dir=self.scratch / "index", form="tool").close()

    def _stream(self) -> Any:
        from surefoot.data.on_disk.dataset import StreamingDataset
        from surefoot.data.on_disk.stream import LargeTaskStream

        return LargeTaskStream(StreamingDataset(self.path, cache_dir=self.scratch / "index", form="tool"), seed=0)

    def deal(self) -> Iterator[Any]:
        stream = self._stream()
        while True:
            yield from stream.take(BATCH)

    def resume(self) -> Iterator[Any]:
        stream = self._stream()
        stream.load_state_dict(stream.state_dict() | {"position": self.late})
        while True:
            yield from stream.take(BATCH)


class Floor(Side):
    """Open the file, seek, read, parse: what any reader has to do. Offsets are found once and not counted."""

    def build(self) -> None:
        with self.path.open("rb") as file:
            offsets = []
            at = 0
            for line in file:
                offsets.append(at)
                at += len(line)
        chosen = random.Random(0).choices(offsets, k=DRAWS)
        (self.scratch / f"offsets{self.count}.json").write_text(json.dumps(chosen))

    def deal(self) -> Iterator[Any]:
        with self.path.open("rb") as file:
            for offset in json.loads((self.scratch / f"offsets{self.count}.json").read_text()):
                file.seek(offset)
                yield json.loads(file.readline())

    resume = deal


class InMemory(Side):
    def _all(self) -> list[Any]:
        with self.path.open("rb") as file:
            tasks = [json.loads(line) for line in file]
        random.Random(0).shuffle(tasks)
        return tasks

    def deal(self) -> Iterator[Any]:
        return iter(self._all())

    def resume(self) -> Iterator[Any]:
        return iter(self._all()[self.late :])


class Hugging(Side):
    def _load(self, *, streaming: bool) -> Any:
        import datasets

        datasets.disable_progress_bars()
        return datasets.load_dataset(
            "json", data_files=str(self.path), split="train", streaming=streaming,
            cache_dir=str(self.scratch / "arrow"),
        )  # fmt: skip


class Map(Hugging):
    def build(self) -> None:
        self._load(streaming=False).shuffle(seed=0)

    def deal(self) -> Iterator[Any]:
        return iter(self._load(streaming=False).shuffle(seed=0))

    def resume(self) -> Iterator[Any]:
        shuffled = self._load(streaming=False).shuffle(seed=0)
        return (shuffled[position] for position in range(self.late, self.count))


class Streamed(Hugging):
    def deal(self) -> Iterator[Any]:
        return iter(self._load(streaming=True))

    def shuffled(self) -> Iterator[Any]:
        return iter(self._load(streaming=True).shuffle(seed=0, buffer_size=1000))

    def resume(self) -> Iterator[Any]:
        return iter(self._load(streaming=True).skip(self.late))


class Stated(Streamed):
    """The state is taken once, by walking there; only going on from it is timed."""

    def build(self) -> None:
        data = self._load(streaming=True)
        for _ in islice(iter(data), self.late):
            pass
        (self.scratch / f"state{self.count}.json").write_text(json.dumps(data.state_dict()))

    def resume(self) -> Iterator[Any]:
        data = self._load(streaming=True)
        data.load_state_dict(json.loads((self.scratch / f"state{self.count}.json").read_text()))
        return iter(data)


SIDES: dict[str, type[Side]] = {
    "ours": Ours, "floor": Floor, "list": InMemory, "map": Map, "iterable": Streamed, "state": Stated,
}  # fmt: skip


def timed(open_it: Callable[[], Iterable[Any]], n: int) -> tuple[float, list[int]]:
    """Seconds until n tasks are here, and which."""
    started = time.perf_counter()
    tasks = list(islice(open_it(), n))
    seconds = time.perf_counter() - started
    if len(tasks) != n:
        raise RuntimeError(f"{len(tasks)} of {n} tasks came")
    return seconds, [number_of(task) for task in tasks]


def disorder(numbers: list[int], count: int) -> float:
    """How far the dealt tasks lie from file order: 1 when any place is as likely as any other, 0 in file order."""
    return sum(abs(number - at) for at, number in enumerate(numbers)) / len(numbers) / expected_distance(
        len(numbers), count
    )  # fmt: skip


def expected_distance(dealt: int, count: int) -> float:
    """Mean of |x - at| over x uniform in the file and at = 0 .. dealt-1."""
    return sum((at * at + (count - at) ** 2) / (2 * count) for at in range(dealt)) / dealt


def main() -> int:
    name, path, count, scratch = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    what = sys.argv[5] if len(sys.argv) > 5 else "all"
    side = SIDES[name](path, count, scratch)
    result: dict[str, Any] = {"side": name, "count": count}
    if what == "build":
        started = time.perf_counter()
        side.build()
        result["build_s"] = time.perf_counter() - started
    elif what == "shuffle":
        deal = getattr(side, "shuffled", side.deal)
        _, numbers = timed(deal, min(count, SHUFFLED))
        result["disorder"] = disorder(numbers, count)
        result["distinct"] = len(set(numbers))
    else:
        timed(side.deal, 1)  # warm-up: imports and the disk cache
        result["first_s"], _ = timed(side.deal, 1)
        result["draws_s"], numbers = timed(side.deal, min(DRAWS, count))
        result["rss"] = memory()
        result["resume_s"], late = timed(side.resume, BATCH)
        result["work"] = {"tasks": len(numbers) + len(late), "distinct": len(set(late)), "of": count}
    print("RESULT " + json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
