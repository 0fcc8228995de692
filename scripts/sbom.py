"""A software bill of materials for a release: CycloneDX 1.6, as JSON, beside the wheel and the source archive.

    python scripts/sbom.py dist

Listed is what `pip install surefoot` brings along without an extra, in the tested versions, with the hashes that
requirements-core.lock allows for them; what builds the wheel is listed as excluded from it. Licences are those of the
installed metadata. The same tree gives the same file: its time is the commit's.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from lock_core import BACKEND, LOCK, ROOT, locked, runtime_needs

from surefoot import __version__
from surefoot.system.git import git_call

SPEC = "1.6"


def bill(folder: Path) -> dict[str, Any]:
    """The document, for the files of a release in `folder`."""
    lock, needs = locked(LOCK.read_text(encoding="utf-8")), runtime_needs()
    itself = _component("surefoot", __version__, []) | {"externalReferences": [_file(path) for path in _built(folder)]}
    refs = {name: f"pkg:pypi/{name}@{version}" for name, (version, _) in lock.items()} | {"": itself["bom-ref"]}
    edges = needs | {name: set(inner) | needs.get(name, set()) for name, inner in BACKEND.items()}
    edges |= {name: set() for name in lock.keys() - edges.keys()}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "version": 1,
        "metadata": {
            "timestamp": _time(),
            "tools": {"components": [{"type": "application", "name": "scripts/sbom.py", "version": __version__}]},
            "component": itself,
        },
        "components": [
            _component(name, version, hashes) | {"scope": "required" if name in needs else "excluded"}
            for name, (version, hashes) in sorted(lock.items())
        ],
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[inner] for inner in edges[name])} for name in sorted(edges)
        ],
    }
    digest = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))
    return {"serialNumber": f"urn:uuid:{digest}"} | document


def _component(name: str, version: str, hashes: list[str]) -> dict[str, Any]:
    ref = f"pkg:pypi/{name}@{version}"
    found = {"type": "library", "bom-ref": ref, "name": name, "version": version, "purl": ref}
    licences = _licences(name)
    return (
        found
        | ({"licenses": licences} if licences else {})
        | ({"hashes": [{"alg": "SHA-256", "content": each} for each in hashes]} if hashes else {})
    )


def _licences(name: str) -> list[dict[str, Any]]:
    """An SPDX expression where the package has one, else the words that it uses; nothing for one not installed."""
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return []
    if about.get("License-Expression"):
        return [{"expression": about["License-Expression"]}]
    classifiers = (line for line in about.get_all("Classifier") or () if line.startswith("License ::"))
    words = [line.rpartition(" :: ")[2] for line in classifiers] or [
        (about.get("License") or "").split("\n")[0].strip()
    ]
    return [{"license": {"name": each}} for each in words if each]


def _built(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz")))


def _file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"type": "distribution", "url": path.name, "hashes": [{"alg": "SHA-256", "content": digest}]}


def _time() -> str:
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    if seconds is None:
        command, env = git_call(ROOT, "log", "-1", "--format=%ct")
        seconds = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


def main() -> None:
    """See the top of the file."""
    if len(sys.argv) != 2 or not _built(Path(sys.argv[1])):
        raise SystemExit("usage: python scripts/sbom.py FOLDER, where a wheel and a source archive lie")
    folder = Path(sys.argv[1])
    path = folder / f"surefoot-{__version__}.cdx.json"
    path.write_text(json.dumps(bill(folder), indent=2) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
