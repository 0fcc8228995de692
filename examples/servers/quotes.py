"""MCP server `quotes`: closing prices of an invented exchange, from shipped files.

Tools: `symbols`, `latest`, `history`, `change`. The same question always gets the same answer.
"""

from __future__ import annotations

import csv
import datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field
from serving import DATA, rows, serve, unknown

MAX_ROWS = 70
Symbol = Annotated[str, Field(description="Ticker symbol, such as VSX", max_length=12)]
Day = Annotated[str, Field(description="A trading day, YYYY-MM-DD", max_length=10)]


class Prices:
    """The whole table, by symbol and day."""

    def __init__(self) -> None:
        self.names = {row["symbol"]: row["name"] for row in rows("companies.jsonl")}
        self.days, self.closes = self._table("closes.csv")
        _, self.volumes = self._table("volumes.csv")

    @staticmethod
    def _table(file: str) -> tuple[list[str], dict[str, dict[str, str]]]:
        with (DATA / file).open(encoding="utf-8", newline="") as lines:
            header, *body = csv.reader(lines)
        columns = {symbol: {row[0]: row[at] for row in body} for at, symbol in enumerate(header) if at}
        return [row[0] for row in body], columns

    def symbol(self, given: str) -> str:
        """The symbol as it is listed; an error with near names when it is not."""
        found = given.strip().upper()
        if found not in self.closes:
            raise unknown("symbol", given, self.closes)
        return found

    def day(self, given: str) -> str:
        """A day on which there are prices; an error with its neighbours when there are none."""
        first, last = self.days[0], self.days[-1]
        try:
            asked = datetime.date.fromisoformat(given).isoformat()
        except ValueError:
            raise ToolError(f"{given!r} is not a date; write it as YYYY-MM-DD, such as {last}") from None
        if not first <= asked <= last:
            raise ToolError(f"no prices for {asked}; there are prices from {first} to {last}")
        if asked not in self.closes[next(iter(self.closes))]:
            before = max(day for day in self.days if day < asked)
            after = min(day for day in self.days if day > asked)
            raise ToolError(f"{asked} was no trading day; the nearest are {before} and {after}")
        return asked

    def span(self, start: str, end: str) -> list[str]:
        """All trading days from `start` to `end`."""
        start, end = self.day(start), self.day(end)
        if start > end:
            raise ToolError(f"start {start} is after end {end}")
        return [day for day in self.days if start <= day <= end]


def build() -> MCPServer:
    """The server, ready to run or to be connected to in memory."""
    prices = Prices()
    server = MCPServer("quotes", instructions="Closing prices of the Talverne exchange, in dral.", log_level="WARNING")

    @server.tool(structured_output=False)
    async def symbols(
        contains: Annotated[str, Field(description="Only names or symbols with this text", max_length=40)] = "",
    ) -> str:
        """List the ticker symbols with the names of their companies."""
        lines = [f"{symbol}  {name}" for symbol, name in prices.names.items()]
        found = [line for line in lines if contains.casefold() in line.casefold()]
        if not found:
            raise ToolError(f"no symbol or name contains {contains!r}; call without it to list all {len(lines)}")
        return "\n".join(found)

    @server.tool(structured_output=False)
    async def latest(symbol: Symbol) -> str:
        """The last closing price of a symbol, with its day."""
        symbol, day = prices.symbol(symbol), prices.days[-1]
        return f"{symbol} closed at {prices.closes[symbol][day]} dral on {day}."

    @server.tool(structured_output=False)
    async def history(symbol: Symbol, start: Day, end: Day) -> str:
        """Closing price and shares traded for every trading day from start to end, both included."""
        symbol, days = prices.symbol(symbol), prices.span(start, end)
        if len(days) > MAX_ROWS:
            raise ToolError(f"{len(days)} trading days are too many for one answer (at most {MAX_ROWS}); ask for fewer")
        lines = [f"{day},{prices.closes[symbol][day]},{prices.volumes[symbol][day]}" for day in days]
        return "\n".join(["date,close,volume", *lines])

    @server.tool(structured_output=False)
    async def change(symbol: Symbol, start: Day, end: Day) -> str:
        """How much the closing price changed between two trading days, in dral and in percent."""
        symbol, days = prices.symbol(symbol), prices.span(start, end)
        first, last = (Decimal(prices.closes[symbol][day]) for day in (days[0], days[-1]))
        percent = ((last - first) * 100 / first).quantize(Decimal("0.01"), ROUND_HALF_UP)
        between = f"from {first} on {days[0]} to {last} on {days[-1]}"
        return f"{symbol} changed by {last - first:+} dral ({percent:+} %), {between}."

    return server


if __name__ == "__main__":
    serve(build())
