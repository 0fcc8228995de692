"""Tasks that need the exchange: the `quotes` and `fundamentals` servers, alone and together with others."""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import mail
from drafts import NAME, NUMBER, SYMBOL, WORDS, Call, Draft
from mail_tasks import read_letter
from search_tasks import named, open_article
from world import READ, World

YEARS = ("2021", "2022", "2023", "2024")
MONEY = {"revenue": "revenue", "gross_profit": "gross profit", "net_income": "net income"}
LED = {
    "revenue": "sold most, by revenue,",
    "gross_profit": "kept most after the cost of its goods, by gross profit,",
    "net_income": "was left with most when all was paid, by net income,",
}


class Market:
    """Companies and closing prices, as shipped."""

    def __init__(self, data: Path, companies: list[dict[str, Any]]) -> None:
        self.companies = {company["symbol"]: company for company in companies}
        with (data / "closes.csv").open(encoding="utf-8", newline="") as lines:
            header, *rows = csv.reader(lines)
        self.days = [row[0] for row in rows]
        self.closes = {symbol: {row[0]: row[at] for row in rows} for at, symbol in enumerate(header) if at}

    def month(self, rng: random.Random) -> tuple[str, list[str]]:
        """A month and its trading days."""
        month = rng.choice(sorted({day[:7] for day in self.days}))
        return month, [day for day in self.days if day.startswith(month)]


def two_places(value: Fraction) -> str:
    """Two decimals, half goes up, away from zero."""
    cents = (2 * abs(value) * 100 + 1) // 2
    return f"{'-' if value < 0 and cents else ''}{cents // 100}.{cents % 100:02d}"


def quotes(rng: random.Random, market: Market, complexity: str) -> Iterator[Draft]:
    """A price, a change, or something about all prices of a month."""
    while True:
        symbol = rng.choice(sorted(market.closes))
        if complexity == "easy":
            yield _close(rng, market, symbol)
        elif complexity == "medium":
            yield _change(rng, market, symbol)
        else:
            yield rng.choice([_highest, _days_above])(rng, market, symbol)


def _close(rng: random.Random, market: Market, symbol: str) -> Draft:
    day = rng.choice(market.days)
    calls = [Call("quotes__history", {"symbol": symbol, "start": day, "end": day}, rf"{day},([\d.]+),")]
    question = f"At how many dral did {symbol} close on {day}?"
    return Draft(question, market.closes[symbol][day], NUMBER, calls, "easy")


def _change(rng: random.Random, market: Market, symbol: str) -> Draft:
    start, end = sorted(rng.sample(market.days, 2))
    first, last = (Fraction(market.closes[symbol][day]) for day in (start, end))
    calls = [Call("quotes__change", {"symbol": symbol, "start": start, "end": end}, r"\(\+?(-?[\d.]+) %\)")]
    question = f"By how many percent did {symbol} change from {start} to {end}, rounded to two places?"
    return Draft(question, two_places((last - first) * 100 / first), NUMBER, calls, "medium")


def _month_calls(symbol: str, days: list[str], program: str) -> list[Call]:
    """Fetch a month of prices and hand them to a program as `closes`."""
    ask = Call("quotes__history", {"symbol": symbol, "start": days[0], "end": days[-1]})
    closes = 'closes = [line.split(",")[1] for line in """<<0>>""".splitlines()[1:]]\n'
    return [ask, Call("python__run", {"code": closes + program}, r"([\d.]+)")]


def _highest(rng: random.Random, market: Market, symbol: str) -> Draft:
    month, days = market.month(rng)
    value = max((market.closes[symbol][day] for day in days), key=Fraction)
    calls = _month_calls(symbol, days, "print(max(closes, key=float))")
    return Draft(f"What was the highest closing price of {symbol} in {month}, in dral?", value, NUMBER, calls, "hard")


def _days_above(rng: random.Random, market: Market, symbol: str) -> Draft:
    month, days = market.month(rng)
    limit = int(float(market.closes[symbol][rng.choice(days)]))
    value = sum(Fraction(market.closes[symbol][day]) > limit for day in days)
    calls = _month_calls(symbol, days, f"print(sum(float(close) > {limit} for close in closes))")
    question = f"On how many trading days of {month} did {symbol} close above {limit} dral?"
    return Draft(question, str(value), NUMBER, calls, "hard")


def fundamentals(rng: random.Random, market: Market, complexity: str) -> Iterator[Draft]:
    """A figure, a ranking, or a figure that has to be worked out."""
    makers = {"easy": [_profile, _figure], "medium": [_margin, _largest], "hard": [_growth, _leader]}[complexity]
    while True:
        yield rng.choice(makers)(rng, market)


def _profile(rng: random.Random, market: Market) -> Draft:
    company = market.companies[rng.choice(sorted(market.companies))]
    fact, question, read, form = rng.choice([
        ("headquarters", "In which town has {s} its headquarters?", r"Headquarters: (\w+)", NAME),
        ("founded", "In which year was the company with the symbol {s} founded?", r"Founded: (\d+)", NUMBER),
        ("sector", "In which sector does the company with the symbol {s} work?", r"Sector: ([\w ]+)\.", WORDS),
        ("name", "What is the name of the company with the symbol {s}?", r": ([\w ]+)\.", NAME),
    ])  # fmt: skip
    calls = [Call("fundamentals__profile", {"symbol": company["symbol"]}, read)]
    return Draft(question.format(s=company["symbol"]), str(company[fact]), form, calls, "easy")


def _results(symbol: str, year: str, read: str) -> Call:
    return Call("fundamentals__results", {"symbol": symbol, "year": int(year)}, read)


def _figure(rng: random.Random, market: Market) -> Draft:
    symbol, year, (fact, words) = rng.choice(sorted(market.companies)), rng.choice(YEARS), rng.choice([*MONEY.items()])
    question = f"What was the {words} of {symbol} in {year}, in thousand dral?"
    value = market.companies[symbol]["years"][year][fact]
    return Draft(question, str(value), NUMBER, [_results(symbol, year, rf"\n{fact}: (-?\d+)")], "easy")


def _margin(rng: random.Random, market: Market) -> Draft:
    symbol, year = rng.choice(sorted(market.companies)), rng.choice(YEARS)
    name, profit = rng.choice([("gross", "gross_profit"), ("net", "net_income")])
    figures = market.companies[symbol]["years"][year]
    question = f"What was the {name} margin of {symbol} in {year}, in percent of revenue, rounded to two places?"
    value = two_places(Fraction(100 * figures[profit], figures["revenue"]))
    return Draft(question, value, NUMBER, [_results(symbol, year, rf"{name}_margin: (-?[\d.]+)")], "medium")


def _largest(rng: random.Random, market: Market) -> Draft:
    symbols, year = rng.sample(sorted(market.companies), 6), rng.choice(YEARS)
    ranked = sorted(symbols, key=lambda symbol: -market.companies[symbol]["years"][year]["employees"])
    arguments = {"symbols": symbols, "metric": "employees", "year": int(year)}
    question = f"Of {', '.join(symbols)}: what is the name of the company that had most employees in {year}?"
    calls = [
        Call("fundamentals__compare", arguments, r"^(\w+)"),
        Call("fundamentals__profile", {"symbol": "<<0>>"}, r": ([\w ]+)\."),
    ]
    return Draft(question, market.companies[ranked[0]]["name"], NAME, calls, "medium")


def _growth(rng: random.Random, market: Market) -> Draft:
    symbol, (start, end) = rng.choice(sorted(market.companies)), sorted(rng.sample(YEARS, 2))
    years = market.companies[symbol]["years"]
    first, last = years[start]["revenue"], years[end]["revenue"]
    question = f"By how many percent did the revenue of {symbol} grow from {start} to {end}, rounded to two places?"
    program = 'from decimal import Decimal\nprint(f"{Decimal((<<1>> - <<0>>) * 100) / <<0>>:.2f}")'
    calls = [_results(symbol, year, r"\nrevenue: (\d+)") for year in (start, end)]
    calls.append(Call("python__run", {"code": program}, r"(-?[\d.]+)"))
    return Draft(question, two_places(Fraction(100 * (last - first), first)), NUMBER, calls, "hard")


def _leader(rng: random.Random, market: Market) -> Draft:
    sector = rng.choice(sorted({company["sector"] for company in market.companies.values()}))
    year, (fact, did) = rng.choice(YEARS), rng.choice([*LED.items()])
    members = [company for company in market.companies.values() if company["sector"] == sector]
    best = max(members, key=lambda company: company["years"][year][fact])
    arguments = {"symbols": [company["symbol"] for company in members], "metric": fact, "year": int(year)}
    question = f"Which company of the sector {sector} {did} in {year}?"
    calls = [Call("fundamentals__sector", {"name": sector}), Call("fundamentals__compare", arguments, r"^(\w+)")]
    return Draft(question, best["symbol"], SYMBOL, calls, "hard")


def mixed(rng: random.Random, market: Market, world: World, letters: list[Any], complexity: str) -> Iterator[Draft]:
    """Questions that need several servers."""
    while True:
        if complexity == "medium":
            yield _seat(rng, market, world)
        else:
            yield _shares(rng, market, letters)


def _seat(rng: random.Random, market: Market, world: World) -> Draft:
    company = market.companies[rng.choice(sorted(market.companies))]
    fact, words = rng.choice([
        ("population", "What is the population of the town"), ("founded", "In which year was the town founded"),
        ("river", "On which river lies the town"), ("province", "In which province lies the town"),
    ])  # fmt: skip
    value = named(world, company["headquarters"]).facts[fact]
    calls = [Call("fundamentals__profile", {"symbol": company["symbol"]}, r"Headquarters: (\w+)")]
    calls += open_article("<<0>>", READ[fact], 1)
    question = f"{words} where the company with the symbol {company['symbol']} has its headquarters?"
    return Draft(question, str(value), NUMBER if isinstance(value, int) else NAME, calls, "medium")


def _shares(rng: random.Random, market: Market, letters: list[Any]) -> Draft:
    letter = rng.choice([letter for letter in letters if letter["subject"].startswith("Invoice")])
    symbol, day, code = rng.choice(sorted(market.closes)), rng.choice(market.days), letter["subject"].split()[1]
    amount = int(re.findall(mail.READ["amount"], letter["text"])[0])
    value = amount // Fraction(market.closes[symbol][day])
    question = (
        f"How many whole shares of {symbol} could have been bought at the close of {day} with the amount of "
        f"invoice {code} in your mailbox?"
    )
    calls = read_letter(letter["subject"], mail.READ["amount"])
    calls.append(Call("quotes__history", {"symbol": symbol, "start": day, "end": day}, rf"{day},([\d.]+),"))
    calls.append(Call("calculator__evaluate", {"expression": "<<1>> // <<2>>"}))
    return Draft(question, str(value), NUMBER, calls, "hard")
