"""A plan as a real graph: splits in applications of their own, survivors merged between them, gone with their front."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isobatch.deployments.metrics import FRONT
from isobatch.optimizer.plan import Plan
from isobatch.profiles.errors import UserError
from tests.helpers.asking import ask, eventually, predict
from tests.helpers.scraping import check_family, scraped
from tests.helpers.toy_graph import application, cut_at
from tests.helpers.toy_model import RAMPS, left_at
from tests.integration.conftest import Put


def test_hundreds_in_flight_each_get_their_own_answer(graph: str) -> None:
    wanted = [[block, label] for label in range(10) for block in range(4)] * 10
    with ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(lambda pair: predict(graph, [pair]), wanted))
    for (block, label), (output,) in zip(wanted, replies, strict=True):
        assert (output["label"], output["exit_block"]) == (label, left_at(block, RAMPS))
        assert [step["block"] for step in output["splits"]] == ([0] if output["exit_block"] < 2 else [0, 2])
    assert ask(graph, "GET", "/readyz")[0] == 200


def test_what_happens_is_told_to_prometheus(graph: str) -> None:
    predict(graph, [[3, 7], [0, 3]])
    of_some = {"isobatch_level_answers", "isobatch_audits", "isobatch_canary_requests", "isobatch_disagreement",
               "isobatch_disagreement_lately", "isobatch_promise"}  # fmt: skip
    always = {family.name: family for family in FRONT if family.name not in of_some}
    result = eventually(lambda: names if (names := scraped()).keys() >= always.keys() else {})
    assert result, always.keys() - scraped().keys()
    for name, family in always.items():
        check_family(family, result[name])


def test_several_fronts_share_the_splits_and_tell_one_story(leisurely: str) -> None:
    before = ask(leisurely, "GET", "/stats")[1]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda label: predict(leisurely, [3, label % 10]), range(60)))
    assert [output["label"] for (output,) in replies] == [number % 10 for number in range(60)]
    assert [step["block"] for step in replies[0][0]["splits"]] == [0, 1, 2]
    assert ask(leisurely, "GET", "/readyz")[0] == 200
    # a front that is silent for two seconds is left out until it joins again
    assert eventually(lambda: len(ask(leisurely, "GET", "/stats")[1]["fronts"]) == 2)
    for _ in range(4):  # whichever of them is asked
        stats = ask(leisurely, "GET", "/stats")[1]
        assert stats["requests"]["answered"] == before["requests"]["answered"] + 60
        assert (len(stats["fronts"]), stats["exits"]["3"]) == (2, before["exits"]["3"] + 60)


def test_a_split_that_cannot_load_says_why(deployed: Put, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no weights here") as error:
        deployed(application(tmp_path, cut_at(), "load_at_the_front_only"))
    assert "\n" not in str(error.value)


def test_pipelines_side_by_side_answer_as_one(leisurely: str, lead: Callable[[Plan], None]) -> None:
    lead(Plan(cut_at(2).placements, beside=(cut_at(),)))
    wanted = [[block, label] for label in range(10) for block in range(4)]
    with ThreadPoolExecutor(40) as pool:
        replies = list(pool.map(lambda pair: predict(leisurely, [pair]), wanted))
    for (block, label), (output,) in zip(wanted, replies, strict=True):
        assert (output["label"], output["exit_block"]) == (label, left_at(block, RAMPS))
    splits = ask(leisurely, "GET", "/stats")[1]["splits"]
    assert [each["blocks"] for each in splits] == [[0, 2], [2, 4], [0, 4]]
    assert len({each["group"] for each in splits}) == 3
    assert all(each["launches"] for each in splits), "every pipeline took its share"
