"""Make a probability of 0.9 mean nine in ten: one temperature a ramp, and the error that is left."""

import numpy as np
import torch
from torch import Tensor

TEMPERATURES = np.geomspace(0.05, 20.0, 400).round(4)


def temperature(logits: Tensor, targets: Tensor) -> float:
    """The divisor of the logits under which the targets (probabilities) are most likely.

    >>> sure_but_half_wrong = torch.tensor([[9.0, 0.0], [9.0, 0.0]])
    >>> temperature(sure_but_half_wrong, torch.eye(2))
    20.0
    """
    losses = [torch.nn.functional.cross_entropy(logits / float(value), targets).item() for value in TEMPERATURES]
    return float(TEMPERATURES[int(np.argmin(losses))])


def calibration_error(logits: Tensor, targets: Tensor, bins: int = 15) -> float:
    """Expected calibration error: how far confidence is from accuracy, over equally wide bins of confidence.

    >>> round(calibration_error(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.eye(2)), 3)
    0.0
    """
    confidence, label = logits.softmax(dim=1).max(dim=1)
    right = targets.gather(1, label.unsqueeze(1)).squeeze(1)
    places = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins).index_add(0, places, right - confidence)
    return float(gaps.abs().sum() / len(logits))
