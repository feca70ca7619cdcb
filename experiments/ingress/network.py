"""A network that computes nothing and samples the front's processor time; a Serve file names it as loader."""

import threading
from pathlib import Path
from typing import Any

from experiments.ingress.sampler import Sampler
from isobatch.deployments.replica.virtual import VirtualModel
from isobatch.profiles.files import load as load_profile

COSTS = "front.json"


def load(directory: str, **_: Any) -> VirtualModel:
    from ray import serve

    profile = load_profile(Path(directory).parent / "profile.json")
    assert profile.exits
    if serve.get_replica_context().deployment == "front":
        Sampler(threading.get_ident(), Path(directory) / COSTS).start()
    return VirtualModel(profile.tables[0], profile.exits)
