"""The recipes for clusters hold: the manifest fits its schema, the batch script does what its comments say."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from repo_tree import ROOT

from surefoot.config.load import load_config

KUBERAY = ROOT / "examples" / "kuberay"
SLURM = ROOT / "examples" / "slurm" / "surefoot_ray.sh"
SCHEMA = json.loads((KUBERAY / "rayjob.schema.json").read_text(encoding="utf-8"))
MANIFEST = yaml.safe_load((KUBERAY / "rayjob.yaml").read_text(encoding="utf-8"))
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
KNOWN = set(
    "$schema $defs $ref title description type required additionalProperties properties items enum const pattern "
    "minimum minLength minItems".split()
)


def problems(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """What is wrong with `value`, by the part of JSON Schema that ours uses; a word it does not know is a problem."""
    if "$ref" in schema:
        yield from problems(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], where)
    yield from (f"{where}: the schema says {word!r}, which nobody checks" for word in schema.keys() - KNOWN)
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{where}: {value!r} is no {kind}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{where}: {value!r} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{where}: {value!r} does not look like {schema['pattern']}"
    if value is not None and "minimum" in schema and value < schema["minimum"]:
        yield f"{where}: {value!r} is below {schema['minimum']}"
    if isinstance(value, str | list) and len(value) < schema.get("minLength", schema.get("minItems", 0)):
        yield f"{where}: {value!r} is too short"
    for index, each in enumerate(value) if isinstance(value, list) else ():
        yield from problems(each, schema.get("items", {}), f"{where}[{index}]")
    if isinstance(value, dict):
        yield from _of_object(value, schema, where)


def _of_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> Iterator[str]:
    yield from (f"{where}: {name} is missing" for name in schema.get("required", []) if name not in value)
    others = schema.get("additionalProperties", True)
    for name, each in value.items():
        inner = schema.get("properties", {}).get(name, others)
        if inner is False:
            yield f"{where}: there is no field {name}"
        elif isinstance(inner, dict):
            yield from problems(each, inner, f"{where}.{name}")


def test_the_manifest_fits_the_schema() -> None:
    assert list(problems(MANIFEST, SCHEMA)) == []


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("spec.rayClusterSpec.authOptions", None, "authOptions is missing"),
        ("spec.rayClusterSpec.authOptions.mode", "disabled", "'disabled' is not 'token'"),
        ("spec.rayClusterSpec.headGroupSpec.serviceType", "LoadBalancer", "is not 'ClusterIP'"),
        ("spec.entryPoint", "x", "no field entryPoint"),
        ("spec.entrypoint", "", "too short"),
        ("spec.backoffLimit", "3", "is no integer"),
        ("spec.backoffLimit", True, "is no integer"),
        ("spec.backoffLimit", -1, "below 0"),
        ("spec.rayClusterSpec.rayVersion", 2.6, "is no string"),
        ("spec.rayClusterSpec.workerGroupSpecs.0.groupName", "Engines_1", "does not look like"),
        ("spec.rayClusterSpec.workerGroupSpecs.0.template.spec.containers.0.resources.limits.cpu", 16, "no string"),
        ("spec.rayClusterSpec.workerGroupSpecs.0.template.spec.containers", [], "too short"),
        ("spec.submissionMode", "Http", "none of"),
        ("apiVersion", "ray.io/v1alpha1", "is not 'ray.io/v1'"),
    ],
)
def test_planted_mistake_in_the_manifest_is_seen(path: str, value: Any, complaint: str) -> None:
    broken = copy.deepcopy(MANIFEST)
    *way, last = path.split(".")
    place = broken
    for word in way:
        place = place[int(word) if isinstance(place, list) else word]
    if value is None:
        del place[last]
    else:
        place[last] = value
    assert complaint in "\n".join(problems(broken, SCHEMA))


def test_every_mount_has_a_volume_and_shared_memory_is_roomy() -> None:
    cluster = MANIFEST["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_overrides_in_the_recipes_are_real_keys(tmp_path: Path) -> None:
    text = MANIFEST["spec"]["entrypoint"] + SLURM.read_text(encoding="utf-8")
    words = re.findall(
        r"\b((?:runtime\.)?[a-z_]+)=(?:127\.0\.0\.1:6379|/runs/surefoot|\$run|127\.0\.0\.1:\$port)", text
    )
    assert set(words) == {"output_dir", "runtime.address"}
    config = load_config(None, ["runtime.kind=ray", "runtime.address=127.0.0.1:6379", "output_dir=/runs/x"]).config
    assert config.runtime.address == "127.0.0.1:6379"


# -- the batch script, with stand-ins for Slurm, Ray and surefoot ------------------------------------

FAKE_RAY = """
import os, types
calls = []
util = types.SimpleNamespace(get_node_ip_address=lambda: "10.1.2.3")
def is_initialized(): return bool(calls)
def init(**how):
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64, "the token is set"
    calls.append(how)
def nodes():
    log = open(os.environ["LOG"]).read()
    return [{"Alive": f"\\n{name} token" in log} for name in ("ray", "srun")]
"""
STANDIN = """#!/bin/sh
echo "{name} $*" >> "$LOG"
echo "{name} token ${{RAY_AUTH_MODE:-none}} ${{#RAY_AUTH_TOKEN}}" >> "$LOG"
{body}
"""
BODIES = {
    "scontrol": "printf 'node1\\nnode2\\n'",
    "srun": "exit 0",
    "ray": "exit 0",
    "surefoot": 'trap "echo saved >> $LOG; exit 75" TERM\necho up >> "$LOG"\n[ -n "$HOLD" ] || exit 0\n'
    "while :; do sleep 0.05; done",
}


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """An environment in which every command of the script is one of ours; what was called is in $LOG."""
    tools, package = tmp_path / "bin", tmp_path / "lib" / "ray"
    tools.mkdir()
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_RAY)
    for name, body in BODIES.items():
        (tools / name).write_text(STANDIN.format(name=name, body=body))
        (tools / name).chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    (tmp_path / "log").touch()
    return {
        "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path / "lib"), "LOG": str(tmp_path / "log"),
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_ON_NODE": "4", "SLURM_GPUS_ON_NODE": "8", "HOLD": "",
    }  # fmt: skip


def submit(site: dict[str, str], *words: str) -> subprocess.Popen[str]:
    command = ["bash", str(SLURM), *words]
    return subprocess.Popen(command, env=site, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def log(site: dict[str, str]) -> str:
    return Path(site["LOG"]).read_text()


def test_bash_finds_no_mistake_in_the_script() -> None:
    done = subprocess.run(["bash", "-n", str(SLURM)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_new_run_starts_with_every_node_and_the_token_in_the_environment(
    site: dict[str, str], tmp_path: Path
) -> None:
    job = submit(site, "my run.toml", str(tmp_path / "a run"))
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 0, text
    said = log(site)
    assert f"surefoot train my run.toml output_dir={tmp_path}/a run runtime.address=127.0.0.1:6379" in said
    assert "ray start --head --port=6379 --num-cpus=4 --num-gpus=8" in said
    assert "srun --nodes=1 --ntasks-per-node=1 --exclude=node1" in said
    assert [name for name in ("ray", "srun", "surefoot") if f"\n{name} token token 64\n" not in said] == []
    assert not re.search(r"[0-9a-f]{64}", said), "the token is on no command line"


def test_a_run_that_is_there_is_resumed(site: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    job = submit(site, "run.toml", str(tmp_path))
    job.communicate(timeout=60)
    assert f"surefoot train --resume {tmp_path}\n" in log(site)


def test_a_term_reaches_the_driver_which_saves_and_its_code_is_the_jobs(site: dict[str, str], tmp_path: Path) -> None:
    job = submit(site | {"HOLD": "1"}, "run.toml", str(tmp_path / "run"))
    assert job.stdout is not None, "it is a pipe"
    while "the driver is process" not in (line := job.stdout.readline()):
        assert line, "the script ended"
    while "\nup\n" not in log(site):
        assert job.poll() is None, "the script ended"
    job.send_signal(signal.SIGTERM)
    text, _ = job.communicate(timeout=60)
    assert (job.returncode, "saved" in log(site)) == (75, True), text


def test_wrong_usage_is_told_with_2(site: dict[str, str]) -> None:
    job = submit(site, "run.toml")
    text, _ = job.communicate(timeout=60)
    assert (job.returncode, "usage: sbatch" in text) == (2, True)
