"""The pictures of E3's figures 7 and 13, from the rows that were measured: `python -m experiments.gains_picture`."""

from pathlib import Path

from experiments.gains import Suite, read
from experiments.heterogeneous.suite import SUITE as MIXED
from experiments.homogeneous.suite import SUITE as ONE_KIND

DOCS = Path(__file__).parents[1] / "docs"
COLOURS = {"isobatch": "#1b6ca8", "serial": "#7fb3d5", "early exit": "#d98c3f", "no exits": "#999999"}


def draw(suite: Suite) -> None:
    """From the rows that were measured, into docs/."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = read(suite.results)
    figure, axes = plt.subplots(figsize=(8, 4))
    batches = sorted({row.batch for row in rows})
    for index, (system, colour) in enumerate(COLOURS.items()):
        heights = [row.goodput_per_s for row in rows if row.system == system]
        at = [place + 0.2 * (index - 1.5) for place in range(len(batches))]
        axes.bar(at, heights, 0.19, color=colour, label=system)
    bound = [max(row.goodput_per_s / row.share_of_oracle for row in rows if row.batch == b) for b in batches]
    axes.plot(range(len(batches)), bound, "k_", markersize=32, label="bound")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    title = f"{suite.network.name} on {suite.devices}, simulated, SLO {suite.slo_s * 1e3:g} ms"
    axes.set(xlabel="largest batch", ylabel="goodput (inputs per second)", title=title)
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / f"{suite.name}.png", dpi=130, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    draw(ONE_KIND)
    draw(MIXED)
