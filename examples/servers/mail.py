"""An invented mailbox: colleagues of a harbour office, what they wrote, and what they answer while they are away.

Read next: `messages.py`, which serves it.
"""

from __future__ import annotations

import datetime
import random
from typing import Any

from names import Namer

READ = {
    "amount": r"over (\d+) dral",
    "due": r"due on (\d{4}-\d\d-\d\d)",
    "room": r"in room (\d+)",
    "time": r"at (\d\d:\d\d)",
    "weight": r"weighs (\d+) kg",
    "counter": r"counter (\d+)",
    "level": r"level is (\d+) cm",
    "order": r"order (\d+) ",
    "deputy": r"(\w+ \w+) stands in for me",
    "extension": r"extension (\d+)",
    "back": r"back on (\d{4}-\d\d-\d\d)",
}
"""How to read each fact out of its message."""

_TEAMS = "pilot crane archive ferry customs lighthouse".split()
_TOPICS = ["dredging", "winter berths", "the new crane", "tide tables", "the ferry strike", "lamp oil", "rope stock"]
_ARTICLES = ["fenders", "signal flags", "oil lamps", "mooring ropes", "life vests", "log books"]


def contacts(seed: int) -> list[dict[str, Any]]:
    """24 colleagues, each with the answer that comes by itself."""
    rng = random.Random(seed)
    namer = Namer(rng)
    people = [namer.person() for _ in range(24)]
    made = []
    for number, name in enumerate(people):
        deputy = people[(number + rng.randint(1, 23)) % 24]
        day, extension = _day(rng), rng.randint(1000, 9999)
        note = f"I am away and back on {day}. {deputy} stands in for me, extension {extension}."
        made.append({"name": name, "team": _TEAMS[number % 6], "away_note": note})
    return made


def messages(seed: int, people: list[str]) -> list[dict[str, Any]]:
    """160 messages, oldest first."""
    rng = random.Random(seed)
    start, made = datetime.datetime(2024, 3, 1, 8, 0), []
    numbers = iter(rng.sample(range(10_000, 100_000), 400))
    for number in range(160):
        start += datetime.timedelta(minutes=rng.randint(20, 600))
        subject, text = _letter(rng, next(numbers))
        sender, sent = rng.choice(people), f"{start:%Y-%m-%d %H:%M}"
        made.append({"id": number + 1, "from": sender, "sent": sent, "subject": subject, "text": text})
    return made


def _day(rng: random.Random) -> str:
    return (datetime.date(2024, 5, 1) + datetime.timedelta(days=rng.randint(0, 200))).isoformat()


def _letter(rng: random.Random, code: int) -> tuple[str, str]:
    """Subject and text of one letter; every letter has a number of its own to be found by."""
    kind = rng.choice(["Invoice", "Meeting", "Parcel", "Gauge", "Request"])
    if kind == "Invoice":
        text = f"Invoice {code} over {rng.randint(120, 48_000)} dral is due on {_day(rng)}."
    elif kind == "Meeting":
        clock = f"{rng.randint(8, 17):02d}:{rng.choice(['00', '15', '30', '45'])}"
        where = f"on {_day(rng)} at {clock} in room {rng.randint(101, 499)}"
        text = f"Meeting {code} about {rng.choice(_TOPICS)} is {where}."
    elif kind == "Parcel":
        text = (
            f"Parcel {code} has arrived and weighs {rng.randint(2, 380)} kg. It waits at counter {rng.randint(1, 60)}."
        )
    elif kind == "Gauge":
        text = f"Reading of gauge {code}: the water level is {rng.randint(40, 990)} cm."
    else:
        what, team = rng.choice(_ARTICLES), rng.choice(_TEAMS)
        text = f"Request {code}: please order {rng.randint(12, 960)} {what} for the {team} team."
    return f"{kind} {code}", text
