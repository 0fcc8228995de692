"""What may lie in a model folder, looked at before anything in it is read by somebody else.

Promises   weights come from safetensors files of the folder itself. Code (`auto_map`), another file of weights
           (`transformers_weights`), quantised weights, adapters, an index at any depth that names anything but
           safetensors beside it, and files that are none (pipes, devices, links that lead out) are a `ModelError` by
           name.
Never      opens a file of weights, or one that is not a regular file.

Read next: `model.py`, who asks.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from pathlib import Path
from typing import Any, BinaryIO

from surefoot.errors import ModelError

INDEX = ".index.json"
ADAPTERS = ("adapter_config.json", "adapter_model.bin", "adapter_model.pt", "adapter_model.safetensors")
MOST_ENTRIES = 100_000
MOST_BYTES = 64 << 20
"""Longest description that is read: the index of a model with a million tensors is shorter."""

_LARGEST = {
    "num_hidden_layers": 2**10, "hidden_size": 2**18, "intermediate_size": 2**20, "vocab_size": 2**24,
    "num_attention_heads": 2**12, "num_key_value_heads": 2**12, "head_dim": 2**14, "max_position_embeddings": 2**28,
}  # fmt: skip
"""Generous limits on what a config.json may ask to be built."""


def check_model_folder(folder: Path) -> None:
    """Refuses a folder of which more than data would be used, or more than its own."""
    _check_entries(folder)
    has_config = (folder / "config.json").is_file()
    if has_config:
        check_model_config(folder / "config.json")
    for name in ADAPTERS:
        if (folder / name).exists():
            refuse_adapter(folder / name)
    if not has_config:
        raise ModelError(f"{folder} has no config.json", "it is not a model folder", "point model at a saved model")
    for index in _indexes(folder):
        check_index(index)


def check_model_config(path: Path) -> None:
    """Refuses a config.json that names code or other files of weights, or numbers that nobody builds."""
    config = read_object(path)
    if "auto_map" in config:
        raise ModelError(
            f"{path} names remote code (auto_map)",
            "a model folder is data; code in it would run with your rights",
            "use a model whose architecture transformers knows",
        )
    if "transformers_weights" in config:
        raise ModelError(
            f"{path} names a file of weights (transformers_weights = {str(config['transformers_weights'])[:100]!r})",
            "weights are read from model.safetensors and its index; another file may be a pickle, which is a program",
            "remove the key, and save the model again with save_pretrained",
        )
    packed = [config[name] for name in ("quantization_config", "compression_config") if config.get(name)]
    if packed:
        method = packed[0].get("quant_method") if isinstance(packed[0], dict) else packed[0]
        raise ModelError(
            f"{path} says that its weights are quantised ({str(method)[:40]})",
            "what they were cannot be told from them, and packed bytes are no weights that could be trained",
            "point model at what it was made from; quantization = nf4 with lora.rank packs that here",
        )
    absurd = {name: config[name] for name, most in _LARGEST.items() if _exceeds(config.get(name), most)}
    if absurd:
        raise ModelError(
            f"{path} says {str(absurd)[:300]}; the largest believed is {_LARGEST}",
            "the model is built from these numbers before its weights are looked at",
            "restore the config.json that belongs to the weights",
        )


def refuse_adapter(path: Path) -> None:
    """Says why an adapter is no model."""
    raise ModelError(
        f"{path} is part of an adapter",
        "its base model would come from elsewhere, its weights may be a pickle, and every weight is trained here",
        "merge the adapter into its model and point at the result: one of ours with surefoot export RUN --merged --out "
        "FOLDER, another with merge_and_unload, then save_pretrained",
    )


def check_index(path: Path) -> None:
    """A list of weight files may name safetensors files beside it, and nothing else: other formats are pickles."""
    named = read_object(path).get("weight_map")
    files = sorted(set(map(str, named.values()))) if isinstance(named, dict) else ["no weight_map"]
    strange = [file for file in files if not file.endswith(".safetensors") or Path(file).name != file]
    if strange:
        raise ModelError(
            f"{path} names {strange[0][:200]!r} as a file of weights",
            "weights are read from safetensors files of the model's own folder",
            "save the model again with save_pretrained",
        )


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder; anything else is refused by name."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}", "it describes the model", "restore it") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object", "it describes the model", "restore it")
    return value


def _exceeds(value: object, most: int) -> bool:
    return isinstance(value, int | float) and not 0 <= value <= most


def _check_entries(folder: Path) -> None:
    """What stands right in the folder is what gets read: regular files, and links that stay at home."""
    try:
        own = folder.resolve(strict=True)
        entries = sorted(folder.iterdir())
        for path in entries:
            kind = path.stat().st_mode if path.exists() else path.lstat().st_mode  # a link to nothing stays a link
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind)):
                raise ModelError(f"{path} is no regular file", "reading it may never end", "remove it")
            if path.is_symlink() and not _at_home(path.resolve(), own):
                raise ModelError(
                    f"{path} is a link that leads out of the folder",
                    "a model is what its own folder holds; a link of a stranger's folder may show any file of yours",
                    "put the file itself there, or point model at the folder that has it",
                )
    except (OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
        raise ModelError(f"{folder} cannot be looked through: {error}", "it is the model", "restore it") from error


def _at_home(target: Path, own: Path) -> bool:
    """Whether a link's target is in the folder, or in the store of the hub's cache that the folder is a view of."""
    return target.is_relative_to(own) or (
        own.parent.name == "snapshots" and target.is_relative_to(own.parent.parent / "blobs")
    )


def _indexes(folder: Path) -> list[Path]:
    found, seen = [], 0
    for root, folders, files in os.walk(folder):
        seen += len(folders) + len(files)
        if seen > MOST_ENTRIES:
            raise ModelError(
                f"{folder} holds more than {MOST_ENTRIES:,} files",
                "a model folder is looked through before it is read",
                "point model at the model's own folder",
            )
        found += [Path(root) / name for name in files if name.endswith(INDEX)]
    for path in found:
        if not path.is_file():
            raise ModelError(f"{path} is no regular file", "reading it may never end", "remove it")
    return sorted(found)


# -- What a GGUF file says about its model, read from its first bytes: no weights, no package -----


_PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


def read_gguf_header(path: Path) -> tuple[dict[str, Any], int]:
    """The fields of the header (a list as its length), and the number of parameters."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if file.read(4) != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            _, tensors, fields = (_number(file, kind) for kind in ("I", "Q", "Q"))
            found = {_text(file, size): _value(file, int(_number(file, "I")), size) for _ in range(int(fields))}
            return found, sum(_tensor(file, size) for _ in range(int(tensors)))
    except (OSError, ValueError, KeyError, struct.error, UnicodeDecodeError) as error:
        raise ModelError(
            f"{path} is no GGUF file: {error}", "its header names the model's shape", "restore it"
        ) from error


def _number(file: BinaryIO, kind: str) -> Any:
    width = struct.calcsize(f"<{kind}")
    return struct.unpack(f"<{kind}", file.read(width))[0]


def _text(file: BinaryIO, size: int) -> str:
    length = int(_number(file, "Q"))
    if length > size:
        raise ValueError(f"a text of {length} bytes in a file of {size}")
    return file.read(length).decode("utf-8")


def _value(file: BinaryIO, kind: int, size: int) -> Any:
    if kind == _TEXT:
        return _text(file, size)
    if kind != _LIST:
        return _number(file, _PLAIN[kind])
    inner, count = int(_number(file, "I")), int(_number(file, "Q"))
    if count > size:
        raise ValueError(f"a list of {count} entries in a file of {size} bytes")
    if inner in _PLAIN:
        file.seek(count * struct.calcsize(f"<{_PLAIN[inner]}"), 1)
    else:
        for _ in range(count):
            _value(file, inner, size)
    return count


def _tensor(file: BinaryIO, size: int) -> int:
    _text(file, size)
    shape = [int(_number(file, "Q")) for _ in range(int(_number(file, "I")))]
    _number(file, "I")
    _number(file, "Q")
    return math.prod(shape)
