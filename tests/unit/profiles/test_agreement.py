"""What audits tell of agreement: unbiased whatever is given up, and right at any time it is looked at."""

from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.profiles.agreement import WATCHED_S, AuditedAnswers, PromiseWatch, recent_agreement

LEFT_SHARES, MISSES = np.array([0.5, 0.3, 0.2]), np.array([0.002, 0.03, 0.0])
SHARE = 0.05  # of the inputs that are audited
TRUTH = float(LEFT_SHARES @ MISSES)
TRIALS = 400


def test_the_interval_holds_at_every_look_though_most_shadows_of_one_block_are_given_up() -> None:
    """Audits get to the end in 90 % of cases from one block and in 30 % from the other, where most disagree."""
    random, held, estimates = np.random.default_rng(0), 0, []
    for _ in range(TRIALS):
        counts = np.zeros((3, 3), np.int64)
        inside = True
        for _ in range(20):
            left = random.multinomial(2_000, LEFT_SHARES)
            audited = random.binomial(left, SHARE * np.array([0.9, 0.3, 0.0]))
            counts += np.array([left, audited, random.binomial(audited, MISSES)])
            agreement = AuditedAnswers(*map(tuple, counts.tolist())).agreement()
            inside &= agreement.low <= 1 - TRUTH <= agreement.high
        held += inside
        estimates.append(agreement.share)
    assert held >= 0.93 * TRIALS
    error = float(np.std(estimates)) / np.sqrt(TRIALS)
    assert abs(float(np.mean(estimates)) - (1 - TRUTH)) < 4 * error


def test_without_audits_nothing_is_known_and_who_ran_to_the_end_agrees() -> None:
    assert AuditedAnswers((10, 0, 90), (0, 0, 0), (0, 0, 0)).agreement() is None
    assert AuditedAnswers((0, 0, 90), (2, 0, 0), (1, 0, 0)).agreement() is None, "audits of those that left before"
    assert AuditedAnswers((0, 0, 0), (2, 0, 0), (1, 0, 0)).agreement() is None
    agreement = AuditedAnswers((10, 0, 90), (10, 0, 0), (5, 0, 0)).agreement()
    assert agreement.share == 0.95
    assert agreement.verdict(0.99) == "not watched"


HIT, MISS = AuditedAnswers((1, 0), (1, 0), (0, 0)), AuditedAnswers((1, 0), (1, 0), (1, 0))


@given(st.floats(0.0, 1.0, exclude_max=True))
def test_the_bet_is_fair_where_as_many_disagree_as_may(limit: float) -> None:
    hit, miss = HIT.score_gain(limit), MISS.score_gain(limit)
    assert limit * exp(miss) + (1 - limit) * exp(hit) == pytest.approx(1.0)
    assert hit <= 0.0 <= miss


def watched(answers: AuditedAnswers, promised: float = 0.9, count: int = 20) -> PromiseWatch:
    """So many looks at the same, each of five seconds."""
    watch = PromiseWatch()
    for number in range(count):
        watch.follow(answers, 5.0 * (number + 1), promised)
    return watch


def test_a_promise_is_broken_for_ten_minutes_after_an_alarm_whatever_changes_meanwhile() -> None:
    watch = watched(AuditedAnswers((50, 0, 50), (10, 0, 0), (5, 0, 0)))
    watch.restart()
    assert recent_agreement([watch], 100.0).agreement is None, "thresholds are others now"
    good = AuditedAnswers((50, 0, 50), (10, 0, 0), (0, 0, 0))
    for number in range(140):
        at_s = 105.0 + 5.0 * number
        watch.follow(good, at_s, 0.9)
        assert recent_agreement([watch], at_s, 0.9).state in (("broken",) if at_s < WATCHED_S else ("broken", "kept"))
    assert recent_agreement([watch], at_s, 0.9).state == "kept"


def test_what_is_seen_is_forgotten_after_ten_minutes() -> None:
    watch = watched(AuditedAnswers((50, 50), (10, 0), (0, 0)), count=1000)
    agreement = recent_agreement([watch], 5000.0).agreement
    assert agreement.audits == pytest.approx(1200, abs=10)
    assert len(watch.looks) <= 122
    assert recent_agreement([watch], 5000.0 + WATCHED_S + 5.0).agreement is None
    assert recent_agreement([watch], 5000.0 + WATCHED_S + 5.0, 0.9).state == "not watched"


def state_by(fronts: int, disagreeing: float, minutes: int) -> str:
    """The state of a promise of 99 % by several watches, whose audits show this share of disagreement."""
    random, watches = np.random.default_rng(0), [PromiseWatch() for _ in range(fronts)]
    for look in range(6 * minutes):
        for watch, audits in zip(watches, random.poisson(40 / fronts, fronts).tolist(), strict=True):
            missed = int(random.binomial(audits, disagreeing))
            watch.follow(AuditedAnswers((50 * audits, 0), (audits, 0), (missed, 0)), 10.0 * look, 0.99)
    return recent_agreement(watches, 10.0 * look, 0.99).state


@pytest.mark.parametrize("fronts", [1, 2, 16])
def test_a_promise_is_broken_by_any_number_of_watches_only_if_it_is(fronts: int) -> None:
    assert state_by(fronts, 0.05, minutes=10) == "broken"
    assert [state_by(fronts, 0.007, minutes) for minutes in (10, 20)] == ["kept", "kept"]


def test_an_alarm_of_one_of_several_watches_breaks_the_promise() -> None:
    alarmed = watched(AuditedAnswers((50, 0, 50), (10, 0, 0), (5, 0, 0)))
    quiet = [watched(AuditedAnswers((50, 0, 50), (10, 0, 0), (0, 0, 0))) for _ in range(8)]
    assert recent_agreement([alarmed, *quiet], 100.0, 0.9).state == "broken"
