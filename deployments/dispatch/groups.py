"""Which replica can run a launch: a group orders its replicas by load, and benches stragglers."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from statistics import median, median_low

from isobatch.deployments.dispatch.messages import Limits

# The factor by which earlier launches count less with each new one: about the last ten launches matter.
_REMEMBERED = 0.9
_EVIDENCE_LAUNCHES = 5  # launches before a replica is compared with its peers: a single one may take long by chance
_RECENT = 0.95  # the factor by which earlier launches of a group count less in the share of its time that is used
# The most time between the ends of two launches that counts in this share, as a multiple of the later launch's time.
# Otherwise replicas that were idle for an hour would count as idle for the next two hundred launches of a rush, too.
_MOST_IDLE = 5.0
_FOLLOWS_S = 0.002  # a launch that was sent at most this long after the last one ended counts as having waited for it
_BENCHED_S = 10.0  # plans should not count on a replica whose launches were too slow, or failed, for this long
_KNOWN_FOR_S = 60.0  # after this time without a slow launch there, a replica may be as fast as others again


@dataclass(eq=False)
class Replica:
    """One replica as the dispatcher sees it."""

    name: str
    home: "Group"  # its present or last group
    pending_s: deque[float] = field(default_factory=deque)  # the planned times of its launches, the running one first
    ends_s: deque[float] = field(default_factory=deque)  # when each of them is expected to end
    taken_s: float = 0.0  # the time of recent launches
    expected_s: float = 0.0  # the planned time of the same launches
    launches: int = 0  # that came back
    last_end_s: float = 0.0
    benched_until_s: float | None = None  # None: it is not benched
    benched_since_s: float = 0.0
    slow_at_s: float = 0.0  # when the last launch came back for which it was benched, or stays so
    excused: bool = False  # the last launch failed there, perhaps because of an audit
    keeps_inputs: bool = False  # the present plan may make inputs wait whose state only this replica has

    @property
    def slowdown(self) -> float:
        """The ratio of measured to planned time. Times are summed before, since short launches vary most."""
        return self.taken_s / self.expected_s if self.expected_s else 1.0

    def followed_s(self, started_s: float, now_s: float) -> float | None:
        """The seconds between the ends of the last launch and of this one; None if this one did not wait for it."""
        waited = self.last_end_s > 0.0 and started_s <= self.last_end_s + _FOLLOWS_S
        return now_s - self.last_end_s if waited else None

    def learn(self, taken_s: float, expected_s: float) -> None:
        """Count a launch. A launch of a benched replica replaces its history, for which the replica was benched."""
        remembered = 0.0 if self.benched_until_s is not None else _REMEMBERED
        self.taken_s = remembered * self.taken_s + taken_s
        self.expected_s = remembered * self.expected_s + expected_s
        self.launches += 1


class Group:
    """Interchangeable replicas. All operations take constant time, except the median of the slowdowns.

    A replica is *benched* while it is much slower than its peers, and for some time after a launch failed on it. A
    benched replica runs the inputs that only it has, and a single other launch now and then, as a probe.
    """

    def __init__(self, name: str, limits: Limits) -> None:
        self.name = name
        self.members: dict[str, Replica] = {}
        self.slowdown = 1.0  # the median of its replicas
        self._usual = 1.0  # the lower median: of two replicas, a slow one would raise the mean of both
        self.may_run_kept: set[Replica] = set()  # replicas that may now be able to launch inputs that only they have
        self.transfer_s = 0.0  # the longest transfer of a full batch to this group
        self.owed_s = 0.0  # the planned time of admitted inputs, without launches that have begun
        self._benched: set[Replica] = set()
        # Replicas by their number of launches, ordered by when they reached it: the first one will be free first.
        self._by_load: list[dict[str, Replica]] = [{}]
        self.running = 0  # launches that have not come back
        self._ends_s = 0.0  # the sum of their expected ends
        self._judged = 0  # launches
        self._worked_s = self._passed_s = 0.0  # the time of recent launches, and of all replicas meanwhile
        self._judged_at_s = 0.0
        self.limit(limits)

    def limit(self, limits: Limits) -> None:
        self._limits = limits
        self._ahead = round(limits.ahead * limits.share)  # other fronts keep a shared replica busy too
        self.early_s = limits.early_s if self._ahead else 0.0  # no launch is sent early where none may wait
        self._update()

    def follow(self, names: Collection[str], moving: dict[str, Replica] | None = None) -> None:
        """Set the members. Replicas that stay, or that move here from another group (`moving`, by name), keep their
        history."""
        for name in self.members.keys() - set(names):
            replica = self.members.pop(name)
            self._by_load[len(replica.pending_s)].pop(name)
            self._benched.discard(replica)
            self.may_run_kept.discard(replica)
        for name in sorted(set(names) - self.members.keys()):
            self._adopt(moving.pop(name) if moving and name in moving else Replica(name, self))
        if not self.working:
            for replica in self.members.values():
                self._bench(replica, 0.0, benched=False)
        self._update()

    def _adopt(self, replica: Replica) -> None:
        """Take a replica with its launches, which it may still run for the group that it comes from."""
        before, launches, ends_s = replica.home, len(replica.pending_s), sum(replica.ends_s)
        before.running -= launches
        before._ends_s = before._ends_s - ends_s if before.running else 0.0
        self.running += launches
        self._ends_s += ends_s
        replica.home, replica.keeps_inputs = self, False
        self.members[replica.name] = replica
        self._enter_level(replica)
        if replica.benched_until_s is not None:
            self._benched.add(replica)

    def forget_kept(self) -> None:
        """Begin with another plan, under which no replica keeps any input yet."""
        self.may_run_kept.clear()
        for replica in self.members.values():
            replica.keeps_inputs = False

    def benched(self, now_s: float) -> list[str]:
        """The replicas on which plans should not count: their launches were too slow, or failed, for some time and
        until lately. A front without inputs launches nothing, so it does not know whether a replica is still slow.
        """
        return [
            replica.name
            for replica in self._benched
            if replica.slow_at_s - replica.benched_since_s >= _BENCHED_S and now_s - replica.slow_at_s < _KNOWN_FOR_S
        ]

    @property
    def working(self) -> int:
        """The number of replicas that are not benched."""
        return len(self.members) - len(self._benched)

    def ahead_s(self, now_s: float, more_s: float = 0.0) -> float:
        """The time that the group needs for the admitted inputs, plus `more_s` of planned work."""
        running_s = self._ends_s - self.running * now_s
        ahead_s = (self.owed_s + more_s) * self._busy_slowdown
        return (ahead_s + running_s if running_s > 0 else ahead_s) / self._devices

    def free_s(self, now_s: float, launches: int, launch_s: float) -> float:
        """The time until a replica is free, after this number of further launches with this planned time each."""
        rounds, number = divmod(launches, self._devices)
        later_s = rounds * launch_s * self._busy_slowdown
        for level in self._by_load:
            for replica in level.values():
                if replica.benched_until_s is None:
                    if not number:
                        return max(0.0, replica.ends_s[-1] - now_s if replica.ends_s else 0.0) + later_s
                    number -= 1
        return later_s

    @property
    def used(self) -> float:
        """The share of its replicas' time that recent launches took; 1 where none came back yet."""
        return min(1.0, self._worked_s / self._passed_s) if self._passed_s else 1.0

    @property
    def has_idle(self) -> bool:
        """Whether any replica has nothing to do, benched or not."""
        return bool(self._by_load[0])

    def idle(self, now_s: float) -> Replica | None:
        """A replica without a launch; a benched one only when its next probe is due."""
        for replica in self._by_load[0].values():
            if replica.benched_until_s is None or now_s >= replica.benched_until_s:
                return replica
        return None

    def nearly_idle(self, now_s: float) -> Replica | None:
        """A busy replica that will be free at about the time when a launch that is sent now arrives there."""
        replica = self._next_free()
        return replica if replica and abs(replica.ends_s[0] - now_s) <= self.early_s else None

    def nearly_idle_at_s(self, now_s: float) -> float:
        """When the next replica will be nearly idle; inf if that time has passed, as its launch takes longer."""
        replica = self._next_free()
        at_s = replica.ends_s[0] - self.early_s if replica else inf
        return at_s if at_s > now_s else inf

    def _next_free(self) -> Replica | None:
        """The busy replica that will be free first; None where no launch may be sent early."""
        if not self.early_s or len(self._by_load) < 2:
            return None
        return next((replica for replica in self._by_load[1].values() if replica.benched_until_s is None), None)

    def soonest(self) -> Replica | None:
        """The busy replica that has room for another launch and will be free first."""
        for level in self._by_load[1 : None if self.transfer_s else self._ahead + 1]:
            for replica in level.values():
                if replica.benched_until_s is None and self.has_room(replica):
                    return replica
        return None

    def has_room(self, replica: Replica) -> bool:
        """Whether a replica may queue another launch: up to `ahead`, or enough to keep it busy in the next transfer."""
        pending_s = replica.pending_s
        waiting = len(pending_s) - 1
        return waiting < self._ahead or (waiting > 0 and sum(pending_s) - pending_s[0] < self.transfer_s)

    def begin(self, replica: Replica, seconds: float, now_s: float) -> float:
        """Count a launch that is sent to this replica. Returns its expected end, after the launches before it."""
        ends_s = (max(now_s, replica.ends_s[-1]) if replica.pending_s else now_s) + seconds * self._busy_slowdown
        del self._by_load[len(replica.pending_s)][replica.name]
        replica.pending_s.append(seconds)
        replica.ends_s.append(ends_s)
        self._enter_level(replica)
        self.running += 1
        self._ends_s += ends_s
        return ends_s

    def end(self, replica: Replica, now_s: float) -> None:
        """The launch that ran there is over, whether it failed or not."""
        load, expected_s = len(replica.pending_s), replica.ends_s.popleft()
        replica.pending_s.popleft()
        self.running -= 1
        self._ends_s = self._ends_s - expected_s if self.running else 0.0
        if replica.pending_s:
            self._restart(replica, now_s)
        if self._has(replica):
            del self._by_load[load][replica.name]
            self._enter_level(replica)
            if replica.keeps_inputs:
                self.may_run_kept.add(replica)

    def _restart(self, replica: Replica, now_s: float) -> None:
        """Expect the next launch to begin now, so that errors do not add up while the replica is busy."""
        for number, seconds in enumerate(replica.pending_s):
            now_s += seconds * self._busy_slowdown
            self._ends_s += now_s - replica.ends_s[number]
            replica.ends_s[number] = now_s

    def judge(self, replica: Replica, started_s: float, expected_s: float, now_s: float) -> None:
        """Count a launch that came back. Bench its replica if it is now slower than its peers, else unbench it.

        Replicas are compared with each other, not with the plan: where all are slow, the latency table is wrong. The
        last replica that works is never benched, since nothing would run.
        """
        replica.excused = False
        if not self._has(replica) or expected_s <= 0:
            return
        taken_s = now_s - max(started_s, replica.last_end_s)  # it may have waited for the launch before it
        replica.learn(taken_s, expected_s)
        replica.last_end_s = now_s
        self._judged += 1
        self._worked_s = _RECENT * self._worked_s + taken_s
        passed_s = min(now_s - self._judged_at_s, _MOST_IDLE * taken_s)
        self._passed_s = _RECENT * self._passed_s + passed_s * self._devices
        self._judged_at_s = now_s
        limit = self._limits.straggler_factor * self._usual
        if self._judged % len(self.members) == 0 or replica.slowdown > limit:
            slowdowns = [peer.slowdown for peer in self.members.values() if peer.launches]
            self.slowdown, self._usual = median(slowdowns), median_low(slowdowns)
            limit = self._limits.straggler_factor * self._usual
            self._update()
        alone = self.working == 1 and replica not in self._benched
        strays = replica.launches >= _EVIDENCE_LAUNCHES and replica.slowdown > limit and not alone
        if strays or replica.benched_until_s is not None:
            self._bench(replica, now_s, strays)

    def distrust(self, replica: Replica, now_s: float, excused: bool = False) -> None:
        """Bench a replica on which a launch failed, if the group has others. `excused`: an audit may be the cause, so
        only the second such failure in a row counts.

        If no other works, replicas that were benched before are used again, since the last working one may hang.
        """
        replica.last_end_s = now_s  # a launch that waited for the failed one begins now
        excused, replica.excused = excused and not replica.excused, excused
        if self._has(replica) and len(self.members) > 1 and not excused:
            self._bench(replica, now_s, benched=True)
            if not self.working:
                for other in self._benched - {replica}:
                    self._bench(other, now_s, benched=False)

    def trust(self, replica: Replica) -> None:
        """Use a replica again, since its launch failed for another reason."""
        if self._has(replica):
            self._bench(replica, 0.0, benched=False)

    def _bench(self, replica: Replica, now_s: float, benched: bool) -> None:
        if benched:
            replica.slow_at_s = now_s
            if replica.benched_until_s is None:
                replica.benched_since_s = now_s
        replica.benched_until_s = now_s + self._limits.probe_every_s if benched else None
        (self._benched.add if benched else self._benched.discard)(replica)
        self._update()

    def _update(self) -> None:
        """Under load, launches of other fronts slow a replica down. This is assumed before it is measured."""
        share = self._limits.share
        self._busy_slowdown = max(self.slowdown, 1 / share) if share < 1 else self.slowdown
        self._devices = max(1, self.working)

    def _has(self, replica: Replica) -> bool:
        """A launch may come back from a former member, even if a new member has the same name."""
        return self.members.get(replica.name) is replica

    def _enter_level(self, replica: Replica) -> None:
        load = len(replica.pending_s)
        while load >= len(self._by_load):
            self._by_load.append({})
        self._by_load[load][replica.name] = replica
