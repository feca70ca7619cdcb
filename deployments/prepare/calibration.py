"""Calibrates ramps by a temperature each, so that 0.9 means right nine times in ten, and measures the error left."""

import math

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

# Bounds of the search for a temperature. Ramps beyond them are useless: sure of everything, or of nothing.
MIN_TEMPERATURE = 0.05
MAX_TEMPERATURE = 20.0


def temperature(logits: Tensor, targets: Tensor) -> float:
    """The divisor of the logits under which the targets (probabilities) are most likely.

    The loss is convex in the inverse of the temperature, so there is one minimum to find.

    >>> sure_but_half_wrong = torch.tensor([[9.0, 0.0], [9.0, 0.0]])
    >>> round(temperature(sure_but_half_wrong, torch.eye(2)), 2)
    20.0
    """

    def loss(log_temperature: float) -> float:
        return torch.nn.functional.cross_entropy(logits / math.exp(log_temperature), targets).item()

    bounds = (math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE))
    result = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return round(math.exp(result.x), 4)


def calibration_error(logits: Tensor, targets: Tensor, bins: int = 15) -> float:
    """Expected calibration error: the mean difference of confidence and accuracy, over equally wide confidence bins.

    >>> round(calibration_error(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.eye(2)), 3)
    0.0
    """
    confidence, label = logits.softmax(dim=1).max(dim=1)
    right = targets.gather(1, label.unsqueeze(1)).squeeze(1)
    places = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins).index_add(0, places, right - confidence)
    return float(gaps.abs().sum() / len(logits))
