"""Who can run a launch: the replicas of a group, those with the least to do first, and stragglers on the bench."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import TYPE_CHECKING

from deployments.dispatch.messages import Limits

if TYPE_CHECKING:
    from deployments.dispatch.pools import Pool

_KEPT = 0.9  # how much of what is known of a replica stays when a launch is added: ten launches, more or less
_EVIDENCE = 5  # launches before a replica is judged: one whose inputs all stay to the end takes long, and rightly so


@dataclass(eq=False)
class Replica:
    """One replica as the dispatcher sees it."""

    name: str
    queue: deque[float] = field(default_factory=deque)  # what each launch there is expected to take, the running first
    taken_s: float = 0.0  # by its last launches
    expected_s: float = 0.0  # of them
    launches: int = 0
    last_end_s: float = 0.0
    ends_s: deque[float] = field(default_factory=deque)  # when each is expected to end
    benched_until_s: float | None = None
    pools: "dict[int, Pool]" = field(default_factory=dict)  # inputs that it keeps, by the block they wait before

    @property
    def pace(self) -> float:
        """How much longer its launches take than expected. Times are summed first: short launches vary most."""
        return self.taken_s / self.expected_s if self.expected_s else 1.0

    def learn(self, taken_s: float, expected_s: float) -> None:
        """A probe is believed at once: what came before has got it onto the bench."""
        kept = 0.0 if self.benched_until_s is not None else _KEPT
        self.taken_s = kept * self.taken_s + taken_s
        self.expected_s = kept * self.expected_s + expected_s
        self.launches += 1


class Group:
    """Interchangeable replicas. All operations but the median of their paces take constant time."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.members: dict[str, Replica] = {}
        self.pace = 1.0  # how much longer launches take than planned
        self.stirred: set[Replica] = set()  # may run something that they keep
        self.transfer_s = 0.0  # the longest that a launch takes to get here
        self.owed_s = 0.0  # to inputs inside, but for the launches under way
        self._benched: set[Replica] = set()
        # By how much they run; each in the order in which they got there, so that the first frees earliest.
        self._by_load: list[dict[str, Replica]] = [{}]
        self._flights = 0
        self._ends_s = 0.0  # the sum of when they are expected to end
        self._notes = 0
        self.limit(limits)

    def limit(self, limits: Limits) -> None:
        """What the group may do from now on."""
        self._limits = limits
        self._ahead = round(limits.ahead * limits.share)  # others keep a shared replica busy too
        self.early_s = limits.early_s if self._ahead else 0.0  # where nothing may wait at a busy replica, never
        self._settle()

    def follow(self, names: Collection[str]) -> None:
        """These are the members from now on. Who stays keeps what is known of it."""
        for name in self.members.keys() - set(names):
            replica = self.members.pop(name)
            self._by_load[len(replica.queue)].pop(name)
            self._benched.discard(replica)
            self.stirred.discard(replica)
        for name in sorted(set(names) - self.members.keys()):
            self.members[name] = self._by_load[0][name] = Replica(name)
        if not self.working:
            for replica in self.members.values():
                self._bench(replica, 0.0, benched=False)
        self._settle()

    def forget_pools(self) -> None:
        """Another plan: what is kept waits for other launches."""
        self.stirred.clear()
        for replica in self.members.values():
            replica.pools.clear()

    @property
    def working(self) -> int:
        """How many are not benched."""
        return len(self.members) - len(self._benched)

    def ahead_s(self, now_s: float) -> float:
        """How long the group needs for what it owes to inputs inside."""
        running_s = self._ends_s - self._flights * now_s
        ahead_s = self.owed_s * self._busy_pace
        return (ahead_s + running_s if running_s > 0 else ahead_s) / self._devices

    @property
    def has_idle(self) -> bool:
        """On the bench or not."""
        return bool(self._by_load[0])

    def idle(self, now_s: float) -> Replica | None:
        for replica in self._by_load[0].values():
            if replica.benched_until_s is None or now_s >= replica.benched_until_s:
                return replica
        return None

    def nearly_idle(self, now_s: float) -> Replica | None:
        """One that will be free about when a launch that leaves now gets there."""
        replica = self._next()
        return replica if replica and abs(replica.ends_s[0] - now_s) <= self.early_s else None

    def ripe_s(self, now_s: float) -> float:
        """When the next one will be nearly idle. Of one that takes longer than expected nothing more is expected."""
        replica = self._next()
        ripe_s = replica.ends_s[0] - self.early_s if replica else inf
        return ripe_s if ripe_s > now_s else inf

    def _next(self) -> Replica | None:
        """The busy one that will be free first, if it may be sent something early."""
        if not self.early_s or len(self._by_load) < 2:
            return None
        return next((each for each in self._by_load[1].values() if each.benched_until_s is None), None)

    def soonest(self) -> Replica | None:
        """One that is busy, has room and will be free first."""
        for level in self._by_load[1 : None if self.transfer_s else self._ahead + 1]:
            for replica in level.values():
                if replica.benched_until_s is None and self.has_room(replica):
                    return replica
        return None

    def has_room(self, replica: Replica) -> bool:
        """For one launch more: so many may wait, or as many as it takes to outlast the journey of the next."""
        waiting = len(replica.queue) - 1
        return waiting < self._ahead or (waiting > 0 and sum(replica.queue) - replica.queue[0] < self.transfer_s)

    def begin(self, replica: Replica, seconds: float, now_s: float) -> float:
        """When it is expected to end: what waits at a busy replica starts when that is done, not now."""
        ends_s = (max(now_s, replica.ends_s[-1]) if replica.queue else now_s) + seconds * self._busy_pace
        del self._by_load[len(replica.queue)][replica.name]
        replica.queue.append(seconds)
        replica.ends_s.append(ends_s)
        self._enter(replica)
        self._flights += 1
        self._ends_s += ends_s
        return ends_s

    def end(self, replica: Replica, now_s: float) -> None:
        load, expected_s = len(replica.queue), replica.ends_s.popleft()
        replica.queue.popleft()
        self._flights -= 1
        self._ends_s = self._ends_s - expected_s if self._flights else 0.0
        if replica.queue:
            self._restart(replica, now_s)
        if self._holds(replica):
            del self._by_load[load][replica.name]
            self._enter(replica)
            if replica.pools:
                self.stirred.add(replica)

    def _restart(self, replica: Replica, now_s: float) -> None:
        """What waits there begins now, whenever that was expected: while it is busy, errors must not add up."""
        for number, seconds in enumerate(replica.queue):
            now_s += seconds * self._busy_pace
            self._ends_s += now_s - replica.ends_s[number]
            replica.ends_s[number] = now_s

    def note(self, replica: Replica, started_s: float, expected_s: float, now_s: float) -> None:
        """A launch came back: bench a replica whose pace has drifted above its peers', or call it back.

        Peers are compared with each other, not with the plan: where all are slow the table is wrong, and nobody strays.
        """
        if not self._holds(replica) or expected_s <= 0:
            return
        taken_s = now_s - max(started_s, replica.last_end_s)  # it may have waited for the launch before it
        replica.learn(taken_s, expected_s)
        replica.last_end_s = now_s
        self._notes += 1
        limit = self._limits.straggler_factor * self.pace
        if self._notes % len(self.members) == 0 or replica.pace > limit:
            self.pace = median(peer.pace for peer in self.members.values() if peer.launches)
            limit = self._limits.straggler_factor * self.pace
            self._settle()
        strays = replica.launches >= _EVIDENCE and replica.pace > limit
        if strays or replica.benched_until_s is not None:
            self._bench(replica, now_s, strays)

    def distrust(self, replica: Replica, now_s: float) -> None:
        """A launch failed there: let others do the work for a while, if there are others."""
        if self._holds(replica) and self.working > 1:
            self._bench(replica, now_s, benched=True)

    def _bench(self, replica: Replica, now_s: float, benched: bool) -> None:
        replica.benched_until_s = now_s + self._limits.probe_every_s if benched else None
        (self._benched.add if benched else self._benched.discard)(replica)
        self._settle()

    def _settle(self) -> None:
        """Under load, what is shared with others is as much slower, also before that could be seen."""
        self._busy_pace = max(self.pace, 1 / self._limits.share) if self._limits.share < 1 else self.pace
        self._devices = max(1, self.working)

    def _holds(self, replica: Replica) -> bool:
        """A launch may come back from a replica that is no longer one of us, even if another bears its name."""
        return self.members.get(replica.name) is replica

    def _enter(self, replica: Replica) -> None:
        load = len(replica.queue)
        if load == len(self._by_load):
            self._by_load.append({})
        self._by_load[load][replica.name] = replica
