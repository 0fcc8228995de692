"""Weights out: a plain Hugging Face folder, complete or absent, never half.

The folder is written beside its final name, described by a manifest with the size and SHA-256
of every file, and renamed into place last.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from surefoot.store.run_folder import commit_folder


def save_checkpoint(net: Any, tokenizer: Any, folder: Path, *, step: int, version: int) -> Path:
    """Save weights and tokenizer so that plain `transformers` loads them.

    Returns:
        `folder`, which exists only if everything in it was written.
    """
    temporary = folder.with_name(f".{folder.name}.partial")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True, mode=0o700)
    net.save_pretrained(temporary, safe_serialization=True)
    tokenizer.save_pretrained(temporary)
    commit_folder(temporary, folder, {"step": step, "version": version})
    return folder
