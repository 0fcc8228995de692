"""The process that renders chat templates which could take for ever: a question per line in, an answer per line out.

Promises   ends when its parent does, and when the kernel counts more processor time than a question allows.
Never      runs anything but the template it is given, in the same sandbox as the tokenizer's own rendering.

Read next: `rendering.py`, who asks.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import sys
import time
from typing import Any

from surefoot.learner import rendering
from surefoot.learner.rendering import OutOfTimeError

_LOOK_S = 2.0
"""How often it looks whether its parent is still there."""


def main() -> None:
    """Answer until there is nobody left to ask."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parent = os.getppid()
    while os.getppid() == parent:
        if not select.select([0], [], [], _LOOK_S)[0]:
            continue
        line = _line()
        if not line:
            return
        answer = _answer(json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _line() -> bytes:
    """One question; nothing at the end. Read unbuffered: what waits must be seen by `select`."""
    found = bytearray()
    while not found.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            return b""
        found += piece
    return bytes(found)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendering.CPU_SECONDS, rendering.MEMORY_BYTES = asked["cpu_s"], asked["memory_bytes"]
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    used = time.process_time() + asked["cpu_s"]
    soft = math.ceil(used) + 1  # whole seconds; a step that lasts is ended by the kernel, a loop by the timer before
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    try:
        with rendering.limited():
            rendered, _ = render_jinja_template(
                conversations=[asked["messages"]], tools=asked["tools"], chat_template=asked["template"],
                add_generation_prompt=asked["generation_prompt"], **asked["special"],
            )  # fmt: skip
            text = str(rendered[0])
    except OutOfTimeError:
        return {"kind": "time"}
    except MemoryError:
        return {"kind": "memory"}
    except Exception as error:  # noqa: BLE001 - whatever a stranger's template raises is the answer
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"text": text} if len(text) <= asked["most"] else {"error": f"it made {len(text):,} characters"}
