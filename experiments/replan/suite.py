"""The network, the devices, and the plans between which the application changes."""

import os
from collections.abc import Mapping
from itertools import pairwise

from experiments.serve.fleet import promise_per_s
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable

BLOCKS = 8
BATCH = 4
FAST, SLOW = "v100", "k80"
BLOCK_S = {FAST: 0.010, SLOW: 0.020}  # at any batch size; so slow that this machine is not the limit
RAMPS = (1, 3, 4)  # open in every plan, so that each input leaves at a known block
SURVIVAL = (1.0, 1.0, 0.8, 0.8, 0.6, 0.5, 0.5, 0.5)
ROOM = 10  # replicas that fit on this machine beside the front: those of a plan, and three more


def profile(block_s: Mapping[str, float] = BLOCK_S) -> Profile:
    sizes, none = (4096,) * BLOCKS, ((0.0,) * BLOCKS,) * 2
    tables = tuple(
        LatencyTable(kind, (1, BATCH), ((seconds,) * BLOCKS,) * 2, none, 0.0, sizes, sizes, "made up")
        for kind, seconds in block_s.items()
    )
    return Profile("virtual", tables, ExitProfile(SURVIVAL))


def cpus_per_replica() -> float:
    return ((os.cpu_count() or 2) - 1) / ROOM


def plan(*parts: tuple[int, int, str], batch: int = BATCH) -> Plan:
    """A plan of these parts: (stop, replicas, kind)."""
    edges = (0, *(stop for stop, _, _ in parts))
    splits = [Split(a, b, batch, tuple(ramp for ramp in RAMPS if a <= ramp < b)) for a, b in pairwise(edges)]
    placements = [Placement(kind, count, (split,)) for (_, count, kind), split in zip(parts, splits, strict=True)]
    return Plan(tuple(placements))


START = plan((4, 4, FAST), (BLOCKS, 3, FAST))
KIND = "device kind changed"

# The name and the new plan of each change; the second round leads back to the start.
ROUNDS = (
    ("cut moved", plan((5, 4, FAST), (BLOCKS, 3, FAST))),
    ("split added", plan((2, 2, FAST), (5, 3, FAST), (BLOCKS, 2, FAST))),
    ("replicas moved", plan((2, 2, FAST), (5, 2, FAST), (BLOCKS, 3, FAST))),
    ("batch changed", plan((2, 2, FAST), (5, 2, FAST), (BLOCKS, 3, FAST), batch=3)),
    ("split removed", plan((5, 4, FAST), (BLOCKS, 3, FAST), batch=3)),
    (KIND, plan((5, 4, FAST), (BLOCKS, 3, SLOW), batch=3)),
    ("cut moved", plan((6, 4, FAST), (BLOCKS, 3, SLOW), batch=3)),
    ("split added", plan((2, 2, FAST), (6, 2, FAST), (BLOCKS, 3, SLOW), batch=3)),
    ("replicas moved", plan((2, 1, FAST), (6, 3, FAST), (BLOCKS, 3, SLOW), batch=3)),
    ("batch changed", plan((2, 1, FAST), (6, 3, FAST), (BLOCKS, 3, SLOW))),
    ("split removed", plan((4, 4, FAST), (BLOCKS, 3, SLOW))),
    (KIND, START),
)
# Six devices of the other kind do not fit beside the running ones, so the old ones end first.
NO_ROOM = "devices freed first"
WITHOUT_ROOM = ((NO_ROOM, plan((4, 3, FAST), (BLOCKS, 6, SLOW))), (NO_ROOM, START))


def steps(changes: int) -> tuple[tuple[str, Plan], ...]:
    """Two changes that must free devices first, then `changes` of all kinds in turn.

    >>> [what for what, _ in steps(2)]
    ['devices freed first', 'devices freed first', 'cut moved', 'split added']
    """
    return WITHOUT_ROOM + tuple(ROUNDS[number % len(ROUNDS)] for number in range(changes))


def offered_per_s(share: float) -> float:
    """A share of the rate of the weakest plan."""
    return share * min(promise_per_s(chosen, profile()) for _, chosen in (*ROUNDS, *WITHOUT_ROOM))


def leaves_after(sure_after: int) -> int:
    """The block after which an input leaves, the same under all of these plans."""
    return next((ramp for ramp in RAMPS if ramp >= sure_after), BLOCKS - 1)
