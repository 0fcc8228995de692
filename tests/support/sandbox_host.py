"""What tests of sandboxes and of servers in them share: where they can run, and how long they may take."""

from __future__ import annotations

import pytest

from surefoot.sandbox.sandbox import available
from surefoot.tools.mcp.servers import ServerLimits

needs_sandbox = pytest.mark.skipif(not available().usable, reason=f"this host has no sandbox: {available().missing}")
AMPLE_S = 120.0
"""Nothing here depends on speed: this only ends a test that would wait for ever."""
AMPLE = ServerLimits(connect_timeout_s=AMPLE_S, call_timeout_s=AMPLE_S, shutdown_s=AMPLE_S)
