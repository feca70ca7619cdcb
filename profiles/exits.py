"""How many inputs are still inside: the exit profile of a network under a workload."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar


@dataclass(frozen=True)
class ExitProfile:
    """`survival[k]` is the share of all inputs that enter block k: it starts at 1, never grows, and may reach 0.

    >>> ExitProfile((1.0, 0.5, 0.5, 0.1)).num_blocks
    4
    """

    survival: tuple[float, ...]

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # a misspelt field in a file is an error

    def __post_init__(self) -> None:
        if not self.survival or self.survival[0] != 1.0:
            raise ValueError(f"survival must start at 1.0 (every input enters block 0), got {self.survival[:1]}")
        for block, (before, after) in enumerate(zip(self.survival, self.survival[1:], strict=False), start=1):
            if not 0.0 <= after <= before:
                raise ValueError(f"survival[{block}] = {after} must lie between 0 and survival[{block - 1}] = {before}")

    @classmethod
    def from_counts(cls, left: Sequence[int]) -> "ExitProfile":
        """From the number of inputs that left after each block; everybody has left after the last.

        >>> ExitProfile.from_counts([5, 3, 2]).survival
        (1.0, 0.5, 0.2)
        """
        total = sum(left)
        if total <= 0:
            raise ValueError(f"cannot tell who survives from {total} inputs")
        return cls(tuple((total - gone) / total for gone in accumulate(left[:-1], initial=0)))

    @property
    def num_blocks(self) -> int:
        return len(self.survival)
