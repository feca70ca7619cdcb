"""From what a user asks for to a network on a backend, its table, its exits and its inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.profiling import Inputs, exits_from_rules, images, in_batches, kind_of, source_of, texts, timed
from cluster.profiling import alone as timed_alone
from deployments.backend_names import Backend
from deployments.demo import demo_digits, demo_directory
from deployments.models import TorchModel, checkpoint, load
from deployments.models.backends import INT8, make_ready, on_backend, planned
from deployments.models.stretch import Stretch
from deployments.prepare.data import rows
from deployments.prepare.sample import label_number, sampled
from experiments.onedevice.compare import Bench
from experiments.onedevice.drawn import drawn, with_told_exits
from experiments.onedevice.rehearsal import Source
from optimizer.plan import Plan
from profiles.errors import UserError
from profiles.exits import ExitProfile
from profiles.files import Profile
from profiles.latency import LatencyTable
from profiles.measure import count_exits, device_name, stopwatch_for

DEMO = "demo"
INVENTED = 512  # inputs that are drawn where there are no real ones


@dataclass(frozen=True)
class Wish:
    """What `isobatch bench` was asked for."""

    model: str
    data: Path | None = None
    profile: Profile | None = None
    device: str = "auto"
    dtype: str = "float32"
    backend: Backend = "auto"
    length: int = 32
    largest: int = 64
    budget_s: float = 20.0
    threads: int = 1
    max_rows: int = 1000


@dataclass(frozen=True)
class Made:
    bench: Bench
    table: LatencyTable
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """Real inputs, and the number of each one's label where there is one."""

    values: list[Any]
    labels: np.ndarray[Any, np.dtype[np.int64]] | None


def make(wish: Wish, progress: Callable[[str], None] = lambda what: None) -> Made:
    torch.set_num_threads(wish.threads)
    int8 = wish.dtype == INT8
    folder = demo_directory("int8" if int8 else "float32") if wish.model == DEMO else checkpoint.locate(wish.model)
    exact = load(folder, wish.device, "float32" if int8 else wish.dtype)
    if not exact.ramp_blocks:
        raise UserError(f"{wish.model} has no ramps: give it some with 'isobatch prepare'")
    recorded = _recorded(wish, folder)
    told = exact if recorded else with_told_exits(exact)
    progress("choosing the backend")
    model = on_backend(told, folder, wish.backend, int8=int8)
    assert isinstance(model, TorchModel), "This is a bug: it was loaded by our own loader."
    inputs = _invented(model, folder, wish.length if recorded is None else _typical_length(model, recorded))
    kind = kind_of(device_name(str(model.device)))
    progress("measuring the network")
    if wish.profile is None:
        make_ready(model, folder, timed_alone(model))
    table, notes = _table(wish, model, inputs, kind)
    progress("looking where inputs leave")
    exits = _counted(model, folder, recorded) if recorded else _told_before(wish, exact)
    found = Profile(folder.name, (table,), exits)
    source = _real(model, recorded) if recorded else _drawn(inputs, exits)
    watch, largest = stopwatch_for(str(model.device)), min(wish.largest, table.batch_sizes[-1])
    bench = Bench(model, found, kind, source, watch, largest, make_ready=_ready(model, folder, kind))
    return Made(bench, table, notes)


def _recorded(wish: Wish, folder: Path) -> Recorded | None:
    if wish.data is None and wish.model == DEMO:
        images, labels = demo_digits(wish.max_rows)
        return Recorded(list(images), labels)
    if wish.data is None:
        return None
    found = sampled(rows(wish.data, images=checkpoint.reads_images(folder)), wish.max_rows)
    if not found:
        raise UserError(f"{wish.data} holds no inputs")
    if found[0].label is None:
        return Recorded([row.value for row in found], None)
    names = checkpoint.label_names(folder)
    numbers = {name.lower(): number for number, name in enumerate(names)}
    return Recorded(
        [row.value for row in found], np.array([label_number(row, wish.data, numbers, names) for row in found])
    )


def _invented(model: TorchModel, folder: Path, length: int) -> Inputs:
    if not checkpoint.reads_images(folder):
        return next(texts(model, [length]))
    return images(model, *checkpoint.image_size(folder))


def _typical_length(model: TorchModel, recorded: Recorded) -> int:
    """What a batch of them is padded to is near their longest; the table is for one of the longer ones."""
    lengths = model.encode(recorded.values[:INVENTED]).lengths
    return 1 if lengths is None else int(np.quantile(lengths, 0.9))


def _ready(model: TorchModel, folder: Path, kind: str) -> Callable[[Plan], None]:
    """What a plan runs is exported before any clock does."""
    return lambda plan: make_ready(model, folder, planned(model, plan, kind))


def _table(wish: Wish, model: TorchModel, inputs: Inputs, kind: str) -> tuple[LatencyTable, tuple[str, ...]]:
    if wish.profile:
        table = wish.profile.table(kind, inputs.length)
        if table.backend and table.backend != model.backend:
            return table, (f"WARNING: the profile was measured on {table.backend}, not on {model.backend}",)
        return table, ()
    source = source_of(device_name(str(model.device)), model.backend, wish.dtype, wish.threads)
    (measured,) = timed(model, [inputs], kind, source, str(model.device), wish.budget_s, wish.largest)
    return measured.table, (str(measured),)


def _counted(model: TorchModel, folder: Path, recorded: Recorded) -> ExitProfile:
    """By the network that will be compared: 8 bits, say, leave elsewhere than float32 does."""
    make_ready(model, folder, [Stretch(0, model.num_blocks, model.ramp_blocks)])
    return count_exits(model, in_batches(model, recorded.values))


def _told_before(wish: Wish, exact: TorchModel) -> ExitProfile:
    if wish.profile and wish.profile.exits:
        return wish.profile.exits
    known = exits_from_rules([(rule.block, rule.survival) for rule in exact.ramps.rules.ramps], exact.num_blocks)
    if known is None:
        raise UserError(f"nobody knows where inputs of {wish.model} leave: give --data, or a --profile with exits")
    return known


def _real(model: TorchModel, recorded: Recorded) -> Source:
    return Source([model.encode([value]) for value in recorded.values], recorded.labels)


def _drawn(inputs: Inputs, exits: ExitProfile) -> Source:
    random = np.random.default_rng(0)
    one = inputs.batch(1)
    return Source([drawn(one, exits, random) for _ in range(INVENTED)])
