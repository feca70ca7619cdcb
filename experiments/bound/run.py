"""Claim: promises are kept, no baseline is better, nobody is refused who would be in time, and most of what is possible
is sustained."""

from experiments.bound import admitted, plans
from experiments.heterogeneous.run import FIGURE as MIXED
from experiments.homogeneous.run import FIGURE as ONE_KIND
from experiments.shared import gains

BATCH = 16  # the largest
PARTS = "plans,admitted,oracle"


def measure(
    parts: str = PARTS, problems: int = plans.PROBLEMS, minutes: int = plans.MINUTES, moved: int = plans.MOVED,
    admissions: int = admitted.PROBLEMS,
) -> dict[str, float]:  # fmt: skip
    """So many problems, as far as the minutes go; `moved` of them also with what is close to their plans."""
    figures: dict[str, float] = {}
    if "plans" in parts:
        figures |= plans.measure(problems, minutes, moved)
    if "admitted" in parts:
        figures |= admitted.measure(admissions)
    if "oracle" in parts:
        one, mixed = (gains.share_of_oracle(claim, BATCH) for claim in (ONE_KIND, MIXED))
        figures |= {"share_of_oracle_homogeneous": one, "share_of_oracle_mixed": mixed}
    return figures
