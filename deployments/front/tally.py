"""What has happened since the start: counts, the latest latencies, how full batches were. A plain object."""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from deployments.front.answers import Answer

OUTCOMES = ("answered", "refused", "failed", "abandoned")
LATEST = 2000
QUANTILES = (50, 95, 99)
BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


@dataclass
class Launches:
    """From one block on: how many, with how many inputs, where so many would have found room."""

    count: int = 0
    inputs: int = 0
    room: int = 0

    def add(self, other: "Launches") -> None:
        self.count += other.count
        self.inputs += other.inputs
        self.room += other.room

    @property
    def fill(self) -> float:
        """
        >>> Launches(2, inputs=24, room=32).fill
        0.75
        """
        return self.inputs / self.room if self.room else 0.0


class Tally:
    """Recorded where it happens, read by /stats and by the metrics."""

    def __init__(self, maxlen: int | None = LATEST) -> None:
        self.outcomes: Counter[str] = Counter()
        self.exits: Counter[int] = Counter()
        self.launches: dict[tuple[str, int], Launches] = defaultdict(Launches)  # by group and first block
        self.survivor_bytes: Counter[str] = Counter()  # that came back "by_value", or were "held" where they were
        # Of answered requests: all, queued, computed.
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.buckets = [0] * (len(BOUNDS_MS) + 1)  # answers by latency: up to each bound, and above the last
        self._latencies_s: deque[float] = deque(maxlen=maxlen)

    def ended(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    def answered(self, answers: Sequence[Answer], took_s: float) -> None:
        self.ended("answered")
        self.exits.update([answer.exit_block for answer in answers])
        self.seconds["all"] += took_s
        self.seconds["queued"] += sum([answer.queued_ms for answer in answers]) / len(answers) / 1e3
        self.seconds["computed"] += sum([answer.computed_ms for answer in answers]) / len(answers) / 1e3
        self.buckets[bisect_left(BOUNDS_MS, 1e3 * took_s)] += 1
        self._latencies_s.append(took_s)

    def launched(self, group: str, block: int, inputs: int, room: int) -> None:
        self.launches[group, block].add(Launches(1, inputs, room))

    def add(self, other: "Tally") -> None:
        self.outcomes.update(other.outcomes)
        self.exits.update(other.exits)
        self.survivor_bytes.update(other.survivor_bytes)
        self.buckets = [ours + theirs for ours, theirs in zip(self.buckets, other.buckets, strict=True)]
        self._latencies_s.extend(other._latencies_s)
        for place, launches in other.launches.items():
            self.launches[place].add(launches)
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds

    def latency_ms(self) -> dict[str, float]:
        """Of the latest answers, from when a request was read to when its last input was answered."""
        if not self._latencies_s:
            return {}
        values = 1e3 * np.percentile(self._latencies_s, QUANTILES)
        return {f"p{quantile}": round(float(value), 2) for quantile, value in zip(QUANTILES, values, strict=True)}

    def survival(self, num_blocks: int) -> list[float]:
        """The share of answered inputs that entered each block.

        >>> tally = Tally()
        >>> tally.exits.update({0: 1, 2: 3})
        >>> tally.survival(3)
        [1.0, 0.75, 0.75]
        """
        total = self.exits.total()
        if not total:
            return []
        left = np.cumsum([0, *(self.exits[block] for block in range(num_blocks - 1))])
        return [round(float(share), 4) for share in (total - left) / total]


def merged(tallies: Iterable[Tally]) -> Tally:
    """Of several fronts, as if it were one.

    >>> one, other = Tally(), Tally()
    >>> one.launched("gpu", 0, 4, 8), other.launched("gpu", 0, 8, 8)
    (None, None)
    >>> merged([one, other]).launches["gpu", 0].fill
    0.75
    """
    whole = Tally(maxlen=None)
    for tally in tallies:
        whole.add(tally)
    return whole
