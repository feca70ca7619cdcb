"""Some blocks on end, and what running them gives: the one thing that backends do differently."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, order=True)
class Stretch:
    """Blocks `start .. stop - 1`, and the ramps among them that are to be looked at."""

    start: int
    stop: int
    ramps: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.start}-{self.stop}" + "".join(f"r{ramp}" for ramp in self.ramps)

    def covers(self, wanted: "Stretch") -> bool:
        """Whether running this gives all that is wanted between its own ends.

        >>> Stretch(2, 4, (2, 3)).covers(Stretch(0, 6, (3,))), Stretch(2, 4).covers(Stretch(0, 6, (3,)))
        (True, False)
        """
        inside = {ramp for ramp in wanted.ramps if self.start <= ramp < self.stop}
        return wanted.start <= self.start and self.stop <= wanted.stop and inside <= set(self.ramps)


@dataclass(frozen=True)
class Passed:
    """After a stretch: the calibrated logits of its ramps by block, and the hidden state or, at the end, the answer."""

    hidden: Tensor | None
    ramps: Mapping[int, Tensor]
    head: Tensor | None
