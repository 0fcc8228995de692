"""A run folder that a stranger made: a thousand ways to spoil one, and what no command may do with any of them.

    mutate(scene, number)     spoils the folder in the way of that number, always the same
    look(scene)               status, report, ledger, check, eval, resume, one after the other, each in a process
    scene.trouble(looks)      what a command did that it may not: ran code, hung, read or wrote elsewhere, crashed

Read next: `test_fuzzed_run_folder.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
import tomllib
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kill_kit import Warm

from surefoot.storage.files import MANIFEST, Journal, manifest_text, read_manifest
from surefoot.system import journal as frames

CANARY = "CanaryTextOfAnotherFile"
COMMANDS = (
    ["status", "run"], ["report", "run"], ["ledger", "run", "--items", "trained"],
    ["check", "run", 'max(data["reward"]) >= 0'], ["eval", "run", "eval_temperature=0.5"], ["train", "--resume", "run"],
)  # fmt: skip
OURS = {0, 1, 2, 3, 4, 5, 74, 75, 76, 77, 78, 79}
"""Exit codes that mean something; 70 is a bug of ours, less than 0 a signal."""
MEMORY_MB = 192
"""How much more one command may hold than the process it was forked from, model and optimiser included."""
HUGE = 256 << 20
DEADLINE_S = 60.0
LEDGER = "journal/ledger.journal"
TEXTS = ("config.toml", "environment.json", "metrics.jsonl", "status.json", "verdict.json", "timeline.jsonl", "lock")


@dataclass(frozen=True)
class Look:
    """One command, and how it ended."""

    argv: list[str]
    code: int | None
    """None when it did not end in time."""
    said: str
    more_mb: float
    """Memory at its peak, beyond that of the process before."""


@dataclass(frozen=True)
class Scene:
    """A run folder in the place where it was made, and everything around it that has to stay as it is."""

    place: Path
    """The folder that the commands are called in; the run is `run` in it."""
    outside: Path
    """Files of somebody else, with the canary in them."""

    @property
    def run(self) -> Path:
        return self.place / "run"

    @property
    def ran(self) -> Path:
        """There only if code of the run folder was run."""
        return self.outside.with_name("RAN")

    def evil(self) -> str:
        """Python that leaves a trace when it is run."""
        return (
            f"open({str(self.ran)!r}, 'a').write('ran')\n"
            "def f(prompts, completions, **_):\n    return [1.0] * len(completions)\n"
            "class World:\n    def reset(self, **row):\n        return None\n    def get_reward(self):\n        return 1.0\n"
        )

    def trouble(self, looks: list[Look], before: dict[str, str]) -> list[str]:
        """Everything that must not be, in words."""
        found = ["code of the folder was run"] if self.ran.exists() else []
        for look in looks:
            name = " ".join(look.argv[:2])
            if look.code is None:
                found.append(f"{name} did not end")
            elif look.code not in OURS:
                found.append(f"{name} ended with {look.code}: {look.said[-600:]}")
            if "Traceback (most" in look.said or "this is a bug in surefoot" in look.said:
                found.append(f"{name} crashed: {look.said[-600:]}")
            if CANARY in look.said:
                found.append(f"{name} showed another file's text: {look.said[-600:]}")
            if strange := {c for c in look.said if unicodedata.category(c) == "Cc" and c not in "\n\t\r"}:
                found.append(f"{name} printed {strange}")
            if look.more_mb > MEMORY_MB:
                found.append(f"{name} took {look.more_mb:.0f} MB")
        page = self.run / "report.html"
        if page.is_file() and not page.is_symlink() and CANARY in page.read_text(errors="replace"):
            found.append("the page shows another file's text")
        if digests(self.outside) != before:
            found.append("a file outside was changed")
        return found


def digests(folder: Path) -> dict[str, str]:
    """Every file below, by its contents."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def make_outside(run: Path, outside: Path) -> None:
    """Another run like this one, with the canary in every text of it, and a file of plain text."""
    shutil.copytree(run, outside / "run", symlinks=True)
    (outside / "plain.txt").write_text(f"{CANARY}\n" * 3)
    (outside / "rows.jsonl").write_text(json.dumps({"prompt": CANARY, "answer": CANARY}) + "\n")
    for path in (outside / "run").rglob("*"):
        if path.suffix in (".json", ".jsonl", ".toml") and path.is_file():
            text = path.read_text()
            path.write_text(f"# {CANARY}\n{text}" if path.suffix == ".toml" else text.replace('": "', f'": "{CANARY} '))


def look(warm: Warm, scene: Scene, *, planted: str = "", deadline_s: float = DEADLINE_S, only: str = "") -> list[Look]:
    """Every command on the folder, in forks of one warm process."""
    order = scene.place / "order.json"
    commands = [argv for argv in COMMANDS if not only or argv[0] == only]
    order.write_text(json.dumps({"commands": commands, "deadline_s": deadline_s, "planted": planted}))
    ended = warm.run("version", cwd=scene.place, before=[("elsewhere", "run_folder_plants", "look_at", order)])
    assert ended.code == 0, ended.said
    return [Look(**each) for each in json.loads((scene.place / "looks.json").read_text())]


# -- a thousand mutations ---------------------------------------------------------------------------


def mutate(scene: Scene, number: int) -> str:
    """Spoil the folder; says how."""
    dice = random.Random(f"run folder {number}")
    kind = KINDS[number % len(KINDS)]
    return f"{kind.__name__}: {kind(scene, dice)}"


def _files(scene: Scene, *suffixes: str) -> list[Path]:
    found = [path for path in sorted(scene.run.rglob("*")) if path.is_file() and not path.is_symlink()]
    return [path for path in found if not suffixes or path.suffix in suffixes]


def _pick(scene: Scene, dice: random.Random, *suffixes: str) -> Path:
    """Any file, the ones at the top more often: those every command reads."""
    found = _files(scene, *suffixes)
    top = [path for path in found if path.parent in (scene.run, scene.run / "journal")]
    return dice.choice(top if top and dice.random() < 0.6 else found)


def _name(scene: Scene, path: Path) -> str:
    return str(path.relative_to(scene.run))


def link_to_a_file(scene: Scene, dice: random.Random) -> str:
    path = _pick(scene, dice)
    twin = scene.outside / "run" / path.relative_to(scene.run)
    target = twin if twin.exists() and dice.random() < 0.7 else scene.outside / "plain.txt"
    path.unlink()
    path.symlink_to(target if dice.random() < 0.7 else os.path.relpath(target, path.parent))
    return _name(scene, path)


def link_to_a_folder(scene: Scene, dice: random.Random) -> str:
    folder = dice.choice([path for path in sorted(scene.run.rglob("*")) if path.is_dir()])
    twin = scene.outside / "run" / folder.relative_to(scene.run)
    shutil.rmtree(folder)
    folder.symlink_to(twin)
    return _name(scene, folder)


def pipe(scene: Scene, dice: random.Random) -> str:
    path = _pick(scene, dice) if dice.random() < 0.8 else scene.run / dice.choice(TEXTS)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return _name(scene, path)


def unix_socket(scene: Scene, dice: random.Random) -> str:
    path = scene.run / dice.choice(TEXTS)
    path.unlink(missing_ok=True)
    here = os.getcwd()
    os.chdir(path.parent)  # an address may have a hundred bytes only
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path.name)
    finally:
        os.chdir(here)
    return _name(scene, path)


def folder_for_a_file(scene: Scene, dice: random.Random) -> str:
    path = _pick(scene, dice)
    path.unlink()
    path.mkdir()
    (path / "inner").write_text("x")
    return _name(scene, path)


def file_for_a_folder(scene: Scene, dice: random.Random) -> str:
    folder = dice.choice([path for path in sorted(scene.run.rglob("*")) if path.is_dir()])
    shutil.rmtree(folder)
    folder.write_text("x")
    return _name(scene, folder)


def huge_file(scene: Scene, dice: random.Random) -> str:
    path = scene.run / dice.choice([name for name in TEXTS if (scene.run / name).exists()])
    with path.open("r+b") as file:
        file.seek(0 if dice.random() < 0.5 else 1 << 16)
        file.truncate(HUGE)
    return _name(scene, path)


def huge_line(scene: Scene, dice: random.Random) -> str:
    path = _pick(scene, dice, ".jsonl", ".json", ".toml")
    line = dice.choice([b'{"step": ' + b"9" * (3 << 20) + b"}\n", b"[" * (2 << 20) + b"\n", b'"' + b"x" * (3 << 20)])
    path.write_bytes(line + path.read_bytes() if dice.random() < 0.5 else path.read_bytes() + line)
    return _name(scene, path)


def changed_bytes(scene: Scene, dice: random.Random) -> str:
    path = _pick(scene, dice)
    data = bytearray(path.read_bytes())
    for _ in range(dice.choice([1, 1, 3, 50])):
        if data:
            data[dice.randrange(len(data))] = dice.randrange(256)
    path.write_bytes(data)
    return _name(scene, path)


def cut_or_grown(scene: Scene, dice: random.Random) -> str:
    path = _pick(scene, dice)
    data = path.read_bytes()
    at = dice.randrange(len(data) + 1)
    path.write_bytes(dice.choice([b"", data[:at], data + data, data[:at] + dice.randbytes(40) + data[at:], b"\0" * 64]))
    return _name(scene, path)


def hostile_json(scene: Scene, dice: random.Random) -> str:
    """One value of one JSON file is of another kind, or leads elsewhere."""
    path = _pick(scene, dice, ".json", ".jsonl")
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    at = dice.randrange(len(lines)) if lines else 0
    try:
        value = json.loads(lines[at])
    except (ValueError, IndexError):
        return f"{_name(scene, path)}: left as it is"
    where = _replace(value, scene, dice)
    lines[at] = json.dumps(value, indent=None if path.suffix == ".jsonl" else 2)
    path.write_text("\n".join(lines) + "\n")
    if path.name == MANIFEST or "checkpoints" in path.parts:
        _forge_manifest(path)
    return f"{_name(scene, path)}: {where}"


def _replace(value: Any, scene: Scene, dice: random.Random) -> str:
    """Change one place in nested data."""
    names: list[str] = []
    while isinstance(value, dict | list) and value:
        key = dice.choice(list(value)) if isinstance(value, dict) else dice.randrange(len(value))
        names.append(str(key))
        if isinstance(value[key], dict | list) and value[key] and dice.random() < 0.7:
            value = value[key]
            continue
        if isinstance(value, dict) and dice.random() < 0.15:
            del value[key]
        else:
            value[key] = _hostile(scene, dice)
        break
    return ".".join(names)[:200]


def _hostile(scene: Scene, dice: random.Random) -> Any:
    deep: Any = "x"
    for _ in range(60):
        deep = [deep]
    return dice.choice([
        None, True, -1, 10**18, 1e308, 10**400, "", "0", [], {}, deep, [None], {"a": {"b": 1}}, "\x1b[31mred\x07", "\u202e",
        "../../outside/plain.txt", str(scene.outside / "plain.txt"), "/dev/zero", "/proc/self/environ", "a\0b", "x" * 5000,
    ])  # fmt: skip


def _forge_manifest(path: Path) -> None:
    """The list of a checkpoint says what is there now, as it would if its maker had meant it."""
    checkpoint = next(each for each in path.parents if each.name.startswith("step_"))
    if path.name == MANIFEST:
        return
    try:
        facts = read_manifest(checkpoint).facts
    except Exception:
        return
    files = [each for each in sorted(checkpoint.rglob("*")) if each.is_file() and each.name != MANIFEST]
    listed = {
        each.relative_to(checkpoint).as_posix(): {
            "size": each.stat().st_size, "sha256": hashlib.sha256(each.read_bytes()).hexdigest()
        }
        for each in files
    }  # fmt: skip
    (checkpoint / MANIFEST).write_text(manifest_text(facts, listed))


def edited_config(scene: Scene, dice: random.Random) -> str:
    """The config names code of the folder; the journal knows another config."""
    return _point_config_at_code(scene, dice)


def forged_config(scene: Scene, dice: random.Random) -> str:
    """The same, and the journal says that this was the config all the time."""
    what = _point_config_at_code(scene, dice)
    forge_journal(scene.run)
    return what


def config_without_journal(scene: Scene, dice: random.Random) -> str:
    """The same, and nobody knows what the config was."""
    what = _point_config_at_code(scene, dice)
    (scene.run / LEDGER).unlink()
    if dice.random() < 0.5:
        shutil.rmtree(scene.run / "checkpoints")
        (scene.run / "checkpoints").mkdir()
    return what


def _point_config_at_code(scene: Scene, dice: random.Random) -> str:
    forms = ["evil.py", str(scene.run / "evil.py"), str(scene.run / "logs" / ".." / "evil.py"), "./logs/evil.py"]
    forms += [str(scene.place / "link.py"), str(scene.place / "by_link" / "evil.py"), "../run/evil.py"]
    (scene.run / "evil.py").write_text(scene.evil())
    (scene.run / "logs" / "evil.py").write_text(scene.evil())
    (scene.place / "link.py").symlink_to(scene.run / "evil.py")
    (scene.place / "by_link").symlink_to(scene.run)
    server = {"command": "python", "args": ["-c", f"open({str(scene.ran)!r}, 'a').write('ran')"]}
    (scene.run / "servers.json").write_text(json.dumps({"mcpServers": {"evil": server}}))
    file = dice.choice(forms)
    key, value, table = dice.choice([
        ("reward_funcs", [f"{file}:f"], ""), ("eval_metric", f"{file}:f", ""), ("functions", [f"{file}:f"], "tools"),
        ("environment", f"{file}:World", "tools"), ("servers", dice.choice(["servers.json", str(scene.run / "servers.json")]), "tools"),
        ("eval_sets", {"own": {"tasks": str(scene.place / "own.jsonl"), "metric": f"{file}:f"}}, ""),
    ])  # fmt: skip
    set_key(scene.run / "config.toml", table, key, value)
    return f"{table}.{key} = {value}"


def set_key(config: Path, table: str, key: str, value: Any) -> None:
    """Edit one key of a kept config, in its own line."""
    lines, here, done = config.read_text().splitlines(), "", False
    for at, line in enumerate(lines):
        here = line[1:-1] if line.startswith("[") else here
        if here == table and line.removeprefix("# ").startswith((f"{key} = ", f"{key} is left out")):
            lines[at], done = f"{key} = {_toml(value)}", True
    assert done, f"{key} is not in the config"
    config.write_text("\n".join(lines) + "\n")
    tomllib.loads(config.read_text())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + " }"
    return json.dumps(value)


def forge_journal(run: Path, change: Callable[[list[dict[str, Any]]], None] | None = None) -> None:
    """Write the ledger's journal anew, as valid as before, with the hash of the config as it is now."""
    path = run / LEDGER
    with Journal.open(path, readonly=True) as journal:
        records = [entry.record for entry in journal.records()]
    digest = hashlib.sha256((run / "config.toml").read_bytes()).hexdigest()
    for record in records:
        if "config_sha256" in record:
            record["config_sha256"] = digest
    if change is not None:
        change(records)
    path.write_bytes(path.read_bytes()[: frames.HEADER_BYTES])
    with Journal.open(path) as journal:
        journal.append_all(records)


def forged_journal(scene: Scene, dice: random.Random) -> str:
    """Records that are whole and cannot be."""
    where: list[str] = []

    def change(records: list[dict[str, Any]]) -> None:
        chosen = dice.randrange(len(records))
        where.append(f"record {chosen} {_replace(records[chosen], scene, dice)}")
        if dice.random() < 0.3:
            text = f'reward_funcs = ["{scene.run}/evil.py:f"]\n'
            records.insert(dice.randrange(len(records)), {"event": "run.extended", "step": 1, "config": text})

    try:
        forge_journal(scene.run, change)
    except Exception as error:  # not even a forger can write it
        return f"not written: {type(error).__name__}"
    return where[0]


def foreign_files_in_the_config(scene: Scene, dice: random.Random) -> str:
    """A forged config that reads somebody else's files: their text is not repeated."""
    plain, rows = scene.outside / "plain.txt", scene.outside / "rows.jsonl"
    key, value, table = dice.choice([
        ("tasks", str(plain), ""), ("chat_template", str(plain), ""), ("replay_pairs", str(plain), ""),
        ("model", str(scene.outside), ""), ("cassette", str(plain), "tools"), ("servers", str(plain), "tools"),
        ("calibrate_from", str(scene.outside / "run"), "guard"), ("tasks", str(scene.outside), ""),
        ("reward_funcs", [f"{rows}:f"], ""), ("eval_metric", f"{plain}:f", ""), ("output_dir", str(scene.outside), ""),
        ("run_name", "../../x", ""),
    ])  # fmt: skip
    set_key(scene.run / "config.toml", table, key, value)
    forge_journal(scene.run)
    return f"{table}.{key} = {value}"


def strange_names(scene: Scene, dice: random.Random) -> str:
    """Names that are none, and half-finished things that lead elsewhere."""
    folder = scene.run / dice.choice(["", "checkpoints", "rollouts", "journal", "logs"])
    name = dice.choice([
        "step_99999999999999999999999", "step_9\n", "step_٣", "step_-1", "\x1b[31mred", "a\u202eb", "batches_9.journal",
        ".config.toml.1.tmp", ".step_3.partial", ".step_3.removed", "step_7", "step_8.jsonl", "damaged_step_4", "..x",
        "events.out.tfevents.1.x", "start_model", ".start_model.tmp", "tensorboard",
    ])  # fmt: skip
    path = folder / name
    if path.exists():
        return f"{name!r} is there already"
    kind = dice.choice(["link to folder", "link to file", "folder", "file", "pipe"])
    if kind.startswith("link"):
        path.symlink_to(scene.outside / ("run" if kind.endswith("folder") else "plain.txt"))
    elif kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("x\n")
    else:
        os.mkfifo(path)
    return f"{kind} {name!r}"


def odd_modes(scene: Scene, dice: random.Random) -> str:
    path = dice.choice([scene.run, *sorted(scene.run.rglob("*"))])
    mode = dice.choice([0o000, 0o444, 0o777, 0o4755, 0o2777, 0o1777])
    path.chmod(mode)
    return f"{path.name} {mode:o}"


def modules_in_the_folder(scene: Scene, dice: random.Random) -> str:
    """Files with the names of libraries, and a model's own code."""
    names = ("yaml.py", "sitecustomize.py", "conftest.py", "reward.py", "numpy.py", "modeling_evil.py", "__init__.py")
    for folder in (scene.run, *sorted((scene.run / "checkpoints").iterdir())):
        for name in names:
            (folder / name).write_text(scene.evil())
    newest = sorted((scene.run / "checkpoints").iterdir())[-1]
    config = json.loads((newest / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_evil.World", "AutoConfig": "modeling_evil.World"}}
    if dice.random() < 0.7:
        (newest / "config.json").write_text(json.dumps(config))
    if dice.random() < 0.5:
        (newest / "pytorch_model.bin").write_bytes(_pickle(scene))
        (newest / "model.safetensors").unlink()
    _forge_manifest(newest / "config.json")
    return newest.name


def _pickle(scene: Scene) -> bytes:
    return b"cos\nsystem\n(S'touch " + str(scene.ran).replace(" ", "\\\\ ").encode() + b"'\ntR."


def lock_of_nobody(scene: Scene, dice: random.Random) -> str:
    record = {
        "pid": os.getpid(),
        "started": 1,
        "host": os.uname().nodename,
        "boot": None,
        "since": "x" * 3000,
        "inode": 1,
    }
    if dice.random() < 0.5:
        record[dice.choice(list(record))] = _hostile(scene, dice)
    (scene.run / "lock").write_text(json.dumps(record))
    return str(record)[:100]


def missing(scene: Scene, dice: random.Random) -> str:
    path = (
        _pick(scene, dice)
        if dice.random() < 0.7
        else dice.choice([p for p in sorted(scene.run.rglob("*")) if p.is_dir()])
    )
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return _name(scene, path)


KINDS: tuple[Callable[[Scene, random.Random], str], ...] = (
    link_to_a_file, edited_config, pipe, changed_bytes, forged_config, link_to_a_folder, hostile_json, huge_file,
    foreign_files_in_the_config, cut_or_grown, modules_in_the_folder, forged_journal, strange_names, folder_for_a_file,
    huge_line, config_without_journal, odd_modes, unix_socket, lock_of_nobody, file_for_a_folder, missing,
)  # fmt: skip
"""21 kinds: with five numbers a day every kind comes within a week."""
