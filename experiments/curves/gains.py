"""Computes the gain of constant batches by these curves: BERT-base in float16, 16 devices of one kind, 100 ms."""

from itertools import product

from rich.progress import track

from experiments.planner.settings import BERT_BASE
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import EARLY_EXIT, NO_EXITS, baseline
from isobatch.optimizer.pipelines.side_by_side import side_by_side

KINDS, BACKENDS = ("a100", "l4", "t4"), ("onnx", "torch")
MOST = Objective(slo_s=0.1, max_batch=16)
GAP = 0.001


def gains() -> dict[str, float]:
    """The gains by the planner's cost model, with batches of at most 16."""
    figures: dict[str, float] = {}
    for kind, backend in track(list(product(KINDS, BACKENDS)), "gains"):
        facts = BERT_BASE.facts(f"{kind}=16", "float16", backend)
        plan = side_by_side(facts, MOST, GAP)
        assert plan is not None
        ours = evaluate(plan, facts, MOST).goodput_per_s
        for name, system in (("early_exit", EARLY_EXIT), ("no_exits", NO_EXITS)):
            other = baseline(system, facts, MOST).score
            figures[f"gain_bert_{kind}_{backend}_over_{name}"] = ours / other.goodput_per_s if other else 0.0
    return figures
