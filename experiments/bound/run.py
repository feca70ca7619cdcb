"""Claim: nobody is refused who would be in time, hardly anybody is late, and plans sustain most of what is possible."""

from experiments.bound import admitted
from experiments.heterogeneous.run import FIGURE as MIXED
from experiments.homogeneous.run import FIGURE as ONE_KIND
from experiments.shared import gains

BATCH = 16  # the largest


def measure(problems: int = admitted.PROBLEMS) -> dict[str, float]:
    one, mixed = (gains.share_of_oracle(claim, BATCH) for claim in (ONE_KIND, MIXED))
    return admitted.measure(problems) | {"share_of_oracle_homogeneous": one, "share_of_oracle_mixed": mixed}
