"""Three ways to use the same devices: as planned, with all ramps at shrinking batches, and without exits.

As in E3's figure 7: BERT-base in single precision on a V100, by its datasheet; half of the inputs have left by the
middle. Each way has the best batch that it can have within the SLO.
"""

from experiments.planner.settings import BERT_BASE
from optimizer import optimize
from optimizer.baselines import Baseline, baselines
from optimizer.objective import Objective
from optimizer.plan import Plan
from profiles.devices import links_between

DEVICES, DTYPE, SLO_S = "v100=1", "float32", 0.1
PROFILE = BERT_BASE.profile(DEVICES, DTYPE)


def contenders(max_batch: int) -> dict[str, tuple[Plan, float]]:
    """Each with its plan, and the goodput that the cost model promises."""
    facts = BERT_BASE.facts(DEVICES, DTYPE)
    objective = Objective(slo_s=SLO_S, max_batch=max_batch)
    stock, naive, _ = baselines(facts, objective)
    ours = optimize(PROFILE, facts.devices, links_between(facts.devices), objective)
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
