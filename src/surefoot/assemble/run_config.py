"""The config of a run folder: data until its hash was compared, and no code of the folder's own unless it is allowed.

Promises   an edited config.toml is refused before anything that it names is imported or started, and so is code that
           lies inside the run folder; the bytes that were compared are those that are parsed.
Never      vouches for whoever made the folder: a journal can be forged, as docs/store.md says.

Read next: `keeper.py`, which compares once more with the lock held.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from surefoot.config import Config
from surefoot.config_load import LoadedConfig, load_config
from surefoot.errors import SecurityError
from surefoot.store.account import LEDGER
from surefoot.store.environment import refuse_hidden
from surefoot.store.identity import compare, extensions
from surefoot.store.journal import Journal
from surefoot.store.run_folder import RunFolder


def read_run_config(folder: RunFolder, words: Sequence[str] = (), *, data: bytes | None = None) -> LoadedConfig:
    """The config of the run as data, every key of it; one of which a part was hidden is refused. Nothing is compared.

    Args:
        words: overrides of its keys.
        data: the bytes of config.toml, where somebody has read them already.
    """
    data = folder.read_config() if data is None else data
    refuse_hidden(data.decode("utf-8", errors="replace"))
    return load_config(folder.config, words, data=data)


def load_run_config(folder: RunFolder) -> LoadedConfig:
    """The same, if it is the config that the run began with; a `StateError` if it was edited since.

    A run that died before it told anybody what its config was has nothing to compare with.
    """
    data = folder.read_config()
    is_as_told(folder, data)
    return read_run_config(folder, data=data)


def is_as_told(folder: RunFolder, data: bytes) -> bool:
    """Whether the journal knows this text of config.toml; False when it knows none, a `StateError` for another one."""
    path = folder.journal / LEDGER
    if not path.exists() and not path.is_symlink():
        return False
    digest = hashlib.sha256(data).hexdigest()
    with Journal.open(path, readonly=True) as journal:
        changed = extensions(journal, whole=True)
        if changed and changed[-1].get("before_sha256") == digest:
            return True  # killed between the journal and the file: the next resume writes the file
        return compare(journal, "config", {"config_sha256": digest})


def refuse_code(
    folder: RunFolder, config: Config, *, allow_code: bool, used: Config | None = None, known: bool = True
) -> None:
    """Raise unless everything that would be imported or started lies outside the run folder, or it is allowed.

    Args:
        config: of the run.
        used: the same with what the caller changed: code that the caller names is the caller's business.
        known: the journal knows this config; where it does not, no code at all is run without being allowed.
    """
    wanted = set(named_code(used or config))
    found = [] if allow_code else [each for each in named_code(config) if each in wanted]
    if inside := [(key, text) for key, text in found if _is_inside(text, folder.root)]:
        key, text = inside[0]
        raise SecurityError(
            f"{folder.root}: {key} = {text!r} names code in the run folder itself",
            "a run folder is data: it may come from anywhere, and no run puts code there",
            "look at that file; if you trust it, say so with --allow-code (in Python allow_code=True)",
        )
    if found and not known:
        key, text = found[0]
        raise SecurityError(
            f"{folder.root}: {key} = {text!r} names code, and no journal says that this is the config of the run",
            "it may have been edited by anybody",
            "bring journal/ back from a copy; or look at config.toml, and if you trust it, say so with --allow-code "
            "(in Python allow_code=True)",
        )


def named_code(config: Config) -> Iterator[tuple[str, str]]:
    """(key, value) of everything in a config that names a file of code, or a file that names commands."""
    for key, values in (("reward_funcs", config.reward_funcs), ("tools.functions", config.tools.functions)):
        yield from ((key, value) for value in values if not value.startswith("builtin:"))
    metrics = {"eval_metric": config.eval_metric}
    metrics |= {f"eval_sets.{name}.metric": keys.metric for name, keys in config.eval_sets.items()}
    yield from ((key, value) for key, value in metrics.items() if ":" in value)
    for key, value in (("tools.environment", config.tools.environment), ("tools.servers", config.tools.servers)):
        if value is not None:
            yield key, value


def _is_inside(text: str, root: Path) -> bool:
    """Whether `file.py:name` or a file lies in the folder, by name or behind links; a relative one is meant there."""
    file = text.rpartition(":")[0] or text
    if not os.path.isabs(file):
        return True  # a run keeps absolute paths: somebody else wrote this one
    roots = {os.path.abspath(root), os.path.realpath(root)}
    forms = {os.path.normpath(file), os.path.realpath(file), os.path.normpath(text), os.path.realpath(text)}
    return any(Path(form).is_relative_to(place) for form in forms for place in roots)
