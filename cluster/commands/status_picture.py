"""The picture that `isobatch status` draws of a running application: the plan, the fill of its launches, survival.

It shows the same as the page at `/`, from the same `/stats`. With earlier statistics, it shows what happened since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

Stats = dict[str, Any]
BAR_WIDTH = 24  # characters
LEAST_ANSWERS = 20  # with fewer, survival since the earlier statistics is not shown
HEIGHTS = "▁▂▃▄▅▆▇█"


def picture(stats: Stats, earlier: Stats | None, forecast: Sequence[float]) -> Group:
    """The splits with their devices and the fill of their launches, then the survival beside its forecast."""
    return Group(_splits(stats, earlier), _survivors(survival(stats, earlier), forecast))


def _splits(stats: Stats, earlier: Stats | None) -> Table:
    from isobatch.optimizer.plan import blocks_text

    table = Table("split", "devices", "batch", "filled", "", "waiting", title="launches", title_justify="left")
    for split in stats["splits"]:
        first, end = split["blocks"]
        blocks = f"block{'s' if end - first > 1 else ''} {blocks_text(first, end - 1)}"
        kind = split["group"].rpartition("-")[0] or split["group"]
        share = fill(split, earlier)
        filled = ("no launches", "") if share is None else (f"[blue]{bar(share)}[/]", f"{share:.0%}")
        table.add_row(blocks, f"{split['replicas']} x {kind}", str(split["batch"]), *filled, f"{split['waiting']:,}")
    return table


def _survivors(current: Sequence[float], forecast: Sequence[float]) -> Table:
    table = Table("", "", "", title="inputs that reach each block", title_justify="left", show_header=False)
    for name, shares in (("lately", current), ("forecast", forecast)):
        if shares:
            table.add_row(name, f"[blue]{sparkline(shares)}[/]", f"{shares[-1]:.0%} reach the last of {len(shares)}")
    return table


def texts_table(stats: Stats, controller: str = "") -> Table:
    """The figures where texts are written: no picture, because its launches contain tokens of all depths.

    `controller`: the text of a row on the controller, if any.
    """
    table = Table("", "", title=stats["model"], show_header=False, title_justify="left")
    tokens = {int(block): count for block, count in stats["exits"].items()}
    written = sum(tokens.values())
    depth = sum((block + 1) * count for block, count in tokens.items()) / written if written else 0.0
    pages = stats["pages"]
    launches = [f"split {each['split']} {bar(each['fill'])} {each['fill']:.0%}" for each in stats["splits"]]
    table.add_row("requests", ", ".join(f"{count:,} {outcome}" for outcome, count in stats["requests"].items()))
    table.add_row("replicas", f"{stats['replicas']:,}")
    table.add_row("tokens", f"{written:,}, {depth:.1f} of {len(tokens)} blocks each, {stats['tokens_per_s']:,.0f}/s")
    table.add_row(
        "sequences", f"{stats['residents']:,} resident, {stats['waiting']:,} wait, {stats['preempted']:,} preempted"
    )
    table.add_row("pages", f"{pages['free']:,} of {pages['of']:,} free")
    table.add_row("launches", "\n".join(launches) or "none yet")
    if controller:
        table.add_row("controller", controller)
    return table


def fill(split: Stats, earlier: Stats | None) -> float | None:
    """How full the launches of a split were since the earlier statistics; None: there were no launches.

    >>> split = {"group": "v100-0", "blocks": [0, 3], "launches": 30, "fill": 0.9}
    >>> fill(split, None), fill(split, {"splits": [split | {"launches": 20, "fill": 0.85}]})
    (0.9, 1.0)
    """
    same = [each for each in (earlier or {"splits": []})["splits"] if _place(each) == _place(split)]
    launches, filled = (same[0]["launches"], same[0]["fill"]) if same else (0, 0.0)
    since = split["launches"] - launches
    if since <= 0:
        return None
    return float(min(1.0, max(0.0, (split["fill"] * split["launches"] - filled * launches) / since)))


def _place(split: Stats) -> tuple[str, tuple[int, ...]]:
    return split["group"], tuple(split["blocks"])


def survival(stats: Stats, earlier: Stats | None) -> list[float]:
    """The share that reached each block since the earlier statistics, or since the start if too few were answered.

    >>> survival({"exits": {"0": 30, "1": 10}, "survival": [1.0, 0.5]}, {"exits": {"0": 0, "1": 0}})
    [1.0, 0.25]
    """
    left = [count - (earlier or {"exits": {}})["exits"].get(block, 0) for block, count in stats["exits"].items()]
    total = sum(left)
    if total < LEAST_ANSWERS:
        return list(stats["survival"])
    return [sum(left[block:]) / total for block in range(len(left))]


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """
    >>> bar(0.5, 8)
    '████░░░░'
    """
    full = round(share * width)
    return "█" * full + "░" * (width - full)


def sparkline(shares: Sequence[float]) -> str:
    """
    >>> sparkline([1.0, 0.6, 0.0])
    '█▅▁'
    """
    return "".join(HEIGHTS[min(len(HEIGHTS) - 1, int(share * len(HEIGHTS)))] for share in shares)
