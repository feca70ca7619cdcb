"""The network, the devices and the plans between which the application is led."""

from itertools import pairwise

from optimizer.evaluate import evaluate
from optimizer.plan import Placement, Plan, Split
from optimizer.problem import problem
from profiles.devices import Device, links_between
from profiles.exits import ExitProfile
from profiles.files import Profile
from profiles.latency import LatencyTable

BLOCKS = 8
BATCH = 8
BLOCK_S = {"v100": 0.030, "k80": 0.060}  # whatever the batch: slow enough that this machine is not the limit
RAMPS = (1, 3, 4)  # active in every plan, so that it is known where each input leaves
SURVIVAL = (1.0, 1.0, 0.8, 0.8, 0.6, 0.5, 0.5, 0.5)


def profile() -> Profile:
    sizes, none = (4096,) * BLOCKS, ((0.0,) * BLOCKS,) * 2
    tables = tuple(
        LatencyTable(kind, (1, BATCH), ((seconds,) * BLOCKS,) * 2, none, 0.0, sizes, sizes, "made up")
        for kind, seconds in BLOCK_S.items()
    )
    return Profile("virtual", tables, ExitProfile(SURVIVAL))


def plan(*parts: tuple[int, int, str], batch: int = BATCH) -> Plan:
    """Parts are (stop, replicas, kind)."""
    edges = (0, *(stop for stop, _, _ in parts))
    splits = [Split(a, b, batch, tuple(ramp for ramp in RAMPS if a <= ramp < b)) for a, b in pairwise(edges)]
    placements = [Placement(kind, count, (split,)) for (_, count, kind), split in zip(parts, splits, strict=True)]
    return Plan(tuple(placements))


START = plan((4, 4, "v100"), (BLOCKS, 3, "v100"))

# One round: what changes, and the plan that the application is led to. The last one leads back.
ROUND = (
    ("cut moved", plan((5, 4, "v100"), (BLOCKS, 3, "v100"))),
    ("replicas moved", plan((5, 5, "v100"), (BLOCKS, 2, "v100"))),
    ("split added", plan((2, 2, "v100"), (5, 3, "v100"), (BLOCKS, 2, "v100"))),
    ("batch changed", plan((2, 2, "v100"), (5, 3, "v100"), (BLOCKS, 2, "v100"), batch=6)),
    ("device kind changed", plan((2, 2, "v100"), (5, 3, "v100"), (BLOCKS, 2, "k80"), batch=6)),
    ("split removed", START),
)


def capacity_per_s(chosen: Plan) -> float:
    """What the planner's cost model says that the plan sustains."""
    devices = [Device(kind, count, 10**12, 1.0) for kind, count in chosen.devices().items()]
    return evaluate(chosen, problem(profile(), devices, links_between(devices))).goodput_per_s


def offered_per_s(share: float) -> float:
    """A share of what the weakest of the plans sustains."""
    return share * min(capacity_per_s(chosen) for chosen in (START, *(chosen for _, chosen in ROUND)))


def leaves_after(sure_after: int) -> int:
    """Where an input leaves, under whatever of these plans it is run."""
    return next((ramp for ramp in RAMPS if ramp >= sure_after), BLOCKS - 1)
