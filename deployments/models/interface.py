"""The interface between networks and backends: a backend's inputs and outputs, and how it is named.

An application chooses a backend by its name or its import path (`backend:`). To add one, write a file with an object
that is a `Backend`; a line in `isobatch.deployments.named.BACKENDS` gives it a short name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from isobatch.deployments.models.served_model import ServedModel
from isobatch.deployments.named import backend_path
from isobatch.profiles.errors import UserError
from isobatch.profiles.model import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from isobatch.deployments.models.torch_model import TorchModel


@runtime_checkable
class BackedModel(ServedModel, Protocol):
    """One network that torch has loaded, on any backend."""

    @property
    def exact(self) -> TorchModel:
        """The network on torch, whose modules hold the weights."""

    def features(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """The training data of ramps: the pooled state after each block but the last, and the network's own logits."""

    def warm_up(self, start: int, stops: Iterable[int], ramps: Collection[int], example: Batch) -> None:
        """Run full batches from block `start` to each stop."""


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
