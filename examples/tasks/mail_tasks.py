"""Tasks that need the mailbox: the `messages` server."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import mail
from drafts import DAY, NAME, NUMBER, WORDS, Call, Draft


def messages(rng: random.Random, contacts: list[Any], letters: list[Any], complexity: str) -> Iterator[Draft]:
    """A message, several messages, or an answer that has to be asked for."""
    while True:
        if complexity == "easy":
            yield _letter(rng, letters)
        elif complexity == "medium":
            yield _count(rng, contacts, letters) if rng.random() < 0.3 else _two_invoices(rng, letters)
        else:
            yield _away(rng, contacts) if rng.random() < 0.6 else _deputy(rng, contacts)


_LETTERS = {
    "Invoice": {"amount": "Over how many dral is invoice {c} in your mailbox?", "due": "When is invoice {c} due?"},
    "Meeting": {"room": "In which room is meeting {c}?", "time": "At what time of day does meeting {c} begin?"},
    "Parcel": {"weight": "How many kg does parcel {c} weigh?", "counter": "At which counter does parcel {c} wait?"},
    "Gauge": {"level": "Which water level, in cm, was reported for gauge {c}?"},
    "Request": {"order": "How many pieces are to be ordered according to request {c}?"},
}


def read_letter(subject: str, read: str, at: int = 0) -> list[Call]:
    """Find the letter with this subject and read something from it."""
    return [
        Call("messages__find", {"text": subject}, rf"\[(\d+)\] [^\n]*: {subject}"),
        Call("messages__read", {"id": f"<<{at}:int>>"}, read),
    ]


def _letter(rng: random.Random, letters: list[Any]) -> Draft:
    letter = rng.choice(letters)
    kind, code = letter["subject"].split()
    fact = rng.choice(sorted(_LETTERS[kind]))
    value = re.findall(mail.READ[fact], letter["text"])[0]
    form = {"due": DAY, "time": WORDS}.get(fact, NUMBER)
    return Draft(
        _LETTERS[kind][fact].format(c=code), value, form, read_letter(letter["subject"], mail.READ[fact]), "easy"
    )


def _count(rng: random.Random, contacts: list[Any], letters: list[Any]) -> Draft:
    name = rng.choice(contacts)["name"]
    value = sum(letter["from"] == name for letter in letters)
    calls = [Call("messages__inbox", {"sender": name}, r"(\d+) messages")]
    return Draft(f"How many messages from {name} are in your mailbox?", str(value), NUMBER, calls, "medium")


def _two_invoices(rng: random.Random, letters: list[Any]) -> Draft:
    first, second = rng.sample([letter for letter in letters if letter["subject"].startswith("Invoice")], 2)
    value = sum(int(re.findall(mail.READ["amount"], letter["text"])[0]) for letter in (first, second))
    calls = read_letter(first["subject"], mail.READ["amount"]) + read_letter(second["subject"], mail.READ["amount"], 2)
    calls.append(Call("calculator__evaluate", {"expression": "<<1>> + <<3>>"}))
    codes = first["subject"].split()[1], second["subject"].split()[1]
    question = f"Over how many dral are the invoices {codes[0]} and {codes[1]} in your mailbox together?"
    return Draft(question, str(value), NUMBER, calls, "medium")


def ask(name: str, read: str, at: int = 0) -> list[Call]:
    """Write to somebody and read the answer that comes by itself."""
    letter = {"to": name, "text": "When are you back, and who stands in for you?"}
    return [
        Call("messages__send", letter, r"came: message (\d+)"),
        Call("messages__read", {"id": f"<<{at}:int>>"}, read),
    ]


def _away(rng: random.Random, contacts: list[Any]) -> Draft:
    contact, fact = rng.choice(contacts), rng.choice(["back", "deputy", "extension"])
    value = re.findall(mail.READ[fact], contact["away_note"])[0]
    wish, form = {
        "back": ("on which day they are back", DAY),
        "deputy": ("who stands in for them", NAME),
        "extension": ("which extension their deputy has", NUMBER),
    }[fact]
    question = f"Write to {contact['name']} and find out from the answer {wish}."
    return Draft(question, value, form, ask(contact["name"], mail.READ[fact]), "hard")


def _deputy(rng: random.Random, contacts: list[Any]) -> Draft:
    contact = rng.choice(contacts)
    deputy = re.findall(mail.READ["deputy"], contact["away_note"])[0]
    note = next(other["away_note"] for other in contacts if other["name"] == deputy)
    question = (
        f"Write to {contact['name']} to learn who stands in for them; write to that deputy too. "
        "On which day is the deputy back?"
    )
    calls = ask(contact["name"], mail.READ["deputy"]) + ask("<<1>>", mail.READ["back"], 2)
    return Draft(question, re.findall(mail.READ["back"], note)[0], DAY, calls, "hard")
