from pathlib import Path

from isobatch.profiles.datasheet import datasheet_table, distilbert
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.picture import draw


def test_a_picture_is_drawn_with_and_without_exits(tmp_path: Path) -> None:
    tables = tuple(datasheet_table(distilbert(), kind) for kind in ("v100", "k80"))
    for exits in (None, ExitProfile.from_counts([1, 2, 3, 0, 0, 4])):
        path = tmp_path / f"{exits is None}.png"
        draw(Profile("distilbert", tables, exits), path)
        assert path.read_bytes().startswith(b"\x89PNG")
