"""Replicas are assigned to groups: all of them, in proportion to the plan, and equally in every front."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.deployments.config import AppConfig
from isobatch.deployments.graph import (
    OF_PLANS,
    OF_PLANS_AND_REPLICAS,
    OF_REPLICAS,
    Graph,
    assigned,
    plan_hash,
    replica_hash,
)
from isobatch.optimizer import Placement, Plan, Split, problem
from isobatch.profiles.devices import Device, links_between
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile
from isobatch.profiles.latency import LatencyTable

replicas = st.sets(st.text("abcdef0123456789", min_size=4, max_size=4), max_size=12)
wanted = st.dictionaries(st.sampled_from(["v100-0", "v100-1", "v100-2", "v100-3"]), st.integers(1, 6), min_size=1)


@given(replicas, wanted)
def test_no_replica_is_idle_and_no_group_is_forgotten(alive: set[str], groups: dict[str, int]) -> None:
    shares = assigned(alive, groups)
    assert set(shares) == set(groups)
    if alive:
        assert all(shares.values())
    if len(alive) >= len(groups):
        assert sorted(name for share in shares.values() for name in share) == sorted(alive)


@given(wanted, st.data())
def test_each_group_has_its_number_when_all_replicas_are_alive(groups: dict[str, int], data: st.DataObject) -> None:
    alive = [f"r{number:02}" for number in range(sum(groups.values()))]
    shares = assigned(data.draw(st.permutations(alive)), groups)
    assert {group: len(share) for group, share in shares.items()} == groups


@given(replicas, wanted)
def test_a_lost_replica_takes_no_group_below_its_share(alive: set[str], groups: dict[str, int]) -> None:
    if len(alive) <= len(groups):
        return
    before, after = assigned(alive, groups), assigned(alive - {min(alive)}, groups)
    assert sum(len(before[group]) - len(after[group]) for group in groups) == 1
    assert all(len(before[group]) - len(after[group]) in (0, 1) for group in groups)


def test_each_group_has_replicas_of_its_own_kind_that_are_alive() -> None:
    tables = [LatencyTable(kind, (1,), ((1.0,) * 3,), ((0.0,) * 3,), 0.0, (1,) * 3, (1,) * 3, "") for kind in "ab"]
    devices = [Device(kind, 4, 100, 1.0) for kind in "ab"]
    facts = problem(Profile("toy", tuple(tables), ExitProfile((1.0,) * 3)), devices, links_between(devices))
    splits = [Split(block, block + 1, 1) for block in range(3)]
    plan = Plan((Placement("a", 2, (splits[0],)), Placement("b", 1, (splits[1],)), Placement("a", 1, (splits[2],))))
    members = Graph(plan, facts, fleet="app").members({"app.a": dict.fromkeys(("a1", "a2", "a3"), "")})
    assert members == {"a-0": ["a1", "a2"], "a-1": ["a3"], "b-0": []}
    ids = {f"a{number}": f"device {number}" for number in range(1, 5)}
    used = Graph(plan, facts, fleet="app", device_ids=frozenset(("device 1", "device 4")))
    assert used.members({"app.a": ids}) == {"a-0": ["a1"], "a-1": ["a4"], "b-0": []}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    file = tmp_path / "profile.json"
    file.write_text("of one network")
    return file


def test_a_stored_plan_is_used_only_for_the_same_terms_network_and_profile(profile: Path) -> None:
    given: dict[str, object] = {"devices": {"v100": 2}, "profile": str(profile), "model": "one"}

    def origin(**changes: object) -> str:
        return plan_hash(AppConfig.model_validate(given | changes))

    before = origin()
    assert origin(log_format="json", max_inside=7) == before
    for name, value in (("model", "another"), ("loader", "mine:load"), ("backend", "onnx"), ("dtype", "int8")):
        assert origin(**{name: value}) != before, name
    for name, number in (("cpus_per_replica", 2.0), ("devices", {"v100": 3}), ("slo_ms", 50.0)):
        assert origin(**{name: number}) != before, name
    profile.write_text("of another network")
    assert origin() != before


def test_every_field_is_in_exactly_one_set_of_dependencies() -> None:
    """A change of a forgotten field would not restart replicas that depend on it."""
    of_fronts = {
        "name", "front_replicas", "max_inside", "max_inputs", "max_body_bytes", "by_value_bytes", "api_key_variable",
        "allowed_origins", "allowed_hosts", "grpc_port", "grpc_host", "too_long", "replan", "audit_share",
        "audit_cost", "agreement", "scores", "predict_form", "relevant_label", "order", "canary",
        "replicas",
    }  # fmt: skip
    counts = Counter([*OF_PLANS, *OF_PLANS_AND_REPLICAS, *OF_REPLICAS, *of_fronts])
    assert counts == Counter([*AppConfig.model_fields])


def test_replicas_stay_if_only_fronts_or_plans_change(profile: Path) -> None:
    fields: dict[str, object] = {"devices": {"v100": 2}, "profile": str(profile)}
    mark = replica_hash(AppConfig.model_validate(fields))
    for same in ({"allowed_origins": ["https://shop.example"]}, {"slo_ms": 50.0}, {"devices": {"v100": 3}}):
        assert replica_hash(AppConfig.model_validate(fields | same)) == mark
    for other in ({"model": "another"}, {"dtype": "float16"}, {"ports": "24000-24099"}, {"log_format": "json"}):
        assert replica_hash(AppConfig.model_validate(fields | other)) != mark
    profile.write_text("of another network")
    assert replica_hash(AppConfig.model_validate(fields)) != mark


@given(replicas, wanted, st.data())
def test_benched_replicas_are_used_if_needed(alive: set[str], groups: dict[str, int], data: st.DataObject) -> None:
    benched = data.draw(st.sets(st.sampled_from(sorted(alive)))) if alive else set()
    shares = assigned(alive, groups, benched)
    if len(alive - benched) >= len(groups):
        working = {group: [name for name in share if name not in benched] for group, share in shares.items()}
        assert working == assigned(alive - benched, groups)
        assert sum(map(len, shares.values())) == len(alive), "they stay, to be tried now and then"
    else:
        assert shares == assigned(alive, groups)


def test_replicas_are_divided_in_the_order_of_their_names_and_shared_where_they_are_too_few() -> None:
    numbers = {"first": 4, "second": 2}
    assert assigned("abcdef", numbers) == {"first": ["a", "b", "c", "d"], "second": ["e", "f"]}
    assert assigned("bcdef", numbers) == {"first": ["b", "c", "d"], "second": ["e", "f"]}
    assert assigned("a", numbers) == {"first": ["a"], "second": ["a"]}
