"""The one list of exceptions to our own rules. Each has a reason; one that is no longer needed turns a test red."""

from __future__ import annotations

FILE_LINES = {
    # "src/surefoot/name.py": "why this file may exceed the limit",
}

FUNCTION_LINES = {
    # "src/surefoot/name.py::Class.function": "why this function may exceed the limit",
}

BANNED_CALLS = {
    "src/surefoot/envs/rewards/marks.py::except": "a stranger's __float__ failed, and that is the finding: not a number",
    "src/surefoot/envs/rewards/reward_worker.py::except": "a stranger's __repr__ failed while a message about it was written",
    "src/surefoot/envs/sandboxes/code_worker.py::importlib.import_module": "in the sandbox of the code, which may import anything anyway; the tests name the module",
    "src/surefoot/envs/sources/foreign_host.py::exec_module": "the user's own environment file, in a process of its own",
    "src/surefoot/envs/grading.py::exec_module": "the user's own reward file, named by the config on the command line",
    "src/surefoot/harness/affected/child/sitecustomize.py::exec_module": "the sitecustomize that Python would have run",
    "src/surefoot/trl_bridge/__init__.py::importlib.import_module": "a module of our own, from the table in that file",
}

PATH_EDITS = {
    "src/surefoot/harness/affected/child/sitecustomize.py": "steps aside so that the user's own sitecustomize is found",
    "src/surefoot/envs/sources/foreign_host.py": "a foreign process: our folder comes off its path, the user's is appended",
    "src/surefoot/envs/grading.py": "a reward file may import a helper that lies beside it; appended, so it shadows nothing",
}

SWALLOWED_IMPORTS = {
    "src/surefoot/harness/groups.py": "the question is whether a module is installed; no is an answer",
    "src/surefoot/harness/worker_coverage_child.py": "runs inside a stranger's process: without coverage it leaves a note and steps aside",
}

PRIVATE_PATHS = {
    "tests/unit/test_pebble.py": "looks for such paths in the model folder",
    "tests/unit/test_pebble_tools.py": "looks for such paths in the model folder",
}

DOC_BLOCKS = {
    # "document:language:first command": "why no test executes this block"
    "README.md:sh:make train": "installs from an index and trains for minutes; continuous integration runs both commands",
    "docs/guards.md:sh:surefoot demo hack --out demo": "two trainings, minutes; tests/runs/test_demo.py runs it",
    "CONTRIBUTING.md:sh:make check": "runs the whole suite, this test included; continuous integration runs it",
}
