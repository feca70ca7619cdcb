"""Three ways to use the same devices: as planned, with all ramps at shrinking batches, and without exits.

Each way has the best batch that it can have within the SLO. Three cases: BERT-base in single precision on a V100 by its
datasheet, as in E3's figure 7 (half of the inputs have left by the middle), with batches up to 16 and up to 4; and
devices that take as long for one input as for sixteen, where constant batch pays most: small kernels, which cannot keep
a device busy.
"""

from dataclasses import dataclass

from experiments.planner.settings import BERT_BASE
from experiments.serve.fleet import BATCH, PASS_S, profile
from optimizer import optimize
from optimizer.baselines import Baseline, baselines
from optimizer.objective import Objective
from optimizer.plan import Plan
from optimizer.problem import problem
from profiles.devices import fleet, links_between
from profiles.files import Profile


@dataclass(frozen=True)
class Case:
    """A network on some devices."""

    profile: Profile
    devices: str
    slo_s: float
    max_batch: int = BATCH


BERT = BERT_BASE.profile("v100=1", "float32")
# What the figures of each are called behind their names. The last has time for two batches, one after the other.
CASES = {
    "": Case(BERT, "v100=1", 0.1),
    "_batch_4": Case(BERT, "v100=1", 0.1, max_batch=4),
    "_flat": Case(profile(4 * PASS_S), "v100=2", 0.5),
}


def contenders(case: Case) -> dict[str, tuple[Plan, float]]:
    """Each with its plan, and the goodput that the cost model promises."""
    devices = fleet(case.devices)
    links = links_between(devices)
    objective = Objective(slo_s=case.slo_s, max_batch=case.max_batch)
    stock, naive, _ = baselines(problem(case.profile, devices, links), objective)
    ours = optimize(case.profile, devices, links, objective)
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
