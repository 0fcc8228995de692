"""Groups that an earlier life of the run delivered and did not train on: they come back, or their tasks do.

Promises   a group that was on the disk when the driver died is used if it may be, also when the ledger had not heard of
           it yet; every other task goes back to the front of the queue; nothing comes back twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from surefoot.errors import StateError
from surefoot.records import Group, Task
from surefoot.store.batches import BatchLog
from surefoot.store.ledger import Item, Ledger
from surefoot.store.ledger_records import Pending

HOLDER = "stream"


def bring_back(
    ledger: Ledger, batches: BatchLog, tasks: Mapping[str, Task], usable: Callable[[Group], bool]
) -> list[tuple[Item, Group]]:
    """Finished groups that no batch has, in the order of delivery; call it when every journaled batch is done.

    Args:
        usable: whether a group may still be trained on, as far as its weights are concerned.
    """
    on_disk = batches.delivered()
    known = [lease.item for lease in ledger.delivered()]
    if missing := set(known) - set(on_disk):
        raise StateError(
            f"the ledger says that {min(missing)} was delivered, and its group is not in the journal",
            "a finished group would be lost without a trace",
            "bring the folder journal/ back from one copy",
        )
    groups = dict(zip(on_disk, batches.read_delivered(on_disk, tasks), strict=True))
    fit = {item: group for item, group in groups.items() if usable(group)}
    ledger.requeue([item for item in known if item not in fit], "stale")
    mine = {item for item in known if item in fit}
    mine |= _adopt(ledger, [item for item in fit if isinstance(ledger.status(item), Pending)], search=len(on_disk))
    batches.release([item for item in on_disk if item not in mine])
    return [(item, group) for item, group in fit.items() if item in mine]


def _adopt(ledger: Ledger, orphans: Sequence[Item], search: int) -> set[Item]:
    """The driver died between "on the disk" and "delivered": these count as delivered now.

    Their leases have ended, so their items are at the front of the queue, among those of other such leases.
    """
    missing, others, adopted = set(orphans), list[Item](), set[Item]()
    while missing and ledger.pending and len(others) <= 1000 + search:
        (lease,) = ledger.lease(1, holder=HOLDER)
        if lease.item in missing:
            ledger.complete([lease])
            missing.discard(lease.item)
            adopted.add(lease.item)
        else:
            others.append(lease.item)
    ledger.requeue(others, "restart")
    return adopted
