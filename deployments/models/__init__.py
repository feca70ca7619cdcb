"""Networks that can be cut between any two blocks and left at any ramp."""

from deployments.models.loading import load
from deployments.models.torch_model import TorchModel

__all__ = ["TorchModel", "load"]
