"""The times of every candidate on every kind of device: measured on this machine's kind, else derived."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.cluster.profiling.block_times import lengths_of, sample_inputs, timed
from isobatch.cluster.profiling.datasheets import tables as derived
from isobatch.deployments.models import checkpoint, load
from isobatch.deployments.models.encode import Encoder
from isobatch.deployments.prepare.cascades import Candidate
from isobatch.profiles.devices import kind_of
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable, cascade_table, edge_bytes
from isobatch.profiles.lengths import Lengths
from isobatch.profiles.measure import device_name

FULL = 8  # inputs of the launch by whose times blocks are compared


@dataclass(frozen=True)
class Timed:
    """One candidate's table on every kind, and the lengths of texts in its tokens (None: it reads images)."""

    tables: tuple[LatencyTable, ...]
    lengths: Lengths | None
    side: int  # of its images, in pixels
    encoder: Encoder

    @property
    def costs(self) -> list[float]:
        """Seconds of each block for one input, on the first kind."""
        table = self.tables[0]
        size = min(FULL, table.largest)
        costs: list[float] = (table.block_times_s(size) / size).tolist()
        return costs

    def tokens(self, values: Sequence[Any]) -> NDArray[np.int64] | None:
        """The tokens of each of these inputs; None for images."""
        return self.encoder(values).lengths if self.lengths else None


def timed_candidate(
    each: Candidate, values: Sequence[Any], kinds: Sequence[str], device: str, budget_s: float, largest: int
) -> tuple[Timed, tuple[str, ...]]:
    """A candidate's tables, and notes on their measurement."""
    model = load(each.folder, device)
    lengths = lengths_of(model, values)
    (inputs,) = sample_inputs(model, each.folder, lengths)
    here, by_kind, notes = kind_of(device_name(str(model.device))), dict[str, LatencyTable](), list[str]()
    if here in kinds:
        dtype = str(model.dtype).removeprefix("torch.")
        (measured,) = timed(model, [inputs], here, dtype, budget_s, largest)
        by_kind[here], notes = measured.table, [f"{each.name}: {measured}"]
    others, config = [kind for kind in kinds if kind != here], checkpoint.read_config(each.folder)
    side = checkpoint.image_size(each.folder)[0] if lengths is None else 0
    if others:
        known = Profile(each.name, tuple(derived(config, others, [inputs.length], side, model.ramp_blocks)))
        by_kind |= {kind: known.table(kind) for kind in others}
    return Timed(tuple(by_kind[kind] for kind in kinds), lengths, side, model.encoder), tuple(notes)


def table_of(levels: Sequence[Timed], place: int, num_labels: int) -> LatencyTable:
    """The table of candidates in sequence, on the kind at this place; sizes count the tokens of the first candidate."""
    first = levels[0].tables[place]
    if len(levels) == 1:
        return first
    carried_bytes = edge_bytes(levels[1].lengths.mean if levels[1].lengths else None, levels[1].side, num_labels)
    tables = [replace(level.tables[place], length=first.length) for level in levels]
    return cascade_table(tables, carried_bytes)
