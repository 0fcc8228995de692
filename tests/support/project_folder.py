"""A small project on disk whose files are written and edited by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class ProjectFolder:
    """A project in a folder of its own."""

    def __init__(self, root: Path, files: Mapping[str, str]) -> None:
        self.root = root
        for name, text in files.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def edit(self, name: str, before: str, after: str) -> None:
        text = (self.root / name).read_text()
        assert before in text, f"{before!r} is not in {name}"
        self.write(name, text.replace(before, after))
