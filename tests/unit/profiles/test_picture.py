from pathlib import Path

from profiles.datasheet import datasheet_table
from profiles.exits import ExitProfile
from profiles.files import Profile
from profiles.picture import draw
from profiles.shapes import distilbert


def test_a_picture_is_drawn_with_and_without_exits(tmp_path: Path) -> None:
    tables = tuple(datasheet_table(distilbert(), kind) for kind in ("v100", "k80"))
    for exits in (None, ExitProfile.from_counts([1, 2, 3, 0, 0, 4])):
        path = tmp_path / f"{exits is None}.png"
        draw(Profile("distilbert", tables, exits), path)
        assert path.read_bytes().startswith(b"\x89PNG")
