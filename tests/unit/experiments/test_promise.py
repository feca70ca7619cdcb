"""What `make bench-promise` compares: the method of before, the bound by betting, and the data that it needs."""

import numpy as np

from cluster.controller.record import THRESHOLDS
from experiments.promise.audited import Setting
from experiments.promise.before import MARGIN, searched
from experiments.promise.greedy import tuned
from experiments.promise.tried import wins
from profiles.evidence import Evidence
from profiles.exit_table import ExitTable, outcome
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
