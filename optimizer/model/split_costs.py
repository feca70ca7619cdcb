"""The cost of a split. Every assumption about hardware is stated here once. All functions take numbers or arrays.

The search (search/options.py) and the evaluation (model/evaluate.py) each sum these costs by themselves. A launch costs
the time of its blocks and active ramps, and `launch_s` once. A batch that shrinks stops at each ramp, which costs
`stop_s` if any input is left.
"""

import numpy as np

from isobatch.optimizer.effort import Number

# Seconds. A split that no input reaches still needs a replica: with so small a load one replica always carries it.
LEAST_LOAD_S = 1e-12


def occupancy(batch: Number, staying: Number) -> Number:
    """The probability that at least one input of a batch is left, if each stays with probability `staying`.

    A batch from which all inputs have left does not run the blocks behind: without batching, exits save only this.

    >>> float(occupancy(1, 0.25)), float(occupancy(2, 0.5)), float(occupancy(8, 1.0))
    (0.25, 0.75, 1.0)
    """
    return 1.0 - np.power(1.0 - np.asarray(staying, float), batch)[()]


def mean_size(batch: Number, staying: Number) -> Number:
    """The mean number of inputs that are left, provided that at least one is.

    >>> float(mean_size(1, 0.25)), bool(mean_size(8, 0.5) > 4), float(mean_size(8, 0.0))
    (1.0, True, 1.0)
    """
    left = np.asarray(occupancy(batch, staying))
    mean = np.divide(batch * staying, left, out=np.ones_like(left), where=left > 0)
    return np.clip(mean, 1.0, batch)[()]


def felt_size(batch: Number, staying: Number) -> Number:
    """The mean size of the batch around an input that stays. Below 1 the batch is one input, shorter than usual.

    >>> float(felt_size(9, 0.5)), float(felt_size(0.25, 0.5))
    (5.0, 0.25)
    """
    return np.minimum(batch, 1.0) + np.maximum(np.asarray(batch) - 1.0, 0.0) * staying


def occupied_s(launch_s: Number, transfer_s: Number) -> Number:
    """How long a batch occupies a replica. It receives the next batch while it computes, so the longer time counts.

    >>> float(occupied_s(0.004, 0.001)), float(occupied_s(0.004, 0.009))
    (0.004, 0.009)
    """
    return np.maximum(launch_s, transfer_s)


def load_s(reach: Number, occupied_s: Number, batch: Number) -> Number:
    """Device seconds per input that arrives at the network, of which the share `reach` comes to the split.

    >>> float(load_s(0.5, 0.008, 4)), float(load_s(0.0, 0.008, 4))
    (0.001, 1e-12)
    """
    return np.maximum(reach * occupied_s / batch, LEAST_LOAD_S)


def fill_arrivals(reach: Number, batch: Number) -> Number:
    """Arrivals at the network between the first and the last input of a batch; 0 where no input comes.

    >>> float(fill_arrivals(0.5, 4))
    6.0
    """
    return np.divide(np.asarray(batch) - 1.0, reach) if reach > 0 else np.zeros(np.shape(batch))


def wait_arrivals(reach: Number, batch: Number) -> Number:
    """Arrivals at the network, at full load, between two launches of a split.

    A placement that keeps up starts each of its splits as often as a batch of it is full, whichever splits take turns
    on it, so a full batch waits no longer than this for a replica.

    >>> float(wait_arrivals(0.5, 4))
    8.0
    """
    return np.divide(np.asarray(batch), reach) if reach > 0 else np.zeros(np.shape(batch))


def others_s(arrivals: Number, load_s: Number, launch_s: Number) -> Number:
    """Seconds of one round of `arrivals` that a replica of a local placement spends on launches of its other splits.

    Every replica forms its batches from the survivors of its own launches. A round is the number of arrivals that fills
    one batch of the split that fills slowest. Full batches run first, the deepest split before the others, so an input
    that stays to the end is finished within its round, and a batch that fills up finds its replica free.

    >>> float(others_s(16, 0.001, 0.004))
    0.012
    """
    return np.maximum(arrivals * load_s - launch_s, 0.0)


def latency_s(work_s: float, arrivals: float, goodput_per_s: float) -> float:
    """Latency at full load of an input that stays to the end.

    It computes and travels for `work_s`, and waits for `arrivals` that fill its batches and that come between launches.

    >>> latency_s(0.02, arrivals=15, goodput_per_s=3000)
    0.025
    """
    return work_s + arrivals / goodput_per_s


def answer_s(alone_s: Number, full_s: Number, load: Number) -> Number:
    """The latency at a part of the full load.

    An idle replica never waits for more inputs, so a lone input takes launches of one. Batches form while replicas are
    busy, which is the share `load` of the time.

    >>> answer_s(1.0, 3.0, load=0.5)
    2.0
    """
    return alone_s + load * (full_s - alone_s)
