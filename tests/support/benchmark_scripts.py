"""The scripts in `benchmarks/`, imported the way they import each other."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def benchmark(name: str) -> Any:
    """One of them; they lie beside one another and are no package."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
