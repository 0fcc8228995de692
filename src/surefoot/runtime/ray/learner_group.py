"""A learner of several ranks on Ray: one actor each, placed together, rank 0 leading the others.

Owns       the placement group, from the driver's request to its end; what the ranks' actors say to each other.
Promises   a group that finds no room within the start's time is an error with what was asked for and what the cluster
           has; every rank has a GPU of its own, or none computes on one; the ranks meet on a port of rank 0's own
           address, which on a private cluster is 127.0.0.1; a rank that is killed is named with its process.
Never      goes on with fewer ranks: a lost rank is a lost learner.

Read next: `runtime/learner_ranks.py`, what rank 0 asks; `actors.py`, who answers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from surefoot.errors import ConfigError, LearnerStartError
from surefoot.learner.grpo import GRPOLearner
from surefoot.learner.model import Policy
from surefoot.runtime.learner_ranks import FollowerRanks, FollowingRank, LedLearner, lead
from surefoot.runtime.ray.actors import LearnerActor, RankActor
from surefoot.runtime.ray.transport import RayReplica, find_replica, make_actor, start_replica
from surefoot.runtime.replicas import ReplicaLostError
from surefoot.runtime.specs import LearnerSpec, PolicyFacts, ProcessSpec
from surefoot.system.connections import interface_of
from surefoot.system.signals import Deadline, tick


class LearnerProcesses(NamedTuple):
    """The driver's end of all of them."""

    first: RayReplica
    """Rank 0, or the only one: what the driver asks."""
    others: tuple[RayReplica, ...] = ()
    group: PlacementGroup | None = None

    async def start(self) -> PolicyFacts:
        """Have them load the model; a start that fails or is cancelled leaves none of them."""
        try:
            for each in self.others:
                await find_replica(each)
            _, facts = await start_replica(self.first, *([list(self.others)] if self.others else []))
        except BaseException:
            self.kill()
            raise
        return facts  # type: ignore[no-any-return]

    def kill(self) -> None:
        """End them all, and give their places back."""
        for each in (self.first, *self.others):
            each.kill()
        if self.group is not None and ray.is_initialized():
            remove_placement_group(self.group)


def place_learner(process: ProcessSpec, recipe: LearnerSpec, *, num_gpus: float) -> LearnerProcesses:
    """Its processes, each in a place of its own; they hold nothing yet."""
    if recipe.ranks is None:
        return LearnerProcesses(_actor(LearnerActor, "learner", process, recipe, num_gpus, "DEFAULT"))
    size = recipe.ranks.size
    group = _room_for_ranks(size, num_gpus, recipe.ranks.start_timeout_s)
    seats = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in range(size)]
    first = _actor(LearnerActor, "learner", process, recipe, num_gpus, seats[0])
    others = [
        _actor(RankActor, f"learner rank {index}", process, recipe, num_gpus, seats[index]) for index in range(1, size)
    ]
    return LearnerProcesses(first, tuple(others), group)


def _actor(
    host: type[RankActor], name: str, process: ProcessSpec, recipe: LearnerSpec, num_gpus: float, strategy: Any
) -> RayReplica:
    handle = make_actor(host, num_gpus=num_gpus, strategy=strategy).remote(name, process, recipe)
    return RayReplica(name, handle, process.log(name))


def _room_for_ranks(size: int, num_gpus: float, start_timeout_s: float) -> PlacementGroup:
    """A bundle for each rank, on as few machines as hold them."""
    bundle = {"CPU": 1.0} | ({"GPU": num_gpus} if num_gpus else {})
    group = placement_group([bundle] * size, strategy="PACK")
    deadline = Deadline(start_timeout_s)
    try:
        while not group.wait(timeout_seconds=min(1.0, deadline.left)):
            tick("waiting for room for the ranks of the learner")
            if deadline.expired:
                raise _no_room(size, bundle, start_timeout_s)
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _no_room(size: int, bundle: Mapping[str, float], start_timeout_s: float) -> LearnerStartError:
    there, free = ray.cluster_resources(), ray.available_resources()
    asked = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    found = ", ".join(f"{free.get(name, 0.0):g} of {there.get(name, 0.0):g} {name} free" for name in bundle)
    return LearnerStartError(
        f"the learner did not start: a placement group of {size} bundles with {asked} each found no room within "
        f"runtime.start_timeout_s = {start_timeout_s:g} s; the cluster has {found}",
        "every rank of the learner needs a place of its own, all of them at once",
        "wait for what runs there, lower runtime.learner_ranks or runtime.learner_gpus, or add machines",
    )


# -- In the actors ----------------------------------------------------------------------------------


class ActorFollower:
    """`learner_ranks.Follower`: another rank's actor, as rank 0's sees it."""

    def __init__(self, member: RayReplica) -> None:
        self.member = member
        self._lost: str | None = None

    def ask(self, line: bytes, seconds: float) -> bytes:
        """One call there, one answer back."""
        try:
            answer: bytes = self.member.wait("answer", line, seconds=seconds)
        except ReplicaLostError as loss:
            self._lost = f"was lost: {loss}"
            raise ConnectionError(self._lost) from None
        return answer

    def killed(self, wait_s: float) -> str | None:
        """What Ray says of its end."""
        return self._lost

    @property
    def is_running(self) -> bool:
        """Until Ray says otherwise."""
        return self._lost is None

    def last_lines(self, count: int) -> list[str]:
        """The end of its log, where this machine can read it."""
        return self.member.last_lines().splitlines()[-count:]

    def end(self) -> None:
        """Through Ray, and by signal where it is near."""
        self.member.kill()


def make_led(recipe: LearnerSpec, others: Sequence[RayReplica]) -> tuple[Policy, GRPOLearner | LedLearner]:
    """The model and its learner, in rank 0's process; the other ranks load it meanwhile."""
    limits = recipe.ranks
    if limits is None:
        policy = recipe.load()
        return policy, recipe.learner(policy)
    assert len(others) == limits.size - 1, f"{limits.size} ranks were placed, and {len(others)} of them were handed on"
    followers = FollowerRanks(
        {index: ActorFollower(each) for index, each in enumerate(others, 1)}, host=_use_own_network(),
        deadline_s=limits.deadline_s, start_timeout_s=limits.start_timeout_s,
    )  # fmt: skip
    try:
        policy = recipe.load()
        _refuse_shared_gpu(policy, limits.gpus)
    except BaseException:
        followers.close()
        raise
    return policy, lead(followers, policy, lambda ranks: recipe.learner(policy, ranks))


def follower(process: ProcessSpec, recipe: LearnerSpec) -> FollowingRank:
    """What another rank's actor answers with."""
    _use_own_network()

    def begin(index: int) -> LearnerSpec:
        process.set_torch()
        return recipe

    return FollowingRank(begin)


def _use_own_network() -> str:
    """Collectives go over the address that Ray knows this machine by; which that is."""
    address: str = ray.util.get_node_ip_address()
    if (name := interface_of(address)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    return address


def _refuse_shared_gpu(policy: Policy, gpus: float) -> None:
    if next(policy.model.parameters()).device.type == "cuda" and gpus != 1:
        raise ConfigError(
            f"runtime.learner_gpus = {gpus:g}, and the ranks of the learner compute on GPUs",
            "ranks that reserve none, or a part of one, would share one; NCCL refuses that",
            'set runtime.learner_gpus = 1, or device = "cpu"',
        )
