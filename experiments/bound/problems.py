"""Makes problems to plan and simulate: random networks and fleets, and the paper's networks on known kinds."""

import numpy as np

from experiments.planner.settings import BERT_BASE, DISTILBERT, EIGHT_KINDS, RESNET50
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.problem import Problem
from isobatch.optimizer.search.exact import search
from isobatch.profiles.devices import HOP_S, TURN_S, Device, Link
from isobatch.profiles.latency import LatencyTable

LARGEST = (4, 8, 16, 32)  # batches
TIMES = (1.3, 6.0)  # the SLO, times what the fastest plan takes
KNOWN = (BERT_BASE, DISTILBERT, RESNET50)
EVERY = 3  # problem is one of the known networks, in turn
COUNTS = (1, 2, 3, 4, 6, 8)  # devices of a kind: what a run takes grows with the rate


def playable(seed: int) -> tuple[Problem, Objective] | None:
    """A problem with a tight or loose SLO and the goal goodput; None if no plan can run the network."""
    random = np.random.default_rng([seed, 2])
    facts = _known(random, seed // EVERY) if seed % EVERY == 0 else _made_up(random)
    largest = int(random.choice(LARGEST))
    fastest = search(facts, Objective(goal="latency", max_batch=largest))
    if fastest is None or fastest.promise is None:
        return None
    times = float(np.exp(random.uniform(*np.log(TIMES))))
    return facts, Objective(slo_s=times * fastest.promise.latency_s, max_batch=largest)


def _known(random: np.random.Generator, number: int) -> Problem:
    kinds = random.choice(EIGHT_KINDS, size=int(random.integers(1, 4)), replace=False)
    devices = ",".join(f"{kind}={random.choice(COUNTS)}" for kind in sorted(kinds))
    backend = str(random.choice(["torch", "onnx"]))
    return KNOWN[number % len(KNOWN)].facts(devices, "float16", backend)


def _made_up(random: np.random.Generator) -> Problem:
    """A random problem, whose links cost the catalogue's time (profiles/devices.py) or nothing."""
    blocks, names = int(random.integers(2, 13)), [f"kind{i}" for i in range(random.integers(1, 4))]
    falls = random.choice([0.0, 0.05, 0.3, 0.6], size=blocks - 1, p=[0.35, 0.25, 0.25, 0.15])
    once, each = random.uniform(0.1, 2, blocks), random.uniform(0.02, 0.5, blocks)
    ramps = random.uniform(0, 0.3, blocks) * (np.arange(blocks) < blocks - 1)
    costly = bool(random.random() < 0.5)
    links = {
        (source, target): Link(source, target, 1e9, HOP_S * costly, TURN_S * costly)
        for source in names
        for target in names
    }
    return Problem(
        tuple(map(float, np.cumprod([1.0, *(1 - falls)]))),
        tuple(_table(random, name, once, each, ramps) for name in names),
        tuple(Device(name, int(random.choice(COUNTS)), 10**9, 1.0) for name in names),
        links,
    )


def _table(
    random: np.random.Generator, kind: str, once: np.ndarray, each: np.ndarray, ramps: np.ndarray
) -> LatencyTable:
    """Kinds differ in the least time of a launch and in the time that an input adds."""
    floor, slope = 1e-3 * np.exp(random.normal(0, 0.7, 2))
    sizes = (1, max(LARGEST))
    block_s = tuple(tuple((floor * once + slope * each * size).tolist()) for size in sizes)
    ramp_s = tuple(tuple((floor * ramps).tolist()) for _ in sizes)
    flat = (1000,) * len(once)
    return LatencyTable(kind, sizes, block_s, ramp_s, float(random.choice([0.0, 1e-3])), flat, flat, "random")
