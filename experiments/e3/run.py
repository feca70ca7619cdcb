"""Claim: E3's figures, in the simulator: the product's dispatcher, the planner's plans and baselines, published curves.

Each figure is kept as soon as it is measured (experiments/e3/results), and is not measured again while the code that it
depends on stays the same: a run that was cut off goes on. `python -m experiments.bench e3 only=fig07` runs one.
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.simulator.sustained import sustained
from experiments.e3.page import write
from experiments.e3.suite import BACKENDS, EARLY, FIGURES, FULL, OURS, E3Figure, E3Setting
from experiments.shared.version import code_of
from optimizer.objective import Objective
from optimizer.pipelines import baselines
from optimizer.pipelines.oracle import oracle_per_s
from optimizer.pipelines.side_by_side import side_by_side
from optimizer.plan import Plan
from optimizer.problem import Problem

RESULTS = Path(__file__).with_name("results")
NAMES = {EARLY: baselines.EARLY_EXIT, FULL: baselines.NO_EXITS}
INPUTS, GAP = 6_000, 0.01
console = Console(stderr=True)
Rows = list[dict[str, Any]]


def measure(only: str = "") -> dict[str, float]:
    mark = sha256(json.dumps(code_of("e3")).encode()).hexdigest()[:12]
    found = {figure.name: _kept_or_measured(figure, mark) for figure in FIGURES if only in ("", figure.name)}
    write({figure: found[figure.name] for figure in FIGURES if figure.name in found}, whole=not only)
    return {name: value for figure in FIGURES if figure.name in found for name, value in _gains(figure, found)}


def _gains(figure: E3Figure, found: dict[str, Rows]) -> Iterator[tuple[str, float]]:
    """The largest gain over each system at any point of the axis, and the best share of the bound."""
    for backend in BACKENDS:
        rows = [row for row in found[figure.name] if row["backend"] == backend]
        ours = {row["x"]: row["goodput_per_s"] for row in rows if row["system"] == OURS}
        for system in dict.fromkeys(row["system"] for row in rows if row["system"] != OURS):
            ratios = [
                ours[row["x"]] / row["goodput_per_s"]
                for row in rows
                if row["system"] == system and row["goodput_per_s"]
            ]
            yield f"{figure.name}_{backend}_over_{system.replace(' ', '_')}", max(ratios, default=0.0)
        yield f"{figure.name}_{backend}_share_of_bound", max(row["share"] for row in rows if row["system"] == OURS)


def _kept_or_measured(figure: E3Figure, mark: str) -> Rows:
    path = RESULTS / f"{figure.name}.json"
    if path.exists() and (kept := json.loads(path.read_text()))["code"] == mark:
        return list(kept["rows"])
    rows = [
        _row(x, setting, backend, system)
        for backend in BACKENDS
        for x, setting in figure.settings
        for system in setting.systems
    ]
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps({"code": mark, "rows": rows}, indent=1) + "\n")
    console.print(f"{figure.name}: {figure.title}")
    return rows


def _row(x: str, setting: E3Setting, backend: str, system: str) -> dict[str, Any]:
    facts = setting.network.facts(setting.devices, setting.dtype, backend)
    plan = _plan(setting, facts, system)
    goodput = sustained(plan, facts, setting.slo_s, INPUTS).goodput_per_s if plan else 0.0
    share = goodput / oracle_per_s(facts, setting.slo_s, setting.batch)
    return {
        "x": x,
        "backend": backend,
        "system": system,
        "goodput_per_s": float(f"{goodput:.4g}"),
        "share": float(f"{share:.3g}"),
    }


def _plan(setting: E3Setting, facts: Problem, system: str) -> Plan | None:
    fixed = setting.batch if setting.fixed else None
    objective = Objective(slo_s=setting.slo_s, max_batch=setting.batch, fixed_batch=fixed)
    if system == OURS:
        return side_by_side(facts, objective, GAP)
    return baselines.baseline(NAMES[system], facts, objective).plan
