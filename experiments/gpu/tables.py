"""Measures latency tables of real networks on this machine's device, with a light ramp after every block."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from experiments.shared.untrained import NAMES, SIDE, batches, config, untrained
from isobatch.cluster.bench.setup import with_recorded_exits
from isobatch.cluster.profiling.block_times import SampleInputs, timed_block_ranges, timed_whole
from isobatch.cluster.profiling.datasheets import shape_of
from isobatch.deployments.models.backends import served
from isobatch.deployments.models.interface import BackedModel
from isobatch.profiles.devices import CATALOGUE, kind_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.files import Profile, load, save
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.measure import device_name
from isobatch.profiles.model import Batch
from isobatch.profiles.sweep import whole_s

TEXTS = ("bert-base", "bert-large", "distilbert")
SQUAD_TOKENS = 176  # of MLPerf's texts without their padding


@dataclass(frozen=True)
class TableSetting:
    """The settings of a measurement. `layers` makes every network shallower, for a trial."""

    device: str
    dtype: str
    backend: str = "torch"
    lengths: tuple[int, ...] = (64, 128, 384)
    largest: int = 256
    budget_s: float = 20.0  # for one table
    layers: int | None = None
    networks: tuple[str, ...] = NAMES

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def kind(self) -> str:
        return kind_of(device_name(self.device))


@lru_cache(1)
def network(name: str, setting: TableSetting) -> BackedModel:
    """An untrained network, whose inputs carry the ramp at which they leave. A large one takes seconds to make."""
    exact = untrained(name, setting.device, getattr(torch, setting.dtype), setting.layers)
    return served(
        with_recorded_exits(exact, everywhere=True), setting.backend, lambda _: f"untrained {name}, {setting}"
    )


def lengths_of(name: str, setting: TableSetting) -> tuple[int | None, ...]:
    """The lengths of texts in tokens; BERT-large begins with the length of MLPerf's texts."""
    if name not in TEXTS:
        return (None,)
    return (SQUAD_TOKENS, *setting.lengths) if name == "bert-large" and setting.layers is None else setting.lengths


def inputs(model: BackedModel, name: str, length: int | None) -> SampleInputs:
    of = batches(name, length or 0)

    def staying(size: float) -> Batch:
        """A batch whose inputs leave at the end, so that every block is timed at the full size."""
        batch = of(round(size))
        return replace(batch, memory=torch.full((len(batch), 1), float(model.num_blocks)).numpy())

    return SampleInputs(length, staying)


def measure(name: str, length: int | None, setting: TableSetting) -> LatencyTable:
    """The table of texts of one length, or of pictures."""
    model, given = network(name, setting), inputs(network(name, setting), name, length)
    model.prepare(timed_block_ranges(model), given.batch(1))
    result = timed_whole(model, given, setting.kind, setting.dtype, setting.budget_s, setting.largest)
    return result.table


def best_rate_per_s(table: LatencyTable) -> float:
    """Inputs a second through the whole network, without exits, at the best batch size."""
    return max(float(size / seconds) for size, seconds in zip(table.batch_sizes, whole_s(table), strict=True))


def keep(name: str, tables: Sequence[LatencyTable], folder: Path) -> Path:
    """Write the tables to the network's file, which keeps tables of other devices."""
    folder.mkdir(parents=True, exist_ok=True)
    path, new = folder / f"{name}.json", Profile(name, tuple(tables))
    save(load(path).joined_by(new) if path.exists() else new, path)
    return path


def kept(name: str, length: int | None, setting: TableSetting, folder: Path) -> LatencyTable:
    """The table that was measured before."""
    path = folder / f"{name}.json"
    result = [
        table
        for table in (load(path).tables if path.exists() else ())
        if (table.kind, table.length, table.backend, table.dtype)
        == (setting.kind, length, setting.backend, setting.dtype)
    ]
    if not result:
        raise UserError(f"{path} has no table of {name} at {length} tokens yet: its full batches come first")
    return result[0]


def roofline_shares(name: str, table: LatencyTable, setting: TableSetting) -> dict[int, float]:
    """By batch size, the time at the device's peak rate over the measured time."""
    if table.kind not in CATALOGUE:
        return {}
    device = CATALOGUE[table.kind]
    peak = device.fp32_flops if setting.dtype == "float32" else device.fp16_flops
    shape = shape_of(config(name, setting.layers), table.length, SIDE)
    flops = sum(kernel.flops for block in shape.blocks for kernel in block.kernels)
    pairs = zip(map(int, table.batch_sizes), whole_s(table), strict=True)
    return {size: float(size * flops / peak / seconds) for size, seconds in pairs}
