"""The way from a command to `experiments/`, which stands on top of the cluster and is no part of the wheel."""

from importlib import import_module
from typing import Any

from profiles.errors import UserError


def tool(name: str, command: str) -> Any:
    """A module of experiments, for a command that is only its front.

    >>> tool("workloads", "load").__name__
    'experiments.workloads'
    """
    try:
        return import_module(f"experiments.{name}")
    except ModuleNotFoundError as error:
        raise UserError(f"isobatch {command} needs a checkout of isobatch: experiments/ is not installed") from error
