"""Makes windows of a server from recorded arrivals, shifts of traffic between tenants, and exits.

Three groups of inputs leave differently: all exits agree, the answer changes once, or it changes more often. Each
tenant sends one group, and the tenants' shares of the traffic change over the day.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from experiments.shared.machine import data
from isobatch.profiles.windows import Window

Floats = NDArray[np.float64]
WINDOW_S = 120.0
DAY = 720  # windows
LOADS = (30, 300, 3000)  # inputs a window, on average
BUSY = (2_500, 12_500)  # tweets per window between which the share of easy inputs falls from all to none
DEMO_NOISES, DEMO_INPUTS = (0.0, 0.2, 0.4), 2000


@dataclass(frozen=True)
class Trace:
    """A day of windows, and its name: the network, the mix of traffic, and the mean number of inputs a window."""

    network: str
    mix: str
    inputs: int
    windows: tuple[Window, ...]


def traces() -> Iterator[Trace]:
    """Every network under every mix at every load."""
    networks = {
        "elasticbert-6 patience 2": elasticbert(6, patience=2),
        "elasticbert-6 patience 1": elasticbert(6, patience=1),
        "elasticbert-4 patience 1": elasticbert(4, patience=1),
        "demo": demo(),
    }
    for seed, (network, groups) in enumerate(networks.items()):
        for mix, shares in (("tenants", tenants(seed)), ("load", load(seed))):
            for inputs in LOADS:
                yield Trace(network, mix, inputs, tuple(sampled(groups, shares, arrivals(seed), inputs, seed)))


def sampled(groups: Floats, shares: Floats, arrived: Floats, inputs: int, seed: int) -> Iterator[Window]:
    """Windows with inputs from the groups in these shares."""
    random = np.random.default_rng(seed)
    leaving = shares @ groups
    counts = random.poisson(arrived * inputs / arrived.mean())
    for index, (count, chances) in enumerate(zip(counts, leaving, strict=True)):
        left = random.multinomial(count, chances / chances.sum())
        yield Window(index * WINDOW_S, WINDOW_S, int(count), tuple(map(int, left)))


@cache
def elasticbert(exits: int, patience: int) -> Floats:
    """Where each group leaves when `patience` agreements in a row are enough: groups x exits, from 50,000 reviews."""
    left, changes = _elasticbert(exits, patience)
    return _shares([np.bincount(left[changes == group], minlength=exits) for group in range(3)])


def elasticbert_survival(exits: int, patience: int) -> tuple[float, ...]:
    """The share of the 50,000 reviews that is still inside before each exit."""
    left, _ = _elasticbert(exits, patience)
    return tuple(float((left >= exit_).mean()) for exit_ in range(exits))


def _elasticbert(exits: int, patience: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The exit at which each review leaves, and how often its answer changes from exit to exit (2: more than once)."""
    table = np.loadtxt(data(f"exits/elasticbert/imdb_{exits}exits.tsv"), int, delimiter="\t", skiprows=1)
    agrees = table[:, 1:exits] == table[:, : exits - 1]
    runs = np.zeros(len(table), int)
    left = np.full(len(table), exits - 1)
    for exit_, agree in enumerate(agrees.T, start=1):
        runs = np.where(agree, runs + 1, 0)
        left = np.where((runs >= patience) & (left == exits - 1), exit_, left)
    return left, np.minimum((~agrees).sum(axis=1), 2)


def demo() -> Floats:
    """Where each group leaves the demo model, whose inputs get harder with noise."""
    from isobatch.deployments.demo import demo_directory
    from isobatch.deployments.demo.digits import demo_inputs
    from isobatch.deployments.models import load as load_model

    model = load_model(demo_directory())
    rows = []
    for noise in DEMO_NOISES:
        exits = model.run(
            model.encode(list(demo_inputs(DEMO_INPUTS, noise))), model.num_blocks, model.ramp_blocks
        ).exits
        rows.append(np.bincount(exits.blocks, minlength=model.num_blocks))
    return _shares(rows)


def tenants(seed: int) -> Floats:
    """The shares of three tenants, each a third of the 1,000 functions of Azure's trace: windows x groups."""
    minutes = _azure()
    tenant = np.random.default_rng(seed).integers(0, 3, len(minutes))
    calls = np.stack([minutes[tenant == each].sum(axis=0).reshape(DAY, 2).sum(axis=1) for each in range(3)], axis=1)
    return _shares(calls)


def load(day: int) -> Floats:
    """The shares of the groups when the share of easy inputs falls with the load."""
    hard = np.clip((arrivals(day) - BUSY[0]) / (BUSY[1] - BUSY[0]), 0, 1)
    return np.stack([1 - hard, hard / 2, hard / 2], axis=1)


def arrivals(day: int) -> Floats:
    """Tweets per window on one day; the end of each day is missing in the source and is skipped."""
    windows = _twitter()
    return windows[day * DAY : (day + 1) * DAY]


@cache
def _twitter() -> Floats:
    counts = np.loadtxt(data("arrivals/twitter/twitter_2021-08_per_minute_derived.csv"), delimiter=",", skiprows=1)[
        :, 1
    ]
    windows = counts[: len(counts) // 2 * 2].reshape(-1, 2).sum(axis=1)
    known: Floats = windows[windows > 1000]
    return known


@cache
def _azure() -> Floats:
    with data("arrivals/azure_functions/invitro_1000_inv.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    return np.array([row[3:1443] for row in rows], float)


def _shares(rows: Sequence[NDArray[np.int64]] | Floats) -> Floats:
    counts = np.asarray(rows, float)
    shares: Floats = counts / counts.sum(axis=1, keepdims=True)
    return shares
