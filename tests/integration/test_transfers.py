"""Survivors that are fetched, or stay on their device: the answers are the uncut network's, and nothing stays held.

The network is a cascade, so some are fetched where another network begins. Then: what is lost when replicas go.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.files import save
from tests.helpers.asking import ask, eventually, predict
from tests.helpers.cascade_directories import cascade_directory
from tests.helpers.tiny_tokenizers import WORDS
from tests.helpers.toy_graph import application, cut_at, fleets, toy_profile
from tests.helpers.toy_model import RAMPS, left_at
from tests.helpers.uncut import answers_as_uncut
from tests.integration.conftest import Put

EDGE, BLOCKS = 4, 7
SPLITS = tuple(
    Split(start, stop, 4, tuple(ramp for ramp in (1, EDGE - 1) if start <= ramp < stop))
    for start, stop in pairwise((0, 2, EDGE, BLOCKS))
)
APART = Plan(tuple(Placement("cpu", 1, (split,)) for split in SPLITS))
TOGETHER = Plan((Placement("cpu", 3, SPLITS, local=True),))  # as many devices, so that none has to go first

# All survivors wait where they were computed; no input runs on behind its answer, which would hold them for a minute.
TOLD = {"by_value_bytes": 0, "audit_share": 0.0}


def replicas() -> list[Any]:
    """The actors of all splits, in the order in which fronts give placements to them."""
    import ray

    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    actors = []
    for name in sorted(name for name in names if name.startswith("SERVE_REPLICA::toy.") and "#split#" in name):
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            actors.append(ray.get_actor(name, "serve"))
    return actors


def held(replica: Any) -> int:
    """Batches of survivors that are held in its process; none in one that still starts, or that has ended."""
    import ray

    def count_held(actor: Any) -> int:
        """Runs inside Serve's actor itself: a call through a handle would go to any replica."""
        split = actor._replica_impl._user_callable_wrapper._callable
        return 0 if split is None else len(split._holdings)  # None: the replica is still starting

    count = replica.__ray_call__.remote(count_held)
    try:
        return int(ray.get(count, timeout=30))
    except ray.exceptions.ActorDiedError:
        return 0


def nothing_is_held() -> bool:
    return all(held(replica) == 0 for replica in replicas())


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its levels number their tokens otherwise, and each lets about half of the inputs go."""
    return cascade_directory(tmp_path_factory.mktemp("cascade"), sure=(0.41, 0.3515), words=WORDS[::-1])


@pytest.fixture(scope="module")
def real(deployed: Put, cascade: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Networks on torch, whose survivors all wait where they were computed."""
    folder = tmp_path_factory.mktemp("real")
    config = application(folder, APART, "isobatch.deployments.models:load_served", model=str(cascade), **TOLD)
    save(replace(toy_profile(BLOCKS), edges=(EDGE,)), folder / "profile.json")
    return deployed(config)


@pytest.mark.parametrize("plan", [APART, TOGETHER], ids=["apart", "together"])
def test_answers_equal_the_uncut_network(real: str, cascade: Path, lead: Callable[[Plan], None], plan: Plan) -> None:
    lead(plan)
    assert eventually(lambda: len(replicas()) == sum(plan.devices().values()))  # what one keeps that goes begins again
    random = Random(3)
    texts = [" ".join(random.choices(WORDS, k=random.randint(1, 12))) for _ in range(300)]
    answers = answers_as_uncut(real, cascade, texts, 64)
    assert max(len(answer["splits"]) for answer in answers) == 3
    assert [answer["level"] for answer in answers] == [int(answer["exit_block"] >= EDGE) for answer in answers]
    assert len({answer["exit_block"] for answer in answers}) == 3, "some leave inside a level, some at the edge"
    assert eventually(nothing_is_held)


def test_a_holder_of_survivors_at_the_edge_may_end(real: str, cascade: Path, lead: Callable[[Plan], None]) -> None:
    """The large level's replica stands still until some wait for it at the one before."""
    import ray

    lead(APART)
    assert eventually(lambda: len(replicas()) == 3)
    _, before_the_edge, large = replicas()
    process = ray.get(large.__ray_call__.remote(lambda _: os.getpid()))
    random = Random(5)
    texts = [" ".join(random.choices(WORDS, k=random.randint(1, 12))) for _ in range(200)]
    with ThreadPoolExecutor(1) as pool:
        os.kill(process, signal.SIGSTOP)
        try:
            pending = pool.submit(answers_as_uncut, real, cascade, texts, 32)
            assert eventually(lambda: held(before_the_edge))
            ray.kill(before_the_edge)
        finally:
            os.kill(process, signal.SIGCONT)
        answers = pending.result()
    assert {answer["level"] for answer in answers} == {0, 1}
    assert eventually(nothing_is_held)


def test_a_replica_that_is_killed_costs_no_answer(leisurely: str, lead: Callable[[Plan], None]) -> None:
    import ray

    lead(Plan(tuple(Placement("cpu", n, each.splits) for n, each in zip((2, 1), cut_at(1).placements, strict=True))))
    wanted = [[block, label] for label in range(10) for block in range(4)] * 2  # for seconds there is something held
    with ThreadPoolExecutor(len(wanted)) as pool:
        pending = [pool.submit(predict, leisurely, [pair]) for pair in wanted]
        victims: list[Any] = []

        def one_holds_something() -> bool:
            victims[:] = [replica for replica in replicas() if held(replica)]
            return bool(victims)

        assert eventually(one_holds_something)
        ray.kill(victims[0])
        replies = [each.result() for each in pending]
    for (block, label), (output,) in zip(wanted, replies, strict=True):
        assert (output["label"], output["exit_block"]) == (label, left_at(block, RAMPS))
    assert eventually(nothing_is_held)


def test_what_was_admitted_is_answered_before_the_splits_go(leisurely: str) -> None:
    from ray import serve

    def launches() -> int:
        return sum(split["launches"] for split in ask(leisurely, "GET", "/stats")[1]["splits"])

    before = launches()
    with ThreadPoolExecutor(1) as pool:
        slow: Future[list[dict[str, Any]]] = pool.submit(predict, leisurely, [[3, 7], [0, 3]] * 20)  # takes seconds
        assert eventually(lambda: launches() > before)
        serve.delete("toy")
        assert [output["label"] for output in slow.result()] == [7, 3] * 20
    assert eventually(lambda: not fleets()), fleets()


def test_a_front_is_not_ready_while_a_split_has_no_replica(real: str) -> None:
    """The deployer may start the replicas anew as they end, when it cleans up after the start."""
    from isobatch.deployments.deployer.fleet import delete_fleets

    assert eventually(lambda: len(fleets()) == 1), fleets()  # those of another application have gone
    delete_fleets(fleets())

    def is_unready() -> bool:
        status, reply = ask(real, "GET", "/readyz")
        return status == 503 and "cpu-" in reply["error"]

    assert eventually(is_unready)
    assert ask(real, "GET", "/healthz")[0] == 200
