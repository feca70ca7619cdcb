"""Measures what constant batches gain on a simulated fleet: our plan beside all baselines, by batch size.

E3's figures 7 (`experiments/homogeneous`) and 13 (`experiments/heterogeneous`) are made by it; so is a part of `sim`.
"""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

from rich.progress import track

from experiments.planner.settings import Network
from isobatch.cluster.simulator.plan_choice import DEFAULT_EFFORT, best_simulated
from isobatch.cluster.simulator.sustained import sustained_per_s
from isobatch.cluster.simulator.tails import Tails
from isobatch.optimizer.model.evaluate import evaluate
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import EARLY_EXIT, NO_EXITS, SERIAL, baseline
from isobatch.optimizer.pipelines.oracle import oracle_per_s
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.plan import Plan
from isobatch.optimizer.problem import Problem
from isobatch.profiles.errors import UserError

COLOURS = {"isobatch": "#1b6ca8", "serial": "#7fb3d5", "early exit": "#d98c3f", "no exits": "#999999"}  # of each system
BASELINES = {"serial": SERIAL, "early exit": EARLY_EXIT, "no exits": NO_EXITS}
GAP = 0.01  # of the planner
EXPERIMENTS = Path(__file__).parents[1]
DOCS = EXPERIMENTS.parent / "docs"


def baseline_plan(name: str, facts: Problem, objective: Objective) -> Plan:
    plan = baseline(name, facts, objective).plan
    if plan is None:
        raise UserError(f"{name}: no batch size keeps these limits")
    return plan


def keeping_tail(plan: Plan, facts: Problem, limited: Objective) -> tuple[Tails, Plan]:
    """The tail without exits, and the plan of `isobatch plan --no-later`. `plan`: the one that is not simulated yet."""
    assert limited.slo_s, "This is a bug: a plan that is no later has an SLO."
    stock, find = baseline_plan(NO_EXITS, facts, limited), partial(side_by_side, gap=GAP)
    tails = Tails(facts, stock, limited.slo_s, DEFAULT_EFFORT.last_inputs)
    return tails, best_simulated(plan, facts, limited, find, replace(DEFAULT_EFFORT, tails=tails)).plan


@dataclass(frozen=True)
class PaperFigure:
    """One figure of the paper: the parameters, and what the paper says."""

    name: str  # of the claim: its results lie in the folder of that name
    network: Network
    devices: str
    slo_s: float
    batches: tuple[int, ...]
    dtype: str
    paper: dict[str, float]
    fixed: bool = False  # every split of every system has exactly the batch, not at most

    @property
    def results(self) -> Path:
        return EXPERIMENTS / self.name / "results.csv"


@dataclass(frozen=True)
class SystemGoodput:
    """The goodput of one system with batches of at most so many inputs; 0 where it cannot keep the SLO."""

    system: str
    batch: int
    promised_per_s: float
    goodput_per_s: float
    share_of_oracle: float


def measure(claim: PaperFigure) -> list[SystemGoodput]:
    facts = claim.network.facts(claim.devices, claim.dtype)
    cases = [(batch, system) for batch in claim.batches for system in COLOURS]
    return [_row(claim, facts, *case) for case in track(cases, description=claim.devices)]


def best(rows: Sequence[SystemGoodput], system: str) -> float:
    """The highest goodput of a system at any batch size."""
    return max(row.goodput_per_s for row in rows if row.system == system)


def ratio(rows: Sequence[SystemGoodput], batch: int, over: str) -> float:
    """How many times more isobatch sustains than this system at a batch size."""
    at = {row.system: row.goodput_per_s for row in rows if row.batch == batch}
    return at["isobatch"] / at[over] if at[over] else inf


def write(rows: Sequence[SystemGoodput], path: Path) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
        table.writeheader()
        table.writerows({name: _short(value) for name, value in asdict(row).items()} for row in rows)


def read(path: Path) -> list[SystemGoodput]:
    """The rows that `write` wrote."""
    with path.open(newline="") as file:
        return [
            SystemGoodput(
                row.pop("system"), int(row.pop("batch")), **{name: float(value) for name, value in row.items()}
            )
            for row in csv.DictReader(file)
        ]


def draw(claim: PaperFigure) -> None:
    """Bars by batch size from the rows that were measured, and the bound, as a picture in docs/."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = read(claim.results)
    figure, axes = plt.subplots(figsize=(8, 4))
    batches = sorted({row.batch for row in rows})
    for index, (system, colour) in enumerate(COLOURS.items()):
        heights = [row.goodput_per_s for row in rows if row.system == system]
        at = [place + 0.2 * (index - 1.5) for place in range(len(batches))]
        axes.bar(at, heights, 0.19, color=colour, label=system)
    bound = [
        max(row.goodput_per_s / row.share_of_oracle for row in rows if row.batch == b and row.share_of_oracle)
        for b in batches
    ]
    axes.plot(range(len(batches)), bound, "k_", markersize=32, label="bound")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    title = f"{claim.network.name} on {claim.devices}, simulated, SLO {claim.slo_s * 1e3:g} ms"
    axes.set(xlabel="batch" if claim.fixed else "largest batch", ylabel="goodput (inputs per second)", title=title)
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / f"{claim.name}.png", dpi=130, bbox_inches="tight")
    plt.close(figure)


def _row(claim: PaperFigure, facts: Problem, batch: int, system: str) -> SystemGoodput:
    plan = _plan(claim, facts, batch, system)
    if plan is None:
        return SystemGoodput(system, batch, 0.0, 0.0, 0.0)
    kept_per_s, bound = sustained_per_s(plan, facts, claim.slo_s), oracle_per_s(facts, claim.slo_s, batch)
    return SystemGoodput(system, batch, evaluate(plan, facts).goodput_per_s, kept_per_s, kept_per_s / bound)


def _plan(claim: PaperFigure, facts: Problem, batch: int, system: str) -> Plan | None:
    """The best plan of a system with batches up to this size, or exactly of it: the same rule for all systems."""
    objective = Objective(slo_s=claim.slo_s, max_batch=batch, fixed_batch=batch if claim.fixed else None)
    if system != "isobatch":
        return baseline(BASELINES[system], facts, objective).plan
    plan = side_by_side(facts, objective, GAP)
    if plan is None:
        raise UserError(f"no plan on {claim.devices} keeps {claim.slo_s} s at batches of {batch}")
    return plan


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value
