"""What `make bench-promise` compares: the method of before, the bound by betting, and the data that it needs."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.controller.record import THRESHOLDS
from deployments.demo import demo_directory
from deployments.models import load
from deployments.prepare import sample
from experiments import bench
from experiments.promise import live, run, tried
from experiments.promise.audited import Setting
from experiments.promise.before import MARGIN, searched
from experiments.promise.greedy import tuned
from experiments.promise.live import NoisyDigits
from experiments.promise.recordings import Recorded, keep, read
from experiments.promise.tried import wins
from profiles.errors import UserError
from profiles.evidence import Evidence
from profiles.exit_table import ExitTable, outcome
from profiles.losses import Floats
from tests.helpers.exit_tables import exit_table


def table(count: int = 800, ramps: int = 2) -> ExitTable:
    random = np.random.default_rng(0)
    hardness = random.uniform(size=count)
    wrong = random.uniform(size=(ramps + 1, count)) < hardness * np.linspace(0.5, 0.2, ramps + 1)[:, None]
    first = np.tile(1 + (9 * hardness).astype(np.uint8), (ramps, 1))
    costs = np.arange(1, ramps + 2) / (ramps + 1)
    return ExitTable(np.arange(10.0), first, (~wrong).astype(np.float32), wrong, np.zeros(count, np.int64), costs)


def test_the_method_of_before_keeps_to_its_own_margin_where_it_chose() -> None:
    found = table()
    result = outcome(found, searched(found, "accuracy", 0.03), "accuracy")
    assert result.lost.within(0.03, MARGIN)
    assert result.cost < 1.0


def test_betting_shows_little_loss_and_no_more_than_the_doubt_of_as_much_as_is_allowed() -> None:
    random = np.random.default_rng(0)

    def shown(loss: float) -> float:
        draws = (random.uniform(size=(400, 2000)) < loss).astype(float)
        return float(np.mean([wins(losses, 0.02, 0.05) for losses in draws]))

    assert shown(0.02) <= 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5
    assert shown(0.005) > 0.95


def test_without_the_public_texts_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ISOBATCH_DATA", str(tmp_path))
    assert bench.main(["promise", "splits=1"]) == 2
    assert capsys.readouterr().err.endswith("set ISOBATCH_DATA to the folder that holds text/sst2_glue/train.tsv\n")


def test_a_run_that_was_broken_off_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[int] = []

    def work(number: int) -> int:
        done.append(number)
        if number == 1 and done.count(1) == 1:
            raise UserError("broken off")
        return 10 * number

    monkeypatch.setattr(run, "WORK", {"work": work})
    monkeypatch.setattr(run, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    monkeypatch.setattr(run, "_code", lambda kind: "some")
    path, parts = tmp_path / "parts.json", [("work", 1), ("work", 2)]
    with pytest.raises(UserError, match="broken off"):
        run.Kept(path).done(parts)
    assert done == [1, 2], "one that fails costs no other"
    assert run.Kept(path).done(parts) == {("work", 1): 10, ("work", 2): 20}
    assert done == [1, 2, 1]
    run.Kept(path).forget(("work", 2))
    run.Kept(path).done(parts)
    assert done == [1, 2, 1, 2], "what nobody forgot is not done again"
    monkeypatch.setattr(run, "_code", lambda kind: "another")
    run.Kept(path).done(parts)
    assert done == [1, 2, 1, 2, 1, 2], "what other code has found is old"


def test_a_recording_is_read_as_it_was_kept_and_named_by_what_it_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recorded = Recorded(table(), replace(table(), right=table().right / 2))
    name = keep(recorded)
    found = read(name)
    assert (found.believed.right == recorded.believed.right).all()
    assert (found.known.first == recorded.known.first).all()
    assert keep(found) == name != keep(Recorded(table(), table()))


def test_rows_are_parted_as_by_prepare() -> None:
    assert tried.TEST_SHARE == sample.TEST_SHARE


def test_a_controller_tightens_where_inputs_drift_and_every_input_is_answered() -> None:
    tables = [exit_table(seed, ramps=7, count=4000) for seed in range(3)]
    setting = Setting.of(Evidence(tables[0], tables[1], "agreement", 0.05, 0.95), tables[2], promised=0.9)
    fit = setting.fit
    ran = setting.run(600.0, 90.0, lambda times_s: np.where(times_s < 20.0, fit.usual, 0.4))
    changes = [event.what for event in ran.events if event.what in THRESHOLDS]
    assert changes[0] == "tightened"
    assert fit.disagreement(setting.chosen(ran.plans[-1][1]), 0.4) < 0.2
    assert ran.report.good == ran.report.arrived
    assert sum(ran.report.tally.audited) > 50


def test_apparate_s_tuner_cannot_show_one_percent_on_sixteen_records() -> None:
    found = exit_table(0, ramps=3, count=4000)
    chosen = tuned(found.of(np.arange(16)))
    places = found.places(chosen)
    assert (found.answers(places)[:16] == found.labels[-1][:16]).all()
    assert float((found.answers(places) != found.labels[-1]).mean()) > 0.01


def test_live_answers_are_compared_with_those_of_the_full_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "DISTINCT", 64)
    digits = NoisyDigits.of(load(demo_directory()), 0.6, seed=0)
    assert digits.own_share < 0.1

    class Server:
        """Answers every fourth request otherwise than the full network, in one of its digits."""

        def __init__(self, url: str, bodies: list[bytes], right: Any) -> None:
            assert url == "http://x/predict"
            self._right, self._count = right, len(bodies)

        async def at(self, due_s: Floats) -> None:
            for request in range(self._count):
                labels = digits.full[request].copy()
                labels[0] += request % 4 == 0
                said = json.dumps({"outputs": [{"label": int(label)} for label in labels]})
                assert self._right(request, said.encode())

    monkeypatch.setattr(live, "LoadGenerator", Server)
    assert digits.asked("http://x") == pytest.approx(1 / (4 * live.TOGETHER))
