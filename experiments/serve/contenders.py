"""Three ways to use the same devices: as planned, with all ramps at shrinking batches, and without exits.

The devices are those of `fleet`: a launch takes as long for one input as for sixteen. That is where constant batch
pays most: small kernels, which cannot keep a device busy. Where a smaller batch takes less time, it pays less.
"""

from experiments.serve.fleet import BATCH, SURVIVAL, facts_for
from optimizer import optimize
from optimizer.baselines import Baseline, baselines
from optimizer.objective import Objective
from optimizer.plan import Placement, Plan, Split
from profiles.devices import links_between
from profiles.files import Profile

DEVICES = {"v100": 2}


def contenders(profile: Profile, slo_s: float) -> dict[str, tuple[Plan, float]]:
    """Each with its plan, and the goodput that the cost model promises."""
    facts = facts_for(profile, DEVICES)
    objective = Objective(slo_s=slo_s, max_batch=BATCH)
    stock, naive, _ = baselines(facts, objective)
    ours = optimize(profile, facts.devices, links_between(facts.devices), objective)
    assert ours.promise, "This is a bug: a plan that was searched promises something."
    return {
        "ours": (ours, ours.promise.goodput_per_s),
        "naive": (_whole(naive, _ramps()), naive.goodput_per_s),
        "stock": (_whole(stock, ()), stock.goodput_per_s),
    }


def _ramps() -> tuple[int, ...]:
    return tuple(k for k in range(len(SURVIVAL) - 1) if SURVIVAL[k + 1] < SURVIVAL[k])


def _whole(baseline: Baseline, ramps: tuple[int, ...]) -> Plan:
    (lane,) = baseline.lanes
    split = Split(0, len(SURVIVAL), lane.batch_size, ramps)
    return Plan((Placement(lane.device.kind, lane.device.count, (split,)),))
