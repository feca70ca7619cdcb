"""What batches are worth on one kind of device, told from its latency table and from who leaves where."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from optimizer.objective import Objective
from optimizer.pipelines.baselines import EARLY_EXIT, baseline
from optimizer.pipelines.shortfalls import MANY, without_hand_overs
from optimizer.problem import Problem
from optimizer.search.exact import search
from profiles.sweep import rate_per_s

LITTLE = 1.1  # constant batches that are worth less than this are not worth splits


@dataclass(frozen=True)
class BatchGain:
    """What batches are worth on a kind of device.

    `gain`: inputs per second in launches of `batch`, the largest to plan with, over those of single inputs; of the
    network in full. `at_most`: no constant batches sustain more times the inputs of early exit in one split; None where
    that does not keep the SLO, or does not fit into the memory.

    >>> print(BatchGain("v100", batch=32, gain=14.08, at_most=1.81))
    v100: this device gains 14.1 times from batches of 32; constant batches are worth at most 1.81 times early exit here
    """

    kind: str
    batch: int
    gain: float
    at_most: float | None

    def __str__(self) -> str:
        gains = f"{self.kind}: this device gains {self.gain:.3g} times from batches of {self.batch}"
        if self.at_most is None:
            return f"{gains}; early exit in one split does not keep this SLO or fit"
        little = ", so early exit in one split does as well" if round(self.at_most, 2) < LITTLE else ""
        return f"{gains}; constant batches are worth at most {self.at_most:.2f} times early exit here{little}"


def batch_gains(facts: Problem, objective: Objective) -> Iterator[BatchGain]:
    """For each kind of device, as if it were alone. Of the objective only the SLO and the largest batch count.

    The upper bound is a quotient, both by the planner's beliefs about the same table and the same survival:

    - above, what the best plan would sustain of an SLO without slack if a hundred times as many devices shared all
      inputs, so that none waits for a batch to fill, and if hand-overs cost nothing. Launches and ramps cost what they
      cost, so this is at most what `oracle_per_s` says;
    - below, what early exit in one split sustains on the devices that there are, with the same SLO, without slack.

    In neither is what bursts and queues cost, nor that a plan which was played may exceed the SLO by the beliefs.
    """
    for device, table in zip(facts.devices, facts.tables, strict=True):
        largest = min(objective.batches[1], table.largest)
        asked = Objective(slo_s=objective.slo_s, slack=0.0, max_batch=largest)
        gain = float(rate_per_s(table, largest) / rate_per_s(table, 1))
        yield BatchGain(device.kind, largest, gain, _at_most(facts.with_devices([device]), asked))


def _at_most(facts: Problem, asked: Objective) -> float | None:
    early_exit = baseline(EARLY_EXIT, facts, asked).score
    if early_exit is None:
        return None
    (device,) = facts.devices
    many = without_hand_overs(facts.with_devices([replace(device, count=MANY * device.count)]))
    best = search(many, asked)
    most_per_s = best.promise.goodput_per_s * (1 + best.promise.gap) / MANY if best and best.promise else 0.0
    return max(1.0, most_per_s / early_exit.goodput_per_s)
