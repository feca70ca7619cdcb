"""What computes a network: torch or ONNX Runtime, each as it is or in CUDA graphs. `auto` takes the fastest."""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch

from deployments.backend_names import Backend
from deployments.dispatch.route import stops
from deployments.models.streams import of_its_own
from deployments.models.stretch import Stretch
from deployments.models.torch_model import TorchModel
from optimizer.plan import Plan
from profiles.errors import UserError
from profiles.files import load
from profiles.model import SplitModel

log = logging.getLogger(__name__)

INT8 = "int8"
EXPORTED = (torch.float32, torch.float16)


def on_backend(model: SplitModel, directory: str | Path, backend: Backend, *, int8: bool = False) -> SplitModel:
    """The network as the backend runs it. `directory` is where it was loaded from."""
    _warn_of_ramps(model, directory, INT8 if int8 else "float32")
    if int8 and backend not in ("onnx", "auto"):
        raise UserError("dtype int8 runs on ONNX Runtime only: use backend: onnx or auto")
    if backend == "auto" and not int8:
        return _fastest(model, directory)
    return served(model, "onnx" if int8 else backend, partial(_fingerprint, directory), int8)


def served(model: SplitModel, backend: str, fingerprint: Callable[[TorchModel], str], int8: bool = False) -> SplitModel:
    """By any backend but auto. The fingerprint tells weights from others, where graphs are kept by it."""
    if backend == "torch":
        return model
    if obstacle := _obstacle(model, backend, int8):
        raise UserError(obstacle)
    assert isinstance(model, TorchModel), "This is a bug: anything else is an obstacle."
    from deployments.models.graphs import GraphModel, TorchRecorder

    if backend == "graphs":
        return GraphModel(model, TorchRecorder(model))
    from deployments.models.onnx_graphs import OnnxRecorder
    from deployments.models.onnx_model import OnnxModel

    exported = OnnxModel(model, fingerprint(model), int8, records=backend == "onnx-graphs")
    return GraphModel(exported, OnnxRecorder(exported)) if backend == "onnx-graphs" else exported


def _fastest(model: SplitModel, directory: str | Path) -> SplitModel:
    """CUDA graphs are tried where there is CUDA."""
    others = [name for name in ("graphs", "onnx", "onnx-graphs") if not _obstacle(model, name)]
    if not others:
        return model
    from deployments.models.choice import choose

    assert isinstance(model, TorchModel), "This is a bug: anything else is an obstacle."
    mark = _fingerprint(directory, model)
    chosen = choose(model, {name: partial(served, model, name, lambda _: mark) for name in others}, directory, mark)
    return served(model, chosen.backend, lambda _: mark)


def _fingerprint(directory: str | Path, model: TorchModel) -> str:
    from deployments.models.onnx_pieces import fingerprint

    return fingerprint(directory, model)


def backend_of(model: SplitModel) -> str:
    return getattr(model, "backend", "torch")


def make_ready(model: SplitModel, directory: str | Path, wanted: Collection[Stretch]) -> None:
    """Have these exported before anybody asks. A network on torch is ready as it is."""
    if isinstance(model, TorchModel) and backend_of(model).startswith("onnx"):
        from deployments.models.choice import example

        model.prepare(wanted, example(model, directory))


def at_once(model: SplitModel, count: int) -> tuple[list[SplitModel], Callable[[], AbstractContextManager[None]]]:
    """The network for so many threads, and what each of them has to compute within."""
    if not isinstance(model, TorchModel):
        if count > 1:
            raise UserError(f"a {type(model).__name__} computes one launch at a time: leave out streams")
        return [model], nullcontext
    own = partial(of_its_own, model.device, torch.get_num_threads())
    within = nullcontext if count == 1 and _has_cuda(model) else own  # alone, it is in order with everything else
    return [model, *(model.twin() for _ in range(count - 1))], within


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


def _warn_of_ramps(model: SplitModel, directory: str | Path, served: str) -> None:
    """Ramps and thresholds are right for the features they were made from."""
    if not isinstance(model, TorchModel) or not model.ramp_blocks or model.ramps.rules.dtype == served:
        return
    made, again = model.ramps.rules.dtype, f"make others with 'isobatch prepare --dtype {served}'"
    log.warning("%s: its ramps were made for %s, in %s inputs leave elsewhere: %s", directory, made, served, again)


def _obstacle(model: SplitModel, backend: str, int8: bool = False) -> str | None:
    """Why this network cannot run on this backend, and what it can run on."""
    if not isinstance(model, TorchModel):
        return f"a {type(model).__name__} is no network on torch, which {backend} could take over: use backend: torch"
    device, dtype = model.device.type, str(model.dtype).removeprefix("torch.")
    if backend in ("graphs", "onnx-graphs") and not _has_cuda(model):
        instead = "torch" if backend == "graphs" else "onnx"
        return f"backend {backend} replays CUDA graphs, and there are none on {device}: use backend: {instead}"
    if backend != "graphs" and model.dtype not in EXPORTED:
        return f"ONNX Runtime does not run {dtype}: use float16 or float32, or backend: torch"
    if int8 and device != "cpu":
        return f"dtype int8 is for CPUs, not for {device}: use float16"
    return None


def _has_cuda(model: TorchModel) -> bool:
    return model.device.type == "cuda"
