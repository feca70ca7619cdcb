"""E3's figure 13: BERT-base on 6 V100, 8 P100 and 15 K80, for about the price of 16 V100."""

from experiments.gains import Suite
from experiments.planner.settings import BERT_BASE

SUITE = Suite(
    name="heterogeneous",
    network=BERT_BASE,
    devices="v100=6,p100=8,k80=15",
    slo_s=0.1,
    batches=(1, 2, 4, 8, 16),
    dtype="float32",
    paper={"best baseline": 1.70},
)
