"""Pure maths: tensors in, tensors out.

Owns       advantages, token log-probabilities, losses, packing, statistics.
Promises   every sum is additive over any cut of a step; masked positions are selected away,
           never multiplied by zero; what is undefined is left out, never 0.
Never      reads a config, logs, picks a device, samples, or talks to another process.

Read next: `advantages.py`, then `losses.py`; `reference.py` says the same slowly.
"""
