"""surefoot: GRPO you can trust. Trains language models, and proves that the training did what it said.

`surefoot.train(...)` is the command line's `surefoot train` from Python; see `assemble.from_python`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.assemble.from_python import train

__version__ = "0.1.0"
__all__ = ["__version__", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":  # heavy parts load on first use, so that `import surefoot` stays light
        from surefoot.assemble.from_python import train

        return train
    raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
