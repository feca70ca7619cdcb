"""What a small and a large network might say of inputs whose right label is always 0."""

from pathlib import Path

import numpy as np
import torch

from isobatch.deployments.prepare.cascades import Candidate, ComparisonTerms
from isobatch.deployments.prepare.sample import Parts

POLICY = "isobatch.deployments.exits:confidence"


def believed(sure: torch.Tensor, right: torch.Tensor, labels: int = 2) -> torch.Tensor:
    """Logits that give the right label, or the next one, this much more than the others."""
    logits = torch.zeros(len(sure), labels)
    logits[torch.arange(len(sure)), (~right).long()] = sure
    return logits


def made_up(count: int, seed: int = 0) -> tuple[list[Candidate], ComparisonTerms]:
    """A small network that is unsure where it errs, and a large one that seldom does. The truth is always 0."""
    random = torch.Generator().manual_seed(seed)
    hard = torch.rand(count, generator=random) < 0.3
    small_right = ~hard | (torch.rand(count, generator=random) < 0.5)
    large_right = torch.rand(count, generator=random) < 0.95
    noise = torch.rand(count, generator=random)
    small = believed(torch.where(hard, noise, 3 + noise), small_right)
    large = believed(2 + noise, large_right)
    candidates = [Candidate("small", Path("s"), 2, small, {}), Candidate("large", Path("l"), 4, large, {})]
    truth = torch.nn.functional.one_hot(torch.zeros(count, dtype=torch.int64), 2).float()
    parts = Parts.of(count)
    terms = ComparisonTerms(truth, np.concatenate((parts.train, parts.calibrate)), parts.test, POLICY)
    return candidates, terms


COSTS = [[1.0, 1.0], [5.0, 5.0, 5.0, 5.0]]
