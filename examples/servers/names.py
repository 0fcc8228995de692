"""Invented names: sounds put together by a seeded generator, never the same one twice.

Read next: `world.py`, which names a country with them.
"""

from __future__ import annotations

import random

_ONSETS = "b br d dr f g gr h k kl l m n p r s st t th tr v vr".split()
_VOWELS = "a e i o u ae ei".split()
_CODAS = "l ld lm n nd r rn rk s sk th v".split()
_ENDINGS = {
    "town": "ford by holm stead wick gate hafen mere".split(),
    "river": "a en el o une".split(),
    "mountain": "horn tor fell spire".split(),
    "surname": "sen a ik or ner man et".split(),
    "first": "a e o in is us".split(),
    "company": "ex or ia um ora ane".split(),
}


class Namer:
    """Makes names of one world.

    Example:
        >>> namer = Namer(random.Random(1))
        >>> namer.name("town") != namer.name("town")
        True
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def name(self, kind: str) -> str:
        """A new name of this kind; no two names of a world are spelt alike, whatever their kinds."""
        while True:
            word = self._syllable()
            if kind not in ("first", "surname") and self._rng.random() < 0.25:
                word += self._rng.choice(_VOWELS[:5])
                word += self._rng.choice(_ONSETS[:12])
                word += self._rng.choice(_VOWELS[:5])
            word = (word + self._rng.choice(_ENDINGS[kind])).capitalize()
            if word not in self._used:
                self._used.add(word)
                return word

    def person(self) -> str:
        """First name and surname."""
        return f"{self.name('first')} {self.name('surname')}"

    def _syllable(self) -> str:
        return self._rng.choice(_ONSETS) + self._rng.choice(_VOWELS) + self._rng.choice(_CODAS)
