"""How much work is ahead of a newcomer: what runs, what waits, and what is expected to come on from there."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from deployments.dispatch.route import Route, Stage


class Backlog:
    """Seconds of device time ahead, per group of replicas.

    What is owed to inputs that wait, or that come on from a launch, is counted again only once it is `stale`: whoever
    joins the first pool is added, so that a newcomer costs constant time however much is inside.
    """

    def __init__(self, route: Route) -> None:
        self._owed_s: dict[str, float] = {}
        self.follow(route)
        self._flying: Counter[int] = Counter()  # inputs in launches, by the block they entered at
        self._launches: Counter[str] = Counter()
        self._ends_s: defaultdict[str, float] = defaultdict(float)  # the sum of when they are expected to end

    def follow(self, route: Route) -> None:
        """From now on inputs go another way; launches under way still count where they are."""
        self.route = route
        self._groups = tuple(dict.fromkeys(stage.group for stage in route.stages))
        self._per_input_s: dict[tuple[int, bool, str], float] = {}
        self._newcomer_s = {group: self._each(0, False, group) for group in self._groups}
        self.stale = True

    def begin(self, stage: Stage, cursor: int, size: int, ends_s: float) -> None:
        self._count(stage, cursor, size, ends_s, 1)

    def end(self, stage: Stage, cursor: int, size: int, ends_s: float) -> None:
        self._count(stage, cursor, size, ends_s, -1)

    def recount(self, waiting: Mapping[int, int]) -> None:
        """What is owed, from how many wait before each block."""
        for group in self._groups:
            queued = sum([size * self._each(cursor, False, group) for cursor, size in waiting.items()])
            coming = sum([size * self._each(cursor, True, group) for cursor, size in self._flying.items() if size])
            self._owed_s[group] = queued + coming
        self.stale = False

    def joined(self) -> None:
        """One more input waits before the first block."""
        for group, seconds in self._newcomer_s.items():
            self._owed_s[group] = self._owed_s.get(group, 0.0) + seconds

    def seconds(self, group: str, now_s: float) -> float:
        """Device time that the group owes to inputs already inside."""
        running = max(0.0, self._ends_s[group] - self._launches[group] * now_s)
        return running + self._owed_s.get(group, 0.0)

    def _count(self, stage: Stage, cursor: int, size: int, ends_s: float, sign: int) -> None:
        self.stale = True
        self._flying[cursor] += sign * size
        self._launches[stage.group] += sign
        self._ends_s[stage.group] += sign * ends_s

    def _each(self, cursor: int, flying: bool, group: str) -> float:
        """What one input before block `cursor` will cost the group; of one that is flying only what comes after."""
        key = (cursor, flying, group)
        if key not in self._per_input_s:
            here, *_ = onward = self.route.onward(cursor)
            stages = onward[1:] if flying else onward
            self._per_input_s[key] = sum(
                _share(stage, here) * stage.seconds_each for stage in stages if stage.group == group
            )
        return self._per_input_s[key]


def _share(stage: Stage, here: Stage) -> float:
    """Of the inputs that are here, how many get there. Where none was expected even here, all are."""
    return stage.survival / here.survival if here.survival > 0 else 1.0
