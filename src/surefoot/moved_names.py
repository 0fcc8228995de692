"""Names that have moved: what the documentation of the first edition imports stays importable, from one table.

    from surefoot.envs.sandbox import Sandbox        still works, and is `surefoot.sandbox.sandbox.Sandbox`

A module of the table does not exist any more. Importing it gives a stand-in that looks each listed name up where it
lives now, when it is asked for. Nothing is loaded before that, and no other name is found there.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

MOVED: dict[str, dict[str, str]] = {
    "surefoot.engines.openai_engine": {
        "OpenAIEngine": "surefoot.engines.openai:OpenAIEngine",
    },
    "surefoot.envs.grading": {
        "exact_answer": "surefoot.rewards.functions:exact_answer",
    },
    "surefoot.envs.mcp_client": {
        "Limits": "surefoot.tools.mcp.toolkit:ServerLimits",
        "MCPToolkit": "surefoot.tools.mcp.toolkit:MCPToolkit",
        "Server": "surefoot.tools.mcp.toolkit:Server",
        "ServerStatus": "surefoot.tools.mcp.toolkit:ServerStatus",
        "check_servers": "surefoot.tools.mcp.toolkit:check_servers",
    },
    "surefoot.envs.sandbox": {
        "Limits": "surefoot.sandbox.sandbox:SandboxLimits",
        "Outcome": "surefoot.sandbox.sandbox:ProgramOutcome",
        "Sandbox": "surefoot.sandbox.sandbox:Sandbox",
    },
    "surefoot.envs.sandboxes.code_tests": {
        "grade_code": "surefoot.sandbox.code_tests:grade_code",
    },
    "surefoot.envs.servers.server_file": {
        "read_servers": "surefoot.tools.mcp.servers:read_servers",
    },
    "surefoot.envs.sources.foreign": {
        "ForeignToolkit": "surefoot.tools.python.foreign:ForeignToolkit",
    },
    "surefoot.envs.sources.gym_environment": {
        "GymToolkit": "surefoot.tools.python.environments:GymToolkit",
    },
    "surefoot.envs.sources.python_tools": {
        "FunctionToolkit": "surefoot.tools.python.environments:FunctionToolkit",
    },
    "surefoot.envs.sources.reasoning_gym_environment": {
        "ReasoningGymToolkit": "surefoot.tools.python.environments:ReasoningGymToolkit",
    },
    "surefoot.envs.sources.trl_environment": {
        "EnvironmentToolkit": "surefoot.tools.python.environments:EnvironmentToolkit",
        "environment_toolkit": "surefoot.tools.python.environments:environment_toolkit",
    },
    "surefoot.envs.verifiers": {
        "MultiVerifier": "surefoot.rewards.verifiers.multi:MultiVerifier",
    },
    "surefoot.envs.verify.verify_judge": {
        "fenced": "surefoot.rewards.verifiers.multi:fenced",
    },
    "surefoot.policy.load": {
        "load_policy": "surefoot.learner.model:load_policy",
    },
    "surefoot.safe_text": {
        "redact": "surefoot.system.text:redact",
    },
    "surefoot.store.durable": {
        "atomic_write": "surefoot.storage.files:atomic_write",
        "commit_folder": "surefoot.storage.files:commit_folder",
    },
    "surefoot.store.journal": {
        "Journal": "surefoot.storage.journal:Journal",
    },
    "surefoot.store.ledger": {
        "Item": "surefoot.storage.ledger:Visit",
        "Ledger": "surefoot.storage.ledger:Ledger",
    },
    "surefoot.store.lock": {
        "RunLock": "surefoot.storage.lock:RunLock",
    },
    "surefoot.store.manifest": {
        "verify_folder": "surefoot.storage.files:verify_folder",
    },
    "surefoot.tracking.report": {
        "write_report": "surefoot.report.page:write_report",
    },
}
"""Module of the first edition -> name -> `module:name` of today."""
RUN: dict[str, str] = {
    "surefoot.envs.sandbox": "surefoot.sandbox.__main__",
}
"""What `python -m MODULE` was -> what it is."""


class MovedNames(MetaPathFinder, Loader):
    """Finds the modules of the table, and the packages above them, where nothing else does."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Only for names of the table; it comes last, so a module that exists wins."""
        above = any(name.startswith(f"{fullname}.") for name in MOVED)
        if fullname not in MOVED and not above:
            return None
        return ModuleSpec(fullname, self, is_package=above)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A stand-in that has nothing but the way to the names."""
        return ModuleType(spec.name, f"Moved: see surefoot.moved_names for where the names of {spec.name} live now.")

    def exec_module(self, module: ModuleType) -> None:
        """Names are looked up when they are asked for."""
        table = MOVED.get(module.__name__, {})

        def find(name: str) -> Any:
            if name not in table:
                raise AttributeError(f"module {module.__name__!r} has moved and {name!r} is not among its moved names")
            home, _, new = table[name].partition(":")
            return getattr(importlib.import_module(home), new)

        module.__getattr__ = find  # type: ignore[method-assign]

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`: the code of the program that took its place."""
        program = RUN.get(fullname)
        found = None if program is None else importlib.util.find_spec(program)
        if program is None or found is None or not isinstance(found.loader, InspectLoader):
            raise ImportError(f"{fullname} has moved, and was never a program")
        return found.loader.get_code(program)


def install() -> None:
    """Once, by `import surefoot`."""
    if not any(isinstance(finder, MovedNames) for finder in sys.meta_path):
        sys.meta_path.append(MovedNames())
