"""The running system: networks that can be split, their exits, and the Ray Serve application.

`load(DIRECTORY).predict(inputs)` answers without a server.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isobatch.deployments.models import Cascade, TorchModel


def load(checkpoint: str | Path, device: str = "auto", dtype: str | None = None) -> "TorchModel | Cascade":
    """A network or cascade from a directory or a hub id, with its ramps if `isobatch prepare` has made some.

    Without `dtype`, in the precision that `isobatch serve` would take.
    """
    from isobatch.deployments import models  # imports torch, which most of this package does not need

    return models.load_served(checkpoint, device, dtype)


if __name__ != "isobatch.deployments":  # under a second name, each class would exist twice
    raise ImportError("deployments is a part of isobatch: import isobatch.deployments")
