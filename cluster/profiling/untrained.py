"""The rows of a file on which ramps were not trained: ramps are surer of their own rows than of others."""

from collections.abc import Iterable
from pathlib import Path

from isobatch.deployments.models.ramps import made_from
from isobatch.deployments.prepare.data import Row, name_of
from isobatch.deployments.prepare.sample import not_trained_on
from isobatch.profiles.errors import UserError
from isobatch.profiles.promise import RULES


def untrained(rows: Iterable[Row], folder: Path, data: Path) -> tuple[Iterable[Row], str]:
    """The rows of `data` without those on which the ramps of this checkpoint were trained, and a name for them."""
    notes, origin = made_from(folder, data), name_of(data)
    if not notes:
        return rows, origin
    if not all(isinstance(notes.get(name), int) for name in ("rows", "seed")):
        raise UserError(f"{folder / RULES}: notes: rows and seed must be whole numbers, as prepare wrote them")
    return not_trained_on(rows, notes), f"{origin} that ramps were not trained on"
