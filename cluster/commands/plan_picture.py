"""A plan as a picture: the network left to right, widths = replicas, height = batch, the survivors above."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from isobatch.cluster.commands.plan_report import PlanResult
from isobatch.optimizer import Plan, Score
from isobatch.optimizer.model.evaluate import SplitScore
from isobatch.profiles.picture import PALETTE, plain, whole_numbers

NARROW = 0.09  # a share of the picture's width: the labels of narrower boxes are turned
INK = "#333333"


def draw(result: PlanResult, path: Path) -> None:
    """One pair of axes per pipeline: the share still inside, and the splits below it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = len(result.pipelines)
    figure, axes = pyplot.subplots(
        2 * rows, 1, figsize=(10, 1.2 + 4.6 * rows), height_ratios=(1, 1.7) * rows, layout="constrained", squeeze=False
    )
    for row, (plan, score) in enumerate(result.pipelines):
        edges = _edges(plan, score)
        _survivors(axes[2 * row, 0], result.facts.survival, score, edges)
        _boxes(axes[2 * row + 1, 0], [device.kind for device in result.facts.devices], plan, score, edges)
    figure.suptitle(_title(result), x=0.02, ha="left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _title(result: PlanResult) -> str:
    """The promised goodput: by the simulator if the plan was simulated, otherwise by its devices alone."""
    score, simulated = result.score, result.simulated
    goodput = f"{score.goodput_per_s:,.0f} per second"
    if simulated:
        goodput = (
            f"{simulated.after_per_s:,.0f} per second as simulated ({score.goodput_per_s:,.0f} by its devices alone)"
        )
    times = f"as simulated: {result.times}; " if result.times else ""
    longest = f"full launches all the way: {score.latency_s * 1e3:.1f} ms"
    return f"{goodput}, ${score.cost_per_hour:,.2f} per hour\n{times}{longest}"


def _devices(part: SplitScore, plan: Plan, score: Score) -> float:
    """The number of replicas that a split keeps busy; a placement's idle time is shared out among its splits."""
    placement = plan.placement_of(part.split)
    total = sum(each.busy for each in score.splits if each.split in placement.splits)
    return placement.replicas * part.busy / total


def _edges(plan: Plan, score: Score) -> list[float]:
    widths = [_devices(part, plan, score) for part in score.splits]
    least = 0.02 * sum(widths)  # a split that few inputs reach must still be visible
    edges = [0.0]
    for width in widths:
        edges.append(edges[-1] + max(width, least))
    return edges


def _survivors(axes: Any, survival: tuple[float, ...], score: Score, edges: list[float]) -> None:
    """Draw the share of inputs inside each block, blocks spread evenly over their split; dots are active ramps.

    The dashed line is the profile: the share that would be inside if every ramp were active.
    """
    places: list[float] = []
    inside: list[float] = []
    for part, (left, right) in zip(score.splits, pairwise(edges), strict=True):
        split, share = part.split, part.reach
        step = (right - left) / (split.stop - split.start)
        for block in range(split.start, split.stop):
            places.append(left + step * (block - split.start))
            inside.append(share)
            share = survival[block + 1] if block in split.ramps else share
        ramps = [left + step * (ramp - split.start + 1) for ramp in split.ramps]
        axes.plot(ramps, [survival[ramp + 1] for ramp in split.ramps], "o", color=INK, markersize=4)
    steps = [*places, edges[-1]]
    axes.step(steps, [*survival, survival[-1]], where="post", color=INK, linewidth=0.8, linestyle="--")
    axes.step(steps, [*inside, inside[-1]], where="post", color=INK)
    axes.fill_between(steps, [*inside, inside[-1]], step="post", color=INK, alpha=0.12)
    for edge in edges[1:-1]:
        axes.axvline(edge, color="#999999", linewidth=0.8, linestyle=":")
    axes.set(ylim=(0, 1.05), xlim=(0, edges[-1]), ylabel="inputs still inside\n(dots: active ramps)", xticks=[])
    axes.yaxis.set_major_formatter("{x:.0%}")
    plain(axes)


def _boxes(axes: Any, kinds: list[str], plan: Plan, score: Score, edges: list[float]) -> None:
    tallest = max(part.split.batch_size for part in score.splits)
    for part, (left, right) in zip(score.splits, pairwise(edges), strict=True):
        color = PALETTE[kinds.index(part.kind) % len(PALETTE)]
        label = f"{part.kind} ({plan.devices()[part.kind]})" if part.kind not in _legend(axes) else None
        axes.bar(
            left, part.split.batch_size, right - left, align="edge", color=color, edgecolor="white", linewidth=1.5,
            label=label,
        )  # fmt: skip
        _write(axes, part, plan, score, (left, right), (edges[-1], tallest))
    axes.set(ylim=(0, tallest * 1.4), xlim=(0, edges[-1]), ylabel="batch size")
    axes.set_xlabel("devices, in the order in which an input meets them")
    whole_numbers(axes.xaxis)
    whole_numbers(axes.yaxis)
    plain(axes)
    axes.legend(frameon=False, ncols=4, loc="upper left")


def _legend(axes: Any) -> list[str]:
    return [label.split()[0] for label in axes.get_legend_handles_labels()[1]]


def _write(
    axes: Any, part: SplitScore, plan: Plan, score: Score, sides: tuple[float, float], size: tuple[float, float]
) -> None:
    """Write a split's label inside its box where it fits, else above it."""
    (left, right), (width, tallest), height = sides, size, part.split.batch_size
    turned = (right - left) / width < NARROW
    inside = height > (0.8 if turned else 0.45) * tallest
    axes.text(
        (left + right) / 2, height / 2 if inside else height + 0.02 * tallest, _label(part, plan, score, turned),
        ha="center", va="center" if inside else "bottom", rotation=90 if turned else 0, fontsize=8,
        color="white" if inside else "black", in_layout=False,
    )  # fmt: skip


def _label(part: SplitScore, plan: Plan, score: Score, turned: bool) -> str:
    split, placement = part.split, plan.placement_of(part.split)
    blocks = f"block{'s' if split.stop - split.start > 1 else ''} {split.blocks_text}"
    shared = len(placement.splits) > 1
    replicas = f"{_devices(part, plan, score):.1f} of {placement.replicas}" if shared else f"{placement.replicas}"
    if turned:
        return f"{blocks}, batch {split.batch_size}"
    return "\n".join(
        (blocks, f"{replicas} {placement.kind}", f"batch {split.batch_size}", f"{part.launch_s * 1e3:.1f} ms")
    )
