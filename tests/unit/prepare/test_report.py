"""The picture of what exits reach."""

from pathlib import Path
from typing import Any

import pytest

from deployments.models.ramps import ExitRules, RampRule
from deployments.prepare.report import draw_exits


@pytest.mark.parametrize("accuracies", [(0.86, 0.945, 0.975), (0.91, 0.92, 0.9275)])
def test_blocks_are_counted_as_in_the_table_and_no_two_ticks_say_the_same(
    monkeypatch: pytest.MonkeyPatch, accuracies: tuple[float, ...]
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    ramps = [
        RampRule(block=block, threshold=0.5, survival=0.9 - 0.2 * block, accuracy=accuracy, exit_accuracy=accuracy)
        for block, accuracy in enumerate(accuracies)
    ]
    draw_exits(ExitRules(ramps=tuple(ramps), full_accuracy=0.93, exit_accuracy=0.928), Path("unused.png"))
    (figure,) = drawn
    above, below = figure.axes
    figure.canvas.draw()
    assert above.lines[0].get_xdata().tolist() == [0, 1, 2]
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in below.patches] == [0, 1, 2, 3]
    ticks = [label.get_text() for label in above.get_yticklabels()]
    shown = [text for text, at in zip(ticks, above.get_yticks(), strict=True) if min(accuracies) <= at <= 1]
    assert len(shown) >= 3
    assert all(
        float(text.rstrip("%")) == pytest.approx(100 * at) for text, at in zip(ticks, above.get_yticks(), strict=True)
    )
