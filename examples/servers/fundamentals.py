"""MCP server `fundamentals`: what the companies of an invented exchange are and earn, from shipped files.

Tools: `profile`, `results`, `sector`, `compare`. The same question always gets the same answer.
"""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from typing import Annotated, Any, Literal

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field
from serving import rows, serve, unknown

Symbol = Annotated[str, Field(description="Ticker symbol, such as VSX", max_length=12)]
Year = Annotated[int, Field(description="Business year, 2021 to 2024")]
Metric = Literal["revenue", "gross_profit", "net_income", "employees", "gross_margin", "net_margin"]
COUNTED: tuple[Metric, ...] = ("revenue", "gross_profit", "net_income", "employees")


def margin(profit: int, revenue: int) -> Decimal:
    """Percent of the revenue, to two places."""
    return (Decimal(profit) * 100 / revenue).quantize(Decimal("0.01"), ROUND_HALF_UP)


class Companies:
    """All of them, by symbol."""

    def __init__(self) -> None:
        self.all: dict[str, dict[str, Any]] = {row["symbol"]: row for row in rows("companies.jsonl")}

    def find(self, given: str) -> dict[str, Any]:
        """A company by its symbol; an error with near names when there is none."""
        found = self.all.get(given.strip().upper())
        if found is None:
            raise unknown("symbol", given, self.all)
        return found

    def year(self, company: dict[str, Any], given: int) -> dict[str, int]:
        """One year's figures."""
        found: dict[str, int] | None = company["years"].get(str(given)) if 0 <= given <= 9999 else None
        if found is None:
            raise ToolError(f"no figures for that year; there are figures for {', '.join(company['years'])}")
        return found

    def metric(self, company: dict[str, Any], metric: Metric, year: int) -> Decimal:
        """One figure of one year."""
        figures = self.year(company, year)
        if metric in COUNTED:
            return Decimal(figures[metric])
        return margin(figures["gross_profit" if metric == "gross_margin" else "net_income"], figures["revenue"])


def build() -> MCPServer:
    """The server, ready to run or to be connected to in memory."""
    companies = Companies()
    about = "Companies of the Talverne exchange: sector, seat, yearly results. Money is in thousand dral."
    server = MCPServer("fundamentals", instructions=about, log_level="WARNING")

    @server.tool(structured_output=False)
    async def profile(symbol: Symbol) -> str:
        """Name, sector, headquarters and founding year of a company."""
        company = companies.find(symbol)
        return (
            f"{company['symbol']}: {company['name']}. Sector: {company['sector']}. "
            f"Headquarters: {company['headquarters']}. Founded: {company['founded']}."
        )

    @server.tool(structured_output=False)
    async def results(symbol: Symbol, year: Year) -> str:
        """Revenue, gross profit, net income (thousand dral), employees and margins (percent) of one year."""
        company = companies.find(symbol)
        figures = companies.year(company, year)
        lines = [f"{name}: {figures[name]}" for name in COUNTED]
        lines += [f"{name}: {companies.metric(company, name, year)}" for name in ("gross_margin", "net_margin")]
        return "\n".join([f"{company['symbol']} {year}", *lines])

    @server.tool(structured_output=False)
    async def sector(name: Annotated[str, Field(description="A sector, such as shipping", max_length=40)]) -> str:
        """List the companies of a sector."""
        sectors = sorted({company["sector"] for company in companies.all.values()})
        if name.strip().casefold() not in sectors:
            raise ToolError(f"{unknown('sector', name, sectors)}; the sectors are {', '.join(sectors)}")
        found = [c for c in companies.all.values() if c["sector"] == name.strip().casefold()]
        return "\n".join(f"{company['symbol']}  {company['name']}" for company in found)

    @server.tool(structured_output=False)
    async def compare(
        symbols: Annotated[list[str], Field(description="2 to 12 ticker symbols", min_length=2, max_length=12)],
        metric: Annotated[Metric, Field(description="What to compare")],
        year: Year,
    ) -> str:
        """One figure of several companies in one year, largest first."""
        found = {company["symbol"]: company for company in map(companies.find, symbols)}
        figures = {symbol: companies.metric(company, metric, year) for symbol, company in found.items()}
        ranked = sorted(figures, key=lambda symbol: (-figures[symbol], symbol))
        return "\n".join(f"{symbol}  {figures[symbol]}" for symbol in ranked)

    return server


if __name__ == "__main__":
    serve(build())
