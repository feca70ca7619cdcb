"""Claim: plans gain in simulation what E3 reports, on published curves, with the product's dispatcher and baselines.

Each figure is kept when it is measured (experiments/e3/results), and is measured again only if its settings or its code
change, so that an interrupted run continues. `python -m experiments.bench e3 only=fig07` measures one figure. Each
process has one backend, so that it measures rates once that several figures share.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.e3.measuring import MEASURES, OURS
from experiments.e3.page import ratio, write
from experiments.e3.suite import BACKENDS, FIGURES, E3Figure
from experiments.shared.version import code_behind
from isobatch.profiles.errors import UserError

RESULTS = Path(__file__).with_name("results")
MEASURING = "experiments/e3/measuring.py"
KEPT = "kept"
console = Console(stderr=True)
Rows = list[dict[str, Any]]


def measure(only: str = "", cores: int = len(BACKENDS)) -> dict[str, float]:
    """`only`: one figure; "kept": write the pages from kept figures, also of older code, without measuring."""
    code = sha256(json.dumps(code_behind(MEASURING)).encode()).hexdigest()
    if only == KEPT:
        rows_by_figure = {figure: rows for figure in FIGURES if (rows := _kept(figure))}
        write(rows_by_figure, [figure for figure in rows_by_figure if not _kept(figure, code)], whole=True)
    else:
        with ExitStack() as stack:
            pools = [stack.enter_context(ProcessPoolExecutor(1)) for _ in range(min(cores, len(BACKENDS)))]
            rows_by_figure = dict(_all_of([figure for figure in FIGURES if only in ("", figure.name)], code, pools))
        write(rows_by_figure, (), whole=not only)
    return {name: value for figure, rows in rows_by_figure.items() for name, value in _gains(figure, rows)}


def _all_of(figures: Sequence[E3Figure], code: str, pools: Sequence[Executor]) -> Iterator[tuple[E3Figure, Rows]]:
    rows_of: dict[E3Figure, Rows | list[Future[Rows]]] = {}
    for figure in figures:
        kept = _kept(figure, code)
        rows_of[figure] = kept or [
            pool.submit(measured, figure, backend) for backend, pool in zip(BACKENDS, cycle(pools), strict=False)
        ]
    for figure, rows in rows_of.items():
        if isinstance(rows[0], Future):
            try:
                rows = [row for each in rows for row in each.result()]
            except UserError as error:  # public data are missing
                console.print(f"{figure.name} is left out: {error}", style="bold red", soft_wrap=True)
                continue
            _keep(figure, code, rows)
            console.print(f"{figure.name}: {figure.title}")
        yield figure, rows


def measured(figure: E3Figure, backend: str) -> Rows:
    """The rows of one backend. `share`: of the upper bound; None: no bound is known."""
    return [_row(figure, x, setting, backend, system) for x, setting in figure.settings for system in setting.systems]


def _row(figure: E3Figure, x: str, setting: Any, backend: str, system: str) -> dict[str, Any]:
    rows_by_figure = MEASURES[figure.unit](setting, backend, system)
    share = None if rows_by_figure.share is None else float(f"{rows_by_figure.share:.3g}")
    return {"x": x, "backend": backend, "system": system, "value": float(f"{rows_by_figure.value:.4g}"), "share": share}


def _mark(figure: E3Figure, code: str) -> str:
    return sha256(f"{code} {figure.unit} {figure.settings!r}".encode()).hexdigest()[:12]


def _kept(figure: E3Figure, code: str | None = None) -> Rows | None:
    """The kept rows of a figure; with `code`, only if this code measured them with these settings."""
    path = RESULTS / f"{figure.name}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    fits = code is None or kept.get("mark") == _mark(figure, code)
    return list(kept["rows"]) if kept and fits else None


def _keep(figure: E3Figure, code: str, rows: Rows) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{figure.name}.json"
    path.write_text(json.dumps({"mark": _mark(figure, code), "rows": rows}, indent=1) + "\n")


def _gains(figure: E3Figure, rows: Rows) -> Iterator[tuple[str, float]]:
    """The largest and the smallest gain over each system on the axis."""
    for backend in BACKENDS:
        here = [row for row in rows if row["backend"] == backend]
        for system in dict.fromkeys(row["system"] for row in here if row["system"] != OURS):
            gains = [gain for row in here if row["system"] == system and (gain := ratio(figure, here, row)) is not None]
            name = f"{figure.name}_{backend}_over_{system.replace(' ', '_')}"
            yield name, max(gains, default=0.0)
            yield f"{name}_least", min(gains, default=0.0)
