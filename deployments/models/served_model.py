"""The interface of networks that our loader makes, and the ranges of blocks that they run.

Nothing is imported here that brings torch: a replica asks whether a network is a `ServedModel`. A user's own network,
in numpy for instance, need not be one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from isobatch.profiles.model import Batch, SplitModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from isobatch.deployments.models.ramps import Ramps


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
        """Export these block ranges now, before a request needs them. The example is an input of block 0."""
