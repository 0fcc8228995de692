"""How much one check may cost: counts, never seconds, so that the answer is the same on every machine."""

from __future__ import annotations

MAX_LENGTH = 4_000
"""Characters of one expression."""

MAX_TOKENS = 600
"""Tokens of one expression."""

MAX_DEPTH = 40
"""Brackets, calls, `not` and signs inside each other."""

MAX_STRING = 500
"""Characters of one quoted name."""

MAX_DIGITS = 40
"""Characters of one number."""

MAX_NUMBER = 1e300
"""Largest literal, either sign."""

MAX_STEP = 10**15
"""Largest step or range bound, either sign: exact as a float."""

MAX_OPERATIONS = 2_000
"""Evaluation steps of one check that do not come from recorded points ..."""

OPERATIONS_PER_POINT = 32
"""... and this many more for each recorded point of each metric it names."""

CALL_OPERATIONS = 5
"""What calling a helper costs, besides its points: about as much as five of the others."""

MAX_CHECKS = 10_000
"""Expressions of one run."""
