"""Puts a network on the backend that was asked for (`auto`: the fastest), and prepares it for its plan.

What brings torch is imported inside the functions, as a network of a user's own may need none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast, overload

from deployments.dispatch.route import stops
from deployments.models.interface import BackedModel, BlockRange, Fingerprint, ServedModel, backend_named
from deployments.named import AUTO, BACKENDS
from optimizer.plan import Plan
from profiles.errors import UserError
from profiles.latency import LatencyTable
from profiles.model import SplitModel

if TYPE_CHECKING:
    from deployments.models.torch_model import TorchModel

log = logging.getLogger(__name__)

INT8 = "int8"
COMPILE_WITHIN_S = 10.0  # then no further shape is begun


@overload
def on_backend(model: BackedModel, directory: str | Path, backend: str, *, int8: bool = False) -> BackedModel: ...


@overload
def on_backend(model: ServedModel, directory: str | Path, backend: str, *, int8: bool = False) -> ServedModel: ...


@overload
def on_backend(model: SplitModel, directory: str | Path, backend: str, *, int8: bool = False) -> SplitModel: ...


def on_backend(model: SplitModel, directory: str | Path, backend: str, *, int8: bool = False) -> SplitModel:
    """The network as the backend runs it. `directory` is where it was loaded from."""
    if isinstance(model, ServedModel) and model.ramp_blocks:
        runs = INT8 if int8 else str(model.dtype).removeprefix("torch.")
        warn_of_ramps(directory, model.ramps.rules.dtype, runs, prepared=isinstance(model, BackedModel))
    return _on(model, directory, backend, int8)


def weights_dtype(dtype: str) -> str:
    """The precision in which weights are loaded: blocks of 8 bits are made from float32.

    >>> weights_dtype("bfloat16"), weights_dtype("int8")
    ('bfloat16', 'float32')
    """
    return "float32" if dtype == INT8 else dtype


def _on(model: SplitModel, directory: str | Path, backend: str, int8: bool) -> SplitModel:
    if isinstance(model, ServedModel):
        from deployments.models.cascade import Cascade

        if isinstance(model, Cascade):
            return model.on_backend(backend, lambda level, folder: cast(BackedModel, _on(level, folder, backend, int8)))
    if int8 and backend not in ("onnx", AUTO):
        raise UserError("dtype int8 runs on ONNX Runtime only: use backend: onnx or auto")
    name = "onnx" if int8 else backend
    if name == "torch":
        return model
    if isinstance(model, BackedModel):
        exact = model.exact
        return _fastest(exact, directory) if name == AUTO else served(exact, name, partial(_mark, directory), int8)
    if name == AUTO:
        return model
    what = type(model).__name__
    raise UserError(f"a {what} is no network on torch, which {name} could take over: use backend: torch")


def served(model: TorchModel, backend: str, fingerprint: Fingerprint, int8: bool = False) -> BackedModel:
    """The network as any backend but auto runs it."""
    chosen = backend_named(backend)
    if obstacle := chosen.obstacle(model, int8):
        raise UserError(obstacle)
    return chosen.serve(model, fingerprint, int8)


def _fastest(model: TorchModel, directory: str | Path) -> BackedModel:
    """The network on the fastest of the backends that `auto` may try and that can run it here."""
    tried = {name: backend for name in BACKENDS if (backend := backend_named(name)).tried_by_auto}
    others = [name for name, backend in tried.items() if not backend.obstacle(model, False)]
    if not others:
        return model
    from deployments.models.choice import choose

    mark = _mark(directory, model)
    chosen = choose(model, {name: partial(served, model, name, lambda _: mark) for name in others}, directory, mark)
    return served(model, chosen.backend, lambda _: mark)


def _mark(directory: str | Path, model: TorchModel) -> str:
    from deployments.models.onnx_pieces import fingerprint

    return fingerprint(directory, model)


def backend_of(model: SplitModel) -> str:
    """What computes it. A network of a user's own loader counts as torch's: no other backend takes it over."""
    return model.backend if isinstance(model, ServedModel) else "torch"


def make_ready(model: SplitModel, directory: str | Path, wanted: Collection[BlockRange]) -> None:
    """Have these stretches exported before anybody asks for them, where the backend exports."""
    if isinstance(model, ServedModel) and model.exports:
        from deployments.models.choice import example

        model.prepare(wanted, example(model, directory))


def compile_shapes(model: SplitModel, table: LatencyTable, clock: Callable[[], float] = time.perf_counter) -> None:
    """Compile what launches of all sizes of this table need, where oneDNN compiles for each number of tokens."""
    if not (table.length and isinstance(model, ServedModel) and model.backend == "torch"):
        return
    from deployments.models.torch_model import TorchModel

    if isinstance(model, TorchModel):
        model.compile_shapes(table.largest, table.largest * table.length, COMPILE_WITHIN_S, clock)


def for_threads(model: SplitModel, count: int) -> tuple[list[SplitModel], Callable[[], AbstractContextManager[None]]]:
    """The network once for each of so many threads, and the context in which each of them must compute."""
    if not isinstance(model, ServedModel):
        if count > 1:
            raise UserError(f"a {type(model).__name__} computes one launch at a time: leave out streams")
        return [model], nullcontext
    import torch

    from deployments.models.streams import beside_others

    own = partial(beside_others, model.device, torch.get_num_threads())
    alone_on_cuda = count == 1 and model.device.type == "cuda"  # where it is in order with everything else
    within = nullcontext if alone_on_cuda else own
    return [model, *(model.twin() for _ in range(count - 1))], within


def planned(model: SplitModel, plan: Plan, kind: str) -> list[BlockRange]:
    """The stretches of a plan that devices of this kind run."""
    return [
        stretch
        for pipeline in plan.pipelines
        for split in pipeline.splits
        if pipeline.placement_of(split).kind == kind
        for stretch in stretches(model, split.start, split.stop, pipeline.ramps)
    ]


def stretches(model: SplitModel, start: int, stop: int, ramps: Collection[int]) -> Iterator[BlockRange]:
    """The stretches that a replica runs in turn, from active ramp to active ramp, with all ramps the policy needs."""
    observed = model.ramps.observed(ramps) if isinstance(model, ServedModel) else frozenset(ramps)
    at = start
    for end in stops(start, stop, ramps):
        yield BlockRange(at, end, tuple(sorted(ramp for ramp in observed if at <= ramp < end)))
        at = end


def warn_of_another(table: LatencyTable, served: str) -> None:
    """Warn when the plan was made from the times of another backend than the one that serves."""
    if table.backend and table.backend != served:
        again = f"measure again with 'isobatch profile --backend {served}'"
        log.warning(
            "the times of %s are %s on %s, but %s serves, at other times: %s",
            table.kind,
            table.origin,
            table.backend,
            served,
            again,
        )


def warn_of_ramps(directory: str | Path, made: str, runs: str, prepared: bool = True) -> None:
    """Warn when the ramps were made for another precision than the one that runs, where features are others."""
    if made == runs:
        return
    remedy = f"use dtype {made}" + (f", or make others with 'isobatch prepare --dtype {runs}'" if prepared else "")
    log.warning("%s: its ramps were made for %s, in %s inputs leave elsewhere: %s", directory, made, runs, remedy)
