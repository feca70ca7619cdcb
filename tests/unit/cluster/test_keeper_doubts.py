"""What a keeper of a promise does where it knows little."""

from dataclasses import replace

from isobatch.cluster.controller.corrections import Corrections
from isobatch.cluster.controller.promise_keeper import PromiseKeeper
from isobatch.cluster.controller.survival import with_all_ramps
from isobatch.deployments.front.observed import Observed
from isobatch.profiles.evidence import Evidence
from tests.helpers.exit_tables import exit_table
from tests.helpers.fluid_application import MEDIUM, first_plan, question

EVIDENCE = Evidence(exit_table(0, count=2000), exit_table(1, count=1000), "agreement", 0.03, 0.95)
PREPARED = dict(EVIDENCE.thresholds(EVIDENCE.prepared, range(3)))
TUNED = replace(with_all_ramps(first_plan(question()), range(3)), thresholds=tuple(PREPARED.items()))
FACTS = question().facts(MEDIUM, Corrections())


def keeper(**terms: object) -> PromiseKeeper:
    return PromiseKeeper(**{"agreement": 0.95, "evidence": EVIDENCE, "prepared": PREPARED, **terms})  # type: ignore[arg-type]


def test_a_window_in_which_all_inputs_ask_for_the_full_network_loosens_no_threshold() -> None:
    kept = keeper()
    kept.resume(8.0, TUNED)
    for exits, full, change in (((0, 0, 0, 0), 6000, None), ((0, 0, 0, 6000), 0, "loosened")):
        seen = Observed(0.0, 120.0, 6000, 6000, exits, full=full)
        change_now = kept.window(seen, TUNED, FACTS, windows=99.0, tightened=0)
        assert (change_now and change_now.what) == change
