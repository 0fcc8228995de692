"""Every module imports on its own, and for real: no placeholder, no edited path."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from exceptions import PATH_EDITS, SWALLOWED_IMPORTS
from repo_tree import HARNESS, PACKAGES, SRC, Source, modules, parse, run_python, sources

IMPORT_EACH = """
import importlib, sys, traceback
failed = []
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # as on a machine without the extras
for name in sys.argv[2:]:
    try:
        module = importlib.import_module(name)
        missing = [item for item in getattr(module, "__all__", []) if getattr(module, item, None) is None]
        if missing:
            failed.append(f"{name}: {missing} missing or None")
    except BaseException as error:
        failed.append(f"{name}: {type(error).__name__}: {error}")
print("\\n".join(failed))
sys.exit(bool(failed))
"""
CHANGES = {"insert", "append", "extend", "remove", "pop", "clear", "reverse", "sort"}
EXTRAS = (
    "ray",
    "vllm",
    "trl",
    "datasets",
    "peft",
    "torchao",
    "bitsandbytes",
    "accelerate",
    "mcp",
    "wandb",
    "reasoning_gym",
    "pyarrow",
    "gguf",
)
TRAINER = (
    "surefoot",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "yaml",
    "jinja2",
    "rich",
)
OPTIONAL_HOMES = {
    "surefoot.runtime.ray.actors": "ray",
    "surefoot.runtime.ray.learner_group": "ray",
    "surefoot.runtime.ray.transport": "ray",
    "surefoot.maths.fused_kernels": "triton",
    "surefoot.maths.fused_training_kernels": "triton",
}
"""The only modules that stop without their package: an actor's class, and a kernel of triton, are made at the import."""


def import_failures(src: Path, below: str = "surefoot", absent: tuple[str, ...] = EXTRAS) -> str:
    names = [name for name in modules(src) if name not in OPTIONAL_HOMES and name.startswith(below)]
    assert len(names) > 5, f"only {len(names)} modules found under {src}"
    result = run_python("-c", IMPORT_EACH, ",".join(absent), *names, src=src)
    return "" if result.returncode == 0 else result.stdout + result.stderr


def placeholders(source: Source) -> Iterator[str]:
    """Handlers of a failed import that go on: they turn a missing module into a None that fails much later."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler) or node.type is None:
            continue
        names = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)}
        raises = any(isinstance(part, ast.Raise) for statement in node.body for part in ast.walk(statement))
        if names & {"ImportError", "ModuleNotFoundError"} and not raises:
            yield f"{source.name}:{node.lineno}: a failed import is swallowed"


def path_edits(source: Source) -> Iterator[str]:
    """Where sys.path is changed; reading it is nobody's business."""
    for node in ast.walk(source.tree):
        changed: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            changed = [node.func.value]
        elif isinstance(node, ast.Assign):
            changed = [target.value if isinstance(target, ast.Subscript) else target for target in node.targets]
        elif isinstance(node, ast.AugAssign):
            changed = [node.target]
        if any(ast.unparse(expression) == "sys.path" for expression in changed):
            yield f"{source.name}:{node.lineno}: sys.path is touched"


def test_every_module_imports() -> None:
    assert OPTIONAL_HOMES.keys() <= set(modules(SRC)), "one of them is called otherwise by now"
    assert import_failures(SRC) == ""


def test_every_module_of_the_harness_imports_without_the_trainer_and_what_the_trainer_needs() -> None:
    absent = (*EXTRAS, *TRAINER, "tensorboard", "coverage")
    assert import_failures(HARNESS, "surefoot_harness", absent) == ""
    assert "surefoot_harness.errors" in import_failures(
        HARNESS, "surefoot_harness", (*absent, "surefoot_harness.errors")
    )


def test_the_modules_left_out_are_the_ones_that_need_an_extra() -> None:
    for home, package in OPTIONAL_HOMES.items():
        result = run_python("-c", IMPORT_EACH, package, home, src=SRC)
        assert f"{home}: ModuleNotFoundError" in result.stdout, (
            f"{home} imports without {package}: take it off the list"
        )
        assert package in result.stdout.partition(": ModuleNotFoundError")[2]


def test_no_failed_import_is_swallowed() -> None:
    swallowing = {source.name for source in sources(*PACKAGES) if list(placeholders(source))}
    assert swallowing == set(SWALLOWED_IMPORTS), "no more and no less than the exceptions"


def test_sys_path_is_left_alone() -> None:
    touched = {source.name for source in sources(*PACKAGES) if list(path_edits(source))}
    assert touched == set(PATH_EDITS), "no more and no less than the exceptions"


def test_planted_hidden_module_fails_the_import_check(tmp_path: Path) -> None:
    shutil.copytree(SRC, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    (tmp_path / "src" / "surefoot" / "records.py").unlink()
    assert "No module named 'surefoot.records'" in import_failures(tmp_path / "src", below="surefoot.guards")


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import ray\nexcept ImportError:\n    ray = None",
        "try:\n    import ray\nexcept (ModuleNotFoundError, OSError):\n    pass",
    ],
)
def test_planted_placeholder_is_seen(text: str) -> None:
    assert len(list(placeholders(parse(text)))) == 1


def test_planted_path_edit_is_seen() -> None:
    assert len(list(path_edits(parse("import sys\nsys.path.insert(0, 'here')")))) == 1
