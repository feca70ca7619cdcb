"""Which replica can run a launch: a group has those with the least to do first, and stragglers on a bench."""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median

from deployments.dispatch.messages import Limits

_REMEMBERED = 0.9  # of the sums over earlier launches, when one is added: what counts is the last ten or so
_EVIDENCE = 5  # launches before a replica is judged: a single one may take long by chance
_FOLLOWS_S = 0.002  # a launch that sets out within so long of the end of the one before was waiting for it
_BENCHED_S = 10.0  # a replica that is benched for longer is no device that plans should count on


@dataclass(eq=False)
class Replica:
    """One replica as the dispatcher sees it."""

    name: str
    pending_s: deque[float] = field(default_factory=deque)  # what its launches were planned to take, the running first
    ends_s: deque[float] = field(default_factory=deque)  # when each of them is expected to end
    taken_s: float = 0.0  # by its last launches that came back
    expected_s: float = 0.0  # of them, as planned
    launches: int = 0  # that came back
    last_end_s: float = 0.0
    benched_until_s: float | None = None  # None: it is not benched
    benched_since_s: float = 0.0  # where it is
    keeps_inputs: bool = False  # under today's plan, inputs may wait that only this replica has

    @property
    def slowdown(self) -> float:
        """How many times longer its launches take than planned. Times are summed first: short launches vary most."""
        return self.taken_s / self.expected_s if self.expected_s else 1.0

    def followed_s(self, started_s: float, now_s: float) -> float | None:
        """Seconds from the end of the launch before to the end of this one, if this one was waiting then; else None."""
        waited = self.last_end_s > 0.0 and started_s <= self.last_end_s + _FOLLOWS_S
        return now_s - self.last_end_s if waited else None

    def take_over(self, other: "Replica") -> None:
        """It was benched in another group, and is the same replica."""
        self.taken_s, self.expected_s, self.launches = other.taken_s, other.expected_s, other.launches
        self.benched_until_s, self.benched_since_s = other.benched_until_s, other.benched_since_s

    def learn(self, taken_s: float, expected_s: float) -> None:
        """A launch on the bench is believed at once: the ones before are why the replica is there."""
        remembered = 0.0 if self.benched_until_s is not None else _REMEMBERED
        self.taken_s = remembered * self.taken_s + taken_s
        self.expected_s = remembered * self.expected_s + expected_s
        self.launches += 1


NOBODY: Mapping[str, Replica] = {}


class Group:
    """Interchangeable replicas. All operations but the median of their slowdowns take constant time.

    A replica is *benched* while it is much slower than its peers, and for a while after a launch has failed there: it
    runs only what it keeps, and now and then one launch as a probe.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.members: dict[str, Replica] = {}
        self.slowdown = 1.0  # how many times longer launches take than planned: the median of its replicas
        self.may_run_kept: set[Replica] = set()  # those to ask: something has changed that concerns inputs they keep
        self.transfer_s = 0.0  # what the inputs of a full batch take to get here, at most
        self.owed_s = 0.0  # what the inputs inside will still cost, as planned, without the launches under way
        self._benched: set[Replica] = set()
        # Replicas by how many launches they have, in the order in which they got there: the first is free first.
        self._by_load: list[dict[str, Replica]] = [{}]
        self.under_way = 0  # launches
        self._ends_s = 0.0  # the sum of when they are expected to end
        self._judged = 0  # launches
        self.limit(limits)

    def limit(self, limits: Limits) -> None:
        """What the group may do from now on."""
        self._limits = limits
        self._ahead = round(limits.ahead * limits.share)  # other fronts keep a shared replica busy too
        self.early_s = limits.early_s if self._ahead else 0.0  # if nothing may wait at a busy replica, nothing is early
        self._update()

    def follow(self, names: Collection[str], benched: Mapping[str, Replica] = NOBODY) -> None:
        """These are the members from now on. What is known of those that stay is not forgotten.

        Nor is it of those that were `benched` in other groups.
        """
        for name in self.members.keys() - set(names):
            replica = self.members.pop(name)
            self._by_load[len(replica.pending_s)].pop(name)
            self._benched.discard(replica)
            self.may_run_kept.discard(replica)
        for name in sorted(set(names) - self.members.keys()):
            self.members[name] = self._by_load[0][name] = replica = Replica(name)
            if name in benched:
                replica.take_over(benched[name])
                self._benched.add(replica)
        if not self.working:
            for replica in self.members.values():
                self._bench(replica, 0.0, benched=False)
        self._update()

    def forget_kept(self) -> None:
        """Another plan begins, under which no replica keeps anything yet."""
        self.may_run_kept.clear()
        for replica in self.members.values():
            replica.keeps_inputs = False

    @property
    def on_the_bench(self) -> dict[str, Replica]:
        return {each.name: each for each in self._benched}

    def benched(self, now_s: float) -> list[str]:
        """The replicas that have been benched for so long that plans should not count on them."""
        return [each.name for each in self._benched if now_s - each.benched_since_s >= _BENCHED_S]

    @property
    def working(self) -> int:
        """How many replicas are not benched."""
        return len(self.members) - len(self._benched)

    def ahead_s(self, now_s: float, more_s: float = 0.0) -> float:
        """How long the group needs for all that the inputs inside will still cost it, and for so much more."""
        running_s = self._ends_s - self.under_way * now_s
        ahead_s = (self.owed_s + more_s) * self._busy_slowdown
        return (ahead_s + running_s if running_s > 0 else ahead_s) / self._devices

    def free_s(self, now_s: float, launches: int, each_s: float) -> float:
        """How long until a replica is free, after so many launches more, each of which takes so long as planned."""
        rounds, number = divmod(launches, self._devices)
        later_s = rounds * each_s * self._busy_slowdown
        for level in self._by_load:
            for replica in level.values():
                if replica.benched_until_s is None:
                    if not number:
                        return max(0.0, replica.ends_s[-1] - now_s if replica.ends_s else 0.0) + later_s
                    number -= 1
        return later_s

    @property
    def has_idle(self) -> bool:
        """Whether any replica has nothing to do, benched or not."""
        return bool(self._by_load[0])

    def idle(self, now_s: float) -> Replica | None:
        for replica in self._by_load[0].values():
            if replica.benched_until_s is None or now_s >= replica.benched_until_s:
                return replica
        return None

    def nearly_idle(self, now_s: float) -> Replica | None:
        """A busy replica that will be free at about the time when a launch that leaves now gets there."""
        replica = self._next()
        return replica if replica and abs(replica.ends_s[0] - now_s) <= self.early_s else None

    def nearly_idle_at_s(self, now_s: float) -> float:
        """When the next replica will be nearly idle; never, if that time is past: it takes longer than expected."""
        replica = self._next()
        at_s = replica.ends_s[0] - self.early_s if replica else inf
        return at_s if at_s > now_s else inf

    def _next(self) -> Replica | None:
        """The busy replica that will be free first, if anything may be sent early."""
        if not self.early_s or len(self._by_load) < 2:
            return None
        return next((each for each in self._by_load[1].values() if each.benched_until_s is None), None)

    def soonest(self) -> Replica | None:
        """The busy replica that has room for one launch more and will be free first."""
        for level in self._by_load[1 : None if self.transfer_s else self._ahead + 1]:
            for replica in level.values():
                if replica.benched_until_s is None and self.has_room(replica):
                    return replica
        return None

    def has_room(self, replica: Replica) -> bool:
        """Whether one launch more may wait there: up to `ahead`, or as many as keep it busy while the next travels."""
        pending_s = replica.pending_s
        waiting = len(pending_s) - 1
        return waiting < self._ahead or (waiting > 0 and sum(pending_s) - pending_s[0] < self.transfer_s)

    def begin(self, replica: Replica, seconds: float, now_s: float) -> float:
        """A launch is sent there; returns when it should end. At a busy replica it starts after those before it."""
        ends_s = (max(now_s, replica.ends_s[-1]) if replica.pending_s else now_s) + seconds * self._busy_slowdown
        del self._by_load[len(replica.pending_s)][replica.name]
        replica.pending_s.append(seconds)
        replica.ends_s.append(ends_s)
        self._enter(replica)
        self.under_way += 1
        self._ends_s += ends_s
        return ends_s

    def end(self, replica: Replica, now_s: float) -> None:
        """The launch that ran there is over, however it went."""
        load, expected_s = len(replica.pending_s), replica.ends_s.popleft()
        replica.pending_s.popleft()
        self.under_way -= 1
        self._ends_s = self._ends_s - expected_s if self.under_way else 0.0
        if replica.pending_s:
            self._restart(replica, now_s)
        if self._has(replica):
            del self._by_load[load][replica.name]
            self._enter(replica)
            if replica.keeps_inputs:
                self.may_run_kept.add(replica)

    def _restart(self, replica: Replica, now_s: float) -> None:
        """What waits there begins now, whenever that was expected. Else errors would add up while it is busy."""
        for number, seconds in enumerate(replica.pending_s):
            now_s += seconds * self._busy_slowdown
            self._ends_s += now_s - replica.ends_s[number]
            replica.ends_s[number] = now_s

    def judge(self, replica: Replica, started_s: float, expected_s: float, now_s: float) -> None:
        """A launch came back: bench its replica if it has become slower than its peers, or take it off the bench.

        Peers are compared with each other, not with the plan: if all are slow, the table is wrong, not a replica. The
        last one that works is never benched: nothing would run at all.
        """
        if not self._has(replica) or expected_s <= 0:
            return
        taken_s = now_s - max(started_s, replica.last_end_s)  # it may have waited for the launch before it
        replica.learn(taken_s, expected_s)
        replica.last_end_s = now_s
        self._judged += 1
        limit = self._limits.straggler_factor * self.slowdown
        if self._judged % len(self.members) == 0 or replica.slowdown > limit:
            self.slowdown = median(peer.slowdown for peer in self.members.values() if peer.launches)
            limit = self._limits.straggler_factor * self.slowdown
            self._update()
        alone = self.working == 1 and replica not in self._benched
        strays = replica.launches >= _EVIDENCE and replica.slowdown > limit and not alone
        if strays or replica.benched_until_s is not None:
            self._bench(replica, now_s, strays)

    def distrust(self, replica: Replica, now_s: float) -> None:
        """A launch failed there: other replicas do the work for a while, if there are any.

        Those that were benched before are asked again where nobody else is left: the last one that worked may hang.
        """
        if self._has(replica) and len(self.members) > 1:
            self._bench(replica, now_s, benched=True)
            if not self.working:
                for other in self._benched - {replica}:
                    self._bench(other, now_s, benched=False)

    def _bench(self, replica: Replica, now_s: float, benched: bool) -> None:
        if benched and replica.benched_until_s is None:
            replica.benched_since_s = now_s
        replica.benched_until_s = now_s + self._limits.probe_every_s if benched else None
        (self._benched.add if benched else self._benched.discard)(replica)
        self._update()

    def _update(self) -> None:
        """Under load a replica that is shared with other fronts is slower by their shares, also before that is seen."""
        share = self._limits.share
        self._busy_slowdown = max(self.slowdown, 1 / share) if share < 1 else self.slowdown
        self._devices = max(1, self.working)

    def _has(self, replica: Replica) -> bool:
        """A launch may come back from a replica that is no longer a member, even if another has its name now."""
        return self.members.get(replica.name) is replica

    def _enter(self, replica: Replica) -> None:
        load = len(replica.pending_s)
        if load == len(self._by_load):
            self._by_load.append({})
        self._by_load[load][replica.name] = replica
