"""A driver with a bad server that left daemons behind: says `ready`, then waits to be killed."""

from __future__ import annotations

import sys
import threading

from server_kinds import AMPLE_S, LIMITS, TASK, Kind

from surefoot.envs.mcp_client import MCPToolkit

kit = MCPToolkit([Kind("leaves_children", "ok", sandbox=sys.argv[1] == "contained").server()], LIMITS)
box = kit.open(TASK, "train/0/0", 0)
assert box.call("bad__echo", {"text": "hello"}, AMPLE_S).text == "hello"
print("ready", box._own["bad"].process.child.folder, flush=True)  # type: ignore[union-attr]
threading.Event().wait()
