"""Runs the network of transformers on texts padded to the longest, as the baseline.

The same code finds which inputs leave, so that both systems have its cost.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from isobatch.deployments.models.onnx_export import OPSET, in_8_bits
from isobatch.deployments.models.onnx_session import Session
from isobatch.deployments.models.served_model import BlockRange, RangeOutput
from isobatch.deployments.models.spans import Spans
from isobatch.deployments.models.torch_model import TorchModel

Logits = Callable[[Tensor, Tensor], Tensor]  # of padded tokens and a mask of real tokens


class PaddedModel(TorchModel):
    """A network that runs as a whole, on padded texts."""

    def __init__(self, inner: TorchModel, logits: Logits) -> None:
        super().__init__(inner.anatomy, inner.encoder, inner.ramps, inner.labels, inner.device, inner.dtype)
        self._logits = logits
        self._present = torch.empty(0)

    def _spans(self, lengths: NDArray[np.int64]) -> Spans:
        """Padding needs only the mask."""
        self._present = torch.arange(int(lengths.max())) < torch.from_numpy(lengths).unsqueeze(1)
        return Spans(len(lengths), self._present, self._present)

    def through(self, block_range: BlockRange, arrays: Mapping[str, Tensor], spans: Spans | None) -> RangeOutput:
        ids = torch.zeros(self._present.shape, dtype=torch.int64)
        ids[self._present] = arrays["input_ids"]
        return RangeOutput(None, {}, self._logits(ids, self._present))


def on_torch(network: Any) -> Logits:
    return lambda ids, present: network(input_ids=ids, attention_mask=present.long()).logits


def on_onnx(network: Any, folder: Path, int8: bool) -> Logits:
    path = folder / f"{'int8' if int8 else 'float32'}.onnx"
    _export(network, path)
    if int8:
        in_8_bits(path)
    session = Session(path, torch.device("cpu"))
    return lambda ids, present: session.run({"ids": ids, "present": present})["logits"]


class _Masked(nn.Module):
    """The network layer by layer with an additive mask, as isobatch exported it with padding."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor, present: Tensor) -> Tensor:
        base = self.network.bert
        hidden = base.embeddings(input_ids=ids, token_type_ids=torch.zeros_like(ids))
        visible = present[:, None, None, :]
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        for layer in base.encoder.layer:
            hidden = layer(hidden, mask)
        logits: Tensor = self.network.classifier(base.pooler(hidden))
        return logits


def _export(network: Any, path: Path) -> None:
    axes = {0: "inputs", 1: "tokens"}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tracing and this old exporter
        torch.onnx.export(
            _Masked(network).eval(),
            (torch.ones(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.bool)),
            path,
            dynamo=False,
            opset_version=OPSET,
            input_names=["ids", "present"],
            output_names=["logits"],
            dynamic_axes={"ids": axes, "present": axes, "logits": {0: "inputs"}},
        )
