"""Which commit broke it: a bisect that cannot blame the innocent.

Owns       the search between a good and a bad commit, by exit code or by a noisy metric.
Promises   only a measured failure counts as bad: a missing script, a failed build or broken infrastructure is
           "cannot tell"; the work tree and the branch come back on every path, signals included; what was
           learnt before a stop can be replayed.
Never      changes the user's git config, or runs code that a checkout may delete: it works from a copy of itself.

Read next: `command.py`, the whole search on one screen; `noisy.py`, the mathematics of noise.
"""
