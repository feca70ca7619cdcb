"""Families of networks that can be cut. To add one, put a file here that defines `FAMILIES`."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from isobatch.deployments.models.anatomy import Family
from isobatch.deployments.tasks import Task
from isobatch.profiles.errors import UserError


@cache
def families_by_type() -> dict[str, Family]:
    """The family of every `model_type` that a file in this folder covers."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    families: list[Family] = [family for module in modules for family in module.FAMILIES]
    return {model_type: family for family in families for model_type in family.model_types}


def check_knows_maps(task: Task, family: Family, model_type: str) -> None:
    """Raise UserError if the head gives maps, and the family knows no such head."""
    if task.by_map and not family.map_task:
        known = ", ".join(sorted(name for name, each in families_by_type().items() if each.map_task))
        raise UserError(f"{model_type} is not known with a head for {task.answered}; known are: {known}")


def family_of(model_type: str) -> Family:
    """
    >>> family_of("distilbert").reads
    'text'
    """
    if model_type not in families_by_type():
        raise UserError(f"model type {model_type!r} is not known; known are: {', '.join(sorted(families_by_type()))}")
    return families_by_type()[model_type]
