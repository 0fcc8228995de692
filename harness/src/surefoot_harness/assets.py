"""Test assets that a command builds ahead of time: tiny models, tokenizers, data.

    [tool.surefoot.assets.tiny]                      .surefoot/assets/tiny/
    command = ["python", "make.py", "{out}"]  --->       model.bin
    inputs = ["make.py"]                                 asset-manifest.json    written last, SHA-256 of each file

Owns       the declarations, building, and telling a whole asset from half a one.
Promises   an asset is there completely or not at all: built beside its place, renamed when whole.
Never      builds during a test run, or builds again what is complete and unchanged.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot_harness.errors import ConfigError, StateError
from surefoot_harness.files import read_json
from surefoot_harness.own_command import own_name
from surefoot_harness.project import FILE, Project, find_project, known_keys, read_project, refused, text_of, words_of
from surefoot_harness.system.files import sha256_of, sha256_of_file

MANIFEST = "asset-manifest.json"
COMPLETE, MISSING, STALE, DAMAGED = "complete", "missing", "stale", "damaged"
_KEYS = ("command", "inputs", "network", "description")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", flags=re.ASCII)


@dataclass(frozen=True, slots=True)
class Asset:
    """One declared asset.

    Example:
        `Asset("tiny", Path("."), Path(".surefoot/assets/tiny"), ("python", "make.py", "{out}"), ("make.py",))`
    """

    name: str
    root: Path
    """Where the command runs and from where `inputs` are named."""
    folder: Path
    """Where the finished asset lies."""
    command: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    network: bool = False
    """Whether building needs the network: `--offline` refuses it then."""
    description: str = ""

    @property
    def build_command(self) -> str:
        """What a person types to get it."""
        return f"{own_name()} assets build {self.name}"


@dataclass(frozen=True, slots=True)
class AssetState:
    """Whether an asset can be used, and why not."""

    status: str
    detail: str = ""
    files: int = 0
    size: int = 0


def read_assets(project: Project) -> dict[str, Asset]:
    """The assets that a project declares, by name, in the order of the file."""
    home = text_of(project.table.get("assets_dir", ".surefoot/assets"), "tool.surefoot.assets_dir", project.file)
    return {
        name: _read_asset(name, table, project, project.root / home) for name, table in project.part("assets").items()
    }


def find_assets(manifest: Path | None, names: list[str]) -> dict[str, Asset]:
    """The assets of `manifest`, or of the nearest pyproject.toml; only those named, if any are."""
    if manifest is not None and not manifest.is_file():
        raise StateError(f"{manifest} is not a file", "it declares the assets", "check the path after --manifest")
    project = read_project(manifest.resolve()) if manifest is not None else find_project(Path.cwd())
    assets = read_assets(project) if project is not None else {}
    if not assets:
        where = manifest or f"{FILE} here or above"
        raise StateError(
            f"no asset is declared in {where}",
            "there is nothing to build or to check",
            "add a table [tool.surefoot.assets.NAME] with a command; see docs/tracker.md",
        )
    unknown = [name for name in names if name not in assets]
    if unknown:
        raise ConfigError(
            f"no such asset: {', '.join(unknown)}", "it is not declared", f"declared are: {', '.join(assets)}"
        )
    return {name: asset for name, asset in assets.items() if not names or name in names}


def examine(asset: Asset) -> AssetState:
    """Compare an asset with its manifest and its recipe, byte by byte."""
    if not asset.folder.exists():
        return AssetState(MISSING, "not built")
    try:
        manifest = read_manifest(asset.folder)
    except StateError as error:
        return AssetState(DAMAGED, error.what)
    if manifest["recipe"] != recipe_hash(asset):
        return AssetState(STALE, "its command or inputs changed since it was built")
    found, expected = dict(hashed_files(asset.folder)), manifest["files"]
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            return AssetState(DAMAGED, f"{name} is gone")
        if name not in expected:
            return AssetState(DAMAGED, f"{name} was not there when it was built")
        if found[name] != expected[name]:
            return AssetState(DAMAGED, f"{name} was changed")
    return AssetState(COMPLETE, "", len(found), sum(entry["size"] for entry in found.values()))


def trouble(asset: Asset) -> str | None:
    """Why a test cannot use the asset, with the command to run; None when it can."""
    state = examine(asset)
    if state.status == COMPLETE:
        return None
    return f"{asset.name} is {state.status} ({state.detail}); run: {asset.build_command}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a built asset; half a manifest is a `StateError`."""
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or not manifest.get("recipe") or not _is_table(manifest.get("files")):
        raise StateError(f"{folder / MANIFEST} has no list of files", "it is written last", "build the asset again")
    return manifest


def recipe_hash(asset: Asset) -> str:
    """What decides whether an asset is current: its command and the content of its inputs."""
    inputs = {name: _digest(path) for name, path in _input_files(asset)}
    text = json.dumps({"command": asset.command, "inputs": inputs}, sort_keys=True)
    return sha256_of(text, errors="surrogateescape")


def hashed_files(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each file below `folder` but the manifest: its relative name, size and SHA-256."""
    inside = folder.resolve()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name == MANIFEST or (path.is_dir() and not path.is_symlink()):
            continue
        if not path.resolve().is_relative_to(inside) or not path.is_file():
            raise StateError(
                f"{path} is not a file of the asset",
                "a link to somewhere else can change without anybody noticing",
                "let the command copy files instead of linking them",
            )
        yield name, {"size": path.stat().st_size, "sha256": _digest(path)}


def _input_files(asset: Asset) -> Iterator[tuple[str, Path]]:
    for pattern in asset.inputs:
        found = sorted(path for path in asset.root.glob(pattern) if path.is_file())
        if not found:
            raise ConfigError(
                f"asset {asset.name}: no file matches the input {pattern}",
                "an input that is not there cannot show a change",
                f"correct [tool.surefoot.assets.{asset.name}] inputs",
            )
        for path in found:
            yield os.fspath(path.relative_to(asset.root)), path


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)  # an asset without a file is none


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return sha256_of_file(file)


def _read_asset(name: str, table: Any, project: Project, home: Path) -> Asset:
    where = f"tool.surefoot.assets.{name}"
    if not _NAME.fullmatch(name):
        raise refused(f"{where}: an asset is a folder, so its name is letters, digits, _, - and .", project.file)
    values = known_keys(table, _KEYS, where, project.file)
    command = words_of(values.get("command", []), f"{where}.command", project.file)
    if isinstance(values.get("command"), str) or not any("{out}" in word for word in command):
        raise refused(f'{where}.command must be a list of words, one of them with "{{out}}" in it', project.file)
    inputs = words_of(values.get("inputs", []), f"{where}.inputs", project.file)
    if any(Path(word).is_absolute() or ".." in Path(word).parts for word in inputs):
        raise refused(f"{where}.inputs must lie in the project", project.file)
    network = values.get("network", False)
    if not isinstance(network, bool):
        raise refused(f"{where}.network must be true or false", project.file)
    description = text_of(values.get("description", ""), f"{where}.description", project.file)
    return Asset(name, project.root, home / name, command, inputs, network, description)
