"""Running it: networks that can be cut, their exits, and the Ray Serve application.

`load(DIRECTORY).predict(inputs)` answers without any server.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deployments.models import Cascade, TorchModel


def load(checkpoint: str | Path, device: str = "cpu", dtype: str = "float32") -> "TorchModel | Cascade":
    """A network from a directory or a hub id, with its ramps if `isobatch prepare` has made some; or a cascade."""
    from deployments import models  # imports torch, which is not needed by all that is in here

    return models.load_served(checkpoint, device, dtype)
