"""What audits tell of agreement: unbiased whatever is given up, and right at any time it is looked at."""

import numpy as np

from profiles.agreement import agreement_of, bounds

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
            seen = agreement_of(*counts.tolist())
            assert seen
            inside &= seen.low <= 1 - TRUTH <= seen.high
        held += inside
        estimates.append(seen.share)
    assert held >= 0.93 * TRIALS
    error = float(np.std(estimates)) / np.sqrt(TRIALS)
    assert abs(float(np.mean(estimates)) - (1 - TRUTH)) < 4 * error


def test_more_audits_tell_more() -> None:
    widths = [np.diff(bounds(0.007 * audits, audits, 0.95))[0] for audits in (200, 2_000, 20_000)]
    assert widths[0] > 2 * widths[1] > 4 * widths[2]
    assert widths[1] < 0.012


def test_without_audits_nothing_is_known_and_who_ran_to_the_end_agrees() -> None:
    assert agreement_of([10, 0, 90], [0, 0, 0], [0, 0, 0]) is None
    assert agreement_of([0, 0, 90], [2, 0, 0], [1, 0, 0]) is None, "audits of those that left before"
    assert agreement_of([0, 0, 0], [2, 0, 0], [1, 0, 0]) is None
    seen = agreement_of([10, 0, 90], [10, 0, 0], [5, 0, 0])
    assert seen
    assert seen.share == 0.95
    assert seen.verdict(0.99) == "not watched"
