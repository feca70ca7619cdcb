"""What every network that our loader gives offers, the block ranges that it runs, and the backends that compute it.

Nothing is imported here that brings torch: a replica asks whether a network is a `ServedModel`. A user's own network,
in numpy for instance, need not be one.

An application chooses a backend by its name or its import path (`backend:`). To add one, write a file with an object
that is a `Backend`; a line in `isobatch.deployments.named.BACKENDS` gives it a short name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from isobatch.deployments.named import backend_path
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import Batch, SplitModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from isobatch.deployments.models.ramps import Ramps
    from isobatch.deployments.models.torch_model import TorchModel


@dataclass(frozen=True, order=True)
class BlockRange:
    """Blocks `start .. stop - 1`, and the ramps among them whose logits are computed."""

    start: int
    stop: int
    ramps: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.start}-{self.stop}" + "".join(f"r{ramp}" for ramp in self.ramps)

    def covers(self, wanted: BlockRange) -> bool:
        """Whether this range can run as a part of the wanted one, and computes all wanted ramps inside it.

        >>> BlockRange(2, 4, (2, 3)).covers(BlockRange(0, 6, (3,))), BlockRange(2, 4).covers(BlockRange(0, 6, (3,)))
        (True, False)
        """
        inside = {ramp for ramp in wanted.ramps if self.start <= ramp < self.stop}
        return wanted.start <= self.start and self.stop <= wanted.stop and inside <= set(self.ramps)


@dataclass(frozen=True)
class RangeOutput:
    """The outcome of a block range: calibrated logits of its ramps by block, and the hidden state after it.

    A range that ends the network has the head's logits in place of a hidden state.
    """

    hidden: Tensor | None
    ramps: Mapping[int, Tensor]
    head: Tensor | None


@runtime_checkable
class ServedModel(SplitModel, Protocol):
    """A network that our loader gives: one checkpoint on any backend, or a cascade of several.

    A user's own loader may give any other `SplitModel`.
    """

    @property
    def backend(self) -> str:
        """The name of the backend that computes the network."""

    @property
    def exports(self) -> bool:
        """Whether block ranges must be exported before they run at full speed, so that `prepare` should come early."""

    @property
    def labels(self) -> tuple[str, ...]: ...

    @property
    def reads_text(self) -> bool: ...

    @property
    def ramps(self) -> Ramps: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def exact(self) -> SplitModel:
        """The network on torch, whose modules hold the weights."""

    def prepare(self, block_ranges: Iterable[BlockRange], example: Batch) -> None:
        """Export these block ranges now, before a request needs them. The example stands before block 0."""


@runtime_checkable
class BackedModel(ServedModel, Protocol):
    """One network that torch has loaded, on any backend."""

    @property
    def exact(self) -> TorchModel:
        """The network on torch, whose modules hold the weights."""

    def features(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """What ramps are trained on: the pooled state after each block but the last, and the network's own logits."""


Fingerprint = Callable[["TorchModel"], str]  # a hash of a network's weights: exported graphs are stored under it


@dataclass(frozen=True)
class Backend:
    """One way to compute a network that torch has loaded.

    `serve`: the same network with the same answers, with 8-bit blocks if the last argument says so. `obstacle`: one
    line on why that cannot be, and which backend can; None if it can. `tried_by_auto`: `backend: auto` measures it.
    """

    serve: Callable[[TorchModel, Fingerprint, bool], BackedModel]
    obstacle: Callable[[TorchModel, bool], str | None] = lambda model, int8: None
    tried_by_auto: bool = True


EXTRA = ": pip install 'isobatch[cpu]', or with a GPU 'isobatch[gpu]'"
TORCH = Backend(lambda model, fingerprint, int8: model, tried_by_auto=False)  # `auto` measures the others against it


def backend_named(name: str) -> Backend:
    """One of `isobatch.deployments.named.BACKENDS`, or a user's own backend by its import path `module:object`.

    >>> backend_named("torch").tried_by_auto
    False
    """
    path = backend_path(name)
    try:
        return resolve_name(path)  # type: ignore[no-any-return]
    except (ImportError, AttributeError, ValueError) as error:
        remedy = EXTRA if getattr(error, "name", None) in ("onnx", "onnxruntime") else ""
        raise UserError(f"backend {name!r} cannot be imported: {error}{remedy}") from error
