"""Talverne, a country that does not exist: what is true of it, and the short articles that say so.

Owns       the facts of the corpus and the sentences that carry them.
Promises   the same seed gives the same country, byte for byte; a fact stands in exactly one sentence form, so that a
           reader (or a test) can find it again with `READ`.
Never      resembles a real place on purpose: an answer can be looked up, it cannot be known.

Read next: `make_data.py`, which writes the articles down.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from names import Namer

READ = {
    "founded": r"founded in (\d+)",
    "population": r"population of (\d+)",
    "river": r"lies on the river (\w+)",
    "province": r"province of (\w+)",
    "product": r"known for its (\w+ ?\w*)\.",
    "length_km": r"(\d+) kilometres long",
    "rises_on": r"rises on (Mount \w+)",
    "height": r"reaches (\d+) metres",
    "first_climbed": r"first climbed in (\d+)",
    "climber": r"party led by (\w+ \w+)",
    "area": r"covers (\d+) square kilometres",
    "depth": r"greatest depth is (\d+) metres",
    "born": r"born in (\d+)",
    "birthplace": r"came into the world in (\w+)",
    "profession": r"worked as an? (\w+)",
    "author": r"written by (\w+ \w+)",
    "published": r"published in (\d+)",
    "pages": r"has (\d+) pages",
    "bridge_town": r"stands in (\w+)",
    "opened": r"opened to traffic in (\d+)",
    "span": r"spans (\d+) metres",
    "engineer": r"designed by (\w+ \w+)",
    "museum_town": r"museum in (\w+)",
    "doors": r"opened its doors in (\d+)",
    "objects": r"holds (\d+) objects",
    "festival_town": r"held in (\w+)",
    "day": r"begins on (\d+ \w+)",
    "first_held": r"first celebrated in (\d+)",
    "ship_port": r"home port is (\w+)",
    "launched": r"launched in (\d+)",
    "tonnes": r"displaces (\d+) tonnes",
    "capital": r"capital is (\w+)",
}
"""How to read each fact out of its article."""

Facts = dict[str, str | int]

_PRODUCTS = [
    "blue glass", "smoked eel", "felt hats", "pear brandy", "slate roofs", "brass bells", "rope", "salt", "goat cheese",
    "paper kites", "oak casks", "amber combs", "linen", "clay pipes", "rye bread", "honey cakes", "copper kettles",
]  # fmt: skip
_PROFESSIONS = "cartographer glassblower astronomer printer botanist surveyor composer weaver shipwright poet".split()
_MONTHS = "January February March April May June July August September October November December".split()
_TITLES = ["Salt", "Lanterns", "Winter Rope", "Nine Doors", "Ash", "Quiet Oars", "The Ferry", "Small Bells", "Thistle"]
_SETTINGS = ["at Dusk", "of the North", "in Rain", "without Name", "for Two Hands", "under Ice", "by the Weir"]
_FILLERS = [
    "Few visitors come before the snow has gone.",
    "The parish books of the time have survived only in part.",
    "Local guides tell the story in several ways.",
    "A drawing of it hangs in the assembly house.",
    "The older spelling of the name is still used on some maps.",
    "Schoolchildren learn about it in their fourth year.",
    "The survey office corrected its figures twice.",
    "Nothing is left of the earlier buildings.",
]


@dataclass(frozen=True, slots=True)
class Thing:
    """One article: its kind, its title, and what is true of it.

    Example:
        >>> Thing("river", "Vosken", {"length_km": 212}, ["The river Vosken is 212 kilometres long."]).slug
        'river-vosken'
    """

    kind: str
    title: str
    facts: Mapping[str, str | int]
    sentences: list[str] = field(default_factory=list)

    @property
    def slug(self) -> str:
        """Its id: the kind and the title, in plain letters."""
        return "-".join([self.kind, *re.findall(r"[a-z0-9]+", self.title.lower())])

    @property
    def text(self) -> str:
        """The article."""
        return " ".join(self.sentences)


class World:
    """Everything that is true, and its articles in order.

    Example:
        >>> len(World(7).things("town"))
        70
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._namer = Namer(self._rng)
        self._all: list[Thing] = []
        self._people = [self._namer.person() for _ in range(90)]
        self._land()
        self._towns()
        self._lives()
        self._works()

    def things(self, kind: str | None = None) -> list[Thing]:
        """All articles, or those of one kind."""
        return [thing for thing in self._all if kind in (None, thing.kind)]

    def _add(self, kind: str, title: str, facts: Mapping[str, str | int], *sentences: str) -> None:
        first, *rest = (sentence.format(title=title, **facts) for sentence in sentences)
        rest += self._rng.sample(_FILLERS, 2)
        self._rng.shuffle(rest)
        self._all.append(Thing(kind, title, dict(facts), [first, *rest]))

    def _pick(self, kind: str) -> str:
        return self._rng.choice(self.things(kind)).title

    def _land(self) -> None:
        number = self._rng.randint
        for _ in range(16):
            facts = Facts(
                height=number(1100, 3900), first_climbed=number(1790, 1931), climber=self._rng.choice(self._people)
            )
            self._add(
                "mountain", f"Mount {self._namer.name('mountain')}", facts,
                "{title} is a mountain in Talverne.", "Its summit reaches {height} metres.",
                "It was first climbed in {first_climbed} by a party led by {climber}.",
            )  # fmt: skip
        for _ in range(18):
            facts = Facts(length_km=number(41, 620), rises_on=self._pick("mountain"))
            self._add(
                "river", self._namer.name("river"), facts,
                "The {title} is a river in Talverne.", "It rises on {rises_on}.", "It is {length_km} kilometres long.",
            )  # fmt: skip
        for _ in range(14):
            facts = Facts(area=number(3, 240), depth=number(9, 310))
            self._add(
                "lake", f"Lake {self._namer.name('river')}", facts,
                "{title} is a lake in Talverne.", "It covers {area} square kilometres.",
                "Its greatest depth is {depth} metres.",
            )  # fmt: skip

    def _towns(self) -> None:
        number = self._rng.randint
        provinces = [self._namer.name("company") for _ in range(9)]
        for index in range(70):
            facts = Facts(
                founded=number(904, 1868), population=number(1200, 380000), river=self._pick("river"),
                province=provinces[index % 9], product=self._rng.choice(_PRODUCTS),
            )  # fmt: skip
            self._add(
                "town", self._namer.name("town"), facts,
                "{title} is a town in the province of {province}.", "It lies on the river {river}.",
                "It was founded in {founded}.", "It has a population of {population}.",
                "It is known for its {product}.",
            )  # fmt: skip
        for province in provinces:
            towns = [thing.title for thing in self.things("town") if thing.facts["province"] == province]
            facts = Facts(area=number(900, 21000), capital=self._rng.choice(towns))
            self._add(
                "province", province, facts,
                "{title} is a province of Talverne.", "It covers {area} square kilometres.",
                "Its capital is {capital}.",
            )  # fmt: skip

    def _lives(self) -> None:
        for person in self._people:
            facts = Facts(
                born=self._rng.randint(1701, 1905), birthplace=self._pick("town"),
                profession=self._rng.choice(_PROFESSIONS),
            )  # fmt: skip
            article = "an" if facts["profession"] == "astronomer" else "a"
            self._add(
                "person", person, facts,
                "{title} was born in {born}.", "The family came from the hills; {title} came into the world in "
                "{birthplace}.", "For most of that life {title} worked as " + article + " {profession}.",
            )  # fmt: skip

    def _works(self) -> None:
        number = self._rng.randint
        titles = [f"{title} {setting}" for title in _TITLES for setting in _SETTINGS]
        for title in self._rng.sample(titles, 50):
            facts = Facts(author=self._rng.choice(self._people), published=number(1741, 1949), pages=number(90, 940))
            self._add(
                "book", title, facts, '"{title}" is a book written by {author}.', "It was published in {published}.",
                "The first edition has {pages} pages.",
            )  # fmt: skip
        for _ in range(45):
            facts = Facts(
                bridge_town=self._pick("town"),
                opened=number(1801, 1967),
                span=number(24, 780),
                engineer=self._rng.choice(self._people),
            )
            self._add(
                "bridge", f"{self._namer.name('surname')} Bridge", facts,
                "The {title} stands in {bridge_town}.", "It was opened to traffic in {opened}.",
                "It spans {span} metres.", "It was designed by {engineer}.",
            )  # fmt: skip
        self._gatherings()

    def _gatherings(self) -> None:
        number = self._rng.randint
        for town in self._rng.sample(self.things("town"), 40):
            facts = Facts(museum_town=town.title, doors=number(1822, 1996), objects=number(310, 48000))
            subject = self._rng.choice("Clock Boat Salt Bell Print Kite Glass Railway".split())
            self._add(
                "museum", f"{subject} Museum {town.title}", facts,
                "The {title} is a museum in {museum_town}.", "It opened its doors in {doors}.",
                "It holds {objects} objects.",
            )  # fmt: skip
        for _ in range(40):
            day = f"{number(1, 28)} {self._rng.choice(_MONTHS)}"
            facts = Facts(festival_town=self._pick("town"), day=day, first_held=number(1640, 1988))
            self._add(
                "festival", f"{self._namer.name('surname')} Fair", facts,
                "The {title} is held in {festival_town} every year.", "It begins on {day}.",
                "It was first celebrated in {first_held}.",
            )  # fmt: skip
        for _ in range(40):
            facts = Facts(ship_port=self._pick("town"), launched=number(1858, 1989), tonnes=number(140, 19000))
            self._add(
                "ship", f"SS {self._namer.name('first')}", facts,
                "The {title} is a ship of the Talverne ferry line.", "Its home port is {ship_port}.",
                "It was launched in {launched}.", "It displaces {tonnes} tonnes.",
            )  # fmt: skip
