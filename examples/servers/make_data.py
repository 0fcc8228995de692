"""Writes the data that the servers answer from: `python examples/servers/make_data.py [FOLDER]`.

Everything is invented and comes from one seed, so that the files can be made again, byte for byte.

Read next: `world.py`, `market.py`, `mail.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mail
import market
from world import World

SEED = 2024
DATA = Path(__file__).parent / "data"


def write(folder: Path, seed: int = SEED) -> None:
    """All files, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    world = World(seed)
    _lines(folder / "corpus.jsonl", ({"id": t.slug, "title": t.title, "text": t.text} for t in world.things()))
    companies = market.companies(seed + 1, [town.title for town in world.things("town")])
    _lines(folder / "companies.jsonl", companies)
    _prices(folder, seed, [company["symbol"] for company in companies])
    contacts = mail.contacts(seed + 2)
    _lines(folder / "contacts.jsonl", contacts)
    _lines(folder / "mail.jsonl", mail.messages(seed + 3, [contact["name"] for contact in contacts]))


def _lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_text(text, encoding="utf-8", newline="\n")


def _prices(folder: Path, seed: int, symbols: list[str]) -> None:
    """One row a day, one column a symbol: closing prices in one file, shares traded in another."""
    table, days = market.prices(seed, symbols), market.trading_days()
    header = ",".join(["date", *symbols]) + "\n"
    closes, volumes = [header], [header]
    for row, day in enumerate(days):
        today = [table[symbol][row] for symbol in symbols]
        closes.append(",".join([day, *(f"{cents // 100}.{cents % 100:02d}" for cents, _ in today)]) + "\n")
        volumes.append(",".join([day, *(str(shares) for _, shares in today)]) + "\n")
    (folder / "closes.csv").write_text("".join(closes), encoding="utf-8", newline="\n")
    (folder / "volumes.csv").write_text("".join(volumes), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
