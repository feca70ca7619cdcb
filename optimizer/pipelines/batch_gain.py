"""The gain from batching on one kind of device, and the goodput that no system exceeds, by its latency table."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.baselines import EARLY_EXIT, baseline
from isobatch.optimizer.pipelines.sharing import bound_per_s
from isobatch.optimizer.problem import Problem
from isobatch.optimizer.search.exact import search
from isobatch.profiles.devices import MOST_DEVICES
from isobatch.profiles.sweep import rate_per_s

MANY = 100  # times the devices; then their number restricts nothing
FREE_BYTES_PER_S = 1e18  # bytes per second of a link that costs nothing


def times_more(facts: Problem) -> int:
    """By how much the devices are multiplied to lift the restriction of few devices; no kind may exceed the limit."""
    return min(MANY, MOST_DEVICES // max(device.count for device in facts.devices))


def without_hand_overs(facts: Problem) -> Problem:
    """The same problem with links that cost nothing."""
    links = {
        ends: replace(link, bytes_per_s=FREE_BYTES_PER_S, latency_s=0.0, turn_s=0.0)
        for ends, link in facts.links.items()
    }
    return replace(facts, links=links)


def oracle_per_s(facts: Problem, slo_s: float, max_batch: int) -> float:
    """The goodput that no system exceeds: every input pays for its blocks only, in the best batch that the SLO allows.

    Ramps, launches, links, queues and the arrival of inputs cost nothing, and any block runs on any device. A linear
    program assigns blocks to kinds: rate * survival[k] inputs reach block k, and no kind exceeds its time.
    """
    cost_s = np.array([list(_each_s(facts, kind, slo_s, max_batch)) for kind in range(len(facts.devices))])
    kinds, blocks = cost_s.shape
    rate = np.append(np.zeros(kinds * blocks), -1.0)  # variables: inputs per second by kind and block, then the rate
    reach = np.hstack([np.tile(np.eye(blocks), kinds), -np.array(facts.survival)[:, None]])
    busy = np.zeros((kinds, kinds * blocks + 1))
    for kind in range(kinds):
        busy[kind, kind * blocks : (kind + 1) * blocks] = np.where(np.isfinite(cost_s[kind]), cost_s[kind], 1e6)
    counts = [device.count for device in facts.devices]
    return float(-linprog(rate, busy, counts, reach, np.zeros(blocks)).fun)


def _each_s(facts: Problem, kind: int, slo_s: float, max_batch: int) -> Iterator[float]:
    """By block: the time of one input in the best batch that ends within the SLO after the fastest way to the block."""
    sizes = np.arange(1, min(max_batch, facts.tables[kind].largest) + 1)
    times_s = facts.tables[kind].block_times_s(sizes)
    fastest_s = np.min([table.block_times_s(1) for table in facts.tables], axis=0)
    for block in range(facts.num_blocks):
        fits = times_s[:, block] + fastest_s[:block].sum() <= slo_s
        yield float((times_s[:, block] / sizes)[fits].min(initial=np.inf))


SMALL_GAIN = 1.1  # constant batches that gain less than this factor are not worth splits


@dataclass(frozen=True)
class BatchGain:
    """The gain from batching on a kind of device.

    `gain`: inputs per second in launches of `batch`, the largest size to plan with, over those of single inputs, for
    the full network. `at_most`: an upper bound on the goodput with constant batches over that of early exit in one
    split; None where early exit in one split does not keep the SLO or fit into memory.

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
        advice = ", so early exit in one split does as well" if round(self.at_most, 2) < SMALL_GAIN else ""
        return f"{gains}; constant batches are worth at most {self.at_most:.2f} times early exit here{advice}"


def batch_gains(facts: Problem, objective: Objective) -> Iterator[BatchGain]:
    """The gain on each kind of device by itself. Of the objective, only the SLO and the largest batch count.

    The upper bound is a quotient of two estimates from the same table and the same survival:

    - above, the goodput of the best plan under an SLO without slack if up to a hundred times as many devices shared all
      inputs, so that no input waits for a batch to fill, and if hand-overs cost nothing. Launches and ramps cost their
      time, so this is at most `oracle_per_s`;
    - below, the goodput of early exit in one split on the real devices, under the same SLO without slack.

    Neither counts bursts and queues, or that a simulated plan may exceed the SLO by its estimated latency.
    """
    for device, table in zip(facts.devices, facts.tables, strict=True):
        largest = min(objective.batches[1], table.largest)
        limits = Objective(slo_s=objective.slo_s, slack=0.0, max_batch=largest)
        gain = float(rate_per_s(table, largest) / rate_per_s(table, 1))
        yield BatchGain(device.kind, largest, gain, _at_most(facts.with_devices([device]), limits))


def _at_most(facts: Problem, limits: Objective) -> float | None:
    early_exit = baseline(EARLY_EXIT, facts, limits).score
    if early_exit is None:
        return None
    (device,) = facts.devices
    times = times_more(facts)
    many = without_hand_overs(facts.with_devices([replace(device, count=times * device.count)]))
    most_per_s = bound_per_s(search(many, limits)) / times
    return max(1.0, most_per_s / early_exit.goodput_per_s)
