"""Simulate the figure: what a mixed fleet sustains, beside every baseline on it."""

from experiments import gains
from experiments.gains_picture import draw
from experiments.heterogeneous.suite import SUITE

BASELINES = ("early exit", "no exits")


def measure() -> dict[str, float]:
    rows = gains.measure(SUITE)
    gains.write(rows, SUITE.results)
    draw(SUITE)
    over = {batch: min(gains.ratio(rows, batch, each) for each in BASELINES) for batch in SUITE.batches}
    return {
        **{f"gain_over_best_batch_{batch}": gain for batch, gain in over.items()},
        "gain_over_best_at_best_batches": gains.best(rows, "isobatch")
        / max(gains.best(rows, each) for each in BASELINES),
        "share_of_oracle": max(row.share_of_oracle for row in rows if row.system == "isobatch"),
        "paper_gain_over_best": SUITE.paper["best baseline"],
    }
