"""Makes small random problems with difficult corners: no survivors, free links, kinds with too little memory."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from isobatch.optimizer.objective import Objective
from isobatch.optimizer.problem import Problem
from isobatch.profiles.devices import Device, Link
from isobatch.profiles.latency import LatencyTable

# Blocks, kinds, largest batch: so small that brute force takes a moment.
SIZES = [
    (1, 3, 6),
    (2, 3, 4),
    (2, 2, 6),
    (3, 3, 2),
    (3, 2, 3),
    (4, 2, 2),
    (4, 1, 4),
    (5, 2, 1),
    (6, 2, 1),
    (6, 1, 2),
    (4, 3, 1),
]
MEMORY = 100


def random_problem(seed: int) -> Problem:
    random = np.random.default_rng(seed)
    blocks, kinds, largest = SIZES[seed % len(SIZES)]
    names = [f"kind{i}" for i in range(kinds)]
    counts = 1 + random.multinomial(random.integers(0, 6 - kinds), np.ones(kinds) / kinds)
    tables = tuple(_table(random, name, blocks, largest) for name in names)
    devices = tuple(_device(random, name, int(count)) for name, count in zip(names, counts, strict=True))
    facts = Problem(_survival(random, blocks), tables, devices, _links(random, names))
    return facts if seed % 5 == 1 else _light(facts)


def is_small(seed: int) -> bool:
    """Whether the problem of this seed has four devices or fewer, so that every plan of it is soon tried."""
    return sum(device.count for device in random_problem(seed).devices) <= 4


def _light(facts: Problem) -> Problem:
    """The same with survivors of a hundredth of the bytes, so that small kinds hold some; links take the same time."""
    tables = [replace(each, hidden_bytes=tuple(size // 100 for size in each.hidden_bytes)) for each in facts.tables]
    links = {way: replace(link, bytes_per_s=link.bytes_per_s / 100) for way, link in facts.links.items()}
    return replace(facts, tables=tuple(tables), links=links)


def random_objective(seed: int, facts: Problem) -> Objective:
    """An objective for this problem: goals take turns, and limits bind in about half of the cases."""
    random = np.random.default_rng(seed)
    per_input = float(np.mean([np.sum(table.block_s[0]) for table in facts.tables]))
    goal = ("goodput", "cost", "goodput-per-dollar", "latency")[seed % 4]
    slo_s = per_input * float(random.uniform(0.5, 12)) if random.random() < 0.7 else None
    wished = float(random.uniform(0.2, 3)) / per_input
    prices = float(np.mean([device.price_per_hour for device in facts.devices])) + 0.1
    return Objective(
        goal=goal,
        slo_s=slo_s,
        goodput_per_s=wished if goal == "cost" or random.random() < 0.2 else 0.0,
        cost_per_hour=prices * float(random.uniform(0.5, 5)) if random.random() < 0.3 else None,
        max_batch=int(random.choice([2, 4, 64])),
    )


def _survival(random: np.random.Generator, blocks: int) -> tuple[float, ...]:
    falls = random.choice([0.0, 0.05, 0.3, 0.6, 1.0], size=blocks - 1, p=[0.3, 0.25, 0.25, 0.15, 0.05])
    return tuple(float(share) for share in np.cumprod(np.concatenate([[1.0], 1 - falls])))


def _table(random: np.random.Generator, kind: str, blocks: int, largest: int) -> LatencyTable:
    speed = float(np.exp(random.normal(0, 0.7)))
    sizes = tuple(sorted({1, largest, int(random.integers(1, largest + 1))}))
    once, each = random.uniform(0.1, 2, blocks), random.uniform(0.05, 1, blocks)
    block_s = tuple(tuple(float(t) for t in speed * 1e-3 * (once + each * size)) for size in sizes)
    ramps = (random.random(blocks) < 0.8) * random.uniform(0, 0.6, blocks) * (np.arange(blocks) < blocks - 1)
    ramp_s = tuple(tuple(float(t) for t in speed * 1e-3 * ramps) for _ in sizes)
    hidden = tuple(int(size) for size in random.integers(1, 1000, blocks))
    memory = tuple(int(size) for size in random.integers(1, 40, blocks))
    activations = tuple(int(size) for size in random.integers(0, 8, blocks)) if random.random() < 0.3 else ()
    launch_s = float(random.choice([0.0, 1e-3]))
    table = LatencyTable(kind, sizes, block_s, ramp_s, launch_s, hidden, memory, "random")
    share = float(random.choice([0.0, 0.5, 1.0], p=[0.7, 0.15, 0.15]))
    least = [int(share * min(pair)) for pair in pairwise(memory)]
    return replace(table, activation_bytes=activations, repeated_bytes=(0, *least) if share else ())


def _device(random: np.random.Generator, kind: str, count: int) -> Device:
    small = random.random() < 0.35  # for the whole network, or even for one block
    memory = int(random.integers(10, MEMORY)) if small else 10_000
    price = float(random.choice([0.0, 1.0, round(float(random.uniform(0.1, 5)), 2)], p=[0.1, 0.3, 0.6]))
    return Device(kind, count, memory, price)


def _links(random: np.random.Generator, kinds: list[str]) -> dict[tuple[str, str], Link]:
    style = random.choice(["free", "fast", "slow", "mixed"])
    rate = {"free": 1e18, "fast": 1e7, "slow": 2e5}
    links = {}
    for source in kinds:
        for target in kinds:
            here = str(random.choice(["free", "fast", "slow"])) if style == "mixed" else str(style)
            latency_s = 0.0 if here == "free" else float(random.uniform(0, 1e-3))
            turn_s = float(random.choice([0.0, 1e-3]))
            links[source, target] = Link(source, target, rate[here], latency_s, turn_s)
    if random.random() < 0.1:
        links.pop((kinds[0], kinds[-1]))
    return links
