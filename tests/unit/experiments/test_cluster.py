"""`make bench-cluster`: the part that needs no Ray, and what is kept of parts."""

from pathlib import Path

import pytest

from experiments.cluster import fleets, run


def test_a_link_that_is_declared_slow_is_avoided_by_the_next_plan() -> None:
    found = fleets.slow_link()
    assert found["slow_link_avoided"] == 1.0
    assert found["slow_link_good_share_after"] > 0.95 > found["slow_link_good_share_before"]


def test_a_part_that_was_measured_is_kept_until_it_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = list[str]()

    def work() -> dict[str, float]:
        asked.append("once more")
        return {"figure": float(len(asked))}

    monkeypatch.setattr(run, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(run, "code_of", lambda claim: {"a.py": "1"})
    assert [run._done("part", work)["figure"] for _ in range(2)] == [1.0, 1.0]
    assert run._done("part", work, anew=True)["figure"] == 2.0
    monkeypatch.setattr(run, "code_of", lambda claim: {"a.py": "2"})
    assert run._done("part", work)["figure"] == 3.0
