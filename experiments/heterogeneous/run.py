"""Claim: E3's figure 13, BERT-base on 6 V100, 8 P100 and 15 K80, for about the price of 16 V100."""

from experiments.planner.settings import BERT_BASE
from experiments.shared import gains
from experiments.shared.gains import PaperFigure

FIGURE = PaperFigure(
    name="heterogeneous",
    network=BERT_BASE,
    devices="v100=6,p100=8,k80=15",
    slo_s=0.1,
    batches=(1, 2, 4, 8, 16),
    dtype="float32",
    paper={"best baseline": 1.70},
)
BASELINES = ("early exit", "no exits")


def measure() -> dict[str, float]:
    rows = gains.measure(FIGURE)
    gains.write(rows, FIGURE.results)
    gains.draw(FIGURE)
    over = {batch: min(gains.ratio(rows, batch, each) for each in BASELINES) for batch in FIGURE.batches}
    return {
        **{f"gain_over_best_batch_{batch}": gain for batch, gain in over.items()},
        "gain_over_best_at_best_batches": gains.best(rows, "isobatch")
        / max(gains.best(rows, each) for each in BASELINES),
        "share_of_oracle": max(row.share_of_oracle for row in rows if row.system == "isobatch"),
        "paper_gain_over_best": FIGURE.paper["best baseline"],
    }
