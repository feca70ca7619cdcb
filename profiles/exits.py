"""How many inputs are still inside: the exit profile of a network under a workload."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExitProfile:
    """`survival[k]` is the share of all inputs that enter block k: it starts at 1, never grows, and may reach 0.

    >>> ExitProfile((1.0, 0.5, 0.5, 0.1)).num_blocks
    4
    """

    survival: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.survival or self.survival[0] != 1.0:
            raise ValueError(f"survival must start at 1.0 (every input enters block 0), got {self.survival[:1]}")
        for block, (before, after) in enumerate(zip(self.survival, self.survival[1:], strict=False), start=1):
            if not 0.0 <= after <= before:
                raise ValueError(f"survival[{block}] = {after} must lie between 0 and survival[{block - 1}] = {before}")

    @property
    def num_blocks(self) -> int:
        return len(self.survival)
