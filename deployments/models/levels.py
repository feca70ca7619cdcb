"""cascade.json: the networks of a cascade from first to last, each a checkpoint in a folder beside the file."""

from itertools import accumulate
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from profiles.errors import UserError, first_wrong, read_text

CASCADE = "cascade.json"


class LevelRule(BaseModel):
    """One level as it stands in cascade.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str = Field(pattern=r"^level-\d+$", description="Where its checkpoint lies, beside this file.")
    model: str = Field("", description="What the checkpoint was called.")
    blocks: int = Field(ge=1, description="How many blocks it has.")
    weight: float = Field(
        1.0, ge=0, le=1, description="Of its own probabilities in its answer; the rest is what the levels before say."
    )


class CascadeRules(BaseModel):
    """cascade.json: which networks answer one behind the other, and how what they say is put together."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    levels: tuple[LevelRule, ...] = Field(min_length=2, description="The first is asked first.")
    notes: dict[str, str | int | float] = Field(default_factory=dict, description="Where all this came from.")

    @property
    def starts(self) -> tuple[int, ...]:
        """The first block of each level, and last the number of all blocks."""
        return tuple(accumulate((level.blocks for level in self.levels), initial=0))

    @property
    def edges(self) -> tuple[int, ...]:
        """The blocks at which a level begins behind another."""
        return self.starts[1:-1]


def is_cascade(folder: Path) -> bool:
    return (folder / CASCADE).is_file()


def read_levels(folder: Path) -> CascadeRules:
    path = folder / CASCADE
    try:
        return CascadeRules.model_validate_json(read_text(path))
    except ValidationError as error:
        wrong = first_wrong(error)
        raise UserError(f"{path}: {wrong.place or 'file'}: {wrong.reason}") from error


def write_levels(folder: Path, rules: CascadeRules) -> None:
    (folder / CASCADE).write_text(rules.model_dump_json(indent=2) + "\n")


def last_of(folder: Path) -> Path:
    """The checkpoint whose labels are answered: the last level's, or the directory's own where it is no cascade."""
    return folder / read_levels(folder).levels[-1].folder if is_cascade(folder) else folder


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints in a directory: one a level, or the directory itself."""
    return [folder / level.folder for level in read_levels(folder).levels] if is_cascade(folder) else [folder]
