"""The runners hand over every word as it was typed, and every exit code as it came."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.errors import ConfigError
from surefoot.harness import runners

ROOT = Path(__file__).resolve().parents[3]
ODD = [
    "two  words",
    "it's",
    'a "quote"',
    "$HOME",
    "*",
    "`date`",
    "back\\slash",
    "",
    "ünïcode",
    "new\nline",
    "-k",
    "a or b",
]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for stand-ins that write their argv and some of their environment as JSON."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "python3").symlink_to(sys.executable)
    return folder


def stand_in(tools: Path, name: str, code: int = 0) -> Path:
    record = tools / f"{name}.json"
    (tools / name).write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"facts = {{'argv': sys.argv[1:], 'cwd': os.getcwd()}}\n"
        f"open({str(record)!r}, 'w').write(json.dumps(facts))\nsys.exit({code})\n"
    )
    (tools / name).chmod(0o755)
    return record


def script(name: str, *words: str, tools: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{tools}:/bin", "HOME": str(tools), **environ}  # /bin for bash; pytest and docker only if put there
    return subprocess.run(
        ["/bin/bash", str(ROOT / "scripts" / name), *words],
        cwd=tools, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def recorded(path: Path) -> list[str]:
    return list(json.loads(path.read_text())["argv"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["tests/unit"]),
        (["maths"], ["tests/unit/maths"]),
        (["maths/test_a.py::test_b[x y]"], ["tests/unit/maths/test_a.py::test_b[x y]"]),
        (["tests/unit"], ["tests/unit"]),
        (["tests/unit/maths", "-x"], ["tests/unit/maths", "-x"]),
        (["./tests/unit/maths"], ["./tests/unit/maths"]),
        (["tests/unit_of_others"], ["tests/unit/tests/unit_of_others"]),
        (["--hf-gated"], ["tests/unit", "--hf-gated"]),
        (["--mcore-only"], ["tests/unit", "--mcore-only"]),
        (["--hf-gated", "--mcore-only"], ["tests/unit", "--hf-gated", "--mcore-only"]),
        (["-k", "a b", "tests/unit/maths"], ["-k", "a b", "tests/unit/maths"]),
        (["maths", *ODD], ["tests/unit/maths", *ODD]),
    ],
)
def test_a_first_path_is_completed_and_the_rest_is_untouched(words: list[str], expected: list[str]) -> None:
    assert runners.pytest_words(words, "tests/unit", ROOT) == expected


def test_an_absolute_path_below_the_folder_stays() -> None:
    path = str(ROOT / "tests" / "unit" / "maths")
    assert runners.pytest_words([path], "tests/unit", ROOT) == [path]


def test_the_script_gives_pytest_every_word_exactly(tools: Path) -> None:
    record = stand_in(tools, "pytest")
    done = script("run_unit.sh", "maths", *ODD, tools=tools)
    assert done.returncode == 0, done.stderr
    assert recorded(record) == ["tests/unit/maths", *ODD]
    assert json.loads(record.read_text())["cwd"] == str(ROOT)


@pytest.mark.parametrize("flags", [[], ["--hf-gated"], ["--mcore-only"], ["--hf-gated", "--mcore-only"]], ids=str)
def test_the_four_configurations_run_the_unit_folder(tools: Path, flags: list[str]) -> None:
    record = stand_in(tools, "pytest")
    assert script("run_unit.sh", *flags, tools=tools).returncode == 0
    assert recorded(record) == ["tests/unit", *flags]


HERE = [
    "tests/unit/harness/test_tables.py", "tests/unit/learner/test_chat_gated.py", "tests/unit/maths/test_logprobs_mcore.py"
]  # fmt: skip
"""A file of each kind: in no group, behind the token, Megatron's."""


@pytest.mark.parametrize(
    ("flags", "words", "code", "chosen"),
    [
        ([], [], 0, "100"),
        (["--hf-gated"], [], 0, "110"),
        (["--mcore-only"], ["needs the module megatron.core", "pip install megatron-core"], 4, "000"),
        (["--mcore-only", "1 GPU"], ["--mcore-only needs 2 GPUs, and 1 can be seen here"], 4, "000"),
        (["--mcore-only", "2 GPUs"], [], 0, "001"),
        (["--hf-gated", "--mcore-only", "2 GPUs"], [], 0, "001"),
    ],
    ids=str,
)
def test_the_configurations_work_in_this_checkout_with_the_real_pytest(
    tools: Path, flags: list[str], words: list[str], code: int, chosen: str
) -> None:
    """Only what this machine may lack is a stand-in: the modules' names, and nvidia-smi."""
    (tools / "pytest").write_text(f'#!/bin/sh\nexec {sys.executable} -m pytest "$@"\n')
    (tools / "pytest").chmod(0o755)
    gpus = [flag for flag in flags if "GPU" in flag]
    path = [str(tools / "modules")] if gpus else []
    (tools / "modules/megatron/core").mkdir(parents=True)
    (tools / "modules/megatron/core/__init__.py").write_text("")
    if gpus:
        (tools / "nvidia-smi").write_text("#!/bin/sh\n" + "echo some GPU\n" * int(gpus[0][0]))
        (tools / "nvidia-smi").chmod(0o755)
    asked = [flag for flag in flags if "GPU" not in flag]
    done = script("run_unit.sh", *HERE, *asked, "--collect-only", "-q", tools=tools, PYTHONPATH=os.pathsep.join(path))
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert all(word in said for word in words), said
    assert "".join("1" if f"{Path(name).name}::" in done.stdout else "0" for name in HERE) == chosen, said


@pytest.mark.parametrize("code", [1, 2, 5, 137])
def test_pytests_exit_code_comes_back_so_nothing_collected_is_not_a_pass(tools: Path, code: int) -> None:
    stand_in(tools, "pytest", code)
    assert script("run_unit.sh", tools=tools).returncode == code


def test_planted_runner_that_splits_words_is_seen(tools: Path, tmp_path: Path) -> None:
    """Teeth: the script with `$*` where it has "$@" hands over other words."""
    record = stand_in(tools, "pytest")
    copy = tmp_path / "scripts" / "run_unit.sh"
    copy.parent.mkdir()
    text = (ROOT / "scripts" / "run_unit.sh").read_text().replace("here=${BASH_SOURCE[0]%/*}", f"here={ROOT}/scripts")
    copy.write_text(text.replace('"$@"', "$*"))
    subprocess.run(["/bin/bash", str(copy), "maths", *ODD], cwd=tools, env={"PATH": f"{tools}:/bin"}, check=True)
    assert recorded(record) != ["tests/unit/maths", *ODD]


def test_without_pytest_the_message_says_how_to_get_it(tools: Path) -> None:
    done = script("run_unit.sh", tools=tools)
    assert done.returncode == 2
    assert "pytest is not on PATH" in done.stderr
    assert "pip install pytest" in done.stderr


def test_the_unit_folder_can_be_named_and_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder tests/unit"):
        runners.unit_folder(tmp_path)
    (tmp_path / "checks").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.surefoot]\nunit_folder = "checks"\n')
    assert runners.unit_folder(tmp_path) == "checks"
    (tmp_path / "pyproject.toml").write_text("[tool.surefoot\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        runners.unit_folder(tmp_path)


# -- docker ------------------------------------------------------------------------------------------------------------


def test_docker_gets_the_repository_the_caches_and_every_word(tools: Path) -> None:
    record = stand_in(tools, "docker")
    (tools / ".cache" / "huggingface").mkdir(parents=True)
    done = script("run_unit_in_docker.sh", "maths", *ODD, tools=tools, CONTAINER="image:tag")
    assert done.returncode == 0, done.stderr
    words = recorded(record)
    place = words.index("image:tag")
    assert words[place + 1 :] == ["bash", "scripts/run_unit.sh", "maths", *ODD]
    assert f"type=bind,source={ROOT},target=/workspace" in words[:place]
    assert f"type=bind,source={tools}/.cache/huggingface,target=/cache/huggingface" in words[:place]
    assert not any(".cache/pip" in word for word in words), "a cache that is not there is not mounted"
    assert words[words.index("--workdir") + 1] == "/workspace"


def test_a_token_is_named_and_never_spelled_out(tools: Path) -> None:
    record = stand_in(tools, "docker")
    done = script(
        "run_unit_in_docker.sh", tools=tools, CONTAINER="image", HF_TOKEN="hf_secret", WANDB_API_KEY="wb_secret"
    )
    words = recorded(record)
    assert {words[i + 1] for i, word in enumerate(words) if word == "--env"} >= {"HF_TOKEN", "WANDB_API_KEY"}
    assert "secret" not in " ".join(words) + done.stdout + done.stderr
    assert "GITHUB_TOKEN" not in words, "what is not set is not passed"


@pytest.mark.parametrize(
    ("terminal", "environ", "interactive"),
    [(True, {}, True), (True, {"CI": "1"}, False), (False, {}, False), (True, {"CI": ""}, True)],
)
def test_interactive_only_with_a_terminal_and_outside_ci(
    terminal: bool, environ: dict[str, str], interactive: bool
) -> None:
    words = runners.docker_words(["x"], ROOT, {"CONTAINER": "image", "PATH": "", **environ}, terminal)
    assert ("--tty" in words) is interactive
    assert ("--interactive" in words) is interactive


def test_a_folder_with_commas_and_quotes_is_still_one_mount(tmp_path: Path) -> None:
    folder = tmp_path / 'a,b "c"'
    words = runners.docker_words([], folder, {"CONTAINER": "image", "PATH": ""}, terminal=False)
    mount = words[words.index("--mount") + 1]
    import csv

    assert next(csv.reader([mount])) == ["type=bind", f"source={folder}", "target=/workspace"]


@pytest.mark.parametrize("name", ["run_unit_in_docker.sh", "run_functional_in_docker.sh"])
@pytest.mark.parametrize(("container", "docker"), [("", True), ("image", False)], ids=["no CONTAINER", "no docker"])
def test_what_is_missing_gives_the_usage_and_2(tools: Path, name: str, container: str, docker: bool) -> None:
    if docker:
        stand_in(tools, "docker")
    done = script(name, "x", tools=tools, **({"CONTAINER": container} if container else {}))
    assert done.returncode == 2
    assert f"usage: CONTAINER=IMAGE scripts/{name}" in done.stderr
    assert done.stdout == ""
    assert not (tools / "docker.json").exists()


@pytest.mark.parametrize("code", [1, 5, 125, 137])
def test_dockers_exit_code_comes_back(tools: Path, code: int) -> None:
    stand_in(tools, "docker", code)
    assert script("run_unit_in_docker.sh", tools=tools, CONTAINER="image").returncode == code


@pytest.mark.parametrize("words", [[], ["a.sh", "b.sh"], ["no/such.sh"], ["../outside.sh"]], ids=str)
def test_a_functional_run_takes_exactly_one_script_of_the_repository(tools: Path, words: list[str]) -> None:
    stand_in(tools, "docker")
    done = script("run_functional_in_docker.sh", *words, tools=tools, CONTAINER="image")
    assert done.returncode == 2
    assert "usage: CONTAINER=IMAGE scripts/run_functional_in_docker.sh SCRIPT" in done.stderr
    assert not (tools / "docker.json").exists()


@pytest.mark.parametrize("form", ["tests/functional/a b.sh", "functional/a b.sh", "ABSOLUTE"])
def test_a_script_may_be_named_from_the_root_or_from_tests(tmp_path: Path, form: str) -> None:
    path = tmp_path / "tests" / "functional" / "a b.sh"
    path.parent.mkdir(parents=True)
    path.write_text("true\n")
    tools = tmp_path / "bin"
    tools.mkdir()
    stand_in(tools, "docker")
    environ = {"CONTAINER": "image", "PATH": str(tools)}
    word = str(path) if form == "ABSOLUTE" else form
    argv = runners.docker_command("docker-functional", [word], tmp_path, environ, terminal=False)
    assert argv[-3:] == ["image", "bash", "tests/functional/a b.sh"]


def test_surefoot_test_hands_its_words_over_unchanged(tools: Path, tmp_path: Path) -> None:
    record = stand_in(tools, "pytest", 5)
    (tmp_path / "project" / "tests" / "unit").mkdir(parents=True)
    words = ["-nh", "--fail-under", "two  words", "--help", "-k", "a or b"]
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "test", *words],
        cwd=tmp_path / "project", env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert recorded(record) == ["tests/unit", *words]
