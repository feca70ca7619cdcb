"""What a user writes of a simulation's inputs and troubles, as the simulator understands it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.devices import Outage
from experiments.workloads import Ints
from profiles.errors import UserError, read_text


def slow_of(wishes: Sequence[str]) -> dict[str, float]:
    """
    >>> slow_of(["v100/3=2.5"])
    {'v100/3': 2.5}
    """
    return dict(_pair(wish, "=", "REPLICA=TIMES, as in v100/3=2") for wish in wishes)


def outages_of(wishes: Sequence[str]) -> tuple[Outage, ...]:
    """
    >>> outages_of(["v100/3=60-90"])
    (Outage(replica='v100/3', from_s=60.0, until_s=90.0),)
    """
    shape = "REPLICA=FROM-UNTIL in seconds, as in v100/3=60-90"
    return tuple(_outage(wish, shape) for wish in wishes)


def shares_of(wish: str) -> tuple[tuple[float, float], ...]:
    """
    >>> shares_of("0:0.8,600:0.2")
    ((0.0, 0.8), (600.0, 0.2))
    """
    shape = "SECONDS:SHARE,..., as in 0:0.8,600:0.2"
    shares = tuple(
        (_number(at, wish, shape), share) for at, share in (_pair(part, ":", shape) for part in wish.split(","))
    )
    if [at_s for at_s, _ in shares] != sorted({at_s for at_s, _ in shares}):
        raise UserError(f"{wish!r}: the seconds of a mix must ascend")
    return shares


def read_exits(path: Path, num_blocks: int) -> Ints:
    """One number per line: after which block an input was sure, counted from 0. They are repeated when they run out."""
    text = read_text(path)
    try:
        blocks = np.array(text.split(), np.int64)
    except ValueError:
        raise UserError(f"{path} must hold one block number per line, counted from 0") from None
    if not len(blocks) or blocks.min() < 0 or blocks.max() >= num_blocks:
        found = f"{blocks.min()}..{blocks.max()}" if len(blocks) else "none"
        raise UserError(f"{path}: block numbers must lie in 0..{num_blocks - 1}, there are {found}")
    return blocks


def _outage(wish: str, shape: str) -> Outage:
    name, _, times = wish.partition("=")
    start, dash, stop = times.partition("-")
    if not (name and dash):
        raise UserError(f"{wish!r} must look like {shape}")
    return Outage(name, _number(start, wish, shape), _number(stop, wish, shape))


def _pair(wish: str, sign: str, shape: str) -> tuple[str, float]:
    name, found, number = wish.partition(sign)
    if not (name and found):
        raise UserError(f"{wish!r} must look like {shape}")
    return name, _number(number, wish, shape)


def _number(text: str, wish: str, shape: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{wish!r} must look like {shape}") from None
