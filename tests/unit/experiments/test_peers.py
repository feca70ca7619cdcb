from typing import Any

import pytest

from experiments.peers import run
from experiments.peers.run import OURS, PEERS, PeerRound
from experiments.peers.workloads import PeerWorkload

WORKLOAD = PeerWorkload("demo", "", [[1, 2]], "made up")


def seen(goodput: float, lone_ms: float, light_ms: float = 0.0) -> PeerRound:
    from types import SimpleNamespace

    best: Any = SimpleNamespace(goodput_per_s=goodput, latency_ms={"p50": 5.0, "p99": 9.0})
    return PeerRound(3.0, 400.0, lone_ms, best, light_ms)


def test_peers_are_compared_by_the_medians_of_their_rounds() -> None:
    rounds = {
        "isobatch": [seen(90, 6, 8), seen(100, 5, 7), seen(400, 4, 6)],
        "ray": [seen(50, 8)],
        "litserve": [seen(80, 4)],
    }
    figures = run._figures(WORKLOAD, rounds, pass_ms=2.0)
    assert figures["goodput_over_ray_demo"] == pytest.approx(2.0)
    assert figures["goodput_over_litserve_demo"] == pytest.approx(1.25)
    assert figures["lone_over_leanest_demo"] == pytest.approx(5 / 4)
    assert figures["p50_extra_ms_at_30_percent_demo"] == pytest.approx(5.0)


def test_a_peer_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_has", lambda peer: peer.name != "bentoml")
    monkeypatch.setattr(run, "workloads", lambda folder: [WORKLOAD])
    monkeypatch.setattr(run, "_seen", lambda workload, system, folder, seconds: seen(50, 8))
    monkeypatch.setattr(run, "_pass_ms", lambda workload: 1.0)
    figures = run.measure(rounds=1)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("bentoml IS NOT MEASURED") == 2  # at first, and when all is measured
    assert "pip install 'isobatch[peers]' there" in said
    assert (figures["missing_bentoml"], figures["missing_ray"]) == (1.0, 0.0)
    assert "goodput_over_bentoml_demo" not in figures


def test_bodies_are_lists_where_a_peer_wants_them() -> None:
    assert WORKLOAD.bodies(listed=False) == [b'{"inputs": [1, 2]}']
    assert WORKLOAD.bodies(listed=True) == [b'{"inputs": [[1, 2]]}']
    assert [peer.listed for peer in (OURS, *PEERS)] == [False, False, False, True]
