"""Finds the public data that claims are measured on. None of it is part of the project."""

import os
from pathlib import Path

from isobatch.profiles.errors import UserError

ROOT = Path(__file__).parents[2]


def data(name: str) -> Path:
    """The path of a file of public data, under ISOBATCH_DATA or beside the checkout."""
    folder = Path(os.environ.get("ISOBATCH_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / name).exists():
        raise UserError(f"{folder / name} is not there: set ISOBATCH_DATA to the folder that holds {name}")
    return folder / name
