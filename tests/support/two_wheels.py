"""The two distributions as wheels, built from this tree without network, and environments that have some of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAINER, HARNESS = "surefoot", "surefoot-harness"
FOLDERS = {TRAINER: ROOT, HARNESS: ROOT / "harness"}
PARTS = {TRAINER: ("src", "harness", "pyproject.toml", "README.md", "LICENSE"), HARNESS: ("src", "pyproject.toml", "README.md", "LICENSE")}  # fmt: skip
VERSIONS = {TRAINER: ("src/surefoot", "harness/src/surefoot_harness"), HARNESS: ("src/surefoot_harness",)}


def build(name: str, out: Path, version: str | None = None) -> Path:
    """A wheel, by the backend that pyproject.toml names; in another version, from a copy that says so."""
    folder = FOLDERS[name]
    if version is not None:
        folder = out / f"{name}-{version}"
        for part in PARTS[name]:
            source = FOLDERS[name] / part
            ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
            shutil.copytree(source, folder / part, ignore=ignored) if source.is_dir() else shutil.copy(source, folder)
        for package in VERSIONS[name]:
            file = folder / package / "__init__.py"
            text = file.read_text(encoding="utf-8")
            assert text.count('__version__ = "') == 1, file
            head, _, tail = text.partition('__version__ = "')
            file.write_text(f'{head}__version__ = "{version}"{tail[tail.index(chr(34)) + 1 :]}', encoding="utf-8")
    place = out / "wheels" / (version or "ours")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = place.glob(f"{name.replace('-', '_')}-*.whl")
    return found


@dataclass
class Environment:
    """A virtual environment of its own. `lend` gives it what others need from ours, and nothing of ours."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Environment:
        venv.create(folder, with_pip=False, symlinks=True)
        return cls(folder)

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def site(self) -> Path:
        (found,) = (self.folder / "lib").glob("python*/site-packages")
        return found

    def pip(self, *words: str) -> str:
        """Our pip, for that environment; without an index and without dependencies."""
        command = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", *words]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=env | {"PIP_CONFIG_FILE": os.devnull}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *wheels: Path) -> None:
        for wheel in wheels:  # one by one: the order is the question
            self.pip("install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel))

    def unpack(self, wheel: Path) -> None:
        """What pip makes of a wheel, without pip: its files over what is there, and its commands."""
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.site)
            (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
            lines = archive.read(points).decode().partition("[console_scripts]")[2].strip().splitlines()
        for name, _, place in (line.partition(" = ") for line in lines[: lines.index("") if "" in lines else None]):
            module, _, function = place.partition(":")
            script = self.folder / "bin" / name
            script.write_text(f"#!{self.python}\nfrom {module} import {function}\n{function}()\n")
            script.chmod(0o755)

    def lend(self, *packages: str) -> None:
        """Make packages of this environment importable there, each by a link of its own, with what pytest reads of it."""
        home = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
        home |= {Path(entry) for entry in sys.path if entry.endswith("site-packages")}
        for package in packages:
            found = [place / name for place in home for name in (package, f"{package}.py") if (place / name).exists()]
            assert found, f"{package} is not installed here"
            (self.site / found[0].name).symlink_to(found[0])

    def lend_all(self) -> None:
        """Everything that is installed here, TRL and torch among it, and none of our packages: nothing of ours is on
        that path, and what .pth files of that folder say is not read."""
        places = {
            Path(sysconfig.get_path("purelib")),
            *(Path(entry) for entry in sys.path if entry.endswith("site-packages")),
        }
        (self.site / "lent.pth").write_text("".join(f"{place}\n" for place in sorted(places)))

    def run(self, *words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """That Python, without a variable of ours in its environment."""
        clean = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "NO_COLOR": "1",
            "COLUMNS": "120",
        }
        command = [self.python, *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=cwd or self.folder, env=clean | env, timeout=900
        )

    def call(self, name: str, *words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """A command that an installation has put there."""
        return self.run(str(self.folder / "bin" / name), *words, cwd=cwd, **env)

    def modules(self, code: str) -> list[str]:
        """What is loaded after `code`."""
        done = self.run("-c", f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))")
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout.splitlines()[-1]))


TYPER = (
    "typer",
    "click",
    "rich",
    "shellingham",
    "typing_extensions",
    "markdown_it",
    "mdurl",
    "pygments",
    "psutil",
    "annotated_doc",
    "pydantic",
    "pydantic_core",
    "typing_inspection",
    "annotated_types",
)
"""What `surefoot-harness` needs, with what that needs."""
PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging")
