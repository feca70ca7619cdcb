"""Claim: what the simulator says is what the live graph does. Both follow the same plans under the same arrivals.

Live means all of it: `isobatch serve` on a local Ray, HTTP through HAProxy, replicas that hold virtual devices for the
table's time. What the front door costs is measured once, from a lone request, and added to every simulated answer.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.fidelity.compare import TOLD, Row, compare, front_s, worst
from experiments.fidelity.suite import PLANS, SLO_S, Case, cases, profile
from experiments.serve import measures, servers
from experiments.serve.fleet import facts_for, promise_per_s, serve_file

RESULTS = Path(__file__).with_name("results.csv")


def measure() -> dict[str, float]:
    rows: list[Row] = []
    front = None
    for name in PLANS:
        of_plan = [case for case in cases() if case.plan == name]
        found, front = _plan(name, of_plan, front)
        rows += found
    write(rows, RESULTS)
    Console().print(table(rows))
    assert front is not None, "This is a bug: there are plans."
    return {**worst(rows), "front_ms": front * 1e3, "cases": len(rows)}


def _plan(name: str, of_plan: Sequence[Case], front: float | None) -> tuple[list[Row], float]:
    """All loads on one server; the first server of all tells what its front costs."""
    plan, facts = PLANS[name], profile()
    problem, promised = facts_for(facts, plan.devices()), promise_per_s(plan, facts)
    with TemporaryDirectory() as folder, servers.isobatch(serve_file(Path(folder), plan, facts, 1e3 * SLO_S)) as url:
        measures.under(url, promised / 3, 2.0, 1e3 * SLO_S)  # warms up
        front = front_s(url) if front is None else front
        each = track(of_plan, description=name, transient=True)
        return [compare(case, url, plan, problem, promised, front) for case in each], front


def write(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("plan", "arrivals", "load", *(f"{who}_{what}" for what in TOLD for who in ("live", "simulated"))))
        out.writerows(_cells(row) for row in rows)


def _cells(row: Row) -> Iterator[str]:
    yield from (row.case.plan, row.case.process, f"{row.case.load:g}")
    for what in TOLD:
        yield from (f"{getattr(who, what):.4g}" for who in (row.live, row.simulated))


def table(rows: Sequence[Row]) -> Table:
    found = Table("plan", "arrivals", "load", title="live / simulated")
    for name in ("goodput per s", "p50 ms", "p99 ms", "sent late p99 ms"):
        found.add_column(name, justify="right")
    for row in rows:
        pairs = [f"{getattr(row.live, what):,.0f} / {getattr(row.simulated, what):,.0f}" for what in TOLD]
        errors = [f"{row.error(what):.1%}" for what in TOLD]
        cells = [f"{pair}  {error:>6}" for pair, error in zip(pairs, errors, strict=True)]
        found.add_row(row.case.plan, row.case.process, f"{row.case.load:.0%}", *cells, f"{row.sent_late_ms:.1f}")
    return found
