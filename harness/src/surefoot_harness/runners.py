"""The test runners' command lines: what is handed to pytest and to docker, word for word.

Owns       where the unit tests are, how a path is completed, what a container sees.
Promises   arguments arrive as they were typed, spaces, quotes and stars included; exit codes pass through, so
           "no tests collected" (5) is not a pass; a secret is named on a command line, never spelled out.
Never      starts a shell.

Needs nothing but the standard library, so that `scripts/run_*.sh` work with any Python on a bare machine.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from surefoot_harness.errors import ConfigError, SurefootError

UNIT = "tests/unit"
INSIDE = "/workspace"
"""Where a container sees the repository."""

SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN")
PASSED_ON = (*SECRETS, "CI", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
CACHES = {"HF_HOME": (".cache/huggingface", "/cache/huggingface"), "PIP_CACHE_DIR": (".cache/pip", "/cache/pip")}
"""Variable: (where it lies below HOME unless the variable says otherwise, where the container sees it)."""

USAGE = {
    "unit": "usage: scripts/run_unit.sh [PATH below tests/unit] [pytest options, such as --hf-gated or --mcore-only]",
    "docker-unit": "usage: CONTAINER=IMAGE scripts/run_unit_in_docker.sh [arguments of run_unit.sh]",
    "docker-functional": "usage: CONTAINER=IMAGE scripts/run_functional_in_docker.sh SCRIPT\n"
    "  SCRIPT: exactly one path, relative to the repository or to tests/, such as functional/train.sh",
}


def unit_folder(root: Path) -> str:
    """The folder of the unit tests below `root`: `unit_folder` in [tool.surefoot] of pyproject.toml, or tests/unit."""
    settings = root / "pyproject.toml"
    folder: object = UNIT
    if settings.is_file():
        import tomllib  # here, so that the Docker runners start on an older Python too

        try:
            named = tomllib.loads(settings.read_text(encoding="utf-8")).get("tool", {}).get("surefoot", {})
        except ValueError as error:
            raise ConfigError(
                f"{settings} is not TOML: {error}", "it may name the test folder", "correct it"
            ) from error
        folder = named.get("unit_folder", UNIT)
    if not isinstance(folder, str) or not (root / folder).is_dir():
        raise ConfigError(
            f"there is no folder {folder} in {root}",
            "the unit tests are looked for there",
            'set unit_folder = "tests" under [tool.surefoot] in pyproject.toml',
        )
    return folder


def pytest_words(words: Sequence[str], folder: str, root: Path) -> list[str]:
    """What pytest gets: `words` unchanged, but for a first path that is completed or a folder that is put first.

    Example:
        []                           -> ["tests/unit"]
        ["maths/test_losses.py"]     -> ["tests/unit/maths/test_losses.py"]
        ["--hf-gated", "-k", "a b"]  -> ["tests/unit", "--hf-gated", "-k", "a b"]
    """
    words = list(words)
    if not words:
        return [folder]
    if words[0].startswith("-"):
        return words if any(_is_below(word, folder, root) for word in words) else [folder, *words]
    return words if _is_below(words[0], folder, root) else [f"{folder}/{words[0]}", *words[1:]]


def _is_below(word: str, folder: str, root: Path) -> bool:
    path = os.path.normpath(root / word.split("::", 1)[0])
    home = os.path.normpath(root / folder)
    return not word.startswith("-") and (path == home or path.startswith(home + os.sep))


def unit_command(words: Sequence[str], root: Path) -> list[str]:
    """The argv that runs the unit tests of `root`: pytest, as the user's shell finds it."""
    arguments = pytest_words(words, unit_folder(root), root)
    program = shutil.which("pytest")
    if program is None:
        raise ConfigError(
            "pytest is not on PATH",
            "it runs the tests",
            "python -m pip install pytest, or activate the environment that has it: source .venv/bin/activate",
        )
    return [program, *arguments]


def run_tests(words: Sequence[str], root: Path) -> None:
    """Become pytest, in `root`: its exit code is ours, 5 for an empty selection included. Does not return."""
    _become(unit_command(words, root), root)


def docker_words(command: Sequence[str], root: Path, environ: Mapping[str, str], terminal: bool) -> list[str]:
    """What docker gets to run `command` in the container: repository and caches mounted, secrets by name only."""
    words = ["run", "--rm", "--ipc=host", f"--user={os.getuid()}:{os.getgid()}"]
    if terminal and not environ.get("CI"):
        words += ["--interactive", "--tty"]
    if shutil.which("nvidia-smi", path=environ.get("PATH")):
        words += ["--gpus=all"]
    words += ["--mount", _bind(root, INSIDE), "--workdir", INSIDE, "--env", "HOME=/tmp"]
    for name, (below, inside) in CACHES.items():
        cache = Path(environ.get(name) or Path(environ.get("HOME", "/nowhere"), below))
        if cache.is_dir():  # docker would make a missing one, owned by its root user
            words += ["--mount", _bind(cache.resolve(), inside), "--env", f"{name}={inside}"]
    for name in PASSED_ON:
        if name in environ:
            words += ["--env", name]
    return [*words, environ["CONTAINER"], *command]


def _bind(source: Path, target: str) -> str:
    fields = ["type=bind", f"source={source}", f"target={target}"]
    return ",".join('"' + part.replace('"', '""') + '"' if set(part) & set(',"\n') else part for part in fields)


def docker_command(
    kind: str, words: Sequence[str], root: Path, environ: Mapping[str, str], terminal: bool
) -> list[str]:
    """The argv of a Docker runner, `kind` being docker-unit or docker-functional."""
    if not environ.get("CONTAINER"):
        raise _usage(kind, "CONTAINER is not set", "it names the image that the tests run in")
    docker = shutil.which("docker", path=environ.get("PATH"))
    if docker is None:
        raise _usage(kind, "docker is not on PATH", "it runs the container")
    inner = ["bash", "scripts/run_unit.sh", *words] if kind == "docker-unit" else ["bash", _script(words, root)]
    return [docker, *docker_words(inner, root, environ, terminal)]


def _script(words: Sequence[str], root: Path) -> str:
    """The one functional script, relative to the repository; `words` may name it relative to tests/ as well."""
    if len(words) != 1:
        raise _usage("docker-functional", f"{len(words)} scripts were given", "a container runs exactly one")
    for start in (root, root / "tests"):
        path = Path(os.path.normpath(start / words[0]))
        if path.is_file() and path.is_relative_to(root):
            return str(path.relative_to(root))
    raise _usage(
        "docker-functional", f"{words[0]!r} is not a file of the repository", "the container sees nothing else"
    )


def _usage(kind: str, what: str, why: str) -> ConfigError:
    return ConfigError(what, why, USAGE[kind])


def _become(argv: list[str], root: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(root)
    os.execv(argv[0], argv)  # noqa: S606 - no shell in between is the point


def main(words: Sequence[str]) -> int:
    """`python -m surefoot_harness.runners KIND ROOT [ARGUMENTS]`: what the scripts call. Returns only on refusal."""
    kind, root, *rest = words
    try:
        if kind == "unit":
            run_tests(rest, Path(root))
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        _become(docker_command(kind, rest, Path(root), os.environ, terminal), Path(root))
    except SurefootError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 70  # unreachable: a command that started has replaced us


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
