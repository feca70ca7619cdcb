from pathlib import Path

import pytest
from matplotlib.figure import Figure

from profiles.datasheet import datasheet_table, distilbert
from profiles.exits import ExitProfile
from profiles.files import Profile
from profiles.picture import draw, plain_logarithmic, whole_numbers


def test_a_picture_is_drawn_with_and_without_exits(tmp_path: Path) -> None:
    tables = tuple(datasheet_table(distilbert(), kind) for kind in ("v100", "k80"))
    for exits in (None, ExitProfile.from_counts([1, 2, 3, 0, 0, 4])):
        path = tmp_path / f"{exits is None}.png"
        draw(Profile("distilbert", tables, exits), path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_blocks_are_numbered_by_whole_numbers_and_shares_in_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    table = datasheet_table(distilbert(), "v100")
    draw(Profile("distilbert", (table,), ExitProfile.from_counts([3, 0, 0, 0, 0, 1])), tmp_path / "a.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    blocks = figure.axes[2]
    assert [label.get_text() for label in blocks.get_yticklabels()][:2] == ["0%", "20%"]
    assert all(float(tick).is_integer() for tick in blocks.get_xticks())


@pytest.mark.parametrize(("least", "most", "numbers"), [(20, 90, ["20", "50"]), (8, 1500, ["100", "1,000"])])
def test_a_logarithmic_axis_is_numbered_in_plain_figures(least: float, most: float, numbers: list[str]) -> None:
    axes = Figure().subplots()
    axes.plot([0, 1], [least, most])
    axes.set(yscale="log", ylim=(least, most))
    plain_logarithmic(axes.yaxis)
    axes.figure.draw_without_rendering()
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert set(numbers) <= set(shown)


def test_counted_things_are_numbered_by_whole_numbers() -> None:
    axes = Figure().subplots()
    axes.set(xlim=(0, 2))
    whole_numbers(axes.xaxis)
    assert [tick for tick in axes.get_xticks() if 0 <= tick <= 2] == [0, 1, 2]


def test_a_short_text_is_no_batch_in_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    table = datasheet_table(distilbert(), "v100", batch_sizes=(0.231, 1, 2, 4))
    draw(Profile("distilbert", (table,)), tmp_path / "a.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert axes.lines[0].get_xdata().tolist() == [1, 2, 4]
        assert all(float(tick).is_integer() for tick in axes.get_xticks() if 1 <= tick <= 4)
