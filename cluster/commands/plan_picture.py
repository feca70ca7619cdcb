"""A plan as a picture: the network left to right, widths = replicas, height = batch, the survivors above."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.figure import Figure

from isobatch.cluster.commands.plan_report import PlanResult
from isobatch.optimizer import Placement, Plan, Score
from isobatch.optimizer.model.evaluate import SplitScore
from isobatch.profiles.picture import PALETTE, plain, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NARROW = 0.09  # a share of the picture's width: the labels of narrower boxes are turned
LEAST = 0.02  # of the width: a split that few inputs reach must still be visible
INK = "#333333"


class _Box(NamedTuple):
    """A split, from `left` to `right` in devices that it keeps busy."""

    part: SplitScore
    placement: Placement
    devices: float
    left: float
    right: float

    def label(self, turned: bool) -> str:
        split, placement = self.part.split, self.placement
        blocks = f"block{'s' if split.stop - split.start > 1 else ''} {split.blocks_text}"
        if turned:
            return f"{blocks}, batch {split.batch_size}"
        of = f"{self.devices:.1f} of " if len(placement.splits) > 1 else ""
        took = f"{self.part.launch_s * 1e3:.1f} ms"
        return f"{blocks}\n{of}{placement.replicas} {placement.kind}\nbatch {split.batch_size}\n{took}"


def draw(result: PlanResult, path: Path) -> None:
    """One pair of axes per pipeline: the share still inside, and the splits below it."""
    rows = len(result.pipelines)
    figure = Figure(figsize=(10, 1.2 + 4.6 * rows), layout="constrained")
    axes = figure.subplots(2 * rows, 1, height_ratios=(1, 1.7) * rows, squeeze=False)[:, 0]
    for row, (plan, score) in enumerate(result.pipelines):
        boxes = list(_boxes(plan, score))
        _draw_survivors(axes[2 * row], result.facts.survival, boxes)
        _draw_boxes(axes[2 * row + 1], [device.kind for device in result.facts.devices], plan, boxes)
    figure.suptitle(_title(result), x=0.02, ha="left")
    figure.savefig(path, dpi=150)


def _title(result: PlanResult) -> str:
    """The promised goodput: by the simulator if the plan was simulated, otherwise by its devices alone."""
    score = result.score
    goodput = f"{score.goodput_per_s:,.0f} per second"
    if result.simulated:
        alone = f"{score.goodput_per_s:,.0f} by its devices alone"
        goodput = f"{result.simulated.after_per_s:,.0f} per second as simulated ({alone})"
    times = f"as simulated: {result.times}; " if result.times else ""
    longest = f"full launches all the way: {score.latency_s * 1e3:.1f} ms"
    return f"{goodput}, ${score.cost_per_hour:,.2f} per hour\n{times}{longest}"


def _boxes(plan: Plan, score: Score) -> Iterator[_Box]:
    """A placement's idle time is shared out among its splits."""
    placements = [plan.placement_of(part.split) for part in score.splits]
    busy = [sum(each.busy for each in score.splits if each.split in placement.splits) for placement in placements]
    shares = zip(score.splits, placements, busy, strict=True)
    devices = [placement.replicas * part.busy / total for part, placement, total in shares]
    left = 0.0
    for part, placement, count in zip(score.splits, placements, devices, strict=True):
        right = left + max(count, LEAST * sum(devices))
        yield _Box(part, placement, count, left, right)
        left = right


def _draw_survivors(axes: "Axes", survival: tuple[float, ...], boxes: Sequence[_Box]) -> None:
    """Draw the share of inputs inside each block, blocks spread evenly over their split; dots are active ramps.

    The dashed line is the profile: the share that would be inside if every ramp were active.
    """
    places: list[float] = []
    inside: list[float] = []
    for box in boxes:
        split, share = box.part.split, box.part.reach
        step = (box.right - box.left) / (split.stop - split.start)
        for block in range(split.start, split.stop):
            places.append(box.left + step * (block - split.start))
            inside.append(share)
            share = survival[block + 1] if block in split.ramps else share
        ramps = [box.left + step * (ramp - split.start + 1) for ramp in split.ramps]
        axes.plot(ramps, [survival[ramp + 1] for ramp in split.ramps], "o", color=INK, markersize=4)
    steps = [*places, boxes[-1].right]
    axes.step(steps, [*survival, survival[-1]], where="post", color=INK, linewidth=0.8, linestyle="--")
    axes.step(steps, [*inside, inside[-1]], where="post", color=INK)
    axes.fill_between(steps, [*inside, inside[-1]], step="post", color=INK, alpha=0.12)
    for box in boxes[:-1]:
        axes.axvline(box.right, color="#999999", linewidth=0.8, linestyle=":")
    axes.set(ylim=(0, 1.05), xlim=(0, boxes[-1].right), ylabel="inputs still inside\n(dots: active ramps)", xticks=[])
    axes.yaxis.set_major_formatter("{x:.0%}")
    plain(axes)


def _draw_boxes(axes: "Axes", kinds: list[str], plan: Plan, boxes: Sequence[_Box]) -> None:
    tallest, width = max(box.part.split.batch_size for box in boxes), boxes[-1].right
    new = dict.fromkeys(box.part.kind for box in boxes)  # kinds that the legend does not have yet
    for box in boxes:
        kind, height = box.part.kind, box.part.split.batch_size
        label = f"{kind} ({plan.devices()[kind]})" if kind in new else None
        new.pop(kind, None)
        color = PALETTE[kinds.index(kind) % len(PALETTE)]
        axes.bar(
            box.left, height, box.right - box.left, align="edge", color=color, edgecolor="white", linewidth=1.5,
            label=label,
        )  # fmt: skip
        turned = (box.right - box.left) / width < NARROW
        inside = height > (0.8 if turned else 0.45) * tallest  # else the label is above its box
        axes.text(
            (box.left + box.right) / 2, height / 2 if inside else height + 0.02 * tallest, box.label(turned),
            ha="center", va="center" if inside else "bottom", rotation=90 if turned else 0, fontsize=8,
            color="white" if inside else "black", in_layout=False,
        )  # fmt: skip
    axes.set(ylim=(0, tallest * 1.4), xlim=(0, width), ylabel="batch size")
    axes.set_xlabel("devices, in the order in which an input meets them")
    whole_numbers(axes.xaxis)
    whole_numbers(axes.yaxis)
    plain(axes)
    axes.legend(frameon=False, ncols=4, loc="upper left")
