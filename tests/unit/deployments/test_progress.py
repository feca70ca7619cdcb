"""Progress: on a terminal a bar, otherwise a line every few seconds."""

import time
from collections.abc import Iterator
from threading import Event

import pytest

from isobatch.deployments.progress import bar, busy, show


def told(capsys: pytest.CaptureFixture[str], *moments_s: float, total: int | None = None) -> list[str]:
    """The lines printed for items that begin at these moments; the first moment is the start."""
    moments: Iterator[float] = iter(moments_s)
    items = range(len(moments_s) - 1)
    assert list(show(items if total is None else iter(items), "features", total, lambda: next(moments))) == [*items]
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_line_comes_after_two_seconds_and_then_every_five(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, 10.0, 10.0, 10.5, 11.9) == []
    assert told(capsys, 10.0, 10.0, 12.5, 14.0, 17.4, 17.6, 30.0) == [
        "features: 1 of 6 after 2 s",
        "features: 4 of 6 after 8 s",
        "features: 5 of 6 after 20 s",
    ]


def test_a_task_without_steps_prints_lines_until_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    told_thrice, waited = Event(), list[float]()

    class Waits(Event):
        """Time flies, until three lines are told."""

        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            if len(waited) <= 3:
                return False
            told_thrice.set()
            return super().wait(60.0)

    with busy("choosing thresholds", clock=lambda: sum(waited), ended=Waits):
        assert told_thrice.wait(60.0)
    assert capsys.readouterr().err.splitlines() == [
        "choosing thresholds: 2 s so far",
        "choosing thresholds: 7 s so far",
        "choosing thresholds: 12 s so far",
    ]


def test_lines_name_the_step_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    reached, passed, waited = Event(), Event(), list[float]()

    class Waits(Event):
        """One line is printed, at the second step."""

        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            if len(waited) == 1:
                return not reached.wait(60.0)
            passed.set()
            return super().wait(60.0)

    with busy("loading", clock=lambda: 3.0, ended=Waits) as now:
        now("comparing")
        reached.set()
        assert passed.wait(60.0)
    assert capsys.readouterr().err.splitlines() == ["comparing: 0 s so far"]


def test_a_bar_on_a_terminal_names_the_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with bar("timing", 4) as move:
        move(1, 0.5, "a batch of 8")
    printed = capsys.readouterr()
    shown = ("timing a batch of 8" in printed.err, "38%" in printed.err)
    assert (printed.out, shown) == ("", (True, True)), "1.5 of 4 are done"


def test_a_bar_is_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("isobatch.deployments.progress.FIRST_LINE_S", 0.0)
    monkeypatch.setattr("isobatch.deployments.progress.EVERY_S", 0.001)
    errors, until_s = "", time.monotonic() + 60.0
    with bar("timing", 4) as move:
        for step in ("a batch of 8", ""):
            move(1, 0.5, step)
            line = f"timing {step}".rstrip() + ", 38% done: 0 s so far\n"
            while line not in errors and time.monotonic() < until_s:
                errors += capsys.readouterr().err
            assert line in errors
