"""Pipelines side by side in one real graph."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from isobatch.optimizer.plan import Plan
from tests.helpers.asking import ask, predict
from tests.helpers.toy_graph import cut_at
from tests.helpers.toy_model import RAMPS, left_at


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
