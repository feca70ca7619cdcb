"""Claim: E3's figure 7, BERT-base on 16 V100, an SLO of 100 ms, batches up to 16."""

from experiments.planner.settings import BERT_BASE
from experiments.shared import gains
from experiments.shared.gains import PaperFigure

FIGURE = PaperFigure(
    name="homogeneous",
    network=BERT_BASE,
    devices="v100=16",
    slo_s=0.1,
    batches=(1, 2, 4, 8, 16),
    dtype="float32",  # the rates of the paper are those of single precision
    paper={"early exit": 1.44, "no exits": 1.30},  # up to so many times more goodput
)


def measure() -> dict[str, float]:
    rows = gains.measure(FIGURE)
    gains.write(rows, FIGURE.results)
    gains.draw(FIGURE)
    over = {
        f"{over.replace(' ', '_')}_batch_{batch}": gains.ratio(rows, batch, over)
        for over in ("early exit", "no exits", "serial")
        for batch in FIGURE.batches
    }
    return {
        **{f"gain_over_{name}": value for name, value in over.items()},
        "share_of_oracle": max(row.share_of_oracle for row in rows if row.system == "isobatch"),
        **{f"paper_gain_over_{name.replace(' ', '_')}": value for name, value in FIGURE.paper.items()},
    }
