"""A running application follows other plans and survives what dies, while requests go on."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

import pytest

from experiments.replan.suite import BLOCK_S, BLOCKS, leaves_after, plan, profile
from experiments.shared.live import NAME, Live, application, kill_node, named, node
from isobatch.cluster.controller.application import RolloutError, RunningApplication
from isobatch.cluster.serving.local import LocalRay
from isobatch.deployments.replica.virtual import FAULTS
from isobatch.optimizer.plan import Plan
from tests.helpers.asking import ask, eventually
from tests.integration.conftest import Run

ELSEWHERE = "t4"  # a kind that only a second node has
PROFILE = profile({**BLOCK_S, ELSEWHERE: 0.020})
ONE_CUT = plan((4, 2, "v100"), (BLOCKS, 1, "v100"), batch=4)
CHANGES = {
    "cut moved": plan((5, 2, "v100"), (BLOCKS, 1, "v100"), batch=4),
    "replicas moved": plan((5, 1, "v100"), (BLOCKS, 2, "v100"), batch=4),
    "batch changed": plan((5, 1, "v100"), (BLOCKS, 2, "v100"), batch=2),
    "split added": plan((2, 1, "v100"), (5, 1, "v100"), (BLOCKS, 1, "v100"), batch=2),
    "device kind changed": plan((5, 2, "v100"), (BLOCKS, 1, "k80"), batch=4),
    "split removed": plan((BLOCKS, 3, "v100"), batch=4),
}


@pytest.fixture(scope="module")
def here(local: tuple[LocalRay, str], tmp_path_factory: pytest.TempPathFactory) -> Live:
    folder = tmp_path_factory.mktemp("live")
    live = Live(local[0], local[1], Path(os.environ[FAULTS]))
    live.deploy(application(ONE_CUT, PROFILE, folder, slo_ms=60_000), patience_s=300)
    return live


@pytest.fixture
def followed(here: Live, run: Run) -> RunningApplication:
    """The application, on the plan that it was declared with."""
    running = RunningApplication(NAME)
    if run(running.plan()) != ONE_CUT:
        assert eventually(lambda: _is_led_to(running, ONE_CUT, run))
    return running


def _is_led_to(running: RunningApplication, plan: Plan, run: Run) -> bool:
    """Not yet, while a deployer that was killed is being started again; any other reason is an error."""
    try:
        run(running.roll_out(plan))
    except RolloutError as error:
        if "not running yet" not in str(error):
            raise
        return False
    return True


@contextmanager
def asked_meanwhile(here: Live, clients: int = 6) -> Iterator[None]:
    """Clients that ask all the while: each answer must come, and say that the input left where it should.

    When the block ends, each is answered five times more.
    """
    stop, trouble, counts = threading.Event(), list[object](), Counter[int]()

    def client(number: int) -> None:
        depth = number % BLOCKS
        while not stop.is_set():
            status, reply = ask(here.base, "POST", "/predict", {"inputs": {"exit_block": depth}})
            if status != 200 or reply["outputs"][0]["exit_block"] != leaves_after(depth):
                trouble.append((depth, status, reply))
            counts[number] += 1

    with ThreadPoolExecutor(clients) as pool:
        asking = [pool.submit(client, number) for number in range(clients)]
        try:
            yield
            before = dict(counts)
            assert eventually(lambda: all(counts[each] >= before.get(each, 0) + 5 for each in range(clients)))
        finally:
            stop.set()
    for each in asking:
        each.result()
    assert trouble == []


def stages(here: Live) -> list[list[int]]:
    return [each["blocks"] for each in ask(here.base, "GET", "/stats")[1]["splits"]]


def answers(here: Live) -> bool:
    try:
        return ask(here.base, "POST", "/predict", {"inputs": {"exit_block": 1}})[0] == 200
    except (OSError, HTTPException, ValueError):  # nobody there, or an HAProxy that knows no front yet
        return False


def test_every_kind_of_change_while_requests_flow(here: Live, followed: RunningApplication, run: Run) -> None:
    plans = [ONE_CUT, *CHANGES.values()]
    with asked_meanwhile(here):
        for what, before, changed in zip(CHANGES, plans, plans[1:], strict=False):
            replicas = here.processes("split")
            run(followed.roll_out(changed))
            assert run(followed.plan()) == changed, what
            assert stages(here) == [[split.start, split.stop] for split in changed.splits], what
            if changed.devices() == before.devices():
                assert here.processes("split") == replicas, what  # none was touched
    assert eventually(lambda: len(here.processes("split")) == 3)  # those of the other kind have gone


def test_what_fronts_count_is_observed(here: Live, followed: RunningApplication, run: Run) -> None:
    run(followed.observe())
    for depth in (0, 1, 7):
        ask(here.base, "POST", "/predict", {"inputs": {"exit_block": depth}})
    seen = run(followed.observe())
    assert (seen.arrivals, seen.in_time) == (3, 3)
    assert seen.exits == (0, 2, 0, 0, 0, 0, 0, 1)
    assert {launched.kind for launched in seen.launches} == {"v100"}


def test_a_plan_that_cannot_run_changes_nothing(here: Live, followed: RunningApplication, run: Run) -> None:
    unknown = Plan.from_json(ONE_CUT.to_json().replace("v100", "abacus"))
    with asked_meanwhile(here, clients=2), pytest.raises(RolloutError, match="abacus"):
        run(followed.roll_out(unknown))
    assert run(followed.plan()) == ONE_CUT


def test_the_same_file_again_leaves_everything_as_it_is(
    here: Live, followed: RunningApplication, run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run(followed.roll_out(CHANGES["cut moved"]))
    before = here.processes("split") | here.processes("front") | here.processes("deployer")
    folder = next(path for path in tmp_path_factory.getbasetemp().iterdir() if path.name.startswith("live"))
    with asked_meanwhile(here, clients=2):
        here.deploy(application(ONE_CUT, PROFILE, folder, slo_ms=60_000))
    assert here.processes("split") | here.processes("front") | here.processes("deployer") == before
    assert run(followed.plan()) == CHANGES["cut moved"]


@pytest.mark.parametrize("deployment", ["split", "deployer"])
def test_killed_processes_cost_no_answer(here: Live, followed: RunningApplication, run: Run, deployment: str) -> None:
    run(followed.roll_out(CHANGES["cut moved"]))
    before = here.processes(deployment)
    with asked_meanwhile(here):
        victim = min(before)
        os.kill(before[victim], signal.SIGKILL)
        assert eventually(
            lambda: len(here.processes(deployment)) == len(before) and victim not in here.processes(deployment),
        )
    assert eventually(lambda: run(_follows(followed, CHANGES["cut moved"])))
    assert eventually(lambda: _is_led_to(followed, ONE_CUT, run))


async def _follows(running: RunningApplication, wanted: Plan) -> bool:
    try:
        return await running.plan() == wanted
    except Exception:  # the next deployer is not there yet
        return False


def test_a_replica_that_hangs_is_replaced(here: Live, followed: RunningApplication) -> None:
    with asked_meanwhile(here):  # a replica's first launch may take long without being missed: let it be behind them
        before = here.processes("split")
    here.slow_down(before[min(before)], 1e6)
    with asked_meanwhile(here):
        assert eventually(lambda: min(before) not in here.processes("split") and len(here.processes("split")) == 3)


def test_who_is_on_a_lost_node_goes_on_elsewhere(here: Live, followed: RunningApplication, run: Run) -> None:
    with node(here.ray.address, {ELSEWHERE: 1}) as second:
        run(followed.roll_out(plan((5, 2, "v100"), (BLOCKS, 1, ELSEWHERE), batch=4)))
        with asked_meanwhile(here):
            kill_node(second)
            run(followed.roll_out(ONE_CUT))  # as the controller does when it sees fewer devices
    assert run(followed.plan()) == ONE_CUT


def test_a_killed_front_follows_the_plan_of_the_others(here: Live, followed: RunningApplication, run: Run) -> None:
    run(followed.roll_out(CHANGES["cut moved"]))
    (process,) = here.processes("front").values()
    os.kill(process, signal.SIGKILL)
    assert eventually(lambda: process not in here.processes("front").values() and answers(here))
    assert stages(here) == [[0, 5], [5, BLOCKS]]


def test_haproxy_is_started_again(here: Live, followed: RunningApplication) -> None:
    before = set(named("haproxy"))
    for process in before:
        with suppress(ProcessLookupError):  # one that a reload has replaced may have ended by itself
            os.kill(process, signal.SIGKILL)
    assert eventually(lambda: set(named("haproxy")) - before and answers(here))
