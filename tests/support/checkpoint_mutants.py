"""Checkpoints that somebody changed: 30 kinds of damage, by a seed.

    python tests/support/checkpoint_mutants.py --count 10000 --seed 0

Some are what a disk does; some are made by somebody who knows the format and makes every digest agree again. Each one
has to be refused with a typed error, or to restore exactly what was saved; anything else prints the seed that makes it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint_kit import Session, fingerprint, make_learner, resealed

from surefoot.errors import StateError
from surefoot.learner.checkpoint import capture, load_training_checkpoint
from surefoot.storage.files import MANIFEST, _digest, _text


def tensor_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))


STATE = "training/state.json"
ODD: tuple[Any, ...] = (-1, 1.5, "x", 1e30, 10**30, [["x"]], {"x": {}}, "\ud800", "../../etc/passwd", [None])

Mutate = Callable[[Path, random.Random, Path], None]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# -- what a disk, or a careless hand, does ------------------------------------------------------


def flip(folder: Path, stream: random.Random, other: Path) -> None:
    path = stream.choice(files_of(folder))
    data = bytearray(path.read_bytes())
    for _ in range(stream.choice([1, 1, 1, 2, 8])):
        data[stream.randrange(len(data))] ^= 1 << stream.randrange(8)
    path.write_bytes(data)


def truncate(folder: Path, stream: random.Random, other: Path) -> None:
    path = stream.choice(files_of(folder))
    os.truncate(path, stream.randrange(path.stat().st_size))


def extend(folder: Path, stream: random.Random, other: Path) -> None:
    with stream.choice(files_of(folder)).open("ab") as file:
        file.write(stream.randbytes(stream.randrange(1, 64)))


def blank(folder: Path, stream: random.Random, other: Path) -> None:
    path = stream.choice(files_of(folder))
    data = bytearray(path.read_bytes())
    at, length = stream.randrange(len(data)), stream.randrange(1, 4096)
    data[at : at + length] = bytes(len(data[at : at + length]))
    path.write_bytes(data)


def delete(folder: Path, stream: random.Random, other: Path) -> None:
    stream.choice(files_of(folder)).unlink()


def add(folder: Path, stream: random.Random, other: Path) -> None:
    name = stream.choice(["more.bin", "training/more", "evil.py", "pytorch_model.bin", "a b", "\udc80", "x/y/z"])
    (folder / name).parent.mkdir(exist_ok=True, parents=True)
    (folder / name).write_bytes(stream.randbytes(10))


def swap(folder: Path, stream: random.Random, other: Path) -> None:
    one, two = stream.sample(files_of(folder), 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def foreign(folder: Path, stream: random.Random, other: Path) -> None:
    """A file of another checkpoint of the same run."""
    path = stream.choice(files_of(folder))
    path.write_bytes((other / path.relative_to(folder)).read_bytes())


def whole_foreign(folder: Path, stream: random.Random, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def no_plain_file(folder: Path, stream: random.Random, other: Path) -> None:
    path = stream.choice(files_of(folder))
    path.unlink()
    kind = stream.choice(["link", "loop", "folder", "pipe"])
    if kind == "link":
        path.symlink_to(other / path.relative_to(folder))
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)


def linked_folder(folder: Path, stream: random.Random, other: Path) -> None:
    (folder / "training").rename(folder.parent / "moved")
    (folder / "training").symlink_to(folder.parent / "moved")


# -- what somebody does who makes the digests agree ---------------------------------------------


def header(folder: Path, stream: random.Random, other: Path) -> None:
    path = folder / stream.choice(tensor_files(folder))
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    record = json.loads(data[8 : 8 + length])
    name = stream.choice([key for key in record if key != "__metadata__"])
    change_header(record, name, stream)
    text = json.dumps(record).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    resealed(folder)


def change_header(record: dict[str, Any], name: str, stream: random.Random) -> None:
    kind = stream.choice(["rename", "drop", "dtype", "shape", "offsets", "odd", "add", "double", "metadata"])
    entry = record[name]
    if kind == "rename":
        record[stream.choice([name + "x", "", "../" + name, "__metadata", name.upper()])] = record.pop(name)
    elif kind == "drop":
        del record[name]
    elif kind == "dtype":
        entry["dtype"] = stream.choice([t for t in ("F64", "F16", "BF16", "I32", "U8", "F8_E4M3", "", None) if t])
    elif kind == "shape":
        entry["shape"] = stream.choice([[1, *entry["shape"]], [-1], [1 << 62, 1 << 62], [0], entry["shape"] + [2]])
    elif kind == "offsets":
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = stream.choice([[begin + 4, end + 4], [begin, end + 4], [end, begin], [0, 1 << 60]])
        if entry["data_offsets"] == [begin, end]:
            entry["data_offsets"] = [begin + 1, end + 1]
    elif kind == "odd":
        record[name] = stream.choice(ODD)
    elif kind == "add":
        record["more"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    elif kind == "double":
        record["again"] = dict(entry)
    else:
        record["__metadata__"] = stream.choice([1, {"a": 1}, [], {"a": {"b": "c"}}])


def header_length(folder: Path, stream: random.Random, other: Path) -> None:
    path = folder / stream.choice(tensor_files(folder))
    data = path.read_bytes()
    right = struct.unpack("<Q", data[:8])[0]
    wrong = stream.choice([0, 1, right - 1, right + 1, len(data), 1 << 32, (1 << 64) - 1])
    path.write_bytes(struct.pack("<Q", wrong) + data[8:])
    resealed(folder)


def payload(folder: Path, stream: random.Random, other: Path) -> None:
    """A number that is not finite, where the file is otherwise in order."""
    path = folder / stream.choice(tensor_files(folder))
    data = bytearray(path.read_bytes())
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    at = begin + 4 * stream.randrange((len(data) - begin) // 4)
    data[at : at + 4] = struct.pack("<f", stream.choice([float("nan"), float("inf"), float("-inf")]))
    path.write_bytes(data)
    resealed(folder)


def cut_payload(folder: Path, stream: random.Random, other: Path) -> None:
    path = folder / stream.choice(tensor_files(folder))
    os.truncate(path, path.stat().st_size - stream.choice([1, 4, 64]))
    resealed(folder)


def pickled(folder: Path, stream: random.Random, other: Path) -> None:
    """Code in place of data: if anything ever unpickles it, the canary appears."""
    canary = folder.parent / "canary"
    code = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    path = folder / stream.choice(
        [*tensor_files(folder), STATE, "tokenizer.json", "pytorch_model.bin", "training/optimiser.pt"]
    )
    path.write_bytes(code)
    resealed(folder)


def state_value(folder: Path, stream: random.Random, other: Path) -> None:
    path = folder / STATE
    record = json.loads(path.read_text())
    key = stream.choice(sorted(record))
    if stream.random() < 0.3:
        del record[key]
    elif stream.random() < 0.2:
        record["schema"] = stream.choice([0, 2, 99, "1", None, [1]])
    elif stream.random() < 0.2:
        record["old"]["rows"][0] = stream.choice([["g", 0], ["g", -1, 3], [0, 0, 3], None, ["g", 0, 10**9]])
    else:
        record[key] = stream.choice([*ODD, None] if key != "census" else ODD)
        if key == "extra":
            record[key] = [record[key]]
        elif key == "idle":
            record[key] = {"more": -1}
    path.write_text(json.dumps(record))
    resealed(folder)


def state_text(folder: Path, stream: random.Random, other: Path) -> None:
    text = stream.choice(["", "[]", "null", "{" * 9, "[" * 90_000, "NaN", '{"a":1,"a":1}', "\x00", "1" * 5000, "\xff"])
    (folder / STATE).write_bytes(text.encode("latin-1"))
    resealed(folder)


def manifest(folder: Path, stream: random.Random, other: Path) -> None:
    """A list that agrees with itself and with nothing else."""
    body = json.loads((folder / MANIFEST).read_text())
    body.pop("digest")
    name = stream.choice(sorted(body["files"]))
    kind = stream.choice(["step", "version", "schema", "format", "size", "sha", "name", "drop", "files", "entry"])
    if kind in ("step", "version", "schema"):
        body[kind] = stream.choice([*ODD, None, body[kind] + 1])
    elif kind == "format":
        body[kind] = stream.choice([2, 0, "1", None])
    elif kind == "size":
        body["files"][name]["size"] += stream.choice([1, -1, 1 << 50])
    elif kind == "sha":
        body["files"][name]["sha256"] = stream.choice(["0" * 64, "", None, 3, "g" * 64])
    elif kind == "name":
        bad = stream.choice(["../x", "/etc/passwd", "", ".", "a//b", "a\0b", "x" * 5000, "manifest.json", "\ud800"])
        body["files"][bad] = body["files"].pop(name)
    elif kind == "drop":
        del body["files"][name]
    else:
        target = body if kind == "files" else body["files"]
        target["files" if kind == "files" else name] = stream.choice([*ODD, {}, []])
    (folder / MANIFEST).write_text(_text({**body, "digest": _digest(body)}))


KINDS: tuple[Mutate, ...] = (
    flip, flip, flip, truncate, extend, blank, delete, add, swap, foreign, whole_foreign, no_plain_file, linked_folder,
    header, header, header, header_length, payload, cut_payload, pickled, state_value, state_value, state_text,
    manifest, manifest,
)  # fmt: skip


def judge(count: int, seed: int, scratch: Path, dtype: str = "float32") -> dict[str, Any]:
    """Make `count` mutants; what became of them, by kind, and the seeds of those that were not dealt with."""
    session = Session(make_learner(dtype=dtype)).train(3)
    original, expected = session.save(scratch / "step_3"), fingerprint(capture(session.learner))
    other = session.train(1).save(scratch / "step_4")
    learner, fates, bad = make_learner(seed=77, dtype=dtype), Counter[str](), []
    for number in range(count):
        stream = random.Random(f"{seed}/{number}")
        mutate = stream.choice(KINDS)
        place = scratch / "work"
        folder = Path(shutil.copytree(original, place / "step_3"))
        mutate(folder, stream, other)
        fate = _fate(learner, folder, expected)
        if (place / "canary").exists():
            fate = "EXECUTED"
        fates[f"{mutate.__name__}: {fate}"] += 1
        if fate not in ("refused", "harmless"):
            bad.append(f"seed {seed}, mutant {number}, {mutate.__name__}: {fate}")
        shutil.rmtree(place)
    return {"fates": dict(sorted(fates.items())), "bad": bad, "count": count}


def _fate(learner: Any, folder: Path, expected: str) -> str:
    try:
        load_training_checkpoint(learner, folder)
    except StateError:
        return "refused"
    except Exception as error:
        return f"UNTYPED {type(error).__name__}: {error}"
    return "harmless" if fingerprint(capture(learner)) == expected else "ACCEPTED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        report = judge(args.count, args.seed, Path(scratch))
    print(json.dumps(report, indent=1))
    return 1 if report["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
