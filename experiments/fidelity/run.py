"""Claim: the simulator predicts the live server, with the same plans and the same arrivals.

Live is the whole path: `isobatch serve` on a local Ray, HTTP through HAProxy, replicas whose virtual devices take the
table's time. The costs of serving beside the devices are measured on the same servers (`calibration.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.fidelity.calibration import Calibration, ServerCosts, calibration, measured
from experiments.fidelity.compare import COMPARED, ComparedCase, LiveCase, compare, errors, live
from experiments.fidelity.suite import PLANS, SLO_S, cases, profile
from experiments.serve import measures, servers
from experiments.serve.fleet import facts_for, promise_per_s

HOST = Path(__file__).with_name("host.json")
WIDE = 140  # so that a row is a line


def measure() -> dict[str, float]:
    calibrated, tried = served()
    HOST.write_text(calibrated.host.model_dump_json(indent=2) + "\n")
    rows = list(compared(tried, calibrated))
    Console(width=max(WIDE, Console().width)).print(table(rows))
    return errors(rows)


def served() -> tuple[Calibration, list[LiveCase]]:
    """Run all loads of a plan on one server."""
    tried: list[LiveCase] = []
    costs: list[ServerCosts] = []
    for name, plan in PLANS.items():
        facts, promised = profile(), promise_per_s(plan, profile())
        with servers.served(plan, facts, 1e3 * SLO_S) as url:
            measures.under(url, promised / 3, 1.0, 1e3 * SLO_S)  # warms up
            costs.append(measured(url, plan, facts, promised))
            tried += [live(case, url, promised) for case in track(cases(name), description=name, transient=True)]
    return calibration(costs), tried


def compared(tried: Iterable[LiveCase], calibrated: Calibration) -> Iterator[ComparedCase]:
    for each in tried:
        plan = PLANS[each.case.plan]
        yield compare(each, plan, facts_for(profile(), plan.devices()), calibrated)


def table(rows: Sequence[ComparedCase]) -> Table:
    result = Table("plan", "arrivals", "load", title="live / simulated, by how much that is off ± from run to run")
    for name in ("goodput per s", "p50 ms", "p99 ms", "sent late p99 ms"):
        result.add_column(name, justify="right")
    for row in rows:
        cells = [
            f"{getattr(row.live, what):,.0f} / {row.median(what):,.0f}  {row.error(what):+.1%} ± {row.spread(what):.1%}"
            for what in COMPARED
        ]
        result.add_row(row.case.plan, row.case.process, f"{row.case.load:.0%}", *cells, f"{row.sent_late_ms:.1f}")
    return result
