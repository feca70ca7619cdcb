"""The best plan so far is shown, and kept at Ctrl-C."""

import signal

import pytest

from isobatch.cluster.commands.plan_search import CHOOSING, SEARCHING, LivePlan
from isobatch.optimizer import Placement, Plan, Split

PLAN = Plan((Placement("v100", 2, (Split(0, 6, 8), Split(6, 12, 4))),))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_search_the_choice_and_the_promise_each_get_a_share_of_the_seconds() -> None:
    clock = Clock()
    live = LivePlan(10.0, clock)
    clock.now_s += 10.0 * SEARCHING - 0.01
    assert not live.is_over()
    clock.now_s += 0.02
    assert live.is_over()
    assert live.__rich__() == "planning; 3 s; confirming it with other inputs"
    live.allow(CHOOSING)
    assert not live.is_over()
    assert live.__rich__() == "planning; 3 s; Ctrl-C keeps it"
    clock.now_s += 10.0 * (CHOOSING - SEARCHING)
    assert live.is_over()
    forever = LivePlan(None, clock)
    clock.now_s += 1e6
    assert not forever.is_over()


def test_the_first_ctrl_c_keeps_the_best_plan_and_the_second_ends() -> None:
    before = signal.getsignal(signal.SIGINT)
    with LivePlan() as live:
        assert not live.is_over()
        signal.raise_signal(signal.SIGINT)
        assert live.is_over()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_without_a_terminal_a_line_is_printed_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with LivePlan(None, clock) as live:
        live.estimated(PLAN, 1234.0)
        assert capsys.readouterr().err == "", "a task that is short prints nothing"
        clock.now_s += 3.0
        live.better(PLAN, 2345.0, 7)
        live.better(PLAN, 2346.0, 8)
    line = "planning: 2,345 per second, as simulated: batches of 8 > 4; 7 other plans tried; 3 s\n"
    assert capsys.readouterr().err == line
