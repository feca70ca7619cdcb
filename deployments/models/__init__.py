"""Networks that can be cut between any two blocks and left at any ramp."""

from deployments.models.cascade import Cascade
from deployments.models.cascade_loading import load_served
from deployments.models.loading import load
from deployments.models.torch_model import TorchModel

__all__ = ["Cascade", "TorchModel", "load", "load_served"]
