"""E3's figure 7: BERT-base on 16 V100, an SLO of 100 ms, batches up to 16."""

from experiments.gains import Suite
from experiments.planner.settings import BERT_BASE

SUITE = Suite(
    name="homogeneous",
    network=BERT_BASE,
    devices="v100=16",
    slo_s=0.1,
    batches=(1, 2, 4, 8, 16),
    dtype="float32",  # the rates of the paper are those of single precision
    paper={"early exit": 1.44, "no exits": 1.30},  # up to so many times more goodput
)
