"""Between the SDK and a process that is gone: whoever waits to be heard is not left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.tools.mcp.lines import CRASHED, WireFault
from surefoot.tools.mcp.servers import ServerLimits
from surefoot.tools.mcp.stdio import Bridge

pytest.importorskip("mcp", reason="needs the mcp extra")
pytestmark = pytest.mark.mcp


class Gone:
    """A process that ended, whose keeper needs a moment to say so."""

    def __init__(self) -> None:
        self.killed = asyncio.Event()

    async def messages(self) -> AsyncIterator[Any]:
        await self.killed.wait()
        for nothing in ():
            yield nothing

    async def write(self, data: bytes) -> None:
        raise WireFault(CRASHED, "closed its input")

    async def drain_stderr(self) -> None: ...

    async def exit_status(self, patience_s: float) -> int | None:
        await asyncio.sleep(0.05)
        return 9

    async def end(self, grace_s: float) -> None:
        self.kill()

    def kill(self) -> None:
        self.killed.set()


async def second_call() -> tuple[list[str], str]:
    """What is blamed, and what becomes of a call that waits behind the one that found the pipe closed."""
    from mcp.shared.message import SessionMessage

    blamed: list[WireFault] = []
    bridge = Bridge(Gone(), ServerLimits(), blamed.append, lambda: None)  # type: ignore[arg-type]
    message: Any = SessionMessage(SimpleNamespace(method="x", id=1, model_dump_json=lambda **_: "{}"))  # type: ignore[arg-type]
    async with bridge.streams(lambda: 0.0) as (_, theirs):
        await theirs.send(message)
        try:
            async with asyncio.timeout(2.0):
                await theirs.send(message)
            how = "sent"
        except TimeoutError:
            how = "left to its deadline"
        except Exception as error:
            how = type(error).__name__
    return [fault.text for fault in blamed], how


def test_a_call_behind_one_that_found_the_server_gone_ends_too_and_the_status_is_told() -> None:
    blamed, how = asyncio.run(second_call())
    assert blamed[0] == "ended with status 9"
    assert how in ("BrokenResourceError", "ClosedResourceError")
