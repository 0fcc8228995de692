"""The one list of exceptions to our own rules. Each has a reason; one that is no longer needed turns a test red."""

from __future__ import annotations

FILE_LINES = {
    # "src/surefoot/name.py": "why this file may exceed the limit",
}

FUNCTION_LINES = {
    # "src/surefoot/name.py::Class.function": "why this function may exceed the limit",
}

BANNED_CALLS = {
    "src/surefoot/guards/reward_values.py::except": "a stranger's __float__ failed, and that is the finding: not a number",
    "src/surefoot/rewards/workers.py::except": "a stranger's __repr__ failed while a message about it was written",
    "src/surefoot/sandbox/code_worker.py::importlib.import_module": "in the sandbox of the code, which may import anything anyway; the tests name the module",
    "src/surefoot/tools/python/foreign_host.py::exec_module": "the user's own environment file, in a process of its own",
    "harness/src/surefoot_harness/system/user_code.py::exec_module": "the user's own reward or tool file, named by the config on the command line",
    "harness/src/surefoot_harness/affected/child/sitecustomize.py::exec_module": "the sitecustomize that Python would have run",
    "src/surefoot/trl_bridge/__init__.py::importlib.import_module": "a module of our own, from the table in that file",
    "src/surefoot/run/build.py::importlib.import_module": "a module of our own, from the table of engines in config/choices.py",
    "src/surefoot/tools/python/environments.py::importlib.import_module": "a module of our own, from the table of environments in config/choices.py",
    "src/surefoot/data/__init__.py::importlib.import_module": "a module of our own, from the table in that file",
    "src/surefoot/moved_names.py::importlib.import_module": "a module of our own, from the table in that file",
}

PATH_EDITS = {
    "harness/src/surefoot_harness/affected/child/sitecustomize.py": "steps aside so that the user's own sitecustomize is found",
    "src/surefoot/tools/python/foreign_host.py": "a foreign process: our folder comes off its path, the user's is appended",
    "harness/src/surefoot_harness/system/user_code.py": "a reward file may import a helper that lies beside it; appended, so it shadows nothing",
}

SWALLOWED_IMPORTS = {
    "harness/src/surefoot_harness/selection.py": "the question is whether a module is installed; no is an answer",
    "harness/src/surefoot_harness/worker_coverage_child.py": "runs inside a stranger's process: without coverage it leaves a note and steps aside",
}

PRIVATE_PATHS = {
    "tests/unit/test_built_in_folders.py": "looks for such paths in the model folder",
}

DOC_BLOCKS = {
    # "document:language:first command": "why no test executes this block"
    "README.md:sh:make train": "installs from an index and trains for minutes; continuous integration runs both commands",
    "docs/guards.md:sh:surefoot demo hack --out demo": "two trainings, minutes; tests/runs/test_demo.py runs it",
    "CONTRIBUTING.md:sh:make check": "runs the whole suite, this test included; continuous integration runs it",
}

UNLINKED_SUBJECTS = {
    # "page": "why it may speak of what was never shown without a link to the list"
    "CHANGELOG.md": "a history: it says what was built, and each entry is of its day",
    "docs/migrating.md": "generated tables of other trainers' names; it says what a key is, not what was run",
}
