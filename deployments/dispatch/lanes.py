"""A lane: one pipeline at work, with the queues of its stages and the groups of replicas that run them."""

from collections.abc import Iterator, Mapping

from deployments.dispatch.estimates import Estimates
from deployments.dispatch.groups import Group, Replica
from deployments.dispatch.messages import Limits
from deployments.dispatch.queues import Queue, StageQueues, Ticket
from deployments.dispatch.route import Route


class Lane:
    """A pipeline's route, the queues before its stages, and the groups that run it (which no other lane uses).

    Newcomers are promised an answer by the last of the stages that are `promised`: by the end or, where a cascade may
    degrade, by the end of its first level.
    """

    def __init__(self, route: Route, groups: Mapping[str, Group], limits: Limits) -> None:
        self.route = route
        self.groups = tuple(groups[name] for name in route.groups)
        until = route.edges[0] if limits.degrades and route.edges else route.num_blocks
        self.stages = tuple(StageQueues(route, stage, groups, until) for stage in route.stages)
        self.promised = tuple(each for each in self.stages if each.is_promised)
        self.estimates = Estimates([each.stage for each in self.promised], limits.slack)
        for each in self.stages:
            each.is_alone = [other.group for other in self.stages].count(each.group) == 1
        self.by_group = tuple(
            (group, tuple(each for each in self.stages if each.group is group)) for group in self.groups
        )
        self.kept: dict[Replica, dict[int, Queue]] = {}  # of inputs that only this replica has, by the block before it
        for group in self.groups:
            group.forget_kept()
            group.transfer_s = max(stage.transfer_s for stage in route.stages if stage.group == group.name)
        self.entry = self.queue(0, None)

    @property
    def open(self) -> bool:
        """Whether an input can get to its end here: every group has a replica."""
        return all(group.members for group in self.groups)

    @property
    def busy(self) -> bool:
        """Whether anybody waits or runs here."""
        return any(group.under_way for group in self.groups) or any(each.waiting for each in self.stages)

    def alone_s(self, weight: int) -> float:
        """By when at least half of the inputs that meet nobody have their answers, as planned."""
        half = next(number for number, after in enumerate(self.estimates.beyond) if after <= 0.5)
        return self.alone_until_s(weight)[half]

    def whole_s(self, weight: int) -> float:
        """By when an input that meets nobody and leaves at no ramp has its answer, as planned."""
        return self.alone_until_s(weight)[-1]

    def alone_until_s(self, weight: int, slow: bool = False) -> list[float]:
        """When an input that meets nobody is at each exit point, as planned; `slow`: as replicas really take."""
        ends_s, at_s = list[float](), 0.0
        for each in self.promised:
            ends_s += each.leaves_s(at_s, weight, each.group.slowdown if slow else 1.0)
            at_s = ends_s[-1]
        return ends_s

    @property
    def may_launch_newcomer(self) -> bool:
        """Whether the newcomer that has just been admitted may have made a launch possible.

        A replica is idle, or the batch is full; or the newcomer is the first who waits, and a replica is nearly idle.
        """
        entry, group = self.entry, self.entry.owner.group
        return entry.weight >= entry.stage.room or group.has_idle or (entry.size == 1 and group.early_s > 0)

    def wait(self, tickets: list[Ticket], cursor: int, kept_by: str | None) -> None:
        """Let inputs wait before one block; either one replica keeps them all, or none keeps any."""
        queue = self.queue(cursor, kept_by)
        if len(tickets) == 1:
            queue.add(tickets[0])
        else:
            queue.add_all(tickets)
        if queue.keeper is not None:
            queue.owner.group.may_run_kept.add(queue.keeper)

    def queues(self) -> Iterator[Queue]:
        """All queues in which somebody waits."""
        for stage in self.stages:
            yield from (queue for queue in stage.shared.values() if queue.size)
        for group in self.groups:
            for replica in group.members.values():
                yield from (queue for queue in self.kept.get(replica, {}).values() if queue.size)

    def forget_gone(self) -> None:
        """Replicas that have left their group keep nothing any more."""
        here = {replica for group in self.groups for replica in group.members.values()}
        self.kept = {replica: queues for replica, queues in self.kept.items() if replica in here}

    def queue(self, cursor: int, kept_by: str | None) -> Queue:
        """Where inputs wait before a block, if this replica keeps them."""
        stage = self.stages[self.route.number_at(cursor)]
        keeper = stage.group.members.get(kept_by) if stage.stage.local and kept_by is not None else None
        if keeper is not None:
            keeper.keeps_inputs = True
        queues = stage.shared if keeper is None else self.kept.setdefault(keeper, {})
        if cursor not in queues:
            queues[cursor] = Queue(stage, cursor, keeper)
        return queues[cursor]
