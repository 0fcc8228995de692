"""Builds one asset: beside its place, checked, renamed when whole.

Promises   killed at any moment it leaves the old asset or none, never a part; the next build clears what was left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from surefoot_harness.assets import COMPLETE, MANIFEST, Asset, AssetState, examine, hashed_files, recipe_hash
from surefoot_harness.errors import StateError, SurefootError
from surefoot_harness.files import write_json
from surefoot_harness.scrub import scrub
from surefoot_harness.system.files import atomic_folder, sync_folder
from surefoot_harness.system.process import Child

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PIP_NO_INDEX": "1"}


def build_all(
    assets: Mapping[str, Asset], *, offline: bool = False, force: bool = False
) -> Iterator[tuple[Asset, AssetState | SurefootError]]:
    """Build each asset; one that fails is reported and does not keep the others from being built."""
    with _stoppable():
        for asset in assets.values():
            try:
                outcome: AssetState | SurefootError = build(asset, offline=offline, force=force)
            except SurefootError as error:
                outcome = error
            yield asset, outcome


def build(asset: Asset, *, offline: bool = False, force: bool = False) -> AssetState:
    """Make `asset` complete; nothing happens when it already is.

    Args:
        offline: refuse an asset that needs the network, and tell the command's usual libraries to stay offline.
        force: build again even when it is complete.
    """
    with _locked(asset):
        state = examine(asset)
        if state.status == COMPLETE and not force:
            return state
        if asset.network and offline:
            raise StateError(
                f"asset {asset.name} is {state.status} and building it needs the network",
                "--offline was given",
                f"run once with a network: {asset.build_command}",
            )
        for leftover in _leftovers(asset):
            shutil.rmtree(leftover)
        recipe = recipe_hash(asset)
        with atomic_folder(asset.folder, prefix=_prefix(asset)) as place:
            _run(asset, place, offline)
            _seal(asset, place, recipe)
            place.chmod(0o755)  # it was made private; an asset is as readable as the checkout
            old = _set_aside(asset)
        sync_folder(asset.folder.parent)
        if old is not None:
            shutil.rmtree(old)
        return examine(asset)


def _run(asset: Asset, place: Path, offline: bool) -> None:
    """The asset's command, in a session of its own, so that nothing of it survives us being stopped."""
    words = [word.replace("{out}", os.fspath(place)) for word in asset.command]
    if words[0] in ("python", "python3"):
        words[0] = sys.executable  # the interpreter that has the project's packages
    environment = {**os.environ, **(_OFFLINE if offline else {})}
    try:
        child = Child.start(
            words, cwd=asset.root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        raise _failed(asset, f"its command cannot be started: {error.strerror}: {words[0]}") from error
    with child:
        said = child.stdout.read().decode(errors="backslashreplace")
        child.wait()
    if child.code:
        tail = "\n".join(scrub(said).splitlines()[-20:])
        raise _failed(asset, f"its command ended with {child.code}" + (f"; it said:\n{tail}" if tail else ""))


def _seal(asset: Asset, place: Path, recipe: str) -> None:
    """Every file on disk, then the manifest: a folder that has one is whole."""
    files = dict(hashed_files(place))
    if not files:
        raise _failed(asset, "its command ended well but wrote nothing to {out}")
    if recipe_hash(asset) != recipe:
        raise _failed(asset, "its inputs changed while it was being built")
    for name in files:
        sync_folder(place / name)
    write_json(place / MANIFEST, {"format": 1, "asset": asset.name, "recipe": recipe, "files": files})


def _set_aside(asset: Asset) -> Path | None:
    """Free the asset's name; the folder that holds the old one now."""
    if not asset.folder.exists():
        return None
    aside = Path(tempfile.mkdtemp(dir=asset.folder.parent, prefix=_prefix(asset)))
    os.rename(asset.folder, aside / "old")
    return aside


def _leftovers(asset: Asset) -> list[Path]:
    return sorted(asset.folder.parent.glob(f"{_prefix(asset)}*"))


def _prefix(asset: Asset) -> str:
    return f".{asset.name}.building."


@contextlib.contextmanager
def _locked(asset: Asset) -> Iterator[None]:
    """One builder at a time; the lock goes with the process that holds it."""
    asset.folder.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(asset.folder.parent / f".{asset.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM stops us as Ctrl-C does: the command is ended and its half-built folder removed."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class AssetBuildError(StateError):
    """An asset's own command did not do its work."""

    exit_code = 1


def _failed(asset: Asset, what: str) -> AssetBuildError:
    return AssetBuildError(
        f"asset {asset.name} was not built: {what}",
        "tests that need it will be skipped",
        f"correct its command and inputs, then: {asset.build_command}",
    )
