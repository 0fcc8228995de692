"""requirements-core.lock: the core set and the build backend, each version with the hash of every file it may come as.

    python scripts/lock_core.py            writes the lock anew, asking the package indexes that pip is configured with
    python scripts/lock_core.py --check    compares it with pyproject.toml and constraints.txt; asks nobody

Versions come from constraints.txt alone, so the lock cannot say another one. Which packages are core follows from the
installed metadata: what surefoot needs without an extra, what those need, and the build backend with its own needs. A
version has many files, one for each platform; pip takes the one that fits, and refuses it unless its hash stands here.
Wheels only: building from source would fetch another build backend, which no hash of ours covers.

Read next: docs/decisions/0015-a-lock-of-hashes.md.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urldefrag

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements-core.lock"
BACKEND = {"hatchling": ("packaging", "pathspec", "pluggy", "trove-classifiers"), "editables": ()}
"""What builds us, and what that needs; the second is what an editable install of ours is made with."""
_PYTHONS = re.compile(r"py3|cp31[1-4]")
_PLATFORMS = re.compile(r"any|(many|musl)linux\S*_(x86_64|aarch64)|linux_(x86_64|aarch64)|macosx_\S+")
_PIN = re.compile(r"([A-Za-z0-9._-]+)==(\S+)")
_HEAD = """\
# The core set and the build backend with the hashes of their files. Made by scripts/lock_core.py from constraints.txt:
# do not edit. `make setup` installs it with --require-hashes.
"""
Hashes = dict[str, list[str]]


class LockError(Exception):
    """The lock cannot be made, or does not say what it has to."""


def pins(text: str) -> dict[str, str]:
    """Name -> version of a constraints file.

    Example:
        >>> pins("# set\\nPyYAML==6.0.3\\n")
        {'pyyaml': '6.0.3'}
    """
    found = (_PIN.fullmatch(line.strip()) for line in text.splitlines())
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def locked(text: str) -> dict[str, tuple[str, list[str]]]:
    """Name -> version and hashes, as a lock has them."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        pin, hashes = _PIN.fullmatch(words[0]), [word.removeprefix("--hash=sha256:") for word in words[1:]]
        if pin is None or not all(re.fullmatch(r"[0-9a-f]{64}", each) for each in hashes):
            raise LockError(f"{line[:80]!r} is no line of a lock: NAME==VERSION and --hash=sha256:...")
        found[canonicalize_name(pin[1])] = pin[2], hashes
    return found


def runtime_needs() -> dict[str, set[str]]:
    """What comes with `pip install surefoot` on this platform, and what each of it needs itself; "" is surefoot."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, set[str]] = {"": set()}
    waiting = [("", Requirement(line)) for line in project["dependencies"]]
    seen = set()
    while waiting:
        whose, need = waiting.pop()
        name, extras = canonicalize_name(need.name), tuple(sorted(need.extras)) or ("",)
        found[whose].add(name)
        found.setdefault(name, set())
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        inner = [Requirement(line) for line in metadata.requires(name) or ()]
        waiting += [(name, each) for each in inner if _holds(each, extras)]
    return found


def _holds(need: Requirement, extras: Iterable[str]) -> bool:
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras)


def core_names() -> set[str]:
    """What comes with surefoot, and what builds it."""
    return runtime_needs().keys() - {""} | {*BACKEND, *(name for needs in BACKEND.values() for name in needs)}


def problems(lock: str, constraints: str, names: Iterable[str]) -> Iterator[str]:
    """What the lock does not say, or says differently from the tested set."""
    have, tested, names = locked(lock), pins(constraints), set(names)
    yield from (f"{name} is core and not in the lock" for name in sorted(names - have.keys()))
    yield from (f"{name} is in the lock and not core" for name in sorted(have.keys() - names))
    for name, (version, hashes) in sorted(have.items()):
        if tested.get(name) != version:
            yield f"{name} is {version} in the lock and {tested.get(name)} in constraints.txt"
        if not hashes:
            yield f"{name} has no hash"


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _indexes() -> tuple[list[str], list[Path]]:
    """Addresses and folders where pip looks, by its own configuration."""
    from pip._internal.models.index import PyPI  # the address that pip has built in

    words = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    settings: dict[str, list[str]] = {}
    for line in said.splitlines():
        name, _, value = line.partition("=")
        settings.setdefault(name.rpartition(".")[2], []).extend(value.strip("'\"").replace("\\n", " ").split())
    addresses = settings.get("index-url", [])[-1:] or [PyPI.simple_url]
    folders = [Path(text) for text in settings.get("find-links", []) if os.path.isdir(text)]
    return [*addresses, *settings.get("extra-index-url", [])], sorted(set(folders))


def _listed(address: str, name: str) -> Iterator[tuple[str, str]]:
    """File name and hash of everything that an index has of this package."""
    page = f"{address.rstrip('/')}/{name}/"
    page += "index.html" if page.startswith("file:") else ""
    try:
        with urllib.request.urlopen(page, timeout=60) as answer:  # an address of the user's own configuration
            text = answer.read(2**26).decode()
    except OSError:
        return  # this index does not have it; another may
    links = _Links()
    links.feed(text)
    for link in links.found:
        address_of_file, fragment = urldefrag(link)
        if fragment.startswith("sha256="):
            yield unquote(address_of_file.rpartition("/")[2]), fragment.removeprefix("sha256=")


def _in_folder(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.iterdir()):
        if path.suffix == ".whl":
            with path.open("rb") as file:
                yield path.name, hashlib.file_digest(file, "sha256").hexdigest()


def fits(file: str, version: str) -> bool:
    """Whether this is a wheel of that version for a Python and a platform that we support; a local build counts.

    Example:
        >>> fits("idna-3.20-py3-none-any.whl", "3.20"), fits("numpy-2.4.6-cp310-cp310-win32.whl", "2.4.6")
        (True, False)
    """
    try:
        _, found, _, tags = parse_wheel_filename(file)
    except ValueError:
        return False
    good = (t for t in tags if _PYTHONS.fullmatch(t.interpreter) or t.abi == "abi3")
    return found.public == version and any(_PLATFORMS.fullmatch(t.platform) and not t.abi.endswith("t") for t in good)


def hashes_of(names: Iterable[str], versions: dict[str, str]) -> Hashes:
    """Every hash that the configured indexes and folders have for these versions."""
    addresses, folders = _indexes()
    beside = [row for folder in folders for row in _in_folder(folder)]
    found: Hashes = {}
    for name in sorted(names):
        if name not in versions:
            raise LockError(f"{name} is core and has no version in constraints.txt")
        own = (row for row in beside if canonicalize_name(row[0].partition("-")[0]) == name)
        rows = [*own, *(row for address in addresses for row in _listed(address, name))]
        found[name] = sorted({digest for file, digest in rows if fits(file, versions[name])})
        if not found[name]:
            raise LockError(f"no configured index has {name} {versions[name]}")
    return found


def text_of(hashes: Hashes, versions: dict[str, str]) -> str:
    """The lock."""
    parts = [
        " \\\n    ".join([f"{name}=={versions[name]}", *(f"--hash=sha256:{h}" for h in hashes[name])])
        for name in hashes
    ]
    return _HEAD + "\n".join(parts) + "\n"


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    only_check = parser.parse_args().check
    constraints, names = (ROOT / "constraints.txt").read_text(encoding="utf-8"), core_names()
    if not only_check:
        LOCK.write_text(text_of(hashes_of(names, pins(constraints)), pins(constraints)), encoding="utf-8")
    wrong = list(problems(LOCK.read_text(encoding="utf-8"), constraints, names))
    if wrong:
        raise SystemExit(
            "\n".join([*wrong, "fix: python scripts/lock_core.py, in an environment with the tested versions"])
        )


if __name__ == "__main__":
    main()
