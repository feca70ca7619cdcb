"""Writes the table of measurements on GPUs into docs/gpu.md."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isobatch.cluster.bench.compare import CONSTANT, NAIVE, STOCK

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end of measured -->\n"
# MLPerf Inference 4.1, BERT-large on SQuAD (bert-99.9, Offline): medians over submitters, of one device.
MLPERF = "bert-large 176"  # texts of SQuAD have 176 tokens without padding
MLPERF_PER_S = {"h100": 7769, "h200": 8020}
SLO_MS = 50.0  # the SLO whose rates are on the page


def write(page: Path, results: Path) -> None:
    """Write the figures of all results in a folder between the marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| device | what | measured |", "|---|---|---|"]
    for path in sorted(results.glob("results-*.json")):
        kind, found = path.stem.removeprefix("results-"), json.loads(path.read_text())
        where = f"{kind}, {found['dtype']}, {found['backend']}, {found['date']}"
        lines += [f"| {where} | {what} | {value} |" for what, value in rows_of(kind, found["parts"])]
        if by := ", ".join(f"{name} {value}" for name, value in found.get("versions", {}).items()):
            lines.append(f"| {where} | measured with | {by} |")
    page.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def rows_of(kind: str, parts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, found in parts.items():
        if "systems" in found:
            if rates := _rates(found["systems"]):
                yield name, rates
        elif "rate_per_s" in found:
            rate_per_s, hop = found["rate_per_s"], found["hop_ms"]
            of_mlperf = f", {rate_per_s / MLPERF_PER_S[kind]:.2f} of MLPerf's" if _is_published(name, kind) else ""
            peak = max(found["roofline_shares"].values(), default=0.0)
            stop = f"; a stop {found['each_stop_ms']:.2f} ms"
            yield f"{name}: full batches", f"{rate_per_s:.0f}/s{of_mlperf}, {peak:.0%} of the peak{stop}"
            ways = ", ".join(f"{key.replace('_', ' ')} {value:.2f} ms" for key, value in hop.items() if key != "bytes")
            yield f"{name}: hop of {hop['bytes'] / 2**20:.2f} MiB", ways
        else:
            yield name, ", ".join(f"{key} {_figure(value)}" for key, value in found.items() if key != "measuring_s")


def _is_published(name: str, kind: str) -> bool:
    return name == MLPERF and kind in MLPERF_PER_S


def _rates(rows: list[dict[str, Any]]) -> str:
    """The rates of the systems under the SLO of the page, or under the only SLO."""
    slo_ms = SLO_MS if any(row["slo_ms"] == SLO_MS for row in rows) else max((row["slo_ms"] for row in rows), default=0)
    rates = {row["system"]: row["goodput_per_s"] for row in rows if row["slo_ms"] == slo_ms}
    return "; ".join(f"{name} {rates[name]:.0f}/s" for name in (STOCK, NAIVE, CONSTANT) if name in rates)


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"
