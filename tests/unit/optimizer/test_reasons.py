"""When there is no plan, the error names what binds and the nearest value that would do; and that value does."""

import math
import re
from dataclasses import replace

import pytest

from experiments.planner.settings import BERT_BASE
from isobatch.optimizer.effort import Floats
from isobatch.optimizer.infeasible import reason
from isobatch.optimizer.model.valuation import Valuation
from isobatch.optimizer.objective import Objective
from isobatch.optimizer.pipelines.side_by_side import side_by_side
from isobatch.optimizer.problem import Problem
from isobatch.optimizer.search.exact import search
from isobatch.profiles.devices import Device, Link
from isobatch.profiles.errors import UserError
from isobatch.profiles.latency import LatencyTable

TABLE = LatencyTable(
    "a", (1, 8), ((1e-3,) * 4, (3e-3,) * 4), ((1e-4, 1e-4, 1e-4, 0.0),) * 2, 1e-4, (100,) * 4, (50,) * 4, "by hand"
)
FACTS = Problem((1.0, 0.9, 0.5, 0.2), (TABLE,), (Device("a", 4, 1000, 2.0),), {("a", "a"): Link("a", "a", 1e9, 0.0)})


def nearest(facts: Problem, objective: Objective, pattern: str) -> float:
    assert search(facts, objective) is None
    match = re.search(pattern, reason(facts, objective))
    assert match, reason(facts, objective)
    return float(match[1])


# Whatever digits follow the ones that are printed.
uneven = pytest.mark.parametrize(
    "facts", [replace(FACTS, tables=(replace(TABLE, launch_s=launch_s),)) for launch_s in (1e-4, 1.23456e-4, 1.777e-4)]
)


@uneven
def test_an_slo_too_tight(facts: Problem) -> None:
    needed_ms = nearest(facts, Objective(slo_s=2e-3), r"2 ms SLO: the fastest plan needs ([\d.]+) ms")
    assert search(facts, Objective(slo_s=needed_ms * 1e-3)) is not None
    assert search(facts, Objective(slo_s=needed_ms * 0.999e-3)) is None


@uneven
def test_a_goodput_too_high(facts: Problem) -> None:
    wanted = Objective(goal="cost", goodput_per_s=1e6, slo_s=0.1)
    most = nearest(facts, wanted, r"at most ([\d.]+) within 100 ms")
    assert search(facts, replace(wanted, goodput_per_s=most)) is not None


@pytest.mark.parametrize("price", [2.0, 2.0001])
def test_a_budget_too_small(price: float) -> None:
    facts = FACTS.with_devices((replace(FACTS.devices[0], price_per_hour=price),))
    least = nearest(facts, Objective(cost_per_hour=1.0), r"\$1 per hour: the cheapest plan costs \$([\d.]+)")
    assert search(facts, Objective(cost_per_hour=least)) is not None


@pytest.mark.filterwarnings("error")
def test_a_budget_that_one_kind_uses_up_leaves_nothing_for_the_next() -> None:
    """No device can be paid from 0 dollars, which must not print a warning of numpy."""
    kinds = [replace(FACTS.devices[0], kind=kind, count=1) for kind in "ab"]
    facts = replace(FACTS, tables=(TABLE, replace(TABLE, kind="b")), devices=tuple(kinds))
    plan = side_by_side(facts, Objective(cost_per_hour=kinds[0].price_per_hour))
    assert sum(plan.devices().values()) == 1


@pytest.mark.filterwarnings("error")
def test_without_money_the_cheapest_plan_of_several_kinds_is_named() -> None:
    slow = replace(TABLE, kind="b", block_s=((2e-3,) * 4, (9e-3,) * 4))
    kinds = FACTS.devices[0], Device("b", 3, 1000, 0.5)
    links = {(one, other): Link(one, other, 1e9, 0.0) for one in "ab" for other in "ab"}
    facts = replace(FACTS, tables=(TABLE, slow), devices=kinds, links=links)
    assert nearest(facts, Objective(cost_per_hour=0.0), r"\$0 per hour: the cheapest plan costs \$([\d.]+)") == 0.5


def test_the_cheapest_plan_on_many_devices_is_named_without_a_search_among_dearer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, staffed = list[float](), Valuation.staffed

    def counted(self: Valuation, loads: Floats, work: float, arrivals: float, below: float = math.inf) -> object:
        calls.append(below)
        return staffed(self, loads, work, arrivals, below)

    monkeypatch.setattr(Valuation, "staffed", counted)
    facts = BERT_BASE.facts("v100=400", "float16")
    price = facts.devices[0].price_per_hour
    assert reason(facts, Objective(slo_s=0.1, cost_per_hour=0.01)).endswith(f"the cheapest plan costs ${price:g}")
    assert len(calls) < 40_000


@pytest.mark.parametrize("limit", ["slo_s", "goodput_per_s", "cost_per_hour"])
def test_a_limit_that_is_no_number_is_refused(limit: str) -> None:
    with pytest.raises(UserError, match=f"{limit} = nan must be"):
        Objective(**{limit: math.nan})  # type: ignore[arg-type]


HEAVY = replace(TABLE, hidden_bytes=(10**9,) * 4, memory_bytes=(10**8,) * 4)


@pytest.mark.parametrize(
    ("facts", "memory_bytes", "why"),
    [
        (FACTS, 40, "block 0 needs"),
        (replace(FACTS, links={}), 120, "no links"),
        (replace(FACTS, tables=(HEAVY,)), 3 * 10**8,
         r"GB are placed on one a, [13] GB of it inputs between splits, which has 0.3 GB"),
    ],
)  # fmt: skip
def test_what_has_no_room_is_named(facts: Problem, memory_bytes: int, why: str) -> None:
    facts = facts.with_devices((Device("a", 4, memory_bytes, 2.0),))
    assert search(facts, Objective()) is None
    assert re.search(why, reason(facts, Objective()))


@pytest.mark.parametrize("wrong", [{"slo_s": 0.0}, {"slack": 1.0}, {"goal": "cost"}, {"max_batch": 0}])
def test_objectives_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong))) if "goal" not in wrong else "goodput_per_s"):
        Objective(**wrong)  # type: ignore[arg-type]
