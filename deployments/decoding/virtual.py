"""A network that computes nothing: launches take the time that a table says, and tokens leave as often as is known."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from random import Random

from deployments.decoding.config import DecoderConfig
from deployments.decoding.engine import Engine
from deployments.decoding.pages import PagePool
from deployments.decoding.scheduler import DecodingLaunch, Piece, Scheduler, by_size
from deployments.decoding.sequences import Opinion, Splits
from profiles.decoding import DecoderProfile, DecodingTable, DecodingWorkload, LaunchSize

TOKEN, OTHER = 1, 2  # what is written, and what the full network says where it does not agree
_SAID = Opinion(TOKEN, sure=False), Opinion(TOKEN)


def size_of(launch: DecodingLaunch, splits: Splits) -> LaunchSize:
    """What a launch is made of, as its time is told from it."""
    blocks, bands, read, seen = len(splits.blocks(launch.split)), 0, 0, 0
    for _, alike in groupby((part for part in launch.pieces if part.running), key=by_size):
        parts = list(alike)
        rows, context = max(part.running for part in parts), max(part.start + part.rows for part in parts)
        context += max(len(part.sequence.wanted.source) for part in parts)
        bands += 1
        read += len(parts) * context
        seen += len(parts) * rows * context
    asked = sum(part.asked for part in launch.pieces)
    sources, source_rows, source_seen = _read_by_encoder(launch)
    return LaunchSize(
        launches=1,
        pieces=len(launch.pieces),
        blocks=blocks,
        bands=blocks * bands,
        rows=blocks * launch.running,
        read=blocks * read,
        seen=blocks * seen,
        heads=float(asked > 0),
        asked=asked,
        sources=sources,
        source_rows=source_rows,
        source_seen=source_seen,
        projections=blocks * launch.projects,
        projected=blocks * (sum(part.rows for part in launch.pieces) - launch.running),
    )


def _read_by_encoder(launch: DecodingLaunch) -> tuple[int, int, int]:
    """Groups, positions, and what these see, of sources that are read in this launch."""
    beginning = sorted(
        (part.size[-1], unread) for part in launch.pieces if (unread := part.sequence.unread(launch.split))
    )
    groups = [[length for _, length in alike] for _, alike in groupby(beginning, key=lambda each: each[0])]
    padded = [(len(group), max(group)) for group in groups]
    return len(groups), sum(n * most for n, most in padded), sum(n * most**2 for n, most in padded)


@dataclass
class VirtualDecoder:
    """Runs launches on paper. `wait` lets time pass; `luck` says who is sure."""

    table: DecodingTable
    workload: DecodingWorkload
    splits: Splits
    wait: Callable[[float], None]
    luck: Random

    def run(self, launch: DecodingLaunch) -> list[list[Opinion]]:
        self.wait(self.table.seconds(size_of(launch, self.splits)))
        if launch.split == self.splits.last:
            return [self._checked(part) for part in launch.pieces]
        leaves, draw = 1.0 - self._goes_on(launch.split), self.luck.random
        return [[_SAID[draw() < leaves]] * part.asked for part in launch.pieces]

    def drop(self, name: int) -> None:
        """Nothing is kept of a sequence."""

    def follow(self, splits: Splits) -> None:
        self.splits = splits

    def _goes_on(self, split: int) -> float:
        """The share of tokens that go on after a split, of those that came there."""
        before = self.workload.after(self.splits.ends[split - 1] - 1) if split else 1.0
        return self.workload.after(self.splits.ends[split] - 1) / before if before else 0.0

    def _checked(self, part: Piece) -> list[Opinion]:
        """What the full network says: of drafts mostly the same."""
        tokens = [TOKEN if self.luck.random() < self.workload.agreement else OTHER for _ in range(part.asked)]
        return [Opinion(token) for token in tokens]


class VirtualClock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def virtual_engine(
    profile: DecoderProfile, kind: str, config: DecoderConfig, luck: Random, clock: VirtualClock
) -> Engine:
    """A replica's engine as its configuration says, whose launches take the time of the table."""
    table, workload = profile.table(kind), profile.workload
    cuts = tuple(block + 1 for block, _ in workload.survival) if config.cuts is None else config.cuts
    splits = config.splits(cuts, profile.num_blocks)
    scheduler = Scheduler(splits, config.limits(), PagePool(config.pages(table.kv_bytes)))
    return Engine(scheduler, VirtualDecoder(table, workload, splits, clock.wait, luck), clock)
