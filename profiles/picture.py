"""The picture of a profile: milliseconds per batch and per input, and the batch size at which more stops paying.

It also has what all pictures share: colours that differ in lightness too, frames of two sides, and plain numbers.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.sweep import knee, whole_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

BLUE = "#1b6ca8"
ORANGE = "#d98c3f"
RED = "#bb3333"
DARK = "#333333"
PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222255")


def draw(profile: Profile, path: Path) -> None:
    from matplotlib.figure import Figure

    panels = 3 if profile.exits else 2
    figure = Figure(figsize=(5 * panels, 4.5), layout="constrained")
    batch_axes, input_axes, *exit_axes = figure.subplots(1, panels)
    for axes in (batch_axes, input_axes, *exit_axes):
        plain(axes)
    for table in profile.usual:
        whole = np.asarray(table.batch_sizes) >= 1  # smaller sizes are short texts
        sizes, seconds = np.asarray(table.batch_sizes)[whole], whole_s(table)[whole]
        (line,) = batch_axes.plot(
            sizes, 1000 * seconds, "o-", label=name(table) + (f" ({table.origin})" if table.derived else "")
        )
        input_axes.plot(sizes, 1000 * seconds / sizes, "o-", color=line.get_color())
        input_axes.axvline(knee(table), color=line.get_color(), linestyle=":", label=f"knee at {knee(table)}")
    in_tokens = any(size % 1 for table in profile.usual for size in table.batch_sizes)
    for axes, what in ((batch_axes, "ms per batch"), (input_axes, "ms per input")):
        axes.set(xlabel="batch size" + (", in texts of that length" * in_tokens), ylabel=what, ylim=(0, None))
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    whole_numbers(batch_axes.xaxis)
    input_axes.set_xscale("log", base=2)
    input_axes.xaxis.set_major_formatter("{x:g}")
    if profile.exits:
        exit_axes[0].step(range(profile.exits.num_blocks), profile.exits.survival, where="mid")
        exit_axes[0].set(xlabel="block", ylabel="inputs that enter it", ylim=(0, 1.05))
        whole_numbers(exit_axes[0].xaxis)
        exit_axes[0].yaxis.set_major_formatter("{x:.0%}")
    figure.suptitle(f"{profile.model}: all blocks, ramps off")
    figure.savefig(path, dpi=110)


def plain(axes: "Axes") -> None:
    """Give axes a frame of two sides, and the colours of the palette in turn to all later lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_prop_cycle(color=PALETTE)


def whole_numbers(axis: "Axis") -> None:
    """Number an axis of counted things, such as blocks, by whole numbers: there is no block 0.5."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def plain_logarithmic(axis: "Axis") -> None:
    """Number a logarithmic axis in plain numbers, even if it spans less than a power of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


def name(table: LatencyTable) -> str:
    """
    >>> from isobatch.profiles.datasheet import datasheet_table
    >>> from isobatch.profiles.datasheet import bert_base
    >>> name(datasheet_table(bert_base(), "v100"))
    'v100, 128 tokens'
    """
    return table.kind if table.length is None else f"{table.kind}, {table.length} tokens"
