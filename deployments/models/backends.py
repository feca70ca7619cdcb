"""What computes a network: torch, as it is or in CUDA graphs, or ONNX Runtime. `auto` takes torch or ONNX Runtime."""

import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

import torch

from deployments.dispatch.route import stops
from deployments.models.stretch import Stretch
from deployments.models.torch_model import TorchModel
from optimizer.plan import Plan
from profiles.errors import UserError
from profiles.files import load
from profiles.model import SplitModel

log = logging.getLogger(__name__)

Backend = Literal["auto", "torch", "graphs", "onnx"]
INT8 = "int8"
EXPORTED = (torch.float32, torch.float16)


def on_backend(model: SplitModel, directory: str | Path, backend: Backend, *, int8: bool = False) -> SplitModel:
    """The network as the backend runs it. `directory` is where it was loaded from."""
    _warn_of_ramps(model, directory, INT8 if int8 else "float32")
    if backend in ("torch", "graphs"):
        if int8:
            raise UserError("dtype int8 runs on ONNX Runtime only: use backend: onnx or auto")
        return model if backend == "torch" else _replayed(model)
    if obstacle := _obstacle(model, int8):
        if backend == "onnx" or int8:
            raise UserError(obstacle)
        return model
    from deployments.models.onnx_choice import choose
    from deployments.models.onnx_model import OnnxModel
    from deployments.models.onnx_pieces import fingerprint

    assert isinstance(model, TorchModel), "This is a bug: anything else is an obstacle."
    served = OnnxModel(model, fingerprint(directory, model), int8)
    return model if backend == "auto" and not int8 and choose(served, directory).backend == "torch" else served


def backend_of(model: SplitModel) -> str:
    return getattr(model, "backend", "torch")


def make_ready(model: SplitModel, directory: str | Path, wanted: Collection[Stretch]) -> None:
    """Have these exported before anybody asks. A network on torch is ready as it is."""
    if backend_of(model) == "onnx":
        from deployments.models.onnx_choice import example
        from deployments.models.onnx_model import OnnxModel

        assert isinstance(model, OnnxModel)
        model.prepare(wanted, example(model, directory))


def planned(model: SplitModel, plan: Plan, kind: str) -> list[Stretch]:
    """What devices of this kind run of a plan."""
    return [
        stretch
        for lane in plan.lanes
        for split in lane.splits
        if lane.placement_of(split).kind == kind
        for stretch in stretches(model, split.start, split.stop, lane.ramps)
    ]


def stretches(model: SplitModel, start: int, stop: int, ramps: Collection[int]) -> Iterator[Stretch]:
    """What a replica runs at a time: from one active ramp to the next, looking at those that its policy must see."""
    observed = model.ramps.observed(ramps) if isinstance(model, TorchModel) else frozenset(ramps)
    at = start
    for end in stops(start, stop, ramps):
        yield Stretch(at, end, tuple(sorted(ramp for ramp in observed if at <= ramp < end)))
        at = end


def warn_of_another(profile: Path, kind: str, served: str) -> None:
    """A plan is only as right as the times it was made from."""
    measured = load(profile).table(kind).backend
    if measured and measured != served:
        again = f"measure again with 'isobatch profile --backend {served}'"
        log.warning(
            "%s: %s was measured on %s, but %s serves, at other times: %s", profile, kind, measured, served, again
        )


def _replayed(model: SplitModel) -> SplitModel:
    from deployments.models.graphs import GraphModel, on_cuda

    if not isinstance(model, TorchModel) or model.device.type != "cuda":
        where = f"on {model.device.type}" if isinstance(model, TorchModel) else f"for a {type(model).__name__}"
        raise UserError(f"backend graphs replays CUDA graphs, and there are none {where}: use backend: torch")
    return GraphModel(model, on_cuda)


def _warn_of_ramps(model: SplitModel, directory: str | Path, served: str) -> None:
    """Ramps and thresholds are right for the features they were made from."""
    if not isinstance(model, TorchModel) or not model.ramp_blocks or model.ramps.rules.dtype == served:
        return
    made, again = model.ramps.rules.dtype, f"make others with 'isobatch prepare --dtype {served}'"
    log.warning("%s: its ramps were made for %s, in %s inputs leave elsewhere: %s", directory, made, served, again)


def _obstacle(model: SplitModel, int8: bool) -> str | None:
    """Why this network cannot run on ONNX Runtime, and what it can run on."""
    if not isinstance(model, TorchModel):
        return (
            f"a {type(model).__name__} is no network on torch, which ONNX Runtime could take over: use backend: torch"
        )
    if model.dtype not in EXPORTED:
        dtype = str(model.dtype).removeprefix("torch.")
        return f"ONNX Runtime does not run {dtype}: use float16 or float32, or backend: torch"
    if int8 and model.device.type != "cpu":
        return f"dtype int8 is for CPUs, not for {model.device.type}: use float16"
    return None
