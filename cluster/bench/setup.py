"""Turns a user's request into a network on a backend, with its table, its exits and its inputs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from isobatch.cluster.bench.compare import Bench
from isobatch.cluster.bench.real_device import Source
from isobatch.cluster.load.workloads import exit_blocks
from isobatch.cluster.profiling import block_times
from isobatch.deployments.demo import demo_directory
from isobatch.deployments.demo.digits import demo_digits
from isobatch.deployments.exits import Decision, remembers
from isobatch.deployments.models import backends, checkpoint, load
from isobatch.deployments.models.interface import BackedModel
from isobatch.deployments.models.loading import resolve_device
from isobatch.deployments.models.ramps import ExitRules, RampRule, Ramps, made_from, make_head
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.named import DEMO_NAME, INT8
from isobatch.deployments.prepare.data import Columns, Row, name_of, naming_rows, rows, taken
from isobatch.deployments.prepare.sample import LabelNames, labels_of, sampled
from isobatch.optimizer.plan import Plan
from isobatch.profiles.devices import kind_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import MOST_BATCH
from isobatch.profiles.measure import count_exits, device_name, stopwatch_for
from isobatch.profiles.model import Batch


@remembers(lambda num_labels: 1)
def leave_at_recorded_block(logits: Tensor, threshold: float, memory: Tensor) -> Decision:
    """Leave at the block that the input carries in its memory. The threshold is the ramp's own block."""
    return Decision(memory[:, 0] <= threshold, logits, memory)


@dataclass(frozen=True)
class RecordedRamps(Ramps):
    """Ramps whose memory never changes, so that no ramp has to be evaluated for the sake of a later one."""

    def observed(self, active: Collection[int]) -> frozenset[int]:
        return frozenset(active)


def with_recorded_exits(model: TorchModel, everywhere: bool = False) -> TorchModel:
    """The same network with recorded exits; `everywhere`: with a light ramp after each block that has none."""
    blocks = range(model.num_blocks - 1) if everywhere else model.ramp_blocks
    rules = ExitRules(
        policy=f"{__name__}:leave_at_recorded_block",
        dtype=model.ramps.rules.dtype,
        ramps=tuple(RampRule(block=block, threshold=float(block)) for block in blocks),
    )
    widths = model.anatomy.pooled_widths
    heads = {
        block: model.ramps.heads.get(block)
        or make_head("light", widths[block], model.num_labels).to(model.device).eval()
        for block in blocks
    }
    return model.with_ramps(RecordedRamps(rules, heads))


def drawn(batch: Batch, exits: ExitProfile, random: np.random.Generator) -> Batch:
    """The same batch, with a block at which to leave drawn from the profile for each input."""
    depths = exit_blocks(exits, len(batch), random)
    return replace(batch, memory=depths[:, None].astype(np.float32))


INVENTED = 512  # inputs that are generated where there are no real ones


@dataclass(frozen=True)
class BenchRequest:
    model: str
    data: Path | None = None
    device: str = "auto"
    dtype: str | None = None  # None: the usual one
    backend: str = "auto"
    length: int = 32
    largest: int | None = None
    budget_s: float = 20.0
    threads: int = 1
    max_rows: int = 1000
    columns: Columns = field(default_factory=Columns)
    labels: Mapping[str, str] = field(default_factory=dict)  # labels of the head by the file's labels


def make(request: BenchRequest, progress: Callable[[str], None] = lambda what: None) -> tuple[Bench, tuple[str, ...]]:
    """A bench with one table, and notes on its measurement."""
    backends.compute_with(request.threads)
    int8 = request.dtype == INT8
    int8_demo = int8 and request.model == DEMO_NAME
    folder = demo_directory("int8") if int8_demo else checkpoint.locate(request.model)
    if request.length != BenchRequest.length and checkpoint.reads_images(folder):
        raise UserError("--length is for networks that read texts: leave it out")
    dtype = request.dtype or checkpoint.usual_dtype(folder, resolve_device(request.device))
    exact = load(folder, request.device, backends.weights_dtype(dtype))
    if exact.task.several or exact.task.by_score:
        several = "several labels" if exact.task.by_label else "a score" if exact.task.by_score else exact.task.answered
        raise UserError(f"{request.model} answers {several}, which bench does not measure: use 'isobatch evaluate'")
    if not exact.ramp_blocks:
        raise UserError(f"{request.model} has no ramps: give it some with 'isobatch prepare'")
    recorded, labels = _recorded(request, folder)
    values = [row.value for row in recorded]
    network = exact if values else with_recorded_exits(exact)
    progress("choosing the backend")
    model = backends.on_backend(network, folder, request.backend, int8=int8)
    progress("counting exits")
    with naming_rows(request.data or folder, recorded):
        exits = _counted(model, folder, values) if values else _known_exits(request.model, exact)
        length = _typical_length(model, values) if values else request.length
        encoded = [model.encode([value]) for value in values]
    inputs = block_times.sample_inputs(model, folder, None, [length])[0]
    kind = kind_of(device_name(str(model.device)))
    progress("measuring the network")
    backends.make_ready(model, folder, block_times.timed_block_ranges(model))
    measured = block_times.timed_whole(model, inputs, kind, dtype, request.budget_s, request.largest)
    notes: tuple[str, ...] = (str(measured),)
    # Without a replica, a launch costs no more than a stop.
    table = replace(measured.table, launch_s=measured.table.each_stop_s)
    profile = Profile(folder.name, (table,), exits)
    source = Source(encoded, labels) if values else _drawn(inputs, exits)
    watch = stopwatch_for(str(model.device))

    def ready(plan: Plan) -> None:
        """Export the blocks of a plan, so that no export falls into a timed trial."""
        backends.make_ready(model, folder, backends.planned_block_ranges(model, plan, kind))

    if request.data:
        notes += (taken(request.data, request.columns, channels=checkpoint.channels_of(folder)),)
        if made_from(folder, request.data):
            notes += (f"measured with {len(values)} inputs of {name_of(request.data)} that ramps were not trained on",)
    return Bench(model, profile, kind, source, watch, request.largest or MOST_BATCH, make_ready=ready), notes


def _recorded(request: BenchRequest, folder: Path) -> tuple[list[Row], NDArray[np.int64] | None]:
    """Real inputs, if there are any, and the label of each as a number, where the file has labels. Rows that ramps were
    trained on are left out."""
    if request.data is None and request.model == DEMO_NAME:
        images, labels = demo_digits(request.max_rows)
        return [Row(number, image, None) for number, image in enumerate(images, start=1)], labels
    if request.data is None:
        return [], None
    every = rows(request.data, request.columns, channels=checkpoint.channels_of(folder))
    known, _ = block_times.untrained(every, folder, request.data)
    sample = sampled(known, request.max_rows)
    if not sample:
        raise UserError(f"{request.data} holds no inputs")
    Random(0).shuffle(sample)  # a short trial reads the first ones only, and files are often sorted
    names = LabelNames(checkpoint.label_names(folder), request.labels)
    return sample, labels_of(sample, request.data, names)


def _typical_length(model: BackedModel, values: Sequence[Any]) -> int:
    """A long length among the inputs (the 90th percentile): a profile for it promises too little, not too much."""
    lengths = model.encode(values[:INVENTED]).lengths
    return 1 if lengths is None else int(np.quantile(lengths, 0.9))


def _counted(model: BackedModel, folder: Path, values: Sequence[Any]) -> ExitProfile:
    """Count exits by the network that is compared: with 8 bits, say, inputs leave elsewhere than with float32."""
    backends.make_ready(model, folder, [BlockRange(0, model.num_blocks, model.ramp_blocks)])
    counted = count_exits(model, block_times.in_batches(model, values))
    if counted.interrupted:
        raise KeyboardInterrupt
    return counted.exits


def _known_exits(name: str, exact: TorchModel) -> ExitProfile:
    ramps = [(rule.block, rule.survival) for rule in exact.ramps.rules.ramps]
    known = block_times.exits_from_rules(ramps, exact.num_blocks)
    if known is None:
        raise UserError(f"it is unknown where inputs of {name} leave: give --data")
    return known


def _drawn(inputs: block_times.SampleInputs, exits: ExitProfile) -> Source:
    random = np.random.default_rng(0)
    one = inputs.batch(1)
    return Source([drawn(one, exits, random) for _ in range(INVENTED)])
