"""Two applications of a fleet and its arbiter, live on virtual devices: a flood moves devices, all of an idle one."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from threading import Event
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from experiments.serve.fleet import profile
from isobatch.cluster.cli import app
from isobatch.cluster.load.generator import LoadGenerator, LoadRecord
from isobatch.cluster.load.workloads import arrivals
from isobatch.profiles.files import save
from tests.helpers.asking import ask, becomes, eventually
from tests.integration.conftest import Put

KIND, DEVICES = "v100", 4
PASS_S, SLO_S = 0.3, 5.0  # a device sustains about 35 inputs per second
LEAST_PER_S, CALM_PER_S, FLOOD_PER_S = 30.0, 12.0, 100.0
FLOOD_S = 2.5  # of one part of a load
PARKED_FLOOD_PER_S = 130.0  # more than three devices sustain
SHARED_PER_S = 8.0  # of a device that two replicas share, each of which sustains about 17
PARK_AFTER_S = 5.0
PATIENT_S = 60.0  # a deadline that is kept on a slow machine, also where replicas must start
ARBITERS = count()
Note = Callable[[str, float], None]
Parts = list[tuple[float, Future[LoadRecord]]]  # of a load, by starting time
pytestmark = pytest.mark.long
HASTY = {"replan_every_s": 8.0, "look_every_s": 1.0, "react_every_s": 0.5, "enough_inputs": 20, "start_s": 2.0}


@dataclass(frozen=True)
class Fleet:
    """The applications at an address, as a Serve file declares them."""

    base: str
    declared: list[dict[str, Any]]
    put: Put

    def parking(self) -> str:
        """From now on the calm application gives its devices away when it has no inputs. Returns the address.

        Only the arbiter is deployed anew. Any slow start of a deployment would be a time without inputs, too.
        """
        (arbiter,) = (each for each in self.declared if each["name"] == "fleet")
        (calm,) = (each for each in arbiter["args"]["applications"] if each["name"] == "calm")
        calm["park_after_s"] = PARK_AFTER_S
        return self.put(*self.declared)


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Notes a figure in the report of the tests, which `make bench-fleet` reads, and prints it."""

    def noted(name: str, seconds: float) -> None:
        record_property(name, seconds)
        print(f"{name} {seconds:.2f}")

    return noted


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, deployed: Put, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """The Serve file that `isobatch plan` writes, with shorter windows. Its tests come one after another.

    started: replicas start and end as devices move; standby: each device holds a replica of both applications; shared:
    there is one device, which replicas of both share.
    """
    folder, shared, standby = tmp_path_factory.mktemp("fleet"), request.param == "shared", request.param == "standby"
    known = profile(PASS_S)
    if shared:
        more = [each.shared_by(2, [2.0] * len(each.batch_sizes)) for each in known.tables]
        known = replace(known, tables=(*known.tables, *more))
    save(known, folder / "virtual.json")
    virtual = {"backend": "virtual", "cpus_per_replica": 0.1, "audit_share": 0.0}
    entry = {"profile": "virtual.json", "slo_ms": 1e3 * SLO_S, "rate_per_s": 60.0, "args": virtual}
    calm = {"name": "calm", "least_per_s": SHARED_PER_S if shared else LEAST_PER_S}
    applications = [entry | calm, entry | {"name": "flooded"}]
    devices = {KIND: 1 if shared else DEVICES}
    fields = {"devices": devices, "goal": "fairness", "standby": standby, "applications": applications}
    (folder / "fleet.yaml").write_text(yaml.safe_dump(fields))
    options = ("plan", "fleet.yaml", "--no-simulation", "--gap", "0.02", "--out", "serve.yaml")
    with contextlib.chdir(folder):
        result = CliRunner().invoke(app, options, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    served = yaml.safe_load((folder / "serve.yaml").read_text())["applications"]
    for each in served:
        if each["name"].endswith("-controller"):
            each["args"] = HASTY | each["args"] | {"memory": str(folder / each["name"])}
        elif each["name"] == "fleet":
            # each deployment has an arbiter of its own, which has moved no device yet
            each["args"] |= {"replan_every_s": 8.0 + 0.1 * next(ARBITERS), "look_every_s": 1.0}
        else:
            each["deployments"] = [{"name": "front", "ray_actor_options": {"num_cpus": 0.1}}]
    return Fleet(deployed(*served), served, deployed)


def status(base: str, name: str, path: str = "status") -> dict[str, Any]:
    code, reply = ask(base, "GET", f"/{name}/{path}")
    return dict(reply) if code == 200 else {}


def budgets(base: str) -> dict[str, dict[str, int]]:
    return dict(status(base, "fleet").get("budgets", {}))


def used(base: str) -> dict[str, int]:
    """The replicas that each application's front sends launches to."""
    splits = {name: status(base, name, "stats")["splits"] for name in ("calm", "flooded")}
    return {name: sum({each["group"]: each["replicas"] for each in has}.values()) for name, has in splits.items()}


def generator(base: str, name: str, deadline_s: float, blocks: Sequence[int], connections: int = 512) -> LoadGenerator:
    bodies = [json.dumps({"inputs": [{"exit_block": block}]}).encode() for block in blocks]
    header = f"X-Deadline-Ms: {1e3 * deadline_s:g}\r\n"
    load = LoadGenerator(f"{base}/{name}/predict", bodies, connections, header)
    load.patience_s = 2 * PATIENT_S
    return load


def load(base: str, name: str, per_s: float, seconds: float, deadline_s: float = SLO_S) -> LoadRecord:
    due_s = arrivals("poisson", per_s, seconds, seed=1)
    return asyncio.run(generator(base, name, deadline_s, (3, 7)).at(due_s))


def check_calm(parts: Parts) -> None:
    """The flood of the other application costs the calm one no request, and no time in the median."""
    records = [part.result() for _, part in parts]
    assert {code for record in records for code in record.status} == {200}
    assert np.median(np.concatenate([record.ended_s - record.due_s for record in records])) < SLO_S


def check_flooded(parts: Parts) -> None:
    codes = {code for _, part in parts for code in part.result().status}
    assert codes <= {200, 503, 504}, "each is answered: some are refused or late"


def keeps_up(parts: Parts, steady_s: float) -> bool:
    """Whether one part of the flood is answered: two devices would answer at most seven of ten requests."""
    ended = [part.result() for start_s, part in parts if start_s > steady_s and part.done()]
    return any((record.status == 200).mean() > 0.8 for record in ended)


def events(base: str, name: str, what: str, after_s: float = 0.0) -> list[dict[str, Any]]:
    """The decisions of this kind of the application's controller, from a time on."""
    all_events = status(base, f"{name}/controller").get("events", [])
    return [each for each in all_events if each["what"] == what and each["at_s"] >= after_s]


@pytest.mark.parametrize("fleet", ["shared"], indirect=True)
def test_two_applications_share_one_device_and_a_flood_of_one_costs_the_other_nothing(fleet: Fleet) -> None:
    base = fleet.base
    each = {f"{KIND}/2": 1}
    becomes(lambda: budgets(base), {"calm": each, "flooded": each})
    becomes(lambda: used(base), {"calm": 1, "flooded": 1})
    with flooding(base, "calm", CALM_PER_S, PATIENT_S) as calms:
        flood = load(base, "flooded", FLOOD_PER_S, 5.0)
    assert budgets(base) == {"calm": each, "flooded": each}, "none gives up its only part of the device"
    check_calm(calms)
    assert (flood.status == 200).sum() > 50
    assert set(np.unique(flood.status)) <= {200, 503, 504}, "each is answered"


@pytest.mark.parametrize("fleet", ["standby"], indirect=True)
def test_a_flood_moves_a_device_where_replicas_stand_by(fleet: Fleet, note: Note) -> None:
    note("move_s", flooded_s(fleet.base))


@pytest.mark.parametrize("fleet", ["standby"], indirect=True)
def test_an_application_without_inputs_lends_its_last_device_and_answers_the_next_input_at_once(
    fleet: Fleet, note: Note
) -> None:
    base = fleet.parking()
    with flooding(base, "flooded", PARKED_FLOOD_PER_S) as floods:
        becomes(lambda: budgets(base), {"calm": {KIND: 0}, "flooded": {KIND: 4}})
        becomes(lambda: used(base), {"calm": 1, "flooded": 4})
        assert status(base, "fleet")["applications"]["calm"]["state"].startswith("parked: no inputs for ")
        asked_s = time.time()
        first_answer_s = calm_answer_s(base)
        note("first_answer_s", first_answer_s)
        # further inputs come, or it would be without inputs and park again before a slow machine has moved the device
        assert eventually(lambda: calm_answer_s(base) and budgets(base) == {"calm": {KIND: 1}, "flooded": {KIND: 3}})
        assert eventually(lambda: calm_answer_s(base) and used(base) == {"calm": 1, "flooded": 3})
        (granted, *_) = events(base, "calm", "granted", asked_s)
    assert first_answer_s < 2.0 or asked_s + first_answer_s < granted["at_s"], "it does not wait for a device"
    check_flooded(floods)


@pytest.mark.parametrize("fleet", ["started"], indirect=True)
def test_a_flood_moves_a_device_where_its_replica_must_start(fleet: Fleet, note: Note) -> None:
    note("move_with_start_s", flooded_s(fleet.base))


@pytest.mark.parametrize("fleet", ["started"], indirect=True)
def test_an_application_without_inputs_ends_its_replicas_and_the_next_inputs_wait_for_others(
    fleet: Fleet, note: Note
) -> None:
    base = fleet.parking()
    with flooding(base, "flooded", PARKED_FLOOD_PER_S) as floods:
        becomes(lambda: budgets(base), {"calm": {KIND: 0}, "flooded": {KIND: 4}})
        becomes(lambda: used(base), {"calm": 0, "flooded": 4})
        assert ask(base, "GET", "/calm/readyz")[0] == 200, "its next input must come through"
        calm = asyncio.run(generator(base, "calm", PATIENT_S, (7,), 8).at(np.arange(3.0)))
        assert calm.status.tolist() == [200] * 3
        (woken, *_) = eventually(lambda: events(base, "calm", "woken"))
    assert woken["took_s"] < PATIENT_S
    check_flooded(floods)
    first_answer_s = float(calm.ended_s[0] - calm.due_s[0])
    note("first_answer_with_start_s", first_answer_s)


def flooded_s(base: str) -> float:
    """Flood an application: a device moves, and that costs the other one nothing. Returns how long it takes."""
    with flooding(base, "calm", CALM_PER_S, PATIENT_S) as calms:
        becomes(lambda: budgets(base), {"calm": {KIND: 2}, "flooded": {KIND: 2}})
        becomes(lambda: used(base), {"calm": 2, "flooded": 2})
        began_s = time.time()
        with flooding(base, "flooded", FLOOD_PER_S) as floods:
            (taken, *_) = eventually(lambda: events(base, "flooded", "granted", began_s))
            (moved, *_) = eventually(lambda: events(base, "flooded", "rolled out", taken["at_s"]))
            becomes(lambda: used(base), {"calm": 1, "flooded": 3})
            steady_s = moved["at_s"] + 2.0
            assert eventually(lambda: keeps_up(floods, steady_s))
            assert budgets(base) == {"calm": {KIND: 1}, "flooded": {KIND: 3}}
    decisions = status(base, "fleet")["decisions"]
    decision = next(each for each in decisions if each["budgets"] and each["at_s"] >= began_s)
    (given, *_) = events(base, "calm", "granted", began_s)
    assert given["why"].startswith(f"calm gives 1 {KIND}: "), "the reason is where people look"
    assert taken["why"].startswith(f"flooded gets 1 {KIND}: ")
    (freed, *_) = events(base, "calm", "rolled out", given["at_s"])
    assert freed["at_s"] <= taken["at_s"], "no two plans use one device"
    move_s = float(moved["at_s"] - decision["at_s"])
    assert move_s < 45.0, "about 4.5 s, and the rest for a machine that is busy"
    assert status(base, "calm/controller")["plan"]["sustains_per_s"] >= LEAST_PER_S
    check_calm(calms)
    check_flooded(floods)
    return move_s


def calm_answer_s(base: str) -> float:
    """How long the calm application took for one input, which it must answer."""
    record = asyncio.run(generator(base, "calm", PATIENT_S, (7,), 1).at(np.zeros(1)))
    assert record.status.tolist() == [200]
    return float(record.ended_s[0])


@contextmanager
def flooding(base: str, name: str, per_s: float, deadline_s: float = SLO_S) -> Iterator[Parts]:
    """Load on an application without a pause until the block ends, however slow the machine is; returns its parts.

    The next part starts before the last answers of the one before it have come, or the forecast would fall.
    """
    ended, parts = Event(), Parts()

    def flood() -> None:
        while not ended.is_set():
            parts.append((time.time(), pool.submit(load, base, name, per_s, FLOOD_S, deadline_s)))
            ended.wait(FLOOD_S)

    with ThreadPoolExecutor(8) as pool:
        try:
            flooder = pool.submit(flood)
            yield parts
        finally:
            ended.set()
    flooder.result()
