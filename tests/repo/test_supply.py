"""What we install and what we release: files by their hashes, a pinned build backend, and a list of what is inside."""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lock_core
import pytest
import sbom
from repo_tree import ROOT

CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
LOCK = lock_core.LOCK.read_text(encoding="utf-8")
ZEROS = "0" * 64
LOCKED = "--requirement requirements-core.lock"


def without(name: str, text: str, keep: str = "") -> str:
    """The lock without one of its entries, or with only a part of it."""
    return re.sub(rf"^{name}==.*?(?=^\w)", keep, text, flags=re.DOTALL | re.MULTILINE)


def test_the_lock_is_the_core_set_of_the_tested_versions() -> None:
    assert list(lock_core.problems(LOCK, CONSTRAINTS, lock_core.core_names())) == []


@pytest.mark.parametrize(
    ("planted", "complaint"),
    [
        (lambda text: without("numpy", text), "numpy is core and not in the lock"),
        (lambda text: text.replace("numpy==", "numpy==0."), "numpy is 0."),
        (lambda text: f"{text}left-pad==1.0 --hash=sha256:{ZEROS}\n", "left-pad is in the lock and not core"),
        (lambda text: without("idna", text, "idna==3.20\n"), "idna has no hash"),
    ],
    ids=["missing", "other version", "stranger", "no hash"],
)
def test_planted_lock_that_says_something_else_is_caught(planted: Callable[[str], str], complaint: str) -> None:
    found = list(lock_core.problems(planted(LOCK), CONSTRAINTS, lock_core.core_names()))
    assert any(complaint in line for line in found), found


@pytest.mark.parametrize("line", [f"numpy>=2 --hash=sha256:{ZEROS}", "numpy==2.0 --hash=md5:" + "0" * 32])
def test_a_line_that_is_no_pin_with_hashes_is_refused(line: str) -> None:
    with pytest.raises(lock_core.LockError, match="no line of a lock"):
        lock_core.locked(line)


def test_the_lock_holds_wheels_for_the_pythons_and_platforms_that_we_name_and_no_others() -> None:
    good = [
        "idna-3.20-py3-none-any.whl",
        "x-1.0-cp310-abi3-manylinux_2_28_aarch64.whl",
        "x-1.0+cpu-cp311-cp311-linux_x86_64.whl",
    ]
    bad = ["x-1.0.tar.gz", "x-1.0-cp310-cp310-linux_x86_64.whl", "x-1.0-cp313-cp313t-linux_x86_64.whl",
           "x-1.0-cp311-cp311-win_amd64.whl", "x-1.1-py3-none-any.whl", "x.whl"]  # fmt: skip
    assert [lock_core.fits(file, "3.20" if "idna" in file else "1.0") for file in good] == [True] * 3
    assert [lock_core.fits(file, "1.0") for file in bad] == [False] * 6


def test_the_build_backend_is_the_one_whose_hash_is_locked() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    version, hashes = lock_core.locked(LOCK)["hatchling"]
    assert required == [f"hatchling=={version}"]
    assert hashes


def make_setup(*words: str) -> list[str]:
    done = subprocess.run(["make", "-nB", "setup", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def line_with(words: str, lines: list[str]) -> int:
    return next(number for number, line in enumerate(lines) if words in line)


def test_the_set_up_checks_hashes_and_builds_with_what_it_checked() -> None:
    lines = make_setup()
    torch, core, ours = (line_with(words, lines) for words in (".venv/torch.lock --no-index", LOCKED, " -e ."))
    assert torch < core < ours
    assert all("--require-hashes --only-binary :all: --no-deps" in lines[number] for number in (torch, core))
    assert "--no-build-isolation" in lines[ours]
    off = "\n".join(make_setup("LOCK="))
    assert "--require-hashes" not in off
    assert "--no-build-isolation" not in off


def test_torch_is_held_to_the_hashes_of_the_lock_and_the_rest_of_the_lock_is_not_asked_for_it() -> None:
    lines = make_setup()
    words = shlex.split(lines[line_with("sed -n '/^torch", lines)].partition(" >")[0])
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert lock_core.locked(done.stdout) == {"torch": lock_core.locked(LOCK)["torch"]}


# -- a file that is not what the lock says, and the real pip ------------------------------------------------


def wheel(folder: Path, body: str) -> Path:
    """The smallest wheel there is."""
    folder.mkdir(exist_ok=True)
    path = folder / "pebble_demo-1.0-py3-none-any.whl"
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: pebble-demo\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "pebble_demo.py,,\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pebble_demo.py", body)
        for name, text in about.items():
            archive.writestr(f"pebble_demo-1.0.dist-info/{name}", text)
    return path


def install(tmp_path: Path, lock: str, *, trusting: bool = False) -> subprocess.CompletedProcess[str]:
    """With the words of `make setup`, from a folder and into one; trusting, without the one that asks for hashes."""
    (tmp_path / "lock").write_text(lock)
    line = next(text for text in make_setup() if LOCKED in text)
    words = shlex.split(line.partition(" 2>&1")[0])
    unwanted = {"requirements-core.lock", *(["--require-hashes"] if trusting else [])}
    words = [word for word in words[words.index("-m") :] if word not in unwanted]
    where = ["--no-index", "--find-links", str(tmp_path / "index"), "--target", str(tmp_path / "site")]
    command = [sys.executable, *words, str(tmp_path / "lock"), *where]
    env = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_a_tampered_wheel_is_refused(tmp_path: Path) -> None:
    good = hashlib.sha256(wheel(tmp_path / "index", "answer = 42\n").read_bytes()).hexdigest()
    lock = f"pebble-demo==1.0 \\\n    --hash=sha256:{good}\n"
    done = install(tmp_path, lock)
    assert done.returncode == 0, done.stderr
    (tmp_path / "site/pebble_demo.py").unlink()
    wheel(tmp_path / "index", "answer = 43\n")
    done = install(tmp_path, lock)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "site/pebble_demo.py").exists()


def test_planted_lock_without_hashes_lets_it_in_and_is_refused_by_our_words(tmp_path: Path) -> None:
    wheel(tmp_path / "index", "answer = 43\n")
    done = install(tmp_path, "pebble-demo==1.0\n")
    assert done.returncode != 0
    assert "Hashes are required" in done.stderr
    assert install(tmp_path, "pebble-demo==1.0\n", trusting=True).returncode == 0
    assert (tmp_path / "site/pebble_demo.py").read_text() == "answer = 43\n"


# -- the bill of materials ----------------------------------------------------------------------------------

TYPES = set("application framework library container platform operating-system device file firmware data".split())


def wrong_with(bill: dict[str, Any]) -> Iterator[str]:
    """What CycloneDX 1.6 requires of a document, and what we do: everything has a purl, and references resolve."""
    if (bill.get("bomFormat"), bill.get("specVersion")) != ("CycloneDX", "1.6"):
        yield "bomFormat and specVersion"
    if not re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill.get("serialNumber", "")):
        yield "serialNumber"
    if not isinstance(bill.get("version"), int) or bill["version"] < 1:
        yield "version"
    if datetime.datetime.fromisoformat(bill["metadata"]["timestamp"]).tzinfo is None:
        yield "timestamp"
    everything = [bill["metadata"]["component"], *bill["components"]]
    for each in everything:
        yield from (f"{each.get('name')}: {what}" for what in _wrong_with_component(each))
    refs = [each.get("bom-ref") for each in everything]
    if len(set(refs)) != len(refs):
        yield "bom-refs that are not unique"
    named = {ref for each in bill["dependencies"] for ref in (each["ref"], *each["dependsOn"])}
    if named != set(refs):
        yield f"dependencies of {named ^ set(refs)}"


def _wrong_with_component(each: dict[str, Any]) -> Iterator[str]:
    if each.get("type") not in TYPES or not each.get("name") or not each.get("version"):
        yield "type, name, version"
    if each.get("purl") != f"pkg:pypi/{each.get('name')}@{each.get('version')}":
        yield "purl"
    if each.get("scope", "required") not in ("required", "optional", "excluded"):
        yield "scope"
    files = each.get("externalReferences", [])
    hashes = [*each.get("hashes", []), *(row for file in files for row in file["hashes"])]
    if not hashes or any(row["alg"] != "SHA-256" or not re.fullmatch("[0-9a-f]{64}", row["content"]) for row in hashes):
        yield "hashes"
    licences = each.get("licenses", [])
    names = [row["license"].get("name") or row["license"].get("id") for row in licences if "license" in row]
    if sum("expression" in row for row in licences) + bool(names) > 1 or not all(names):
        yield "licenses: one expression, or licences with names"


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("dist")
    wheel(folder, "x = 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1767225600")
        patch.setattr(sys, "argv", ["sbom.py", str(folder)])
        sbom.main()
        text = next(folder.glob("*.cdx.json")).read_text()
        assert text == json.dumps(sbom.bill(folder), indent=2) + "\n", "the same tree gives the same file"
    return dict(json.loads(text))


def test_the_bill_of_materials_is_cyclonedx_and_lists_the_lock(bill: dict[str, Any]) -> None:
    assert list(wrong_with(bill)) == []
    locked = lock_core.locked(LOCK)
    assert {each["name"]: each["version"] for each in bill["components"]} == {n: v for n, (v, _) in locked.items()}
    scopes = {each["name"]: each["scope"] for each in bill["components"]}
    assert (scopes["torch"], scopes["packaging"], scopes["hatchling"]) == ("required", "required", "excluded")
    ours = next(each for each in bill["dependencies"] if each["ref"] == bill["metadata"]["component"]["bom-ref"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert len(ours["dependsOn"]) == len(project["dependencies"])
    assert all("licenses" in each for each in bill["components"] if each["scope"] == "required")


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        (lambda b: b.pop("bomFormat"), "bomFormat"),
        (lambda b: b["components"][3].pop("type"), "type, name"),
        (lambda b: b["components"][3]["hashes"][0].update(content="abc"), "hashes"),
        (lambda b: b["components"][3].update(purl="pkg:npm/x@1"), "purl"),
        (lambda b: b["components"].append(b["components"][3]), "unique"),
        (lambda b: b["components"].pop(3), "dependencies"),
        (lambda b: b["components"][3].update(licenses=[{"expression": "MIT"}, {"license": {"name": "x"}}]), "licenses"),
    ],
)
def test_planted_fault_in_a_bill_is_caught(plant: Callable[[Any], Any], complaint: str, bill: dict[str, Any]) -> None:
    broken = copy.deepcopy(bill)
    plant(broken)
    assert any(complaint in line for line in wrong_with(broken))


@pytest.mark.nightly
def test_a_release_has_a_wheel_a_source_archive_and_their_bill(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="make setup installs it")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), "-t", "sdist", "-t", "wheel"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    subprocess.run([sys.executable, ROOT / "scripts/sbom.py", str(tmp_path)], check=True, capture_output=True)
    made = json.loads(next(tmp_path.glob("*.cdx.json")).read_text())
    assert list(wrong_with(made)) == []
    files = {row["url"]: row["hashes"][0]["content"] for row in made["metadata"]["component"]["externalReferences"]}
    assert {name.rpartition(".")[2] for name in files} == {"whl", "gz"}
    assert all(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest for name, digest in files.items())
    with zipfile.ZipFile(tmp_path / next(name for name in files if name.endswith(".whl"))) as archive:
        assert "surefoot/system/git.py" in archive.namelist()


# -- what we say about it -----------------------------------------------------------------------------------


def test_the_security_page_has_its_parts_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    parts = ["Reporting", "Who is assumed to do what", "What is promised", "What is not promised"]
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == parts
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
