"""What a process that we start may see of our environment: a list of names, and what the config adds by name.

Owns       the list, and the narrowing of a process that was forked and has everything already.
Promises   a variable that is neither on the list nor named is absent: from the child's `os.environ`, from what its
           own children inherit, and from /proc/PID/environ; what sounds or looks like a secret comes through no
           pattern (HF_TOKEN not by `HF_*`), only by its own name; a lookup of a withheld variable is remembered.
Never      clears what a fork shares of our memory: a reward file that read a variable when it was imported has it.

Read next: `text.py`, which names are secret; `rewards/workers.py`, the fork.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from surefoot_harness.errors import ConfigError
from surefoot_harness.system.text import is_secret_name, redact, remember

PASSED = frozenset(
    """PATH HOME USER LOGNAME SHELL PWD HOSTNAME LANG LANGUAGE TZ TERM COLUMNS LINES NO_COLOR FORCE_COLOR
    TMPDIR TEMP TMP XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR
    LD_LIBRARY_PATH LD_PRELOAD LIBRARY_PATH CPATH CC CXX VIRTUAL_ENV CONDA_PREFIX
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NO_PROXY no_proxy
    TOKENIZERS_PARALLELISM DO_NOT_TRACK""".split()
)
"""Passed on by their own names."""
PREFIXES = tuple(
    """LC_ PYTHON OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ NUMEXPR_ BLIS_ MALLOC_ CUDA_ CUDNN_ CUBLAS_ NVIDIA_ NCCL_ NVTE_ GLOO_
    UCX_ HIP_ HSA_ ROCM_ ROCR_ RAY_ SLURM_ HF_ TRANSFORMERS_ TORCH PYTORCH_ TRITON_ VLLM_ SUREFOOT_ COVERAGE_""".split()
)
"""Passed on when they begin so, and neither their name nor their value is a secret's."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_SHOWN = re.compile(r"[A-Za-z0-9_*]{0,254}")


def misnamed(names: Iterable[str]) -> list[str]:
    """What of these is no name of a variable; of NAME=VALUE only the name is shown."""
    wrong = [name for name in names if not NAME.fullmatch(name)]
    return [
        name if _SHOWN.fullmatch(name) else f"{re.split('[^A-Za-z0-9_*]', name, maxsplit=1)[0]}..." for name in wrong
    ]


def check_named(names: Iterable[str]) -> None:
    """Refuse a `pass_env` that names no variable, or one that is not there."""
    if wrong := misnamed(names := tuple(names)):
        raise ConfigError(
            f"pass_env holds {wrong[0]!r}, which is no name of a variable",
            "variables are passed on one by one and by name; their values stay out of configs, which are kept",
            'write pass_env = ["JUDGE_API_KEY"], and set the variable in the shell that starts the run',
        )
    for name in names:
        if name not in os.environ:
            raise ConfigError(
                f"pass_env names {name}, which is not set",
                "reward functions and workers would not find it, and could not tell that from an empty one",
                f"export {name}, or take it out of pass_env",
            )


def inherited(named: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a child: those on the list, and `named` ones where they are set.

    Example:
        >>> inherited(["JUDGE_KEY"], {"PATH": "/bin", "HF_HOME": "/hf", "HF_TOKEN": "t", "JUDGE_KEY": "j", "X": "x"})
        {'PATH': '/bin', 'HF_HOME': '/hf', 'JUDGE_KEY': 'j'}
    """
    there, also = dict(os.environ if environ is None else environ), frozenset(named)
    return {name: value for name, value in there.items() if name in also or _is_passed(name, value)}


def _is_passed(name: str, value: str) -> bool:
    if name in PASSED:
        return True
    if not name.startswith(PREFIXES):
        return False
    if os.path.isabs(value) and os.path.exists(value):
        return True  # a file that holds a secret is not one: RAY_TLS_SERVER_KEY
    return not is_secret_name(name) and redact(value, {}) == value


class _Noticing(os._Environ[str]):
    """`os.environ` of a narrowed process: remembers who asked for what was withheld."""

    def __getitem__(self, key: str) -> str:
        try:
            return super().__getitem__(key)
        except KeyError:
            if key in _withheld:
                _missed[key] = None
            raise


_withheld: frozenset[str] = frozenset()
_missed: dict[str, None] = {}


def withheld(named: Iterable[str] = ()) -> tuple[str, ...]:
    """Names of variables that are set here and that no child sees."""
    kept = inherited(named)
    return tuple(sorted(name for name in os.environ if name not in kept))


def narrow(named: Iterable[str] = (), elsewhere: Iterable[str] = ()) -> None:
    """Take from this process what a child of ours may not have; call it first thing after a fork.

    Values of secrets are remembered for `redact`: what was read before the fork may still be printed.

    Args:
        elsewhere: names that were withheld before they came here, by who started this process.
    """
    global _withheld
    kept = inherited(named)
    remember(os.environ)
    for name in (gone := [name for name in os.environ if name not in kept]):
        del os.environ[name]
    _withheld |= frozenset([*gone, *elsewhere]) - frozenset(os.environ)
    _missed.clear()
    os.environ.__class__ = _Noticing
    _wipe(frozenset(os.fsencode(name) for name in kept))


def missed() -> list[str]:
    """Withheld variables that were asked for since the last look, in this order."""
    names = list(_missed)
    _missed.clear()
    return names


def missing_words(names: Sequence[str]) -> tuple[str, str]:
    """What happened, and what to do.

    Example:
        >>> print(*missing_words(["JUDGE_API_KEY"]), sep="; ")
        the reward asked for JUDGE_API_KEY, which is set here and not passed on; add pass_env = ["JUDGE_API_KEY"]
    """
    several = ", ".join(names)
    what = f"the reward asked for {several}, which {'is' if len(names) == 1 else 'are'} set here and not passed on"
    return what, f"add pass_env = {json.dumps(list(names))}"


def _wipe(kept: frozenset[bytes]) -> None:
    """Blank out, in this process's copy, the block that the kernel shows as /proc/PID/environ; names in `kept` stay.

    No pointer of the C library leads to a wiped entry: its variable was unset, or had been set anew elsewhere.
    """
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
        begin, end = (int(field) for field in fields[47:49])
        block = Path("/proc/self/environ").read_bytes()
    except (OSError, ValueError):
        return  # no such file here, so nobody reads it either
    if not 0 < begin < end or len(block) > end - begin:
        return
    place = begin
    for entry in block.split(b"\0"):
        if entry and entry.partition(b"=")[0] not in kept:
            ctypes.memset(place, 0, len(entry))
        place += len(entry) + 1
