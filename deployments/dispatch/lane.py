"""One pipeline at work: who waits before each of its stages, and what a newcomer would have to wait for."""

from collections.abc import Iterator, Mapping, Sequence

from deployments.dispatch.pools import Pool, Ticket
from deployments.dispatch.replicas import Group
from deployments.dispatch.route import Route, Stage

Debts = tuple[tuple[Group, float], ...]


class Station:
    """A stage at work. What waits for it waits together, or with the replicas that keep it."""

    def __init__(self, lane: "Lane", stage: Stage, group: Group) -> None:
        self.lane, self.stage, self.group = lane, stage, group
        self.waiting = 0  # in all its pools
        self.keep = lane.route.keeps(stage)
        self.pools: dict[int, Pool] = {}  # those that nobody keeps, by the block they wait before

    def pool(self, cursor: int, holder: str | None) -> Pool:
        keeper = self.group.members.get(holder) if self.stage.local and holder is not None else None
        pools = self.pools if keeper is None else keeper.pools
        if cursor not in pools:
            pools[cursor] = Pool(self, cursor, keeper)
        return pools[cursor]

    def own_s(self) -> float:
        """What the launch of an input will take that joins those who wait now."""
        stage, size = self.stage, self.waiting
        if stage.local and stage.start:
            size //= max(1, len(self.group.members))
        return stage.launch_s[size if size < stage.batch else -1] * self.group.pace

    def debts(self, cursor: int) -> tuple[Debts, Debts]:
        """What one input that waits before block `cursor` will cost each group; and what after its next launch."""
        here, *after = onward = self.lane.route.onward(cursor)
        return self._debts(onward, here), self._debts(after, here)

    def _debts(self, stages: Sequence[Stage], here: Stage) -> Debts:
        each_s: dict[Group, float] = {}
        for stage in stages:
            group = self.lane.group_of(stage)
            each_s[group] = each_s.get(group, 0.0) + _share(stage, here) * stage.seconds_each
        return tuple(each_s.items())


class Lane:
    """A route and the groups that run it."""

    def __init__(self, route: Route, groups: Mapping[str, Group]) -> None:
        self.route = route
        self.groups = tuple(groups[name] for name in route.groups)
        self.stations = tuple(Station(self, stage, groups[stage.group]) for stage in route.stages)
        self.posts = tuple(
            (group, tuple(each for each in self.stations if each.group is group)) for group in self.groups
        )
        for group in self.groups:
            group.forget_pools()
            group.transfer_s = max(stage.transfer_s for stage in route.stages if stage.group == group.name)
        self.entry = self.stations[0].pool(0, None)
        self.alone_s = sum(stage.launch_s[0] for stage in route.stages)  # of an input that meets nobody, as planned

    @property
    def open(self) -> bool:
        """Whether an input can get to its end here: every group has a replica."""
        return all(group.members for group in self.groups)

    @property
    def is_stirred(self) -> bool:
        """Whether a newcomer may have made a launch possible: a replica is idle, or the batch is full.

        Or a replica is nearly idle, which nobody asks about before the first one waits.
        """
        entry, group = self.entry, self.entry.station.group
        return entry.size >= entry.stage.batch or group.has_idle or (entry.size == 1 and group.early_s > 0)

    def group_of(self, stage: Stage) -> Group:
        return next(group for group in self.groups if group.name == stage.group)

    def expected_s(self, now_s: float) -> float:
        """What an input admitted now takes to the very end, by today's backlog, at the pace that replicas really keep.

        Where a table is wrong and all are slow, promising by the table would let in what expires half-way.
        """
        ahead_s = own_s = 0.0
        for group in self.groups:
            if (group_s := group.ahead_s(now_s)) > ahead_s:
                ahead_s = group_s
        for station in self.stations:
            own_s += station.own_s()
        return ahead_s + own_s

    def wait(self, tickets: list[Ticket], cursor: int, holder: str | None) -> None:
        """Inputs before one block, all of them kept by one replica, or by none."""
        station = self.stations[self.route.number_at(cursor)]
        pool = station.pool(cursor, holder)
        if len(tickets) == 1:
            pool.add(tickets[0])
        else:
            pool.add_all(tickets)
        if pool.keeper is not None:
            station.group.stirred.add(pool.keeper)

    def pools(self) -> Iterator[Pool]:
        """All that have somebody who waits."""
        for station in self.stations:
            yield from (pool for pool in station.pools.values() if pool.size)
        for group in self.groups:
            for replica in group.members.values():
                yield from (pool for pool in replica.pools.values() if pool.size)


def _share(stage: Stage, here: Stage) -> float:
    """Of the inputs that are here, how many get there. Where none was expected even here, all are."""
    return min(1.0, stage.survival / here.survival) if here.survival > 0 else 1.0
