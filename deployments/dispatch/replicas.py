"""Who can run a launch: the replicas of a group, those with the least to do first, and stragglers on the bench."""

from dataclasses import dataclass
from statistics import median

_KEPT = 0.9  # how much of what is known of a replica stays when a launch is added: ten launches, more or less
_EVIDENCE = 5  # launches before a replica is judged: one whose inputs all stay to the end takes long, and rightly so


@dataclass
class Replica:
    """One replica as the dispatcher sees it."""

    name: str
    running: int = 0
    taken_s: float = 0.0  # by its last launches
    expected_s: float = 0.0  # of them
    launches: int = 0
    last_end_s: float = 0.0
    ends_s: float = 0.0  # when it is expected to have done all that it has
    benched_until_s: float | None = None

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
    """Interchangeable replicas. All operations but `typical_pace` take constant time."""

    def __init__(self, ahead: int, straggler_factor: float, probe_every_s: float) -> None:
        self.members: dict[str, Replica] = {}
        self._benched: set[str] = set()
        # By how much they run; each in the order in which they got there, so that the first frees earliest.
        self._by_load: list[dict[str, Replica]] = [{} for _ in range(ahead + 2)]
        self._straggler_factor = straggler_factor
        self._probe_every_s = probe_every_s
        self.typical_pace = 1.0
        self._notes = 0

    def add(self, name: str) -> None:
        self.members[name] = self._by_load[0][name] = Replica(name)

    def remove(self, name: str) -> None:
        replica = self.members.pop(name)
        self._by_load[replica.running].pop(name)
        self._benched.discard(name)

    @property
    def working(self) -> int:
        """How many are not benched."""
        return len(self.members) - len(self._benched)

    def pick(self, now_s: float, *, idle: bool) -> Replica | None:
        """One that is idle; or else, if it may be busy, the one that will be free first and has room."""
        for level in self._by_load[: 1 if idle else -1]:
            for replica in level.values():
                if replica.benched_until_s is None or (replica.running == 0 and now_s >= replica.benched_until_s):
                    return replica
        return None

    def begin(self, replica: Replica) -> None:
        self._move(replica, +1)

    def end(self, replica: Replica) -> None:
        if self._holds(replica):
            self._move(replica, -1)

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
        limit = self._straggler_factor * self.typical_pace
        if self._notes % len(self.members) == 0 or replica.pace > limit:
            self.typical_pace = median(peer.pace for peer in self.members.values() if peer.launches)
            limit = self._straggler_factor * self.typical_pace
        self._bench(replica, now_s, replica.launches >= _EVIDENCE and replica.pace > limit)

    def distrust(self, replica: Replica, now_s: float) -> None:
        """A launch failed there: let others do the work for a while, if there are others."""
        if self._holds(replica) and self.working > 1:
            self._bench(replica, now_s, benched=True)

    def _bench(self, replica: Replica, now_s: float, benched: bool) -> None:
        replica.benched_until_s = now_s + self._probe_every_s if benched else None
        (self._benched.add if benched else self._benched.discard)(replica.name)

    def _holds(self, replica: Replica) -> bool:
        """A launch may come back from a replica that is no longer one of us, even if another bears its name."""
        return self.members.get(replica.name) is replica

    def _move(self, replica: Replica, step: int) -> None:
        self._by_load[replica.running].pop(replica.name)
        replica.running += step
        self._by_load[replica.running][replica.name] = replica
