"""Between the SDK's streams and a server's process: what may pass, and what is a fault.

Owns       the three tasks that move messages, and the ids that were asked and not yet answered.
Promises   only answers to what was asked, once each, and pings reach the SDK; sampling, roots and elicitation are off;
           a server that answers nobody, or twice, is cut off.
Never      waits for a call, or decides what a fault means for a rollout.

Read next: `mcp_stdio.py`, the wire below; `mcp_session.py`, the connection above.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from surefoot.envs.servers.mcp_lines import CRASHED, PROTOCOL, WireFault
from surefoot.envs.servers.mcp_sdk import SIZE, sdk, words, wrapped
from surefoot.envs.servers.mcp_servers import Limits
from surefoot.envs.servers.mcp_stdio import ServerProcess, exit_words
from surefoot.safe_text import printable

LIST_CHANGED = "notifications/tools/list_changed"
_LAST_LOOK_S = 2.0
"""A server that closed a pipe has usually ended; on a busy machine its keeper needs a moment to say how."""


class Bridge:
    """Moves messages for one process until it ends, breaks a rule, or is left."""

    def __init__(
        self, process: ServerProcess, limits: Limits, blame: Callable[[WireFault], None], changed: Callable[[], None]
    ) -> None:
        self.process, self.limits, self._blame, self._changed = process, limits, blame, changed
        self._asked: set[Any] = set()
        self._abandoned: set[Any] = set()
        self._leaving = False

    @contextlib.asynccontextmanager
    async def streams(self, grace_s: Callable[[], float]) -> AsyncIterator[Any]:
        """The two streams that the SDK's client wants; on leaving, nothing of the process is left."""
        to_us, ours = sdk().streams(0)
        theirs, to_them = sdk().streams(0)
        tasks = [
            asyncio.create_task(self._read(to_us)),
            asyncio.create_task(self._write(to_them)),
            asyncio.create_task(self.process.drain_stderr()),
        ]
        try:
            yield ours, theirs
        finally:
            self._leaving = True
            for stream in (to_us, ours, theirs, to_them):
                stream.close()
            try:
                await self.process.end(grace_s())
            finally:
                self.process.kill()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, to_us: Any) -> None:
        try:
            async for message, size in self.process.messages():
                if self._may_pass(message, size):
                    await to_us.send(wrapped(_sized(message, size, self.limits.max_line_bytes)))
            ended = await self._how_it_ended("closed its output")
            if self._leaving:
                return  # it ended because we left
            self._blame(ended)
        except WireFault as fault:
            self._give_up(fault)
        except ValueError as error:
            self._give_up(WireFault(PROTOCOL, f"said something that is no message: {words(error)}"))
        except sdk().closed:
            pass  # the session is being left
        except Exception as error:
            self._give_up(WireFault(PROTOCOL, f"could not be read: {words(error)}"))
            raise
        finally:
            to_us.close()

    async def _how_it_ended(self, otherwise: str) -> WireFault:
        """Its exit status, if it has one within a moment: that says more than a closed pipe."""
        status = await self.process.exit_status(_LAST_LOOK_S)
        return WireFault(CRASHED, otherwise if status is None else f"ended with {exit_words(status)}")

    def _give_up(self, fault: WireFault) -> None:
        self._blame(fault)
        self.process.kill()

    def _may_pass(self, message: Mapping[str, Any], size: int) -> bool:
        """Whether the SDK should see it; a `WireFault` when nobody should have sent it."""
        if "method" in message:
            self.process.count_unasked(size)
            if "id" in message and message["method"] != "ping":
                raise WireFault(PROTOCOL, f"asked us for {printable(str(message['method']))[:80]!r}, which is off")
            if message["method"] == LIST_CHANGED:
                self._changed()
            return "id" in message
        answered = message.get("id")
        if isinstance(answered, bool) or not isinstance(answered, int | str):
            raise WireFault(PROTOCOL, f"answered {printable(repr(answered))[:80]}, which is no id")
        if answered in self._abandoned:
            self._abandoned.discard(answered)
            return False  # too late, and not its fault: we stopped waiting
        if answered not in self._asked:
            raise WireFault(PROTOCOL, f"answered {printable(repr(answered))[:80]}, which nobody asked, or asked once")
        self._asked.discard(answered)
        return True

    async def _write(self, to_them: Any) -> None:
        try:
            async for item in to_them:
                self._note(item.message)
                await self.process.write(
                    item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
                )
        except WireFault as fault:
            if fault.reason == CRASHED and not self._leaving:
                fault = await self._how_it_ended(fault.text)
            self._give_up(fault)
        except sdk().closed:
            pass
        finally:
            to_them.close()  # nobody writes any more: a call that waits for its turn is not left to its deadline

    def _note(self, message: Any) -> None:
        """What is asked may be answered once; what was called off may still be."""
        method, number = getattr(message, "method", None), getattr(message, "id", None)
        if method is not None and number is not None:
            self._asked.add(number)
        elif method == "notifications/cancelled":
            called_off = (message.params or {}).get("requestId")
            if called_off in self._asked:
                self._asked.discard(called_off)
                self._abandoned.add(called_off)


def _sized(message: dict[str, Any], size: int, kept: int) -> dict[str, Any]:
    """The same message, with its full size where it was cut; a server cannot claim a size itself."""
    result = message.get("result")
    if not isinstance(result, dict):
        return message
    meta = result.get("_meta")
    if isinstance(meta, dict):
        meta.pop(SIZE, None)
    if size > kept:
        result["_meta"] = {**(meta if isinstance(meta, dict) else {}), SIZE: size}
    return message
