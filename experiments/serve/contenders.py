"""Three ways to use the same devices: as planned, with all ramps at shrinking batches, and without exits.

The devices are those of `fleet`: a launch takes as long for one input as for sixteen. That is where constant batch
pays most: small kernels, which cannot keep a device busy. Where a smaller batch takes less time, it pays less.
"""

from experiments.serve.fleet import BATCH, facts_for
from optimizer import optimize
from optimizer.baselines import Baseline, baselines
from optimizer.objective import Objective
from optimizer.plan import Plan
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
        "naive": _contender(naive),
        "stock": _contender(stock),
    }


def _contender(baseline: Baseline) -> tuple[Plan, float]:
    assert baseline.plan, f"no batch size of {baseline.name!r} keeps the SLO"
    assert baseline.score
    return baseline.plan, baseline.score.goodput_per_s
