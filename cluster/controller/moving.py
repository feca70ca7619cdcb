"""What it takes to go from one plan to another: nothing but a message, or replicas that have to start."""

from dataclasses import dataclass

from optimizer.plan import Plan


@dataclass(frozen=True)
class Moving:
    """`starts` of the new plan's `replicas` are not running yet.

    >>> Moving(starts=0, replicas=4).lost_share(start_s=10, hold_s=100)
    0.0
    >>> Moving(starts=2, replicas=4).lost_share(start_s=10, hold_s=100)  # half is missing for a tenth of the time
    0.05
    """

    starts: int
    replicas: int

    @property
    def told(self) -> str:
        return f"{self.starts} of {self.replicas} replicas start" if self.starts else "a message"

    def lost_share(self, start_s: float, hold_s: float) -> float:
        """Of the goodput while the new plan holds: a device brings nothing before its replica has started."""
        return min(1.0, start_s / hold_s) * self.starts / self.replicas


def moving(before: Plan, after: Plan) -> Moving:
    """A replica holds the whole network, so all of a kind are alike: only how many there are takes time."""
    has, wants = before.devices(), after.devices()
    starts = sum(max(0, count - has.get(kind, 0)) for kind, count in wants.items())
    return Moving(starts, sum(wants.values()))
