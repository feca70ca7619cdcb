"""The linear layers of a network, each as a product of matrices, and those that read the same rows as one."""

from collections.abc import Sequence as Listed
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS = 32  # weights are packed for products with about this number of rows, as in a usual launch
# torch's checks whether the processor computes in half precision.
HALVES = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


class Product:
    """Linear layers that read the same rows, as one product.

    On a processor, weights are packed once in the order in which oneDNN reads them, as torch's compiler does: otherwise
    each call packs them again.
    """

    def __init__(self, layers: Listed[nn.Linear]) -> None:
        first, *others = layers
        self.weight: Tensor = torch.cat([layer.weight.data for layer in layers]) if others else first.weight.data
        self._bias: Tensor | None = None
        if first.bias is not None:
            self._bias = torch.cat([layer.bias.data for layer in layers])
        self._packed = can_pack(self.weight)
        if self._packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, ROWS)

    def __call__(self, rows: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        if self._packed:
            outputs: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self._bias, "none", [], "")
            return outputs[..., start:stop]
        return functional.linear(rows, self.weight[start:stop], None if self._bias is None else self._bias[start:stop])


def can_pack(weight: Tensor) -> bool:
    """Whether products with this weight are quicker if it is packed."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.float32:
        return True
    check = HALVES.get(weight.dtype)
    return check is not None and bool(getattr(torch.ops.mkldnn, check)())


class ProductPart(nn.Module):
    """A layer whose weights are in a product, of which it computes its part."""

    def __init__(self, product: Product, start: int, stop: int) -> None:
        super().__init__()
        self._product, self._start, self._stop = product, start, stop

    @property
    def weight(self) -> Tensor:
        """The weights of the product, for their type."""
        return self._product.weight

    def forward(self, rows: Tensor) -> Tensor:
        return self._product(rows, self._start, self._stop)


class PackedLinear(nn.Linear):
    """A linear layer that packs its weight when it first runs: a replica reads only the weights of its own blocks."""

    _packing = Lock()
    _product: Product | None = None

    def forward(self, rows: Tensor) -> Tensor:
        return (self._product or self.pack())(rows)

    def pack(self) -> Product:
        with self._packing, torch.inference_mode(False):  # threads that compute at the same time share the weights
            if self._product is None:
                self._product = Product([self])
                self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)  # its size, without its numbers
        return self._product


def pack_when_used(network: nn.Module) -> list[PackedLinear]:
    """Let each linear layer pack its weight when it first runs, and return these layers. A weight that an embedding
    shares stays as it is: it would be kept twice."""
    embedded = {module.weight for module in network.modules() if isinstance(module, nn.Embedding)}
    layers: list[Any] = [
        layer
        for layer in network.modules()
        if type(layer) is nn.Linear and layer.weight not in embedded and can_pack(layer.weight)
    ]
    for layer in layers:
        layer.__class__ = PackedLinear
    return layers


def product_of(owner: nn.Module, *names: str) -> Product:
    """The layers of these names as one product. From now on they are parts of it, so that no weight is kept twice."""
    layers = [getattr(owner, name) for name in names]
    product, start = Product(layers), 0
    for name, layer in zip(names, layers, strict=True):
        setattr(owner, name, ProductPart(product, start, start + layer.out_features))
        start += layer.out_features
    return product
