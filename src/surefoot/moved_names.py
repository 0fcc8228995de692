"""Names that have moved: what the documentation has ever imported stays importable, from one table.

    from surefoot.envs.sandbox import Sandbox        still works, and is `surefoot.sandbox.sandbox.Sandbox`

A module of the table `MOVED` does not exist any more. Importing it gives a stand-in that looks each listed name up
where it lives now, when it is asked for. Nothing is loaded before that, and no other name is found there.

    from surefoot.harness.checks import run_checks   still works, and is `surefoot_harness.checks.run_checks`

What `RENAMED` lists has become a package of its own. Every module below it is the very same object under both names; a
package is a stand-in that passes each name on, in both directions, because with that one's `__path__` Python would load
every file a second time. Neither needs a file here.
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
    "surefoot.data.content": {
        "Content": "surefoot.data.tasks:Content",
    },
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
    "surefoot.rewards.components": {
        "component_reward": "surefoot.rewards.functions:component_reward",
    },
    "surefoot.safe_text": {
        "redact": "surefoot.system.text:redact",
    },
    "surefoot.storage.journal": {
        "Journal": "surefoot.storage.files:Journal",
    },
    "surefoot.store.durable": {
        "atomic_write": "surefoot.storage.files:atomic_write",
        "commit_folder": "surefoot.storage.files:commit_folder",
    },
    "surefoot.store.journal": {
        "Journal": "surefoot.storage.files:Journal",
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
    "surefoot.tracking.timeline": {
        "Timeline": "surefoot.tracking.live:Timeline",
        "span": "surefoot.tracking.live:span",
    },
}
"""Module that was documented once -> name -> `module:name` of today."""
RUN: dict[str, str] = {
    "surefoot.envs.sandbox": "surefoot.sandbox.__main__",
}
"""What `python -m MODULE` was -> what it is."""


RENAMED: dict[str, str] = {
    "surefoot.cli.bisect": "surefoot_harness.cli.bisect",
    "surefoot.cli.check": "surefoot_harness.cli.check",
    "surefoot.cli.testing": "surefoot_harness.cli.testing",
    "surefoot.harness": "surefoot_harness",
    "surefoot.harness.plugin": "surefoot_harness.pytest_entry",  # not the plugin itself: it may be there already
}
"""What has a package of its own now, with all that is below it."""


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


class RenamedPackage(ModuleType):
    """A package under its old name: names are read and set in the package itself.

    Who sets a name and then deletes it, as pytest's monkeypatch does with what is not in `__dict__`, has it as before.
    """

    def __init__(self, name: str, real: ModuleType) -> None:
        super().__init__(name, f"Moved: {real.__name__}.")
        self.__dict__.update(_real=real, _before={})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or sys.modules.get(f"{self.__name__}.{name}") is value:  # the import system's
            super().__setattr__(name, value)
            return
        real, before = self.__dict__["_real"], self.__dict__["_before"]
        if name in vars(real):
            before.setdefault(name, vars(real)[name])
        setattr(real, name, value)

    def __delattr__(self, name: str) -> None:
        real, before = self.__dict__["_real"], self.__dict__["_before"]
        if name in self.__dict__:
            super().__delattr__(name)
        elif name in before:
            setattr(real, name, before.pop(name))
        else:
            delattr(real, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self.__dict__["_real"]), *self.__dict__})


class RenamedModules(MetaPathFinder, Loader):
    """Finds what `RENAMED` lists and everything below it, before anybody else looks for files."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """A spec without a place of its own; None for what is not there under the new name either."""
        real = new_name(fullname)
        found = None if real is None else importlib.util.find_spec(real)
        if found is None:
            return None
        return ModuleSpec(fullname, self, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, or the stand-in for a package."""
        real = importlib.import_module(_renamed(spec.name))
        spec.loader_state = getattr(real, "__spec__", None)
        return real if spec.submodule_search_locations is None else RenamedPackage(spec.name, real)

    def exec_module(self, module: ModuleType) -> None:
        """It has run. A module keeps the spec that it was loaded by."""
        if not isinstance(module, RenamedPackage) and module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`."""
        found = importlib.util.find_spec(_renamed(fullname))
        if found is None or not isinstance(found.loader, InspectLoader):
            raise ImportError(f"{fullname} is not a program")
        return found.loader.get_code(found.name)


def new_name(fullname: str) -> str | None:
    """`surefoot.harness.checks.parser` -> `surefoot_harness.checks.parser`; None for what was not renamed."""
    if fullname in RENAMED:
        return RENAMED[fullname]
    above, _, name = fullname.rpartition(".")
    home = new_name(above) if above else None
    return None if home is None else f"{home}.{name}"


def _renamed(fullname: str) -> str:
    return new_name(fullname) or fullname


def install() -> None:
    """Once, by `import surefoot`."""
    if not any(isinstance(finder, MovedNames) for finder in sys.meta_path):
        sys.meta_path.append(MovedNames())
        sys.meta_path.insert(0, RenamedModules())
