"""An invented stock exchange: companies, what they earn, and what their shares cost day by day.

Promises   whole numbers and seeds only, no floating point: the same files on every machine.

Read next: `make_data.py`, which writes them down.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterator
from typing import Any

from names import Namer

YEARS = (2021, 2022, 2023, 2024)
SECTORS = ["energy", "shipping", "glass and ceramics", "food", "software", "paper", "railways", "instruments"]
_FORMS = ["Works", "Union", "Lines", "Foundry", "Holdings", "Mills", "Systems", "Brothers"]
FIRST_DAY, LAST_DAY = datetime.date(2023, 1, 2), datetime.date(2024, 12, 31)


def trading_days() -> list[str]:
    """Weekdays, without the first day of each year and the two days of midsummer."""
    days = []
    for offset in range((LAST_DAY - FIRST_DAY).days + 1):
        day = FIRST_DAY + datetime.timedelta(days=offset)
        holiday = (day.month, day.day) in {(1, 1), (6, 20), (6, 21)}
        if day.weekday() < 5 and not holiday:
            days.append(day.isoformat())
    return days


def companies(seed: int, towns: list[str]) -> list[dict[str, Any]]:
    """48 companies with four years of results, in order of their symbols."""
    rng = random.Random(seed)
    namer = Namer(rng)
    made: dict[str, dict[str, Any]] = {}
    while len(made) < 48:
        word = namer.name("company")
        symbol = "".join([word[0], *(letter for letter in word[1:] if letter not in "aeiou")]).upper()[:4]
        if len(symbol) < 3 or symbol in made:
            continue
        made[symbol] = {
            "symbol": symbol,
            "name": f"{word} {rng.choice(_FORMS)}",
            "sector": SECTORS[len(made) % len(SECTORS)],
            "headquarters": rng.choice(towns),
            "founded": rng.randint(1851, 2009),
            "years": {str(year): results for year, results in zip(YEARS, _results(rng), strict=True)},
        }
    return [made[symbol] for symbol in sorted(made)]


def _results(rng: random.Random) -> Iterator[dict[str, int]]:
    """Year after year, money in thousand dral."""
    revenue, employees = rng.randint(40_000, 9_000_000), rng.randint(120, 64_000)
    for _ in YEARS:
        gross = revenue * rng.randint(180, 710) // 1000
        yield {
            "revenue": revenue,
            "gross_profit": gross,
            "net_income": gross * rng.randint(-150, 520) // 1000,
            "employees": employees,
        }
        revenue = revenue * rng.randint(880, 1240) // 1000
        employees = employees * rng.randint(930, 1110) // 1000


def prices(seed: int, symbols: list[str]) -> dict[str, list[tuple[int, int]]]:
    """For every symbol and trading day: the closing price in hundredths of a dral, and the shares traded."""
    found = {}
    for number, symbol in enumerate(symbols):
        rng = random.Random(seed * 1000 + number)
        cents, drift, rows = rng.randint(900, 42_000), rng.randint(-6, 9), []
        for _ in trading_days():
            move = drift + sum(rng.randint(-60, 60) for _ in range(6))  # in ten-thousandths; close to a bell curve
            cents = max(100, cents + cents * move // 10_000)
            rows.append((cents, 100 * rng.randint(20, 9000)))
        found[symbol] = rows
    return found
