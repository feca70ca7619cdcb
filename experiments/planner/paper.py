"""The settings of E3's figures 7, 8, 9, 13 and 15, planned from datasheets: the gains beside the paper's."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from experiments.planner.settings import BERT_BASE, DISTILBERT, RESNET50, Network
from optimizer.baselines import Baseline, baselines
from optimizer.evaluate import evaluate
from optimizer.lanes import side_by_side
from optimizer.objective import Objective
from optimizer.problem import Problem

BATCH = 8  # the largest of E3's figures 7 to 15
HOMOGENEOUS, MIXED = "v100=16", "v100=6,p100=8,k80=15"
WANTED = 6000.0  # samples per second, figure 15
GAP = 0.01


@dataclass(frozen=True)
class Row:
    """One setting: what is better than what, by how much, and what the paper says."""

    key: str
    setting: str
    over_exits: float
    over_stock: float
    paper: str


def paper(console: Console) -> dict[str, float]:
    rows = list(_rows())
    table = Table("setting", "over early exit", "over no exits", "paper", title="gains, datasheet tables, batch <= 8")
    for row in rows:
        table.add_row(row.setting, f"{row.over_exits:.2f}x", f"{row.over_stock:.2f}x", row.paper)
    console.print(table)
    console.print(_by_launch())
    over = {f"gain_{row.key}_over_early_exit": row.over_exits for row in rows}
    return over | {f"gain_{row.key}_over_no_exits": row.over_stock for row in rows}


def _rows() -> Iterator[Row]:
    yield _goodput("bert_16v100", "BERT-base, 16 V100", BERT_BASE, HOMOGENEOUS, "1.44x, 1.30x (figure 7)")
    yield _goodput("resnet50_16v100", "ResNet-50, 16 V100", RESNET50, HOMOGENEOUS, "1.74x, 1.58x (figure 8)")
    yield _goodput("distilbert_16v100", "DistilBERT, 16 V100", DISTILBERT, HOMOGENEOUS, "1.67x over stock (figure 9)")
    yield _goodput("bert_mixed", "BERT-base, 6 V100 + 8 P100 + 15 K80", BERT_BASE, MIXED, "1.70x (figure 13)")
    yield _cost("cost_bert_v100", "BERT-base, 6,000/s, V100", BERT_BASE, "v100=200", "35-78% less (figures 14, 15)")
    yield _cost("cost_bert_mixed", "BERT-base, 6,000/s, mixed", BERT_BASE, "v100=100,p100=100,k80=200", "35-78% less")


def _by_launch() -> Table:
    """What a launch costs decides what shrinking batches lose: every active ramp is one more launch."""
    table = Table("ms per launch", "over early exit", "over no exits", title="BERT-base, 16 V100, batch <= 8")
    facts, objective = BERT_BASE.facts(HOMOGENEOUS, "float32"), Objective(slo_s=0.1, max_batch=BATCH)
    for launch_s in (0.0, 2e-4, 5e-4, 1e-3, 2e-3):
        slower = replace(facts, tables=tuple(replace(table, launch_s=launch_s) for table in facts.tables))
        row = _gains("", "", slower, objective, "")
        table.add_row(f"{launch_s * 1e3:g}", f"{row.over_exits:.2f}x", f"{row.over_stock:.2f}x")
    return table


def _goodput(key: str, setting: str, network: Network, devices: str, said: str) -> Row:
    return _gains(key, setting, network.facts(devices, "float32"), Objective(slo_s=0.1, max_batch=BATCH), said)


def _gains(key: str, setting: str, facts: Problem, objective: Objective, said: str) -> Row:
    plan = side_by_side(facts, objective, GAP)
    assert plan is not None
    pace = evaluate(plan, facts, objective).goodput_per_s
    stock, exits, _ = baselines(facts, objective)
    assert exits.score
    assert stock.score
    return Row(key, setting, pace / exits.score.goodput_per_s, pace / stock.score.goodput_per_s, said)


def _cost(key: str, setting: str, network: Network, devices: str, said: str) -> Row:
    """Here a gain of 2 is half the cost."""
    facts = network.facts(devices, "float32")
    objective = Objective(goal="cost", slo_s=0.1, goodput_per_s=WANTED, arrivals_per_s=WANTED, max_batch=BATCH)
    plan = side_by_side(facts, objective, GAP)
    assert plan is not None
    dollars = evaluate(plan, facts, objective).cost_per_hour
    stock, exits, _ = baselines(facts, objective)
    return Row(key, setting, _dearer(exits, dollars), _dearer(stock, dollars), said)


def _dearer(other: Baseline, dollars: float) -> float:
    assert other.score
    return other.score.cost_per_hour / dollars
