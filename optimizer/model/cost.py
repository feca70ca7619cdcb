"""What a split costs. Every belief about hardware stands here once; all of it takes numbers or arrays.

The search (search/options.py) and the check (model/evaluate.py) sum these in ways of their own. A launch costs what its
blocks and active ramps cost, and `launch_s` once; a batch that is to shrink stops at each ramp, which costs `stop_s` if
anybody is left.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Number = Any  # a float or an array of floats: numpy broadcasts

# A split that no input reaches still needs a replica: this load is so small that one replica always carries it.
LEAST_LOAD_S = 1e-12


def occupancy(batch: Number, staying: Number) -> Number:
    """The chance that anybody is left of a batch of which each input stays with chance `staying`.

    A batch of one that left does not run the blocks behind its ramp: that is what early exit saves without batches.

    >>> float(occupancy(1, 0.25)), float(occupancy(2, 0.5)), float(occupancy(8, 1.0))
    (0.25, 0.75, 1.0)
    """
    return 1.0 - np.power(1.0 - np.asarray(staying, float), batch)[()]


def mean_size(batch: Number, staying: Number) -> Number:
    """How many are left when anybody is.

    >>> float(mean_size(1, 0.25)), bool(mean_size(8, 0.5) > 4), float(mean_size(8, 0.0))
    (1.0, True, 1.0)
    """
    left = np.asarray(occupancy(batch, staying))
    mean = np.divide(batch * staying, left, out=np.ones_like(left), where=left > 0)
    return np.clip(mean, 1.0, batch)[()]


def felt_size(batch: Number, staying: Number) -> Number:
    """How many are left in the batch of an input that stays itself. Below 1 it is one input, shorter than others.

    >>> float(felt_size(9, 0.5)), float(felt_size(0.25, 0.5))
    (5.0, 0.25)
    """
    return np.minimum(batch, 1.0) + np.maximum(np.asarray(batch) - 1.0, 0.0) * staying


def occupied_s(launch_s: Number, transfer_s: Number) -> Number:
    """A replica receives its next batch while it computes this one: the longer of the two keeps it.

    >>> float(occupied_s(0.004, 0.001)), float(occupied_s(0.004, 0.009))
    (0.004, 0.009)
    """
    return np.maximum(launch_s, transfer_s)


def load_s(reach: Number, occupied_s: Number, batch: Number) -> Number:
    """Seconds of device per input that arrives at the network, of which the share `reach` comes to the split.

    >>> float(load_s(0.5, 0.008, 4)), float(load_s(0.0, 0.008, 4))
    (0.001, 1e-12)
    """
    return np.maximum(reach * occupied_s / batch, LEAST_LOAD_S)


def fill_arrivals(reach: Number, batch: Number) -> Number:
    """Arrivals at the network until the first input of a batch has seen the last one come; 0 where no input comes.

    >>> float(fill_arrivals(0.5, 4))
    6.0
    """
    return np.divide(np.asarray(batch) - 1.0, reach) if reach > 0 else np.zeros(np.shape(batch))


def wait_arrivals(reach: Number, batch: Number) -> Number:
    """Arrivals at the network, at full load, between two launches of a split.

    A placement that keeps up starts each of its splits as often as batches form, however many splits take turns on it,
    so that a full batch waits for a replica no longer than this.

    >>> float(wait_arrivals(0.5, 4))
    8.0
    """
    return np.divide(np.asarray(batch), reach) if reach > 0 else np.zeros(np.shape(batch))


def others_s(arrivals: Number, load_s: Number, launch_s: Number) -> Number:
    """Where inputs stay on their replica: how long it is at the other launches of a split, in one round of `arrivals`.

    Batches form on every replica by itself, of what its own launches let through. A round is as many arrivals as fill
    one batch of the split that takes longest to fill. Full batches come first, the deepest before the others, so that
    an input which stays to the end is through with its round, and what fills up finds its replica free.

    >>> float(others_s(16, 0.001, 0.004))
    0.012
    """
    return np.maximum(arrivals * load_s - launch_s, 0.0)


def latency_s(work_s: float, arrivals: float, goodput_per_s: float) -> float:
    """Of an input that stays to the end, at full load: computing and travelling, and waiting for so many `arrivals`
    to fill its batches and to come between two launches.

    >>> latency_s(0.02, arrivals=15, goodput_per_s=3000)
    0.025
    """
    return work_s + arrivals / goodput_per_s


def answer_s(alone_s: Number, full_s: Number, load: Number) -> Number:
    """The same at a part of the full load. An idle replica never waits for others to come, so that an input which is
    alone takes launches of one. A batch forms while replicas are busy, and they are busy as much as the load says.

    >>> answer_s(1.0, 3.0, load=0.5)
    2.0
    """
    return alone_s + load * (full_s - alone_s)
