"""Networks that can be cut between any two blocks and left at any ramp."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isobatch.deployments.models.cascade import Cascade
    from isobatch.deployments.models.cascade_loading import load_served
    from isobatch.deployments.models.loading import load
    from isobatch.deployments.models.torch_model import TorchModel

__all__ = ["Cascade", "TorchModel", "load", "load_served"]

_MODULES = {"Cascade": "cascade", "TorchModel": "torch_model", "load": "loading", "load_served": "cascade_loading"}


def __getattr__(name: str) -> Any:
    """Import a name on first use: these modules bring torch, which a user's own network may not need."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
