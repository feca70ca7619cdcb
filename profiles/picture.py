"""The look of all pictures: colours that differ in lightness too, frames of two sides, and plain numbers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

BLUE = "#1b6ca8"
ORANGE = "#d98c3f"
RED = "#bb3333"
DARK = "#333333"
PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222255")


def plain(axes: "Axes") -> None:
    """Give axes a frame of two sides, and the colours of the palette in turn to all later lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_prop_cycle(color=PALETTE)


def plain_logarithmic(axis: "Axis") -> None:
    """Number a logarithmic axis in plain numbers, even if it spans less than a power of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())
