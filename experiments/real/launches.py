"""Measures the cost of launches beside their arithmetic, in one process: with empty layers, and with new sizes."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from experiments.shared.real_network import BLOCKS, LABELS, LARGEST_BATCH, WIDTH, WORDS, checkpoint, texts
from isobatch.deployments.models import load
from isobatch.deployments.models.backends import compute_with
from isobatch.deployments.models.spans import Spans
from isobatch.deployments.models.torch_model import TorchModel
from isobatch.deployments.replica.split import SplitReplica
from isobatch.deployments.transport.connection import frame
from isobatch.deployments.transport.orders import NumberedReply, Order
from isobatch.deployments.transport.packed import pack
from isobatch.profiles.model import Batch

INPUTS = 31
WARM, TIMES = 20, 300
STOP = 4  # the block behind whose ramp a launch stops
SHAPES, LONGEST = 500, 24  # launches of different token counts, and words of a text
SPLIT = 1  # blocks of a launch


def figures(dtype: str) -> dict[str, float]:
    compute_with(1)
    model = load(str(checkpoint()), dtype=dtype)
    return _new_shapes(model) | _beside_layers(load(str(checkpoint()), dtype=dtype))


class _Chance(nn.Module):
    """A ramp that computes nothing: random numbers, drawn before, decide which inputs leave."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn, self._next = torch.rand(INPUTS * TIMES, len(LABELS)), 0

    def forward(self, pooled: Tensor) -> Tensor:
        self._next = (self._next + INPUTS) % (len(self._drawn) - INPUTS)
        return self._drawn[self._next : self._next + len(pooled)]


def _beside_layers(model: TorchModel) -> dict[str, float]:
    """Processor time of a launch and of a stop with empty layers, including merging, packing and messages."""
    hidden = torch.zeros(LARGEST_BATCH * (LONGEST + 2), WIDTH, dtype=model.dtype)

    def first(hidden: Tensor, spans: Spans | None) -> Tensor:
        return hidden[: spans.count if spans else len(hidden), :2]

    model.anatomy = replace(
        model.anatomy,
        blocks=[lambda hidden, spans: hidden] * BLOCKS,
        embed=lambda arrays: hidden[: len(arrays["input_ids"])],
        pool=first,
        head=lambda hidden: hidden.new_zeros(len(hidden), len(LABELS)),
    )
    model.ramps = replace(model.ramps, heads={block: _Chance() for block in model.ramps.heads})
    replica = SplitReplica(model)
    parts = tuple(pack(model.encode([text])) for text in texts(INPUTS))
    launch_ms, stopping_ms = (
        _ms(partial(_run, replica, Order(BLOCKS, ramps, parts))) for ramps in (frozenset[int](), frozenset({STOP}))
    )
    ramp_ms = _ms(partial(_decide, model, first(hidden[:INPUTS], None)))
    return {"launch_beside_layers_ms": launch_ms, "stop_beside_layers_ms": stopping_ms - launch_ms - ramp_ms}


def _run(replica: SplitReplica, order: Order) -> None:
    """Run a launch as a replica does, up to its messages."""
    for reply in replica.run(order):
        frame(NumberedReply(0, reply), [])


@torch.inference_mode()
def _decide(model: TorchModel, pooled: Tensor) -> None:
    """The work of a ramp that is not part of the stop behind it: its head and its policy."""
    model.ramps.decide(STOP, model.ramps.logits(STOP, pooled), torch.zeros(len(pooled), 0))


def _ms(call: Callable[[], object]) -> float:
    """The median of a call's processor time in milliseconds."""
    result = []
    for number in range(WARM + TIMES):
        began_s = time.thread_time()
        call()
        if number >= WARM:
            result.append(time.thread_time() - began_s)
    return 1e3 * median(result)


def _new_shapes(model: TorchModel) -> dict[str, float]:
    """The time of launches with new token counts, over that of the same launches repeated."""
    drawn = np.random.default_rng(5)
    model.compile_shapes(LARGEST_BATCH, LARGEST_BATCH * (LONGEST + 2), 60.0, time.perf_counter)
    counts = drawn.permutation(np.arange(SHAPES) + LARGEST_BATCH)
    batches = [model.encode(_texts_of(int(count), drawn)) for count in counts]
    first, again = zip(*((_took_s(model, batch), _took_s(model, batch)) for batch in batches), strict=True)
    return {"new_shape_over_known": sum(first) / sum(again)}


def _texts_of(tokens: int, drawn: np.random.Generator) -> list[str]:
    """Texts with this number of tokens in total."""
    lengths = list[int]()
    while tokens > 0:
        lengths.append(min(tokens, int(drawn.integers(3, LONGEST + 2))))
        tokens -= lengths[-1]
    words = (drawn.choice(WORDS, max(1, length - 2)) for length in lengths)
    return [" ".join(each) for each in words]


def _took_s(model: TorchModel, batch: Batch) -> float:
    assert batch.lengths is not None, "This is a bug: texts have lengths."
    batch = replace(batch, lengths=batch.lengths.copy())  # a launch that continues with the same lengths is faster
    began_s = time.thread_time()
    model.run(batch, SPLIT, ())
    return time.thread_time() - began_s
