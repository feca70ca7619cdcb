"""What the fronts tell of a promise is what the controller says of it, look for look."""

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.peeks import with_all_ramps
from isobatch.cluster.controller.promise_keeper import AgreementTerms, PromiseKeeper
from isobatch.deployments.dispatch.route import Route, Stage
from isobatch.deployments.front.counts import AUDIT_WINDOW_S, Counts
from isobatch.deployments.front.observed import Observed
from isobatch.profiles.agreement import recent_agreement
from isobatch.profiles.evidence import Evidence
from tests.helpers.exit_tables import exit_table
from tests.helpers.fluid_application import MEDIUM, first_plan, question

PROMISED = 0.95
EVIDENCE = Evidence(exit_table(0, count=2000), exit_table(1, count=1000), "agreement", 0.03, 0.95)
PREPARED = dict(EVIDENCE.thresholds(EVIDENCE.prepared, range(3)))
ASKED = question()
FACTS = ASKED.facts(MEDIUM, Corrections())
PLAN = with_all_ramps(first_plan(ASKED), range(3))
STAGE = Stage(0, 4, 1, "a", (0.001,), ramps=frozenset(range(3)))
AUDITS = (40, 20, 10, 0)

leaving = st.sampled_from([(400, 300, 200, 100), (340, 280, 220, 160), (0, 0, 0, 1000)])
stretches = st.tuples(leaving, st.integers(1, 30), st.sampled_from([0, 1, 2, 4, 8, 20]))


@settings(max_examples=40, deadline=None)
@given(st.lists(stretches, min_size=1, max_size=6))
@example([((400, 300, 200, 100), 2, 8), ((0, 0, 0, 1000), 3, 0)])  # inputs are doubted while much is in the purse
def test_a_front_says_broken_whenever_the_controller_does(played: list[tuple[tuple[int, ...], int, int]]) -> None:
    """Inputs that leave so, for so many looks, in each of which so many audits miss."""
    keeper, plan, now_s = PromiseKeeper(AgreementTerms(PROMISED, EVIDENCE, PREPARED)), PLAN, 0.0
    counts, route = Counts({}, lambda: now_s), Route((STAGE,))
    counts.promised = PROMISED
    for exits, looks, missed in played:
        for _ in range(looks):
            counts.end_windows(route)
            for counted, more in ((counts.exits, exits), (counts.audited, AUDITS), (counts.missed, (missed, 0, 0, 0))):
                counted.update(dict(enumerate(more)))
            now_s += AUDIT_WINDOW_S
            seen = Observed(
                now_s - AUDIT_WINDOW_S, AUDIT_WINDOW_S, 1000, 1000, exits, audited=AUDITS, missed=(missed, 0, 0, 0)
            )
            change = keeper.look(seen, plan, FACTS)
            state = recent_agreement([counts.watched(route)], now_s, PROMISED).state
            assert state == keeper.lately(now_s).state
            if change and "broken" in change.why:
                assert state == "broken"
            if change and change.thresholds != plan.thresholds:
                plan, route = replace(plan, thresholds=change.thresholds), Route((STAGE,), thresholds=change.thresholds)
                keeper.restart()
