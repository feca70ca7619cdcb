"""Turns a user's request into a network on a backend, with its table, its exits and its inputs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
from isobatch.deployments.models.ramps import ExitRules, RampRule, Ramps, make_head
from isobatch.deployments.models.served_model import BlockRange
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.named import DEMO_NAME, INT8
from isobatch.deployments.prepare.data import Columns, Row, naming_rows, rows, taken
from isobatch.deployments.prepare.sample import LabelNames, labels_of, sampled
from isobatch.optimizer.plan import Plan
from isobatch.profiles.devices import kind_of
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
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


MADE_UP = 512  # inputs that are drawn where there are no real ones
Labels = NDArray[np.int64]


def make(
    name: str, data: Path | None, columns: Columns, names: Mapping[str, str], max_rows: int, length: int,
    *, device: str, dtype: str | None, backend: str, threads: int, budget_s: float, largest: int,
    progress: Callable[[str], None],
) -> tuple[Bench, tuple[str, ...]]:  # fmt: skip
    """A bench with one table, and notes on its measurement.

    `names`: labels of the head by the file's labels. `length`: the tokens of a text where there are no real ones.
    """
    backends.compute_with(threads)
    int8 = dtype == INT8
    folder = demo_directory("int8") if int8 and name == DEMO_NAME else checkpoint.locate(name)
    dtype = dtype or checkpoint.usual_dtype(folder, resolve_device(device))
    exact = load(folder, device, backends.weights_dtype(dtype))
    if exact.task.several or exact.task.by_score:
        several = "several labels" if exact.task.by_label else "a score" if exact.task.by_score else exact.task.answered
        raise UserError(f"{name} answers {several}, which bench does not measure: use 'isobatch evaluate'")
    if not exact.ramp_blocks:
        raise UserError(f"{name} has no ramps: give it some with 'isobatch prepare'")
    notes, recorded, labels = list[str](), list[Row](), None
    if data:
        recorded, labels = _recorded(data, columns, names, max_rows, folder)
        notes.append(taken(data, columns, channels=checkpoint.channels_of(folder)))
    elif name == DEMO_NAME:
        images, labels = demo_digits(max_rows)
        recorded = [Row(number, image, None) for number, image in enumerate(images, start=1)]
    values = [row.value for row in recorded]
    network = exact if values else with_recorded_exits(exact)
    progress("choosing the backend")
    model = backends.on_backend(network, folder, backend, int8=int8)
    progress("counting exits")
    with naming_rows(data or folder, recorded):
        exits = _counted(model, folder, values) if values else _known_exits(name, exact)
        encoded = [model.encode([value]) for value in values]
        length = _typical_length(model, values) if values else length
    inputs = block_times.sample_inputs(model, folder, None, [length])[0]
    kind = kind_of(device_name(str(model.device)))
    progress("measuring the network")
    backends.make_ready(model, folder, block_times.timed_block_ranges(model))
    (measured,) = block_times.timed(model, [inputs], kind, dtype, budget_s, largest)
    # Without a replica, a launch costs no more than a stop.
    table = replace(measured.table, launch_s=measured.table.each_stop_s)
    profile = Profile(folder.name, (table,), exits)
    source = Source(encoded, labels) if values else _drawn(inputs, exits)

    def ready(plan: Plan) -> None:
        """Export the blocks of a plan, so that no export falls into a timed trial."""
        backends.make_ready(model, folder, backends.planned_block_ranges(model, plan, kind))

    watch, largest = stopwatch_for(str(model.device)), min(largest, table.largest)
    return Bench(model, profile, kind, source, watch, largest, make_ready=ready), (str(measured), *notes)


def _recorded(
    data: Path, columns: Columns, names: Mapping[str, str], max_rows: int, folder: Path
) -> tuple[list[Row], Labels | None]:
    """The inputs of a file, and the label of each as a number, where the file has labels."""
    sample = sampled(rows(data, columns, channels=checkpoint.channels_of(folder)), max_rows)
    if not sample:
        raise UserError(f"{data} holds no inputs")
    return sample, labels_of(sample, data, LabelNames(checkpoint.label_names(folder), names))


def _typical_length(model: BackedModel, values: Sequence[Any]) -> int:
    """A long length among the inputs (the 90th percentile): a profile for it promises too little, not too much."""
    lengths = model.encode(values[:MADE_UP]).lengths
    return 1 if lengths is None else int(np.quantile(lengths, 0.9))


def _counted(model: BackedModel, folder: Path, values: Sequence[Any]) -> ExitProfile:
    """Count exits by the network that is compared: with 8 bits, say, inputs leave elsewhere than with float32."""
    backends.make_ready(model, folder, [BlockRange(0, model.num_blocks, model.ramp_blocks)])
    return count_exits(model, block_times.in_batches(model, values)).exits


def _known_exits(name: str, exact: TorchModel) -> ExitProfile:
    ramps = [(rule.block, rule.survival) for rule in exact.ramps.rules.ramps]
    known = block_times.exits_from_rules(ramps, exact.num_blocks)
    if known is None:
        raise UserError(f"it is unknown where inputs of {name} leave: give --data")
    return known


def _drawn(inputs: block_times.SampleInputs, exits: ExitProfile) -> Source:
    random = np.random.default_rng(0)
    one = inputs.batch(1)
    return Source([drawn(one, exits, random) for _ in range(MADE_UP)])
