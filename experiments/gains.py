"""What constant batches gain on one fleet, simulated: our plan beside stock, naive and serial, by batch size."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from experiments.baselines import naive, oracle_per_s, serial, stock
from experiments.planner.settings import Network
from experiments.sustained import sustained
from optimizer.lanes import side_by_side
from optimizer.objective import Objective
from optimizer.plan import Plan
from optimizer.problem import Problem
from profiles.errors import UserError

SYSTEMS = ("isobatch", "serial", "early exit", "no exits")
GAP = 0.01  # of the planner


@dataclass(frozen=True)
class Suite:
    """One figure of the paper: the parameters, and what the paper says."""

    name: str  # of the claim: its results lie in the folder of that name
    network: Network
    devices: str
    slo_s: float
    batches: tuple[int, ...]
    dtype: str
    paper: dict[str, float]

    @property
    def results(self) -> Path:
        return Path(__file__).with_name(self.name) / "results.csv"


@dataclass(frozen=True)
class Row:
    """What one system sustains with batches of at most so many inputs."""

    system: str
    batch: int
    promised_per_s: float
    goodput_per_s: float
    share_of_oracle: float


def measure(suite: Suite) -> list[Row]:
    facts = suite.network.facts(suite.devices, suite.dtype)
    cases = [(batch, system) for batch in suite.batches for system in SYSTEMS]
    return [_row(suite, facts, *case) for case in track(cases, description=suite.devices)]


def best(rows: Sequence[Row], system: str) -> float:
    """The highest goodput of a system at any batch size."""
    return max(row.goodput_per_s for row in rows if row.system == system)


def ratio(rows: Sequence[Row], batch: int, over: str) -> float:
    """How much more isobatch sustains at a batch size."""
    at = {row.system: row.goodput_per_s for row in rows if row.batch == batch}
    return at["isobatch"] / at[over]


def write(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
        table.writeheader()
        table.writerows({name: _short(value) for name, value in asdict(row).items()} for row in rows)


def read(path: Path) -> list[Row]:
    """The rows that `write` wrote."""
    with path.open(newline="") as file:
        return [
            Row(row.pop("system"), int(row.pop("batch")), **{name: float(value) for name, value in row.items()})
            for row in csv.DictReader(file)
        ]


def _row(suite: Suite, facts: Problem, batch: int, system: str) -> Row:
    found = sustained(_plan(suite, facts, batch, system), facts, suite.slo_s)
    bound = oracle_per_s(facts, suite.slo_s, batch)
    return Row(system, batch, found.promised_per_s, found.goodput_per_s, found.goodput_per_s / bound)


def _plan(suite: Suite, facts: Problem, batch: int, system: str) -> Plan:
    if system != "isobatch":
        return {"serial": serial, "early exit": naive, "no exits": stock}[system](facts, batch)
    plan = side_by_side(facts, Objective(slo_s=suite.slo_s, max_batch=batch), GAP)
    if plan is None:
        raise UserError(f"no plan on {suite.devices} keeps {suite.slo_s} s at batches of {batch}")
    return plan


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value
