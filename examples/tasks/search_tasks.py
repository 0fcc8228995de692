"""Tasks that need an article of the encyclopedia: the `search` server."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from drafts import NAME, NUMBER, WORDS, Call, Draft
from world import READ, Thing, World

ASK = {
    "town": {
        "founded": "In which year was the town of {t} founded?", "population": "What is the population of {t}?",
        "product": "What is the town of {t} known for?", "river": "On which river does the town of {t} lie?",
    },
    "river": {"length_km": "How many kilometres long is the river {t}?", "rises_on": "Where does the river {t} rise?"},
    "mountain": {
        "height": "How high is {t}, in metres?", "climber": "Who led the party that first climbed {t}?",
        "first_climbed": "In which year was {t} first climbed?",
    },
    "lake": {"area": "How large is {t}, in square kilometres?", "depth": "How deep is {t} at most, in metres?"},
    "person": {
        "born": "In which year was {t} of Talverne born?", "birthplace": "In which town was {t} born?",
        "profession": "What did {t} of Talverne work as?",
    },
    "book": {
        "author": 'Who wrote the book "{t}"?', "published": 'In which year was the book "{t}" published?',
        "pages": 'How many pages has the first edition of "{t}"?',
    },
    "bridge": {
        "opened": "In which year was the {t} opened to traffic?", "span": "How many metres does the {t} span?",
        "engineer": "Who designed the {t}?",
    },
    "museum": {"doors": "In which year did the {t} open?", "objects": "How many objects does the {t} hold?"},
    "festival": {"day": "On which day does the {t} begin?", "first_held": "In which year was the {t} first held?"},
    "ship": {"launched": "In which year was the {t} launched?", "tonnes": "How many tonnes does the {t} displace?"},
    "province": {"capital": "What is the capital of the province of {t}?"},
}  # fmt: skip
"""A question for every fact."""

HOPS = [
    ("book", "author", "person", "birthplace", "In which town was the author of the book \"{t}\" born?"),
    ("book", "author", "person", "born", "In which year was the author of the book \"{t}\" born?"),
    ("bridge", "engineer", "person", "birthplace", "In which town was the engineer of the {t} born?"),
    ("bridge", "bridge_town", "town", "population", "What is the population of the town where the {t} stands?"),
    ("bridge", "bridge_town", "town", "river", "On which river does the town with the {t} lie?"),
    ("museum", "museum_town", "town", "founded", "In which year was the town with the {t} founded?"),
    ("festival", "festival_town", "town", "province", "In which province is the {t} held?"),
    ("ship", "ship_port", "town", "product", "What is the home port of the {t} known for?"),
    ("town", "river", "river", "length_km", "How many kilometres long is the river on which {t} lies?"),
    ("river", "rises_on", "mountain", "height", "How high, in metres, is the mountain on which the river {t} rises?"),
    ("province", "capital", "town", "population", "What is the population of the capital of the province of {t}?"),
]  # fmt: skip
"""Questions that go from one article to the next."""


def open_article(title: str, read: str, at: int = 0) -> list[Call]:
    """Find the article called `title` and read something from it; `at` is the number of calls before."""
    escaped = title if title.startswith("<<") else re.escape(title)
    return [
        Call("search__search", {"query": title}, rf"\[([a-z0-9-]+)\] {escaped}:"),
        Call("search__open", {"id": f"<<{at}>>"}, read),
    ]


def form_of(value: str | int) -> str:
    """How an answer of this kind is to be given."""
    return NUMBER if isinstance(value, int) else NAME if value[0].isupper() else WORDS


def search(rng: random.Random, world: World, complexity: str) -> Iterator[Draft]:
    """One article, two articles, or a sum over two articles."""
    make = {"easy": _fact, "medium": _hop, "hard": _far}[complexity]
    while True:
        yield make(rng, world)


def _fact(rng: random.Random, world: World) -> Draft:
    thing = rng.choice([each for each in world.things() if each.kind in ASK])
    fact = rng.choice(sorted(ASK[thing.kind]))
    value = thing.facts[fact]
    calls = open_article(thing.title, READ[fact])
    return Draft(ASK[thing.kind][fact].format(t=thing.title), str(value), form_of(value), calls, "easy")


def _hop(rng: random.Random, world: World) -> Draft:
    kind, link, _, fact, question = rng.choice(HOPS)
    thing = rng.choice(world.things(kind))
    value = named(world, str(thing.facts[link])).facts[fact]
    calls = open_article(thing.title, READ[link]) + open_article("<<1>>", READ[fact], 2)
    return Draft(question.format(t=thing.title), str(value), form_of(value), calls, "medium")


def _far(rng: random.Random, world: World) -> Draft:
    """How the birthplaces of an author and of an engineer differ in size."""
    book, bridge = rng.choice(world.things("book")), rng.choice(world.things("bridge"))
    home = named(world, str(named(world, str(book.facts["author"])).facts["birthplace"]))
    town = named(world, str(bridge.facts["bridge_town"]))
    total = int(home.facts["population"]) + int(town.facts["population"])
    question = (
        f'How many people live in the birthplace of the author of "{book.title}" and in the town of the '
        f"{bridge.title} together? (If it is one and the same town, count it twice.)"
    )
    calls = open_article(book.title, READ["author"]) + open_article("<<1>>", READ["birthplace"], 2)
    calls += open_article("<<3>>", READ["population"], 4) + open_article(bridge.title, READ["bridge_town"], 6)
    calls += open_article("<<7>>", READ["population"], 8)
    calls.append(Call("calculator__evaluate", {"expression": "<<5>> + <<9>>"}))
    return Draft(question, str(total), NUMBER, calls, "hard")


def named(world: World, title: str) -> Thing:
    """The article with this title."""
    return next(thing for thing in world.things() if thing.title == title)
