"""Several replicas on one device: what that costs is measured, and plans share devices where it is worth it."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from experiments.planner.networks import distilbert
from isobatch.cluster.commands.plan import ClassifierPlanOptions
from isobatch.cluster.commands.plan_report import tables
from isobatch.cluster.commands.plan_search import LivePlan, most_promising, objective_of, planned
from isobatch.cluster.commands.profile_inputs import kept
from isobatch.cluster.profiling.links import child, first_message
from isobatch.cluster.profiling.together import TimedNetwork, shared_tables
from isobatch.cluster.serving.serve_file import arbiters, controllers, serve_file
from isobatch.cluster.simulator.plan_choice import LEAST_GAIN, SimulatedChoice
from isobatch.optimizer import optimize
from isobatch.optimizer.pipelines.baselines import Baseline
from isobatch.optimizer.plan import Plan, SimulatedTimes, read_plan
from isobatch.profiles.datasheet import datasheet_table
from isobatch.profiles.devices import fleet, links_between, sharing_choices
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.latency import LatencyTable
from tests.helpers.commands import ran
from tests.helpers.handlers import send_handler

MEASURED = {"source": "measured: made up", "backend": "torch", "dtype": "float32"}
OWN = {kind: replace(datasheet_table(distilbert(), kind), **MEASURED) for kind in ("v100", "k80")}
EXITS = ExitProfile((1.0, 0.9, 0.7, 0.5, 0.4, 0.3))
VIRTUAL = {"args": {"backend": "virtual", "cpus_per_replica": 0}}


def shared(kind: str, factor: float, sharers: int = 2) -> LatencyTable:
    return OWN[kind].shared_by(sharers, [factor] * len(OWN[kind].batch_sizes))


def profile(*more: LatencyTable) -> Profile:
    return Profile("distilbert", (*OWN.values(), *more), EXITS)


def planned_file(folder: Path, given: Profile, *options: str) -> str:
    save(given, path := folder / "profile.json")
    arguments = ("--profile", path, "--devices", "v100=2", "--slo-ms", "100", "--out", folder / "plan.json")
    ran("plan", *arguments, *(options or ("--no-simulation",)))
    return (folder / "plan.json").read_text()


def test_a_plan_shares_no_device_where_that_was_not_measured_or_is_not_worth_it(tmp_path: Path) -> None:
    before = planned_file(tmp_path, profile())
    for factor in (2.3, 3.0):
        assert planned_file(tmp_path, profile(shared("v100", factor))) == before
    assert planned_file(tmp_path, profile(shared("v100", 1.2)), "--no-simulation", "--no-later")
    assert read_plan(tmp_path / "plan.json").devices() == {"v100": 2}, "tails are compared with those of whole devices"


def test_a_plan_shares_devices_where_that_promises_more(tmp_path: Path) -> None:
    alone = Plan.from_json(planned_file(tmp_path, profile()))
    both = Plan.from_json(planned_file(tmp_path, profile(shared("v100", 1.2))))
    assert both.devices() == {"v100/2": 4}
    assert both.promise.cost_per_hour == pytest.approx(alone.promise.cost_per_hour)
    assert 1.4 < both.promise.goodput_per_s / alone.promise.goodput_per_s < 1.8, "about 2 / 1.2"
    options = ("--profile", str(tmp_path / "profile.json"), "--devices", "v100=2", "--slo-ms", "100", "--no-simulation")
    rows = {each["name"]: each for each in json.loads(ran("plan", *options, "--json"))["baselines"]}
    assert rows["not shared"]["goodput_per_s"] > 0
    assert "shared" not in rows


def test_the_plan_that_is_not_taken_is_reported_as_simulated() -> None:
    given, options = profile(), ClassifierPlanOptions(slo_ms=100, no_simulation=True)
    result = planned(options, "v100=2", given, objective_of(options))
    promise = replace(result.plan.promise, goodput_per_s=100.0, simulated=SimulatedTimes(0.1, 0.1, 0.99))
    plan = replace(result.plan, promise=promise)
    others = (Baseline("shared", plan, result.score), Baseline("not simulated", result.plan, result.score))
    result = replace(result, plan=replace(plan, promise=replace(promise, goodput_per_s=150.0)), baselines=others)
    rows = json.loads(json.dumps(result.as_json()))["baselines"]
    assert [row["goodput_per_s"] for row in rows] == [100.0, result.score.goodput_per_s]
    console = Console(width=200)
    with console.capture() as printed:
        for table in tables(result, objective_of(options)):
            console.print(table)
    shared_row, other_row = (line for line in printed.get().splitlines() if "shared" in line or "not simul" in line)
    assert "1.50x, 1.50x per dollar" in shared_row
    assert "1.00x, 1.00x per dollar" in other_row


@pytest.mark.parametrize(("times", "says"), [(1.2, "not known"), (0.9, "within")])
def test_no_bound_is_named_for_a_plan_that_sustains_more_than_its_devices_alone(times: float, says: str) -> None:
    given, options = profile(), ClassifierPlanOptions(slo_ms=100, no_simulation=True)
    result = planned(options, "v100=2", given, objective_of(options))
    promise = replace(result.plan.promise, goodput_per_s=times * result.score.goodput_per_s, gap=0.1)
    plan = replace(result.plan, promise=promise)
    result = replace(result, plan=plan, simulated=SimulatedChoice(plan, 1.0, promise.goodput_per_s, 0))
    console = Console(width=200)
    with console.capture() as printed:
        for table in tables(result, objective_of(options)):
            console.print(table)
    assert [says in line for line in printed.get().splitlines() if "best possible" in line] == [True]


@pytest.mark.parametrize(("per_s", "fronts"), [(2_000, 1), (9_000, 4), (400, 1)])
def test_the_report_says_how_many_fronts_the_promise_needs(per_s: float, fronts: int) -> None:
    given, options = profile(), ClassifierPlanOptions(slo_ms=100, no_simulation=True)
    result = planned(options, "v100=2", given, objective_of(options))
    plan = replace(result.plan, promise=replace(result.plan.promise, goodput_per_s=per_s))
    lines = map(str, tables(replace(result, plan=plan), objective_of(options)))
    ends = [line.rpartition(" ")[2] for line in lines if "front_replicas" in line]
    assert ends == ([f"{fronts}."] if fronts > 1 else [])


def test_only_sharing_choices_that_have_a_plan_are_searched() -> None:
    given = profile(replace(shared("v100", 1.2), backend="onnx"))
    ways = sharing_choices(fleet("v100=2"), given.kinds)[1:]
    assert len(ways) == 1
    for backend, kept_ways in (("onnx", ways), ("torch", [])):
        options = ClassifierPlanOptions(slo_ms=100, no_simulation=True, backend=backend)
        given_on = given if backend == "torch" else replace(given, tables=given.tables[-1:])
        with LivePlan() as live:
            assert most_promising(options, given_on, objective_of(options), ways, live) == kept_ways


def test_no_device_is_shared_where_dollars_count(tmp_path: Path) -> None:
    for options in (("--goal", "cost", "--rate", "50"), ("--goal", "goodput-per-dollar"), ("--budget", "100")):
        planned_file(tmp_path, profile(shared("v100", 1.2)), "--no-simulation", "--max-batch", "16", *options)
        assert read_plan(tmp_path / "plan.json").devices().keys() == {"v100"}, options


def test_a_network_that_fits_only_once_is_not_shared(tmp_path: Path) -> None:
    large = (int(10e9), *OWN["v100"].memory_bytes[1:])  # of 16 GB
    tables = (replace(OWN["v100"], memory_bytes=large), replace(shared("v100", 1.2), memory_bytes=large))
    planned_file(tmp_path, Profile("distilbert", tables, EXITS))
    assert read_plan(tmp_path / "plan.json").devices() == {"v100": 2}


@pytest.mark.parametrize("seed", [0, 2, 4])  # the best is three on a device, two on a device, and nothing shared
def test_the_plan_is_the_best_of_all_sharing_choices_each_kind(seed: int) -> None:
    chance = np.random.default_rng(seed)
    tables = [shared("v100", chance.uniform(1.2, 2.2)), shared("k80", chance.uniform(1.2, 2.2)),
              shared("k80", chance.uniform(1.5, 3.5), 3)]  # fmt: skip
    given, options = profile(*tables), ClassifierPlanOptions(slo_ms=200, max_batch=16, no_simulation=True)
    best = planned(options, "v100=1,k80=1", given, objective_of(options)).plan
    per_s = {}
    for v100, k80 in ((a, b) for a in ("v100=1", "v100/2=2") for b in ("k80=1", "k80/2=2", "k80/3=3")):
        devices = fleet(f"{v100},{k80}")
        plan = optimize(given, devices, links_between(devices), objective_of(options))
        per_s[v100, k80] = plan.promise.goodput_per_s
    most = max(per_s.values())
    enough = most > per_s["v100=1", "k80=1"] * (1 + LEAST_GAIN)
    assert best.promise.goodput_per_s == pytest.approx(most if enough else per_s["v100=1", "k80=1"])


def test_wrong_options_of_a_plan_are_one_sentence_where_devices_may_be_shared(tmp_path: Path) -> None:
    given = profile(shared("v100", 1.2), shared("v100", 1.3, 3), shared("k80", 1.2))
    for options, sentence in (
        (("--cut", "99"), "--cut 99: the network has 6 blocks"),
        (("--backend", "onnx"), "has no times of onnx"),
        (("--slo-ms", "0.1"), "0.1 ms SLO: the fastest plan needs"),
    ):
        with pytest.raises(UserError, match=sentence):
            planned_file(tmp_path, given, "--no-simulation", *options)


def test_two_applications_share_the_one_device_of_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entries = [{"name": name, "profile": "profile.json", "slo_ms": 200} | VIRTUAL for name in ("reviews", "queries")]

    def divide(devices: dict[str, int], goal: str = "fairness", **more: Any) -> dict[str, dict[str, int]]:
        content = {"devices": devices, "goal": goal, "applications": entries} | more
        Path("fleet.yaml").write_text(yaml.safe_dump(content))
        ran("plan", "fleet.yaml", "--no-simulation", "--gap", "0.02", "--out", "serve.yaml")
        return {each["name"]: read_plan(Path(f"{each['name']}-plan.json")).devices() for each in entries}

    save(profile(), Path("profile.json"))
    with pytest.raises(UserError, match=r"queries: no device .* is left .*: add devices; .* once that is measured"):
        divide({"v100": 1})
    with pytest.raises(UserError, match=r"queries: no device .* is left .*: add devices$"):
        divide({"v100": 1}, standby=True)
    save(profile(shared("v100", 2.1)), Path("profile.json"))
    assert divide({"v100": 1}) == {"reviews": {"v100/2": 1}, "queries": {"v100/2": 1}}
    content = serve_file(Path("serve.yaml"), {})
    (arbiter,) = arbiters(content)
    assert arbiter["args"]["devices"] == {"v100/2": 2}
    assert [each["args"]["shared"] for each in controllers(content)] == [{"v100/2": 2}] * 2
    ran("simulate", "--config", "serve.yaml", "--rate", "50", "--hours", "0.001", "--application", "queries")
    assert divide({"v100": 2}) == {"reviews": {"v100": 1}, "queries": {"v100": 1}}, "where whole devices do as well"
    assert divide({"v100": 3}) == {"reviews": {"v100/2": 3}, "queries": {"v100/2": 3}}, "not 1 and 2"
    assert set(divide({"v100": 3}, "goodput")["reviews"]) == {"v100"}, "sharing costs goodput"
    for entry in entries:
        entry.update(rate_per_s=20, slo_ms=15)  # a search for the least cost takes longer where more plans keep the SLO
    assert set(divide({"v100": 2}, "cost")["reviews"]) == {"v100"}, "where dollars count"
    with pytest.raises(UserError, match="standby: each application has a replica on a whole device, not on a v100/2"):
        divide({"v100/2": 4}, standby=True)


@pytest.mark.parametrize("goal", ["goodput", "fairness"])
def test_a_fleet_is_shared_in_the_best_of_all_ways(goal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = {"v100/2": shared("v100", 1.5), "k80/2": shared("k80", 2.1)}

    def value(devices: dict[str, int], *tables: LatencyTable) -> float:
        names = ("reviews", "queries")
        entries = [{"name": name, "profile": "profile.json", "slo_ms": 200, "rate_per_s": 300} for name in names]
        save(Profile("distilbert", tables, EXITS), Path("profile.json"))
        Path("fleet.yaml").write_text(yaml.safe_dump({"devices": devices, "goal": goal, "applications": entries}))
        return float(json.loads(ran("plan", "fleet.yaml", "--no-simulation", "--gap", "0.02", "--json"))["value"])

    ways = [(v100, k80) for v100 in ({"v100": 1}, {"v100/2": 2}) for k80 in ({"k80": 1}, {"k80/2": 2})]
    values = [value(v100 | k80, *((OWN | more)[kind] for kind in v100 | k80)) for v100, k80 in ways]
    assert value({"v100": 1, "k80": 1}, *OWN.values(), *more.values()) == pytest.approx(max(values))
    assert len(set(values)) > 1


@pytest.mark.long
def test_a_process_that_cannot_launch_says_why_and_ignores_ctrl_c(tmp_path: Path) -> None:
    network = TimedNetwork(str(tmp_path), tmp_path, "cpu", "float32", "torch", None, (), threads=1)
    with pytest.raises(UserError, match=f"--together: a process that launches has ended: .*{tmp_path}"):
        next(shared_tables(network, [OWN["v100"]], 0, budget_s=0.1))  # the one that is alone ends first
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background a shell ignores it
    with child(send_handler) as pipe:
        assert first_message(pipe) == signal.SIG_IGN
    assert signal.signal(signal.SIGINT, before) == signal.default_int_handler


@pytest.mark.parametrize("error", [UserError("no memory"), RuntimeError("did not start"), KeyboardInterrupt()])
def test_what_was_measured_at_once_is_kept_where_more_cannot_be(error: BaseException) -> None:
    def measured() -> Iterator[tuple[LatencyTable, str]]:
        yield OWN["v100"], "steady"
        raise error

    assert kept(measured()) == ([(OWN["v100"], "steady")], error)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--kind", "cpu/2"), "--kind cpu/2 is a shared device: name the device, and measure it with --together"),
        (("--links", "--kind", "cpu/2"), "--kind cpu/2 is a shared device"),
        (("--kind", "a,b"), "--kind 'a,b': --devices of isobatch plan could not name it"),
        (("--kind", "RTX"), "--kind 'RTX': --devices of isobatch plan could not name it: give small letters"),
        (("--devices", "v100/2"), "v100/2: no times of shared devices are published: measure them with --together"),
        (("--links", "--together", "2"), "--together is not read by --links"),
    ],
)
def test_wrong_options_are_one_sentence(tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ran("profile", "demo", "--out", str(tmp_path / "profile.json"), *options)
