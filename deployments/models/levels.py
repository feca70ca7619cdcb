"""cascade.json: the levels of a cascade from first to last. Each is a checkpoint in a folder beside the file."""

from itertools import accumulate
from pathlib import Path
from typing import Literal

from pydantic import Field

from isobatch.profiles.errors import read_model
from isobatch.profiles.promise import FilePart

CASCADE = "cascade.json"


class LevelRule(FilePart):
    """One level in cascade.json."""

    folder: str = Field(pattern=r"^level-\d+$", description="The folder of its checkpoint, beside this file.")
    model: str = Field("", description="The name of its checkpoint.")
    blocks: int = Field(ge=1, description="The number of its blocks.")
    weight: float = Field(
        1.0,
        ge=0,
        le=1,
        description="The weight of its own probabilities in its answer; the earlier levels have the rest.",
    )


class CascadeRules(FilePart):
    """cascade.json: the levels in their order, and the weights by which their answers are combined."""

    version: Literal[1] = 1
    levels: tuple[LevelRule, ...] = Field(min_length=2, description="In the order in which inputs run through them.")
    notes: dict[str, str | int | float] = Field(default_factory=dict, description="How the cascade was made.")

    @property
    def starts(self) -> tuple[int, ...]:
        """The first block of each level, followed by the number of all blocks."""
        return tuple(accumulate((level.blocks for level in self.levels), initial=0))

    @property
    def edges(self) -> tuple[int, ...]:
        """The first blocks of all levels but the first."""
        return self.starts[1:-1]


def is_cascade(folder: Path) -> bool:
    return (folder / CASCADE).is_file()


def read_levels(folder: Path) -> CascadeRules:
    return read_model(folder / CASCADE, CascadeRules)


def last_of(folder: Path) -> Path:
    """The checkpoint whose labels are in the answers: of a cascade its last level, else the directory itself."""
    return folder / read_levels(folder).levels[-1].folder if is_cascade(folder) else folder


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints in a directory: one per level of a cascade, or the directory itself."""
    return [folder / level.folder for level in read_levels(folder).levels] if is_cascade(folder) else [folder]
