"""Moves a network to the requested backend (`auto`: the fastest), and prepares it for its plan.

Modules that bring torch are imported inside the functions, as a user's own network may not need torch.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from isobatch.deployments.dispatch.route import stops
from isobatch.deployments.models.interface import BackedModel, Fingerprint, backend_named
from isobatch.deployments.models.served_model import BlockRange, ServedModel
from isobatch.deployments.named import AUTO, BACKENDS, INT8
from isobatch.optimizer.plan import Plan, Split
from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import LatencyTable
from isobatch.profiles.model import SplitModel

if TYPE_CHECKING:
    from isobatch.deployments.models.torch_model import TorchModel

log = logging.getLogger(__name__)
Network = TypeVar("Network", BackedModel, ServedModel, SplitModel)

# A replica starts no further compilation after this many seconds: shapes left over are compiled when they occur.
COMPILE_WITHIN_S = 10.0
# glibc's options: from these sizes on, in bytes, freed memory goes back to the kernel, at the heap's end or by itself.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 30


def on_backend(model: Network, directory: str | Path, backend: str, *, int8: bool = False) -> Network:
    """The network on this backend. `directory` is the one that it was loaded from."""
    if isinstance(model, ServedModel) and model.ramp_blocks:
        dtype = INT8 if int8 else str(model.dtype).removeprefix("torch.")
        warn_of_ramp_dtype(directory, model.ramps.rules.dtype, dtype, prepared=isinstance(model, BackedModel))
    moved: Network = _moved(model, directory, backend, int8)
    return moved


def weights_dtype(dtype: str) -> str:
    """The precision in which weights are loaded: 8-bit blocks are made from float32.

    >>> weights_dtype("bfloat16"), weights_dtype("int8")
    ('bfloat16', 'float32')
    """
    return "float32" if dtype == INT8 else dtype


def _moved(model: SplitModel, directory: str | Path, backend: str, int8: bool) -> Any:
    """A network of the same kind."""
    if isinstance(model, ServedModel):
        from isobatch.deployments.models.cascade import Cascade

        if isinstance(model, Cascade):
            return model.on_backend(backend, lambda level, folder: _moved(level, folder, backend, int8))
    if int8 and backend not in ("onnx", AUTO):
        raise UserError("dtype int8 runs on ONNX Runtime only: use backend: onnx or auto")
    name = "onnx" if int8 else backend
    if name == "torch":
        return model
    if isinstance(model, BackedModel):
        if name == AUTO:
            return _fastest(model.exact, directory)
        return served(model.exact, name, partial(_fingerprint, directory), int8)
    if name == AUTO:
        return model
    raise UserError(f"backend {name} runs networks on torch only, not a {type(model).__name__}: use backend: torch")


def served(model: TorchModel, backend: str, fingerprint: Fingerprint, int8: bool = False) -> BackedModel:
    """The network on any backend but `auto`."""
    chosen = backend_named(backend)
    if obstacle := chosen.obstacle(model, int8):
        raise UserError(obstacle)
    return chosen.serve(model, fingerprint, int8)


def _fastest(model: TorchModel, directory: str | Path) -> BackedModel:
    """The network on the fastest backend that `auto` may try and that can run the network on this machine."""
    candidates = {name: backend for name in BACKENDS if (backend := backend_named(name)).tried_by_auto}
    others = [name for name, backend in candidates.items() if not backend.obstacle(model, False)]
    if not others:
        return model
    from isobatch.deployments.models.choice import choose

    weights_hash = _fingerprint(directory, model)
    makers = {name: partial(served, model, name, lambda _: weights_hash) for name in others}
    return served(model, choose(model, makers, directory, weights_hash), lambda _: weights_hash)


def _fingerprint(directory: str | Path, model: TorchModel) -> str:
    from isobatch.deployments.models.onnx_model import fingerprint

    return fingerprint(directory, model)


def backend_of(model: SplitModel) -> str:
    """The name of the network's backend: "torch" for a network of a user's own loader, which no other backend runs."""
    return model.backend if isinstance(model, ServedModel) else "torch"


def make_ready(model: SplitModel, directory: str | Path, wanted: Collection[BlockRange]) -> None:
    """Export these block ranges before a request needs them, if the backend exports at all."""
    if isinstance(model, ServedModel) and model.exports:
        from isobatch.deployments.models.checkpoint import example

        model.prepare(wanted, example(model, directory))


def warm_ups(
    model: SplitModel, directory: str | Path, plan: Plan, kind: str, tokens: int | None
) -> Iterator[tuple[Hashable, int, Callable[[], None]]]:
    """Calls that run a full batch of each split of the plan on devices of this kind, each with what it computes and the
    size of the batch. `tokens`: those of a text that counts as one, where the plan does not say it.

    After that no request waits for what a device does only once: load weights and kernels, allocate memory, record
    graphs.
    """
    if not isinstance(model, ServedModel):
        return
    from isobatch.deployments.models.cascade import Cascade
    from isobatch.deployments.models.checkpoint import example
    from isobatch.deployments.models.torch_model import TorchModel

    if not isinstance(model, TorchModel | Cascade):
        return
    network, length = model, plan.length or tokens
    for pipeline, split in _splits_on(plan, kind):
        ramps = tuple(ramp for ramp in pipeline.ramps if split.start <= ramp < split.stop)

        def run(split: Split = split, ramps: tuple[int, ...] = ramps) -> None:
            batch = example(network, directory, split.batch_size, length)
            network.warm_up(split.start, stops(split.start, split.stop, ramps), ramps, batch)

        # Exported graphs have their ramps inside, and recorded ones are of one shape.
        own = {"torch": (), "onnx": ramps}.get(network.backend, (ramps, split.batch_size))
        yield (split.start, split.stop, length, own), split.batch_size, run


def needs_one_warm_up(model: SplitModel) -> bool:
    """Whether one warm-up is enough for all plans: a CPU on torch then has all weights and, by `compile_shapes`, all
    kernels."""
    return (
        isinstance(model, ServedModel) and model.device.type == "cpu" and model.backend == "torch" and not model.exports
    )


def compute_with(threads: int) -> None:
    """Let torch compute on this many threads, as a replica with as many cores does."""
    import torch

    torch.set_num_threads(threads)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let this process keep memory that a launch frees, so that the next launch need not get it again from the kernel,
    page by page and filled with zeros: a tenth of the time of a large launch. The process keeps what its largest launch
    took. Other C libraries than glibc have no such options, and are left as they are.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option in (TRIM_THRESHOLD, MMAP_THRESHOLD):
            libc.mallopt(option, KEPT_BYTES)


def compile_shapes(model: SplitModel, table: LatencyTable, clock: Callable[[], float] = time.perf_counter) -> None:
    """Compile the shapes of launches of all sizes of this table, as oneDNN compiles for each number of tokens."""
    if not (table.length and isinstance(model, ServedModel) and model.backend == "torch"):
        return
    from isobatch.deployments.models.torch_model import TorchModel

    if isinstance(model, TorchModel):
        model.compile_shapes(table.largest, table.largest * table.length, COMPILE_WITHIN_S, clock)


def planned_block_ranges(model: SplitModel, plan: Plan, kind: str) -> list[BlockRange]:
    """The block ranges of a plan that devices of this kind run."""
    return [
        block_range
        for pipeline, split in _splits_on(plan, kind)
        for block_range in block_ranges(model, split.start, split.stop, pipeline.ramps)
    ]


def _splits_on(plan: Plan, kind: str) -> Iterator[tuple[Plan, Split]]:
    """The splits that devices of this kind run, each with its pipeline."""
    for pipeline in plan.pipelines:
        for split in pipeline.splits:
            if pipeline.placement_of(split).kind == kind:
                yield pipeline, split


def block_ranges(model: SplitModel, start: int, stop: int, ramps: Collection[int]) -> Iterator[BlockRange]:
    """The ranges that a replica runs in turn, from active ramp to active ramp, with all ramps that the policy needs."""
    observed = model.ramps.observed(ramps) if isinstance(model, ServedModel) else frozenset(ramps)
    begin = start
    for end in stops(start, stop, ramps):
        yield BlockRange(begin, end, tuple(sorted(ramp for ramp in observed if begin <= ramp < end)))
        begin = end


def warn_of_other_times(table: LatencyTable, backend: str, dtype: str) -> None:
    """Warn when the plan was made from the times of another backend or precision than the one that serves."""
    for name, timed, served in (("backend", table.backend, backend), ("dtype", table.dtype, dtype)):
        if timed and timed != served:
            log.warning(
                f"the times of {table.kind} are {table.origin} with {name} {timed}, but {served} serves, and takes "
                f"other times: measure again with 'isobatch profile --{name} {served}'"
            )


def warn_of_ramp_dtype(directory: str | Path, ramps: str, blocks: str, prepared: bool = True) -> None:
    """Warn when the ramps were made for another precision than that of the blocks, which changes their features."""
    if ramps == blocks:
        return
    remedy = f", or make new ramps with 'isobatch prepare --dtype {blocks}'" if prepared else ""
    made_for = f"{directory}: its ramps were made for {ramps}; in {blocks} inputs leave at other ramps"
    log.warning(f"{made_for}: use dtype {ramps}{remedy}")
