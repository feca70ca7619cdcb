"""What a request says of its own size, checked before anything of that size is made: one place for all protocols."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from deployments.front.answers import RefusedError, shown

MOST_DIMENSIONS = 8
LONGEST_NAME = 1024  # characters, of a name or an id
MOST_NAMED = 64  # of what a request names several: outputs


@dataclass(frozen=True)
class Sizes:
    """What one request may carry."""

    max_inputs: int
    max_bytes: int  # as it comes; no tensor may hold more values than that

    def check_count(self, inputs: int) -> None:
        if not inputs:
            raise RefusedError(422, "'inputs' is empty: give one input or a list of them")
        if inputs > self.max_inputs:
            raise RefusedError(422, f"{inputs} inputs in one request: {self.max_inputs} are allowed")

    def check_shape(self, name: str, shape: Sequence[int]) -> int:
        """How many values a tensor of this shape has; its first dimension counts the inputs."""
        if not 0 < len(shape) <= MOST_DIMENSIONS or min(shape) < 0:
            reason = f"shape {shown(shape)} must be a list of sizes, of {MOST_DIMENSIONS} dimensions at most"
            raise RefusedError(400, f"tensor {shown(name)}: {reason}")
        self.check_count(shape[0])
        if not 0 < (values := prod(shape)) <= self.max_bytes:
            reason = f"shape {shown(shape)} must hold at least one value, and {self.max_bytes} at most"
            raise RefusedError(400, f"tensor {shown(name)}: {reason}")
        return values
