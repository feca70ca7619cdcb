"""The latency table of a cascade, from those of its levels."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from profiles.errors import UserError
from profiles.latency import LatencyTable, Rows

TOKEN_BYTES = 16  # of one token on the wire: its number and its type


def edge_bytes(length: int | None, side: int, num_labels: int) -> int:
    """The size of one input at an edge: a text of `length` tokens or a square image, and the labels' probabilities.

    >>> edge_bytes(10, 0, num_labels=2), edge_bytes(None, 32, num_labels=2)
    (168, 12296)
    """
    return (TOKEN_BYTES * length if length else 4 * 3 * side * side) + 4 * num_labels


def cascade_table(tables: Sequence[LatencyTable], carried_bytes: int) -> LatencyTable:
    """One table of all levels, from one table of each on the same kind of device, for inputs of one length.

    `carried_bytes` is the size of one input on the wire at an edge, in the form that the next level reads. Before the
    edge this form travels along with the hidden state. A launch costs as much as at the most expensive level.
    """
    first = tables[0]
    if any((each.kind, each.length) != (first.kind, first.length) for each in tables):
        raise UserError(f"levels must be timed on one kind and at one length: {first.kind}, {first.length}")
    sizes = _sizes(tables)
    before = [(*(size + carried_bytes for size in each.hidden_bytes[:-1]), carried_bytes) for each in tables[:-1]]
    sources = dict.fromkeys(each.source for each in tables)
    return replace(
        first,
        batch_sizes=sizes,
        block_s=_joined([each.block_times_s(sizes) for each in tables]),
        ramp_s=_joined([each.ramp_times_s(sizes) for each in tables]),
        block_p95_s=_joined([each.block_p95_times_s(sizes) for each in tables]),
        launch_s=max(each.launch_s for each in tables),
        stop_s=max(each.each_stop_s for each in tables),
        launch_p95_s=max(each.launch_p95_s or each.launch_s for each in tables),
        hidden_bytes=(*chain.from_iterable(before), *tables[-1].hidden_bytes),
        memory_bytes=_one_after_another([each.memory_bytes for each in tables]),
        activation_bytes=_one_after_another([each.activation_bytes for each in tables]),
        source="; ".join(sources),
        repeated_bytes=_repeated(tables),
    )


def _repeated(tables: Sequence[LatencyTable]) -> tuple[int, ...]:
    """The weights that blocks share inside their level; levels share none with each other."""
    if not any(each.repeated_bytes for each in tables):
        return ()
    return tuple(chain.from_iterable(each.repeated_bytes or (0,) * each.num_blocks for each in tables))


def _one_after_another(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The values of all levels in order; empty if one level has none."""
    return tuple(chain.from_iterable(parts)) if all(parts) else ()


def _sizes(tables: Sequence[LatencyTable]) -> tuple[int | float, ...]:
    """All batch sizes of any level that lie within the range of every level."""
    low, high = (max(each.batch_sizes[0] for each in tables), min(each.batch_sizes[-1] for each in tables))
    return tuple(sorted({size for each in tables for size in each.batch_sizes if low <= size <= high} | {low, high}))


def _joined(parts: Sequence[np.ndarray]) -> Rows:
    return tuple(tuple(row) for row in np.concatenate(parts, axis=1).tolist())
