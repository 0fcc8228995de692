"""The harness beside the trainer is the one that it was released with; any other is refused by name.

The trainer's wheel carries `surefoot_harness`, and the distribution `surefoot-harness` has the same files. Who installs
both in two versions has the files of the later one, and who removes one of the two removes them. Both are told here,
before anything of the harness is loaded.
"""

from __future__ import annotations

import importlib.util

from surefoot import __version__


class PairingError(ImportError):
    """`surefoot_harness` is missing, or of another version. No `SurefootError`: those live in the harness."""

    exit_code = 2

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}\n  why: {why}\n  fix: {fix}")
        self.what, self.why, self.fix = what, why, fix


def require() -> None:
    """Raise `PairingError` unless `surefoot_harness` is there, in our version."""
    if importlib.util.find_spec("surefoot_harness") is None:
        raise PairingError(
            f"surefoot {__version__} is installed without its package surefoot_harness",
            "both distributions, surefoot and surefoot-harness, have its files; removing one removes them",
            f"pip install --force-reinstall --no-deps surefoot=={__version__}",
        )
    import surefoot_harness

    found = getattr(surefoot_harness, "__version__", "of no version")
    if found != __version__:
        raise PairingError(
            f"surefoot {__version__} found surefoot_harness {found} ({surefoot_harness.__file__})",
            "the distribution surefoot-harness was installed over it, or is older; a mixture was never tested",
            f"pip install --force-reinstall --no-deps surefoot=={__version__} surefoot-harness=={__version__}",
        )
