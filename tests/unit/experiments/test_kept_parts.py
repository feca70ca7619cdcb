"""Parts of a benchmark: measured once by the same code, unless they shall be measured anew."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from experiments.shared.kept_parts import kept_part


def test_a_part_is_measured_once_for_its_options_unless_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    numbers = iter(range(10))

    def measure() -> Iterator[tuple[str, float]]:
        yield "number", float(next(numbers))

    def figure(options: str, again: bool = False) -> float:
        return kept_part("dense", "part", options, again, measure, Console(quiet=True))["number"]

    assert [figure("a"), figure("a"), figure("b"), figure("a", again=True), figure("a")] == [0, 0, 1, 2, 2]
