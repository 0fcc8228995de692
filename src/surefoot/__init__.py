"""surefoot: GRPO you can trust. Trains language models, and proves that the training did what it said.

`surefoot.train(...)` and `surefoot.resume(...)` are the command line's from Python; see `assemble.from_python`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.assemble.from_python import resume, train

__version__ = "0.1.0"
__all__ = ["__version__", "resume", "train"]


def __getattr__(name: str) -> Any:
    if name in ("train", "resume"):  # heavy parts load on first use, so that `import surefoot` stays light
        from surefoot.assemble import from_python

        return getattr(from_python, name)
    raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
