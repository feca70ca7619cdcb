"""Block latency tables of real networks on the device at hand, with a light ramp after every block."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from experiments.backend.families import NAMES, SIDE, batches, config, untrained
from isobatch.cluster.bench.setup import with_recorded_exits
from isobatch.cluster.profiling.block_times import SampleInputs, timed, timed_block_ranges
from isobatch.cluster.profiling.datasheets import shape_of
from isobatch.deployments.models.backends import served
from isobatch.deployments.models.interface import BackedModel
from isobatch.profiles.devices import CATALOGUE, kind_of
from isobatch.profiles.files import Profile, load, save
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.measure import device_name
from isobatch.profiles.model import Batch
from isobatch.profiles.sweep import whole_s

TEXTS = ("bert-base", "bert-large", "distilbert")


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
    def kind(self) -> str:
        return kind_of(device_name(self.device))


@lru_cache(1)
def network(name: str, setting: TableSetting) -> BackedModel:
    """An untrained network with ramps at which inputs leave where they are told to. Large ones take seconds."""
    exact = untrained(name, setting.device, getattr(torch, setting.dtype), setting.layers)
    return served(
        with_recorded_exits(exact, everywhere=True), setting.backend, lambda _: f"untrained {name}, {setting}"
    )


def lengths_of(name: str, setting: TableSetting) -> tuple[int | None, ...]:
    return setting.lengths if name in TEXTS else (None,)


def inputs(model: BackedModel, name: str, length: int | None) -> SampleInputs:
    of = batches(name, length or 0)

    def staying(size: float) -> Batch:
        """A batch whose inputs leave only at the end, so that every block is timed at the full size."""
        batch = of(round(size))
        return replace(batch, memory=torch.full((len(batch), 1), float(model.num_blocks)).numpy())

    return SampleInputs(length, staying)


def measure(name: str, setting: TableSetting) -> Iterator[LatencyTable]:
    """One table per length."""
    model = network(name, setting)
    for length in lengths_of(name, setting):
        given = [inputs(model, name, length)]
        model.prepare(timed_block_ranges(model), given[0].batch(1))
        (found,) = timed(model, given, setting.kind, setting.dtype, setting.budget_s, setting.largest)
        yield found.table


def keep(name: str, tables: Sequence[LatencyTable], folder: Path) -> Path:
    """One file a network, to which other devices are added."""
    folder.mkdir(parents=True, exist_ok=True)
    path, new = folder / f"{name}.json", Profile(name, tuple(tables))
    save(load(path).joined_by(new) if path.exists() else new, path)
    return path


def roofline_shares(name: str, table: LatencyTable, setting: TableSetting) -> dict[int, float]:
    """By batch size, the time at the device's peak rate as a share of the time that the network took."""
    if table.kind not in CATALOGUE:
        return {}
    device = CATALOGUE[table.kind]
    peak = device.fp32_flops if setting.dtype == "float32" else device.fp16_flops
    shape = shape_of(config(name, setting.layers), table.length, SIDE)
    flops = sum(kernel.flops for block in shape.blocks for kernel in block.kernels)
    pairs = zip(map(int, table.batch_sizes), whole_s(table), strict=True)
    return {size: float(size * flops / peak / seconds) for size, seconds in pairs}
