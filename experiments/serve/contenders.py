"""Three systems on the same devices: the planned one, all ramps with shrinking batches, and no exits.

Each system has its best batch within the SLO. There are three cases: BERT-base in single precision on a V100 by its
datasheet, as in E3's figure 7 (half of the inputs have left by the middle), with batches up to 16 and up to 4; and
devices that take as long for one input as for sixteen, where constant batch gains most, as with small kernels, which
cannot keep a device busy.
"""

from dataclasses import dataclass

from experiments.planner.settings import BERT_BASE
from experiments.serve.fleet import BATCH, PASS_S, profile
from isobatch.optimizer import optimize
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import Baseline, baselines
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import problem
from isobatch.profiles.devices import fleet, links_between
from isobatch.profiles.files import Profile


@dataclass(frozen=True)
class Contest:
    """A network on some devices."""

    profile: Profile
    devices: str
    slo_s: float
    max_batch: int = BATCH


BERT = BERT_BASE.profile("v100=1", "float32")
# The suffix of each case in the names of figures. The last case has time for two batches one after the other.
CASES = {
    "": Contest(BERT, "v100=1", 0.1),
    "_batch_4": Contest(BERT, "v100=1", 0.1, max_batch=4),
    "_flat": Contest(profile(4 * PASS_S), "v100=2", 0.5),
}


def contenders(case: Contest) -> dict[str, tuple[Plan, float]]:
    """Each system with its plan, and the goodput that the cost model promises."""
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
