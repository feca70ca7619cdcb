"""Makes inputs leave at recorded blocks, on real blocks and ramps, so that untrained networks have any survival."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cluster.load.workloads import exit_blocks
from deployments.exits import Decision, remembers
from deployments.models.ramps import ExitRules, RampRule, Ramps, make_head
from deployments.models.torch_model import TorchModel
from profiles.exits import ExitProfile
from profiles.model import Batch


@remembers(lambda num_labels: 1)
def leave_at_recorded_block(logits: Tensor, threshold: float, memory: Tensor) -> Decision:
    """Leave at the block that the input carries in its memory. The threshold is the ramp's own block."""
    return Decision(memory[:, 0] <= threshold, logits, memory)


@dataclass(frozen=True)
class RecordedRamps(Ramps):
    """Ramps whose memory never changes, so that no ramp has to be evaluated for the sake of a later one."""

    def observed(self, active: Collection[int]) -> frozenset[int]:
        return frozenset(active)


def with_recorded_exits(model: TorchModel, everywhere: bool = False) -> TorchModel:
    """The same network with recorded exits; `everywhere`: with a light ramp after each block that has none."""
    blocks = range(model.num_blocks - 1) if everywhere else model.ramp_blocks
    rules = ExitRules(
        policy=f"{__name__}:leave_at_recorded_block",
        dtype=model.ramps.rules.dtype,
        ramps=tuple(RampRule(block=block, threshold=float(block)) for block in blocks),
    )
    heads = {block: model.ramps.heads.get(block) or _light(model, block) for block in blocks}
    return model.with_ramps(RecordedRamps(rules, heads))


def drawn(batch: Batch, exits: ExitProfile, random: np.random.Generator) -> Batch:
    """The same batch, with a block at which to leave drawn from the profile for each input."""
    depths = exit_blocks(exits, len(batch), random)
    return replace(batch, memory=depths[:, None].astype(np.float32))


def _light(model: TorchModel, block: int) -> torch.nn.Module:
    head = make_head("light", model.anatomy.pooled_widths[block], model.num_labels)
    return head.to(model.device).eval()
