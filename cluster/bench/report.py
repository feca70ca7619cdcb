"""The report of a comparison on one device: a table and JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from isobatch.cluster.bench.compare import STOCK, ComparedSystem
from isobatch.optimizer.pipelines.batch_gain import BatchGain
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.sweep import whole_s

SPAN = 4  # a trial should last at least this many times the SLO


def table(rows: Sequence[ComparedSystem], title: str) -> Table:
    """A table that fits into 80 columns; the plans are left to `plan_lines`."""
    result = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    result.add_column("SLO ms", justify="right")
    result.add_column("system", no_wrap=True)
    for heading in ("per s", "x", "bound", "p50 ms", "p99 ms", "accuracy", "depth"):
        result.add_column(heading, justify="right", no_wrap=True)
    stock = {row.slo_ms: row for row in rows if row.system == STOCK}
    for row in rows:
        if row.system == STOCK and result.rows:
            result.add_section()
        result.add_row(f"{row.slo_ms:g}", row.system, *_cells(row, stock[row.slo_ms]))
    return result


def plan_lines(rows: Sequence[ComparedSystem]) -> Iterator[str]:
    """A line for every plan that was run: blocks @ batch, split by split."""
    slos_of: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.goodput_per_s:
            slos_of.setdefault((row.system, row.plan), []).append(f"{row.slo_ms:g}")
    for (system, plan), slos in slos_of.items():
        yield f"{system}, {', '.join(slos)} ms: blocks @ batch {plan}"


def gain_lines(gains: Mapping[float, BatchGain]) -> Iterator[str]:
    """The gain of batches by the latency table: a line for all SLOs with the same gain."""
    slos_of: dict[str, list[str]] = {}
    for slo_ms, gain in gains.items():
        slos_of.setdefault(str(gain), []).append(f"{slo_ms:g}")
    for gain_text, slos in slos_of.items():
        yield f"{', '.join(slos)} ms, {gain_text}"


def _cells(row: ComparedSystem, stock: ComparedSystem) -> list[str]:
    return [
        f"{row.goodput_per_s:,.0f}" if row.goodput_per_s >= 100 else f"{row.goodput_per_s:.1f}",
        f"{row.goodput_per_s / stock.goodput_per_s:.2f}" if stock.goodput_per_s else "-",
        f"{row.share_of_bound:.0%}",
        _number(row.p50_ms),
        _number(row.p99_ms),
        "-" if row.accuracy is None else f"{row.accuracy:.1%}",
        "-" if row.mean_depth is None else f"{row.mean_depth:.0%}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def unkept(rows: Sequence[ComparedSystem], measured: LatencyTable) -> Iterator[str]:
    """A line for each SLO that no system keeps."""
    alone_ms = 1e3 * whole_s(measured)[0]
    for slo_ms in dict.fromkeys(row.slo_ms for row in rows):
        if not any(row.goodput_per_s for row in rows if row.slo_ms == slo_ms):
            yield f"nothing keeps an SLO of {slo_ms:g} ms: one input alone takes {alone_ms:.3g} ms in full"


def too_short(slos_ms: Sequence[float], seconds: float) -> Iterator[str]:
    """A line for each SLO whose trials are so short that the inputs still inside at their end distort the rate.

    >>> list(too_short([25.0, 1000.0], seconds=1.0))
    ['1 s of load is short for an SLO of 1000 ms, and rates are low for it: use --seconds 4']
    """
    for slo_ms in slos_ms:
        if seconds < (enough := SPAN * slo_ms / 1e3):
            short = f"{seconds:g} s of load is short for an SLO of {slo_ms:g} ms, and rates are low for it"
            yield f"{short}: use --seconds {enough:g}"


def write(
    rows: Sequence[ComparedSystem], model: str, measured: LatencyTable, path: Path, gains: Mapping[float, BatchGain]
) -> None:
    content = {
        "model": model,
        "measured": measured.source,
        "kind": measured.kind,
        "length": measured.length,
        "date": datetime.now(UTC).date().isoformat(),
        "rows": [row.as_dict() for row in rows],
        "batch_gains": [{"slo_ms": slo_ms, **asdict(gain)} for slo_ms, gain in gains.items()],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
