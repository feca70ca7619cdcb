"""The table of `isobatch cascade`."""

from collections.abc import Sequence
from math import isfinite

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from isobatch.cluster.cascades.contenders import AnswerTimes, Contender
from isobatch.deployments.models.ramps import ExitRules

COLUMNS = (
    "right\n%", "agrees\n%", "lost\n%", "mean\nms", "p99\nms", "goodput\n/s", "$ per\nmillion", "levels\n%",
)  # fmt: skip


def table(rows: Sequence[Contender], latencies: Sequence[AnswerTimes | None], rate_per_s: float) -> Table:
    title = f"latencies at {rate_per_s:,.0f} inputs/s; goodput and cost at full load, within the deadline"
    caption = "right, and the last network's answer; lost against it alone (!: more than can be promised)"
    result = Table(title=title, caption=caption, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    result.title_justify = result.caption_justify = "left"
    result.add_column("network")
    for heading in COLUMNS:
        result.add_column(heading, justify="right", no_wrap=True)
    for row, latency in zip(rows, latencies, strict=True):
        result.add_row(Text(row.name), *_cells(row, latency))
    return result


def _cells(row: Contender, latency: AnswerTimes | None) -> tuple[str, ...]:
    figures, dollars = row.figures, row.dollars_per_million
    return (
        f"{100 * figures.accuracy:.1f}",
        f"{100 * figures.agreement:.1f}",
        f"{100 * figures.lost:+.2f}" + ("" if row.hopeful else "!"),
        "-" if latency is None else f"{1e3 * latency.mean_s:.3g}",
        "-" if latency is None else f"{1e3 * latency.p99_s:.3g}",
        f"{row.goodput_per_s:,.0f}" if row.plan else "late",
        f"{dollars:.3g}" if isfinite(dollars) else "-",
        "/".join(f"{100 * share:.0f}" for share in row.shares),
    )


def taken(row: Contender, rules: ExitRules) -> str:
    """The combination that is written, and its promise, as text."""
    weights = "".join(f", weight {weight:g}" for weight in row.made.weights[1:])
    shares = " / ".join(f"{share:.1%}" for share in row.shares)
    answered = f"; its levels answer {shares}{weights}" if len(row.made.members) > 1 else ""
    promised = str(rules.promise) if rules.promise else "nothing is promised: too few inputs to test it on"
    return f"taken: {row.name}: {row.goodput_per_s:,.0f} inputs/s{answered}\n{promised}"
