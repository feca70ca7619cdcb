"""TCB's algorithm does what the paper says, in our dispatcher; the figures have the names that are quoted."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.dispatch.batching import Ticket
from deployments.dispatch.messages import Place
from deployments.dispatch.orders import das_row
from experiments.tcb import engines, run
from experiments.tcb.schedulers import das

NOWHERE = Place(None, 0)


def waiting(tokens: list[int], deadlines_s: list[float] | None = None) -> list[Ticket]:
    deadlines_s = deadlines_s or [1.0] * len(tokens)
    found = [
        Ticket(number, at_s, NOWHERE, count)
        for number, (count, at_s) in enumerate(zip(tokens, deadlines_s, strict=True))
    ]
    return sorted(found, key=lambda ticket: ticket.weight)


def test_a_row_goes_to_the_shortest_then_to_the_earliest_of_enough_utility_then_to_the_rest() -> None:
    """Of 40 tokens the four shortest fit, so two go by utility; 11 and 12 tokens are worth more than half of that."""
    texts = waiting([8, 9, 10, 11, 12, 40], [9.0, 9.0, 9.0, 5.0, 4.0, 0.1])
    assert row(texts) == [8, 9, 12, 11]
    assert row(waiting([8, 9, 30])) == [8, 9], "40 is all there is"
    assert row(waiting([8, 9])) == [8, 9]


def row(texts: list[Ticket]) -> list[int]:
    by_deadline = sorted(texts, key=lambda ticket: ticket.deadline_s)
    return [ticket.weight for ticket in das_row(texts, by_deadline, 40)]


@given(st.lists(st.integers(3, 100), min_size=1, max_size=60), st.integers(1, 5), st.randoms(use_true_random=False))
def test_no_row_is_above_its_length_and_nobody_is_taken_twice(
    tokens: list[int], rows: int, chance: random.Random
) -> None:
    texts = waiting(tokens, [chance.random() for _ in tokens])
    taken = das(rows, 100)(texts, 0)
    assert len({ticket.id for ticket in taken}) == len(taken) <= len(tokens)
    assert sum(ticket.weight for ticket in taken) <= rows * 100
    assert taken
    assert len(das(rows, 100, most=3)(texts, 0)) <= 3


def test_ways_to_lay_texts_side_by_side_cost_what_they_pad() -> None:
    tokens = [20, 20, 20, 60]
    assert engines.padded(tokens) == engines.padded_to(60)(tokens) == engines.seconds(4, 60)
    assert engines.by_length(tokens) <= engines.padded(tokens)
    assert engines.by_length([20] * 4) == engines.padded([20] * 4)
    assert engines.in_rows(100)(tokens) == engines.seconds(2, 100)
    assert engines.in_slots(tokens) == engines.seconds(2, 60)
    assert engines.packed(20)(tokens) == engines.seconds(6.0, 20)


@pytest.mark.parametrize("name", run.SYSTEMS)
def test_every_system_answers_under_light_load(name: str) -> None:
    found = run.played(run.SYSTEMS[name], 20, 2.0)
    assert len(found.in_time) == len(found.asked)
    assert found.least_share == pytest.approx(1.0)


def test_the_rule_for_das_has_its_figures() -> None:
    figures = run._adopt(2, 20)
    assert {f"{name}_{at}" for name in ("das_gain", "das_least_quarter") for at in ("1_5x", "2x", "3x")} <= set(figures)
