"""Parses the command line's options of a simulation: slow replicas, outages, mixes, recorded exits."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cluster.load.workloads import Ints
from cluster.simulator.troubles import Outage
from profiles.errors import UserError, read_text


def slow_of(written: Sequence[str]) -> dict[str, float]:
    """
    >>> slow_of(["v100/3=2.5"])
    {'v100/3': 2.5}
    """
    return dict(_pair(option, "=", "REPLICA=TIMES, as in v100/3=2") for option in written)


def outages_of(written: Sequence[str]) -> tuple[Outage, ...]:
    """
    >>> outages_of(["v100/3=60-90"])
    (Outage(replica='v100/3', from_s=60.0, until_s=90.0),)
    """
    shape = "REPLICA=FROM-UNTIL in seconds, as in v100/3=60-90"
    return tuple(_outage(option, shape) for option in written)


def shares_of(option: str) -> tuple[tuple[float, float], ...]:
    """
    >>> shares_of("0:0.8,600:0.2")
    ((0.0, 0.8), (600.0, 0.2))
    """
    shape = "SECONDS:SHARE,..., as in 0:0.8,600:0.2"
    shares = tuple(
        (_number(at, option, shape), share) for at, share in (_pair(part, ":", shape) for part in option.split(","))
    )
    if [at_s for at_s, _ in shares] != sorted({at_s for at_s, _ in shares}):
        raise UserError(f"{option!r}: the seconds of a mix must ascend")
    return shares


def read_exits(path: Path, num_blocks: int) -> Ints:
    """Read one number per line: the block, from 0, after which an input was sure. The caller repeats them as needed."""
    text = read_text(path)
    try:
        blocks = np.array(text.split(), np.int64)
    except (ValueError, OverflowError):
        raise UserError(f"{path} must hold one block number per line, counted from 0") from None
    if not len(blocks) or blocks.min() < 0 or blocks.max() >= num_blocks:
        present = f"{blocks.min()}..{blocks.max()}" if len(blocks) else "none"
        raise UserError(f"{path}: block numbers must lie in 0..{num_blocks - 1}, there are {present}")
    return blocks


def _outage(option: str, shape: str) -> Outage:
    name, _, times = option.partition("=")
    start, dash, stop = times.partition("-")
    if not (name and dash):
        raise UserError(f"{option!r} must look like {shape}")
    return Outage(name, _number(start, option, shape), _number(stop, option, shape))


def _pair(option: str, sign: str, shape: str) -> tuple[str, float]:
    name, separator, number = option.partition(sign)
    if not (name and separator):
        raise UserError(f"{option!r} must look like {shape}")
    return name, _number(number, option, shape)


def _number(text: str, option: str, shape: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{option!r} must look like {shape}") from None
