"""An exit policy of your own: an input leaves when the best label is TIMES as likely as all others together.

Use: isobatch prepare my-bert --data reviews.csv --out my-bert-ee --policy own_policy:odds    (in this folder)
"""

from torch import Tensor

from isobatch.deployments.exits import Decision, Range, takes


@takes(Range(low=lambda labels: 1 / (labels - 1), high=lambda ramps: 1000.0))
def odds(logits: Tensor, threshold: float, memory: Tensor) -> Decision:
    best = logits.softmax(-1).amax(-1)
    return Decision(best / (1 - best).clamp_min(1e-9) > threshold, logits, memory)
