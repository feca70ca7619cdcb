"""Ramps of a decoder: the network's own head, read early, and who is sure there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deployments.decoding.checkpoint import DecoderRules
from deployments.decoding.choosing import at_least_float32
from deployments.exits import Policy, memory_width
from deployments.models.ramps import policy_at
from profiles.errors import UserError


@dataclass(frozen=True)
class DecoderRamps:
    """All ramps of one network that a cut may stand behind. `head` makes logits of states, its norm included."""

    rules: DecoderRules
    head: Callable[[Tensor], Tensor]
    policy: Policy = field(init=False)
    _thresholds: Mapping[int, float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", independent(self.rules.policy))
        object.__setattr__(self, "_thresholds", {ramp.block: ramp.threshold for ramp in self.rules.all_ramps})

    def look(self, block: int, states: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the next token after a block, and who is sure of it (as 0 or 1)."""
        logits = at_least_float32(self.head(states))
        leaves = self.policy(logits, self._thresholds[block], logits.new_empty(len(logits), 0)).leaves
        return logits, leaves.to(torch.long)


def independent(path: str) -> Policy:
    """A policy that remembers nothing: a sequence's next token is another input."""
    policy = policy_at(path)
    if memory_width(policy, num_labels=2):
        raise UserError(f"policy {path!r} remembers earlier ramps: tokens need one that does not, such as confidence")
    return policy
