"""The way of inputs through a plan: what the dispatcher needs to know of it, and nothing more."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Stage:
    """Blocks `start..stop`, run as one launch by any replica of `group`.

    `launch_s[n - 1]` is what a launch of n inputs is expected to take; `survival` is the share of all inputs that are
    expected to get here; `transfer_s` is what a full batch takes to get here over the link. `local`: inputs that come
    from an earlier stage of the same group are run by the very replica that ran them there, which has kept them.
    """

    start: int
    stop: int
    batch: int
    group: str
    launch_s: tuple[float, ...]
    survival: float = 1.0
    ramps: frozenset[int] = frozenset()
    local: bool = False
    transfer_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a stage must run at least one block, got {self.start}..{self.stop}")
        if self.batch < 1 or len(self.launch_s) != self.batch:
            raise ValueError(f"launch_s must have one time per size 1..{self.batch}, got {len(self.launch_s)}")

    def seconds(self, size: int) -> float:
        """
        >>> Stage(0, 4, batch=2, group="a", launch_s=(0.01, 0.012)).seconds(1)
        0.01
        """
        return self.launch_s[size - 1 if size < self.batch else -1]

    @property
    def seconds_each(self) -> float:
        """What one input costs in a full batch."""
        return self.launch_s[-1] / self.batch


@dataclass(frozen=True)
class Route:
    """Stages that cover all blocks, in order; `beside`: further routes, each on groups of its own.

    An input goes one of them to the end. `lanes` are all of them, each by itself.
    """

    stages: tuple[Stage, ...]
    beside: "tuple[Route, ...]" = ()

    def __post_init__(self) -> None:
        if not self.stages or self.stages[0].start != 0:
            raise ValueError("a route must start at block 0")
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            if before.stop != after.start:
                raise ValueError(f"a route must have no gap: block {before.stop} is followed by {after.start}")
        if any(lane.num_blocks != self.num_blocks or lane.beside for lane in self.beside):
            raise ValueError(f"every route beside must cover {self.num_blocks} blocks, and have none beside itself")
        ways = Counter(group for lane in (self, *self.beside) for group in {stage.group for stage in lane.stages})
        if shared := [group for group, count in ways.items() if count > 1]:
            raise ValueError(f"routes side by side need groups of their own, but share {shared[0]!r}")

    @property
    def lanes(self) -> "tuple[Route, ...]":
        return (replace(self, beside=()), *self.beside)

    @property
    def everywhere(self) -> "tuple[Stage, ...]":
        """The stages of all lanes."""
        return tuple(stage for lane in (self, *self.beside) for stage in lane.stages)

    @property
    def groups(self) -> tuple[str, ...]:
        """All that its stages name."""
        return tuple(dict.fromkeys(stage.group for stage in self.everywhere))

    @cached_property
    def ramps(self) -> frozenset[int]:
        """The active ramps of the whole network."""
        return frozenset().union(*(stage.ramps for stage in self.stages))

    @property
    def num_blocks(self) -> int:
        return self.stages[-1].stop

    def at(self, cursor: int) -> Stage:
        """The stage that holds this block. A batch that met another plan before may stand in the middle of one."""
        return self.stages[self.number_at(cursor)]

    def number_at(self, cursor: int) -> int:
        return self._by_block[cursor]

    def onward(self, cursor: int) -> Sequence[Stage]:
        """This stage and all after it."""
        return [stage for stage in self.stages if stage.stop > cursor]

    def keeps(self, stage: Stage) -> bool:
        """Whether whoever survives this stage goes on where it is."""
        after = self.at(stage.stop) if stage.stop < self.num_blocks else None
        return after is not None and after.local and after.group == stage.group

    def remaining_s(self, cursor: int) -> float:
        """What the rest takes at most: full batches to the very end."""
        return self._remaining_s[cursor]

    @cached_property
    def _by_block(self) -> tuple[int, ...]:
        return tuple(number for number, stage in enumerate(self.stages) for _ in range(stage.start, stage.stop))

    @cached_property
    def _remaining_s(self) -> tuple[float, ...]:
        return tuple(sum(stage.launch_s[-1] for stage in self.onward(block)) for block in range(self.num_blocks))


def stops(cursor: int, stop: int, ramps: Collection[int]) -> Sequence[int]:
    """Where a launch lets inputs go: after every active ramp on its way, and at its end.

    >>> stops(2, 8, {0, 3, 5, 7, 9})
    [4, 6, 8]
    """
    return sorted({ramp + 1 for ramp in ramps if cursor <= ramp < stop} | {stop})
