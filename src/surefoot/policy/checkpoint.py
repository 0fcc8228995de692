"""Weights out: a plain Hugging Face folder, complete or absent, never half.

The folder is written beside its final name, described by a manifest with the size and SHA-256
of every file, and renamed into place last.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from surefoot.store.durable import commit_folder, storage_error


def save_checkpoint(net: Any, tokenizer: Any, folder: Path, *, step: int, version: int) -> Path:
    """Save weights and tokenizer so that plain `transformers` loads them.

    Returns:
        `folder`, which exists only if everything in it was written.
    """
    temporary = folder.with_name(f".{folder.name}.partial")
    if temporary.exists():
        shutil.rmtree(temporary)
    try:
        temporary.mkdir(parents=True, mode=0o700)
        net.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        return commit_folder(temporary, folder, {"step": step, "version": version})
    except SafetensorError as error:  # the writer's own word for a disk that said no
        raise storage_error(folder, OSError(str(error))) from error
    except OSError as error:
        raise storage_error(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already when it was renamed
