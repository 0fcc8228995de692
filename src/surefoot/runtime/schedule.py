"""How far sampling may run ahead: arithmetic on whole numbers.

Owns       how many groups may be under way, and which of them the next batch must have.
Promises   with no more groups under way than `allowance` says, and batches taken in order of asking (or as `owed`
           says), no group is too old when it is trained on.
Never      looks at a clock, or guesses how long anything takes.

Words, all counted in weight versions, of which an optimiser step makes one:

    passes     k = num_iterations: a batch makes k versions, and its groups' age is looked at before the first
    cadence    N: engines get new weights every N steps, between two batches, so k divides N
    behind     how far the engines are behind the learner when a batch begins: 0, k, 2k ... N - k

A group that is asked for when the engines are `behind`, and that is in the j-th batch from there (the batch that is
being trained on, or if there is none the next, is the 0th), is `behind + j k` versions old when that batch begins.
Everything below is this one line, solved for the number that is asked for.

Read next: `buffer.py`, which looks at the age of every group anyway, twice; `stream.py`, which asks for groups;
`config_schedule.py`, which cadences are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from surefoot.config import Config
from surefoot.config_schedule import require_count


def allowance(config: Config, behind: int) -> int:
    """Groups that may be under way while the engines are `behind`, so that none of them has to age.

    Under way is a group from the moment it is asked for until the update it took part in is done, and published where
    that is due: in flight, waiting, and in the learner's hands. A batch in hand counts as `tasks_per_step`, also when
    it has fewer groups. Ask for a new group only while fewer than this are under way.

    With L under way, the newest is in batch (L - 1) // tasks_per_step, counted from the one in hand, so it is
    `behind + k ((L - 1) // tasks_per_step)` versions old when that begins. The largest L that keeps this within
    `max_staleness` is the answer; 0 while nothing that is asked for now can be used.

    Args:
        behind: the learner's version before the first pass over the batch in hand (over the next one, when none is),
            less the version that the engines sample from.
    """
    require_count("behind", behind, least=0)
    require_count("num_iterations", config.num_iterations, least=1)
    spare = config.max_staleness - behind
    return config.tasks_per_step * (1 + spare // config.num_iterations) if spare >= 0 else 0


def owed(ages: Iterable[int], config: Config) -> list[tuple[int, int]]:
    """What this batch must have so that no group ages later: pairs (n, age), n groups that are `age` or older.

    For whoever lets fast groups overtake slow ones. A group of age a can wait for `(max_staleness - a) // k` more
    batches, each with `tasks_per_step` seats. Where more groups have to be seated by then than there are seats, the
    rest is owed to this batch. Wait until for every pair n such groups are finished, and a whole batch in all; then
    take the oldest finished first: this pays every debt. An n above `tasks_per_step` cannot be paid, and does not come
    up while no more groups are under way than `allowance` allows.

    Args:
        ages: of every group under way that is in no batch yet, in flight or waiting; in versions, counted from the
            learner's version before this batch's first pass.

    Example:
        >>> owed([2, 2, 1], Config(model="pebble", tasks="builtin:sums", tasks_per_step=1, max_staleness=3))
        [(1, 2), (1, 1)]
    """
    counts, seated, debts = Counter(ages), 0, []
    for age in sorted(counts, reverse=True):
        require_count("the age of a group", age, least=0)
        seated += counts[age]
        later = max(0, (config.max_staleness - age) // config.num_iterations)
        if seated > later * config.tasks_per_step:
            debts.append((seated - later * config.tasks_per_step, age))
    return debts
