"""A driver with a bad server that left daemons behind: says `ready`, then waits to be killed."""

from __future__ import annotations

import os
import signal
import sys
import threading

from server_kinds import AMPLE_S, LIMITS, TASK, Kind

from surefoot.sandbox import process
from surefoot.tools.mcp.toolkit import MCPToolkit

kit = MCPToolkit([Kind("leaves_children", "ok", sandbox=sys.argv[1] == "contained").server()], LIMITS)
box = kit.open(TASK, "train/0/0", 0)
assert box.call("bad__echo", {"text": "hello"}, AMPLE_S).text == "hello"
copy = os.dup(process._current.control.fileno()) if process._current else -1
if (forked := os.fork()) == 0:  # as reward workers are: it holds a copy of everything that is open here
    signal.pause()
print("ready", box._own["bad"].process.child.folder, forked, flush=True)  # type: ignore[union-attr]
threading.Event().wait()
