"""`make bench-cluster`: the part that needs no Ray, and what is kept of parts."""

from pathlib import Path

import pytest

from experiments.cluster import fleets, fronts, run


def test_a_link_that_is_declared_slow_is_avoided_by_the_next_plan() -> None:
    found = fleets.slow_link()
    assert found["slow_link_avoided"] == 1.0
    assert found["slow_link_good_share_after"] > 0.95 > found["slow_link_good_share_before"]


def test_a_part_that_was_measured_is_kept_until_its_file_is_deleted_or_the_code_is_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = list[str]()

    def work() -> dict[str, float]:
        asked.append("once more")
        return {"figure": float(len(asked))}

    monkeypatch.setattr(run, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(run, "code_behind", lambda path: {"a.py": "1"})
    assert [run._done("part", work, "fleets")["figure"] for _ in range(2)] == [1.0, 1.0]
    (tmp_path / "bench-cluster" / "part.json").unlink()
    assert run._done("part", work, "fleets")["figure"] == 2.0
    monkeypatch.setattr(run, "code_behind", lambda path: {"a.py": "2"})
    assert run._done("part", work, "fleets")["figure"] == 3.0


def test_fronts_are_compared_with_one() -> None:
    def seen(fill: float, per_s: float) -> dict[str, dict[str, float]]:
        filled = {"fill": fill, "p99_ms": 100.0, "good_share": 1.0, "busiest_share": 0.9}
        return {"filled": filled, "passed": {"per_s": per_s, "cpu_ms": 0.5}}

    found = fronts.figures({1: seen(0.4, 1000.0), 2: seen(0.3, 1500.0)})
    assert (found["fill_2_fronts_over_one"], found["fronts_2_rps"]) == (pytest.approx(0.75), 1500.0)
    assert "fill_1_fronts_over_one" not in found
