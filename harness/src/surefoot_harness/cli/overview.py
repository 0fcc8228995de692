"""What `--help` shows: every command under a heading, one whole line each.

Owns       the headings, their order, and each command's line in the list; a command's own --help has the rest.
Promises   nothing is cut: a line that does not fit is wrapped; a command without a heading is listed all the same.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

JUDGING = {
    "Judge what was logged": {
        "check": "Judge a run's metrics by expressions, or list the metrics.",
        "baseline": "Stored runs, from which bands are derived.",
        "trend": "Show a metric over the history of test sessions.",
        "dump": "Merge TensorBoard events into one JSON file.",
    },
    "Test and search": {
        "test": "Run the unit tests with pytest; every word is passed on.",
        "suite": "Recipes, executors, verdicts: run a suite and judge it.",
        "bisect": "Find the first commit that broke something.",
        "assets": "Build, list and check what tests need built ahead of time.",
        "cover": "Coverage of a command and every Python process below it.",
    },
}
"""The harness's own commands; `surefoot` has them too, under the same headings."""
OTHERS = "More commands"
_WHOLE = 10_000
"""A limit that no sentence reaches: click cuts at it."""


class WholeLines(TyperGroup):
    """A group of commands whose list is not cut at the screen's edge."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one list."""
        rows = [(name, command.get_short_help_str(_WHOLE)) for name, command in self._shown(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def _shown(self, ctx: Any) -> list[tuple[str, Any]]:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return [(name, command) for name, command in found if command is not None and not command.hidden]


class Overview(WholeLines):
    """The command itself: a list under each heading."""

    headings: dict[str, dict[str, str]] = JUDGING

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the lists, their second columns in line."""
        commands = dict(self._shown(ctx))
        wide = max(map(len, commands))
        for heading, lines in self.headings.items():
            rows = [(name.ljust(wide), line) for name, line in lines.items() if commands.pop(name, None)]
            _write(formatter, heading, rows)
        _write(
            formatter, OTHERS, [(name.ljust(wide), each.get_short_help_str(_WHOLE)) for name, each in commands.items()]
        )


def _write(formatter: Any, heading: str, rows: list[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(heading):
            formatter.write_dl(rows)
