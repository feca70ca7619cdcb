"""Plans the settings of E3's figures 7, 8, 9, 13 and 15 from datasheets, and shows the gains beside the paper's."""

from dataclasses import dataclass, replace
from math import inf

from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.planner.settings import BERT_BASE, DISTILBERT, RESNET50, Network
from isobatch.optimizer.model.evaluate import Score, evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import Baseline, baselines
from isobatch.optimizer.pipelines.side_by_side import side_by_side

BATCH = 8  # the largest of E3's figures 7 to 15
HOMOGENEOUS, MIXED = "v100=16", "v100=6,p100=8,k80=15"
WANTED = 6000.0  # samples per second, figure 15
GAP = 0.01
LAUNCHES_S = (2e-4, 5e-4, 1e-3)  # the first is what datasheet tables assume

MOST = Objective(slo_s=0.1, max_batch=BATCH)
CHEAP = Objective(goal="cost", slo_s=0.1, goodput_per_s=WANTED, max_batch=BATCH)


@dataclass(frozen=True)
class PaperSetting:
    """One setting of the paper, with the gains that the paper reports over early exit and over no exits."""

    key: str
    title: str
    network: Network
    devices: str
    paper: str
    objective: Objective = MOST


LESS = "35-78% less dollars (figures 14, 15)"
SETTINGS = (
    PaperSetting("bert_16v100", "BERT-base, 16 V100", BERT_BASE, HOMOGENEOUS, "1.44x, 1.30x (figure 7)"),
    PaperSetting("resnet50_16v100", "ResNet-50, 16 V100", RESNET50, HOMOGENEOUS, "1.74x, 1.58x (figure 8)"),
    PaperSetting("distilbert_16v100", "DistilBERT, 16 V100", DISTILBERT, HOMOGENEOUS, "-, 1.67x (figure 9)"),
    PaperSetting("bert_mixed", "BERT-base, 6 V100 + 8 P100 + 15 K80", BERT_BASE, MIXED, "1.70x (figure 13)"),
    PaperSetting("cost_bert_v100", "BERT-base, 6,000/s, V100", BERT_BASE, "v100=200", LESS, CHEAP),
    PaperSetting("cost_bert_mixed", "BERT-base, 6,000/s, mixed", BERT_BASE, "v100=100,p100=100,k80=200", LESS, CHEAP),
)


@dataclass(frozen=True)
class Gain:
    """How much better than a baseline: in goodput, or in dollars for a goodput."""

    over_exits: float
    over_stock: float
    over_serial: float


def paper(console: Console) -> dict[str, float]:
    """The gains at several times per launch, which decide what shrinking batches lose, and no datasheet says."""
    columns = [f"{launch_s * 1e3:g} ms per launch" for launch_s in LAUNCHES_S]
    title = "gains over early exit, no exits, serial: estimated from datasheets, batch <= 8"
    table = Table("setting", *columns, "E3 says, over early exit, no exits", title=title)
    figures: dict[str, float] = {}
    for setting in track(SETTINGS, "the paper's settings"):
        gains = [_gain(setting, launch_s) for launch_s in LAUNCHES_S]
        cells = [f"{gain.over_exits:.2f}x, {gain.over_stock:.2f}x, {gain.over_serial:.2f}x" for gain in gains]
        table.add_row(setting.title, *cells, setting.paper)
        for launch_s, gain in zip(LAUNCHES_S, gains, strict=True):
            at = "" if launch_s == LAUNCHES_S[0] else f"_at_{launch_s * 1e6:.0f}us"
            figures[f"gain_{setting.key}_over_early_exit{at}"] = gain.over_exits
            figures[f"gain_{setting.key}_over_no_exits{at}"] = gain.over_stock
    console.print(table)
    return figures


def _gain(setting: PaperSetting, launch_s: float) -> Gain:
    facts = setting.network.facts(setting.devices, "float32")
    facts = replace(facts, tables=tuple(replace(table, launch_s=launch_s) for table in facts.tables))
    plan = side_by_side(facts, setting.objective, GAP)
    assert plan is not None
    ours = evaluate(plan, facts, setting.objective)
    stock, exits, serial = (_better(ours, other, setting.objective) for other in baselines(facts, setting.objective))
    return Gain(exits, stock, serial)


def _better(ours: Score, other: Baseline, objective: Objective) -> float:
    if other.score is None:
        return inf
    if objective.aim.at_given_goodput:
        return other.score.cost_per_hour / ours.cost_per_hour
    return ours.goodput_per_s / other.score.goodput_per_s
