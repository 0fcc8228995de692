"""MCP server `python`: runs a program that the model wrote, in surefoot's sandbox, and shows what it printed.

Tool: `run`. Every call is a process of its own without network, files of yours, or memory of the call before. On a
host that cannot contain programs the server refuses to start, unless `--allow-unsafe` says that it may run them bare.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError
from pydantic import Field
from serving import parser, run

sys.path.append(str(Path(__file__).resolve().parents[2] / "src"))  # a checkout works without being installed

from surefoot.errors import SecurityError, SurefootError
from surefoot.sandbox.sandbox import ProgramOutcome, Sandbox, SandboxLimits

LIMITS = SandboxLimits(wall_s=10.0, cpu_s=8, memory_mb=512, output_bytes=16_384)
INTERNAL_ERROR = -32603
STOPPED = {
    "deadline": f"it ran longer than {LIMITS.wall_s:g} seconds",
    "cpu": f"it used more than {LIMITS.cpu_s} seconds of processor time",
    "memory": f"it used more than {LIMITS.memory_mb} MB",
    "output": f"it printed more than {LIMITS.output_bytes} bytes",
}
"""What the sandbox ends a program for, in words."""


def told(outcome: ProgramOutcome) -> str:
    """What the model reads after a program that ended well; a tool error after any other."""
    printed = outcome.stdout.rstrip("\n")
    if outcome.killed is not None or outcome.timed_out:
        reason = STOPPED.get(outcome.killed or "deadline", str(outcome.killed))
        raise ToolError(f"the program was stopped: {reason}. It had printed:\n{printed[:2000]}")
    if outcome.exit_code != 0:
        raise ToolError(f"the program ended with exit code {outcome.exit_code}\n{outcome.stderr[-4000:].rstrip()}")
    return printed or "(the program printed nothing; print what you want to see)"


def build(allow_unsafe: bool = False) -> MCPServer:
    """The server, ready to run or to be connected to in memory."""
    sandbox = Sandbox(LIMITS, allow_unsafe=allow_unsafe)
    server = MCPServer("python", instructions="Runs small Python programs in a sandbox.", log_level="WARNING")

    @server.tool(name="run", structured_output=False)
    def run_code(
        code: Annotated[str, Field(description="A complete Python 3 program", min_length=1, max_length=20_000)],
    ) -> str:
        """Run a Python program and show what it prints. No network, no files; at most 10 seconds and 512 MB."""
        try:
            outcome = sandbox.run_python(code)
        except SurefootError as error:  # the sandbox failed, not the program: no answer for the model to learn from
            raise MCPError(INTERNAL_ERROR, f"the sandbox failed: {error.what}") from error
        return told(outcome)

    return server


def main() -> None:
    """Refuse where nothing contains the programs; else serve."""
    options = parser("Runs small Python programs in a sandbox.")
    options.add_argument("--allow-unsafe", action="store_true", help="run programs even where no sandbox contains them")
    given = options.parse_args()
    try:
        server = build(given.allow_unsafe)
    except SecurityError as refusal:
        print(f"python_server: {refusal}\n  here: the option is --allow-unsafe", file=sys.stderr)
        raise SystemExit(refusal.exit_code) from refusal
    run(server, given.http)


if __name__ == "__main__":
    main()
