"""The seam between the networks and what computes them: what a backend gets, what it gives, and how it is found.

An application chooses a backend by its name or its import path (`backend:`). To add one, write a file with an object
that is a `Backend`; a line in `deployments.named.BACKENDS` gives it a short name.

Nothing is imported here that brings torch: a replica asks whether a network is a `ServedModel`, which one of a user's
own, in numpy for instance, is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from deployments.named import backend_path
from profiles.errors import UserError
from profiles.model import Batch, SplitModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from deployments.models.ramps import Ramps
    from deployments.models.torch_model import TorchModel


@dataclass(frozen=True, order=True)
class BlockRange:
    """Blocks `start .. stop - 1`, and the ramps among them that are to be looked at."""

    start: int
    stop: int
    ramps: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.start}-{self.stop}" + "".join(f"r{ramp}" for ramp in self.ramps)

    def covers(self, wanted: BlockRange) -> bool:
        """Whether running this gives all that is wanted between its own ends.

        >>> BlockRange(2, 4, (2, 3)).covers(BlockRange(0, 6, (3,))), BlockRange(2, 4).covers(BlockRange(0, 6, (3,)))
        (True, False)
        """
        inside = {ramp for ramp in wanted.ramps if self.start <= ramp < self.stop}
        return wanted.start <= self.start and self.stop <= wanted.stop and inside <= set(self.ramps)


@dataclass(frozen=True)
class RangeOutput:
    """After a stretch: the calibrated logits of its ramps by block, and the hidden state or, at the end, the answer."""

    hidden: Tensor | None
    ramps: Mapping[int, Tensor]
    head: Tensor | None


@runtime_checkable
class ServedModel(SplitModel, Protocol):
    """A network that our loader gives, whatever computes it: one checkpoint, or a cascade of several.

    A loader of the user's own may give anything else.
    """

    @property
    def backend(self) -> str:
        """The name of what computes it."""
        ...

    @property
    def exports(self) -> bool:
        """Whether its stretches are exported before they run as they should, so that they are better made early."""
        ...

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
        ...

    def twin(self) -> ServedModel:
        """The same network, same weights, for another thread that computes at the same time. Nothing else is shared."""
        ...

    def prepare(self, stretches: Iterable[BlockRange], example: Batch) -> None:
        """Export these before anybody asks. The example stands before block 0."""
        ...


@runtime_checkable
class BackedModel(ServedModel, Protocol):
    """One network that torch has loaded, whatever computes it now."""

    @property
    def exact(self) -> TorchModel:
        """The network on torch, whose modules hold the weights."""
        ...

    def twin(self) -> BackedModel: ...

    def features(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """What ramps are made from: what one after each block but the last reads, and the network's own logits."""
        ...


Fingerprint = Callable[["TorchModel"], str]  # tells weights from others, where graphs are kept by it


class Backend(Protocol):
    """One way to compute a network that torch has loaded."""

    @property
    def tried_by_auto(self) -> bool:
        """Whether `backend: auto` measures it against torch."""
        ...

    def obstacle(self, model: TorchModel, int8: bool) -> str | None:
        """One line on why it cannot run this network, and what can; None if it can."""
        ...

    def serve(self, model: TorchModel, fingerprint: Fingerprint, int8: bool) -> BackedModel:
        """The same network with the same answers, computed by this backend."""
        ...


def backend_named(name: str) -> Backend:
    """One of `deployments.named.BACKENDS`, or of the user's own by its import path `module:object`.

    >>> backend_named("torch").tried_by_auto
    False
    """
    path = backend_path(name)
    try:
        return resolve_name(path)  # type: ignore[no-any-return]
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"backend {name!r} cannot be imported: {error}") from error
