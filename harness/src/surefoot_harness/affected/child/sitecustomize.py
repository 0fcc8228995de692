"""Runs at the start of every Python process below a recorded test: starts its recorder, then gets out of the way.

This folder is first on PYTHONPATH of those processes. It needs nothing but the standard library, since the process may
belong to another environment. A `sitecustomize` that this one hides is run as if it had been found.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _start() -> None:
    if os.environ.get("SUREFOOT_AFFECTED") and sys.version_info >= (3, 11):
        from surefoot_affected import recorder  # type: ignore[import-not-found]  # beside this file

        recorder.start_child()


def _run_hidden() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_start()
_run_hidden()
