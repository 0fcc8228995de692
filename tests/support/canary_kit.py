"""Twelve secrets in the environment of a run, a reward that waits to be looked at, and where secrets may turn up."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from command import Ran, surefoot

from surefoot.system.process import family

CANARIES = {
    "HUGGING_FACE_HUB_TOKEN": "hf_canaryOneAbcdefghijkl",
    "WANDB_API_KEY": "wandb_v1_canaryTwo22222222",
    "AWS_SECRET_ACCESS_KEY": "/canary+three/AbCdEfGh0123456789+=",
    "OPENAI_KEY": "canary-four-of-no-shape",
    "AZURE_STORAGE_KEY": "canaryFive/5555+5555==",
    "JWT": "canary-six-alone",
    "HMAC_SALT": "canary-seven-of-salt",
    "SLACK_WEBHOOK_URL": "https://hooks.example.org/services/canary-eight",
    "DB_PASSWORD": 'can"ary nine\\ü',
    "SUREFOOT_ENGINE_API_KEY": "canary-ten-behind-a-listed-prefix",
    "RAY_JOB_ORIGIN": "https://me:canary-eleven@example.org/",
    "NOTES_OF_MINE": "canary-twelve-under-no-name",
}
"""By name, by the end of a name, by shape, by what stands in an address, behind a prefix that is passed on, and by nothing."""
PATIENCE_S = 240.0
"""Nothing here depends on speed: this only ends a test that would wait for ever."""
REWARD = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent

def watched(completions, **columns):
    print("environment:", dict(os.environ), os.environb, os.environ.get("OPENAI_KEY"))
    for pid in ("self", os.getppid()):
        print(Path(f"/proc/{pid}/environ").read_bytes())
    (HERE / "judge").write_text(os.environ.get("JUDGE_API_KEY", ""))
    if not (HERE / "go").exists():
        (HERE / "called").write_text("yes")
        until = time.monotonic() + 200
        while not (HERE / "go").exists() and time.monotonic() < until:
            time.sleep(0.02)
    return [float(len(str(text)) % 3) for text in completions]
"""


def watch(
    place: Path, *words: str, run: str, fresh: bool, env: Mapping[str, str] = {}
) -> tuple[Ran, dict[str, list[str]]]:
    """`surefoot WORDS` with the canaries around it; its processes' environments are read while its reward is called.

    Returns what became of it, and each process below the driver with the canaries that its environment holds.
    """
    for name in ("called", "go"):
        (place / name).unlink(missing_ok=True)
    done: list[Ran] = []
    given = CANARIES | dict(env)
    where = run if words[0] == "train" and "--resume" not in words else ""
    command = threading.Thread(
        target=lambda: done.append(surefoot(*words, cwd=place, run=where, env=given, fresh=fresh))
    )
    command.start()
    try:
        give_up = time.monotonic() + PATIENCE_S
        while not (place / "called").exists() and command.is_alive():
            assert time.monotonic() < give_up, "the reward was never called"
            time.sleep(0.02)
        seen = _look(place / run) if command.is_alive() else {}
    finally:
        (place / "go").touch()
        command.join(PATIENCE_S)
    return Ran(done[0].code, done[0].out, done[0].err, place / run), seen


def _look(run: Path) -> dict[str, list[str]]:
    """The environment of every process below the driver; one that is between fork and exec is looked at again."""
    driver = json.loads((run / "lock").read_text())["pid"]
    seen = {}
    for pid in family(driver)[1:]:
        held, give_up = _held(pid), time.monotonic() + 10.0
        while held and time.monotonic() < give_up:
            time.sleep(0.1)
            held = _held(pid)
        if held is not None:
            seen[f"{pid} {_command(pid)}"] = held
    return seen


def _held(pid: int) -> list[str] | None:
    """Canaries in the environment of a process; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    return [name for name, value in CANARIES.items() if value.encode() in text]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    except OSError:
        return "gone"


def leaks(ran: Ran, *more: str) -> list[str]:
    """Where a canary is, in any spelling that a reader could undo."""
    texts = {"stdout": ran.out.encode(), "stderr": ran.err.encode(), "other commands": "".join(more).encode()}
    for path in ran.run.rglob("*"):
        texts[f"name of {path.name}"] = os.fsencode(path.name)
        if path.is_file():
            texts[str(path.relative_to(ran.run))] = path.read_bytes()
    return sorted(
        f"{where}: {name}" for where, text in texts.items() for name, secret in CANARIES.items()
        if any(form in text for form in set(_spellings(secret)))
    )  # fmt: skip


def _spellings(secret: str) -> Iterator[bytes]:
    yield secret.encode()
    yield json.dumps(secret)[1:-1].encode()
    yield repr(secret)[1:-1].encode()
    yield repr(secret.encode())[2:-1].encode()
    yield quote(secret, safe="").encode()
    yield base64.b64encode(secret.encode())
