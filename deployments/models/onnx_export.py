"""From a stretch of a network on torch to an ONNX graph: its blocks fused into one, with ramps and head inside.

Torch's TorchScript exporter is used, not the newer one: on BERT, ViT and ResNet it took half as long or less, its
graphs ran as fast or faster, and it needs `onnx` only.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from deployments.models.interface import BlockRange, RangeOutput
from deployments.models.spans import PLACES, POSITIONS, MaskOf, Spans, example, is_of_spans

OPSET = 17
HIDDEN, AFTER, HEAD = "hidden", "after", "head"
Compute = Callable[[BlockRange, Mapping[str, Tensor], Spans | None, MaskOf], RangeOutput]


_one_at_a_time = Lock()  # the exporter keeps its state in globals, and so does the hook that notes modules


def ramp_name(block: int) -> str:
    return f"ramp{block}"


def export(compute: Compute, stretch: BlockRange, inputs: Mapping[str, Tensor], path: Path) -> None:
    """Write the graph. `inputs` are an example of what it reads: how many inputs and tokens may vary, nothing else."""
    with _one_at_a_time:
        _export(compute, stretch, inputs, path)


def _export(compute: Compute, stretch: BlockRange, inputs: Mapping[str, Tensor], path: Path) -> None:
    inputs = _unspecial(inputs)
    with torch.no_grad(), _modules() as modules:
        passed = _call(compute, stretch, inputs)
    outputs = flat(passed)
    traced = _Traced(compute, stretch, list(inputs), list(modules))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing and of this exporter's age
        torch.onnx.export(
            traced,
            tuple(inputs.values()),
            path,
            dynamo=False,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=_free_axes({**inputs, **outputs}, texts=_reads_texts(inputs)),
        )


def flat(passed: RangeOutput) -> dict[str, Tensor]:
    """What a graph gives, by name."""
    hidden = {} if passed.hidden is None else {AFTER: passed.hidden}
    head = {} if passed.head is None else {HEAD: passed.head}
    return hidden | {ramp_name(block): logits for block, logits in passed.ramps.items()} | head


class _Traced(nn.Module):
    """Holds the modules that run, so that their weights become the graph's own instead of constants in its nodes."""

    def __init__(self, compute: Compute, stretch: BlockRange, names: list[str], modules: list[nn.Module]) -> None:
        super().__init__()
        self.owned = nn.ModuleList(modules)
        self._compute, self._stretch, self._names = compute, stretch, names
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(zip(self._names, tensors, strict=True))
        return tuple(flat(_call(self._compute, self._stretch, inputs)).values())


def _call(compute: Compute, stretch: BlockRange, inputs: Mapping[str, Tensor]) -> RangeOutput:
    return compute(stretch, *as_given(inputs), _added)


def as_read(arrays: Mapping[str, Tensor], spans: Spans | None) -> Mapping[str, Tensor]:
    """What a graph reads, by name."""
    return arrays if spans is None else {**arrays, **spans.tensors()}


def as_given(inputs: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Spans | None]:
    """The inverse of `as_read`."""
    arrays = {name: tensor for name, tensor in inputs.items() if not is_of_spans(name)}
    return arrays, Spans.of(inputs) if _reads_texts(inputs) else None


def _reads_texts(inputs: Mapping[str, Tensor]) -> bool:
    return any(is_of_spans(name) for name in inputs)


def _unspecial(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """An example in which nothing looks special to the tracer: no batch of one, no band of nobody."""
    if not _reads_texts(inputs):
        return {name: torch.cat((tensor, tensor)) for name, tensor in inputs.items()}
    arrays, _ = as_given(inputs)
    count = sum(name.startswith(PLACES) for name in inputs)
    spans, tokens = example(next(iter(arrays.values())).device, count)
    return as_read({name: torch.cat([each[:1]] * tokens) for name, each in arrays.items()}, spans)


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to be added to the scores: of one that says yes or no, the exporter makes float32 in any network."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)


def _free_axes(tensors: Mapping[str, Tensor], texts: bool) -> dict[str, dict[int, str]]:
    """Axis 0 counts tokens where one row is a token, else inputs; pictures may have any height and width."""
    axes, tokens = {}, len(tensors[POSITIONS]) if texts else None
    for name, tensor in tensors.items():
        axes[name] = {0: "tokens" if len(tensor) == tokens else "inputs"}
        if is_of_spans(name) and tensor.ndim == 2:
            axes[name] = {0: f"inputs{name[-1]}", 1: f"longest{name[-1]}"}
        elif tensor.ndim == 4:
            axes[name] |= {2: f"{name}_height", 3: f"{name}_width"}
    return axes


@contextmanager
def _modules() -> Iterator[dict[nn.Module, None]]:
    """The modules that run meanwhile, each once, in order."""
    found: dict[nn.Module, None] = {}

    def note(module: nn.Module, *_: Any) -> None:
        found[module] = None

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        yield found
    finally:
        hook.remove()
