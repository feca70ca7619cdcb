"""Simulate the figure: goodput by system and batch size, and the gains beside the paper's."""

from experiments import gains
from experiments.gains_picture import draw
from experiments.homogeneous.suite import SUITE


def measure() -> dict[str, float]:
    rows = gains.measure(SUITE)
    gains.write(rows, SUITE.results)
    draw(SUITE)
    over = {
        f"{over.replace(' ', '_')}_batch_{batch}": gains.ratio(rows, batch, over)
        for over in ("early exit", "no exits", "serial")
        for batch in SUITE.batches
    }
    return {
        **{f"gain_over_{name}": value for name, value in over.items()},
        "share_of_oracle": max(row.share_of_oracle for row in rows if row.system == "isobatch"),
        **{f"paper_gain_over_{name.replace(' ', '_')}": value for name, value in SUITE.paper.items()},
    }
