"""Survivors that are fetched, or stay on their device: the answers are the uncut network's, and nothing stays held."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from optimizer.plan import Placement, Plan, Split
from tests.helpers.asking import eventually, predict
from tests.helpers.toy_graph import application, cut_at
from tests.helpers.toy_model import RAMPS, left_at
from tests.helpers.uncut import answers_as_uncut

BLOCKS = 4


def splits(*cuts: int) -> tuple[Split, ...]:
    """A ramp after every block but the last."""
    return tuple(
        Split(start, stop, 4, tuple(range(start, min(stop, BLOCKS - 1))))
        for start, stop in pairwise((0, *cuts, BLOCKS))
    )


APART = Plan(tuple(Placement("cpu", 1, (split,)) for split in splits(1, 3)))
TOGETHER = Plan((Placement("cpu", 2, splits(1, 3), local=True),))


def replicas() -> list[Any]:
    """The actors of all splits."""
    import ray

    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return [
        ray.get_actor(name, "serve") for name in names if name.startswith("SERVE_REPLICA::toy.") and "#split#" in name
    ]


def held(replica: Any) -> int:
    """Batches of survivors that are held in its process; none in one that still starts, or that has ended."""
    import ray

    # Straight into Serve's actor: a call through a handle would go to any replica.
    count = replica.__ray_call__.remote(
        lambda actor: len(getattr(actor._replica_impl._user_callable_wrapper._callable, "_holdings", ()))
    )
    try:
        return int(ray.get(count, timeout=30))
    except ray.exceptions.ActorDiedError:
        return 0


def nothing_is_held() -> bool:
    return all(held(replica) == 0 for replica in replicas())


@pytest.mark.parametrize("plan", [APART, TOGETHER], ids=["apart", "together"])
def test_answers_are_those_of_the_uncut_network(
    deployed: Callable[..., str], checkpoint: Path, tmp_path: Path, plan: Plan
) -> None:
    base = deployed(application(tmp_path, plan, "deployments.models:load", model=str(checkpoint), by_value_bytes=0))
    answers = answers_as_uncut(base, checkpoint, 300, 64)
    assert max(len(answer["splits"]) for answer in answers) == 3
    assert eventually(nothing_is_held)


def test_a_replica_that_is_killed_costs_no_answer(deployed: Callable[..., str], tmp_path: Path) -> None:
    import ray

    plan = Plan(tuple(Placement("cpu", n, each.splits) for n, each in zip((2, 1), cut_at(1).placements, strict=True)))
    base = deployed(application(tmp_path, plan, "load_leisurely", by_value_bytes=0))
    wanted = [[block, label] for label in range(10) for block in range(4)] * 2  # for seconds there is something held
    with ThreadPoolExecutor(len(wanted)) as pool:
        asked = [pool.submit(predict, base, [pair]) for pair in wanted]
        victims: list[Any] = []

        def one_holds_something() -> bool:
            victims[:] = [replica for replica in replicas() if held(replica)]
            return bool(victims)

        assert eventually(one_holds_something)
        ray.kill(victims[0])
        replies = [each.result() for each in asked]
    for (block, label), (output,) in zip(wanted, replies, strict=True):
        assert (output["label"], output["exit_block"]) == (label, left_at(block, RAMPS))
    assert eventually(nothing_is_held)
