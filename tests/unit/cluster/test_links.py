"""What moving survivors costs is measured between real processes, kept in a profile, and counted by plans."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from isobatch.cluster.profiling import links
from isobatch.cluster.profiling.links import Hops, Passing, between_nodes, in_one_machine
from isobatch.deployments.config import AppConfig, checked
from isobatch.deployments.graph import read_graph
from isobatch.profiles.devices import Link, fleet, links_between
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, load, save
from tests.helpers.commands import ran
from tests.helpers.virtual_device import SURVIVAL, table

SIZES = (4096, 2**20, 2**22)


def test_hops_between_two_processes_are_measured() -> None:
    link, note = in_one_machine("cpu", "cpu", SIZES, rounds=9)
    assert (link.source, link.target, link.one_machine) == ("cpu", "cpu", True)
    assert link.turn_s < 1.0
    assert link.transfer_s(2**22) > 2**22 / 100e9, "4 MiB do not come at 100 GB/s"
    assert note.startswith("link cpu>cpu in one machine: 4 KiB ")
    assert ", 4096 KiB " in note


def test_a_link_is_the_line_through_its_hops() -> None:
    known = Link("a", "b", 2e9, 0.0005)
    measured = Hops({size: known.transfer_s(size) for size in (4096, 2**16, 2**20, 2**24)}, turn_s=0.0003)
    link = measured.link("a", "b", one_machine=False)
    assert (link.bytes_per_s, link.latency_s) == pytest.approx((2e9, 0.0005), rel=1e-6)
    assert (link.turn_s, measured.link("a", "a", one_machine=False).turn_s) == (0.0, 0.0003)
    noise = Hops({4096: 0.002, 2**20: 0.001}, 0.0).link("a", "b", one_machine=False)
    assert noise.transfer_s(2**20) == pytest.approx(0.001), "a line that falls is none"


def test_hops_that_other_work_hid_do_not_count() -> None:
    known = Link("a", "b", 2e9, 0.0005)
    seen = {size: known.transfer_s(size) for size in (2**16, 2**20)}
    link = Hops({4096: -0.0001, **seen, 2**24: 0.0}, turn_s=-0.001).link("a", "a", one_machine=True)
    assert (link.bytes_per_s, link.latency_s) == pytest.approx((2e9, 0.0005), rel=1e-6)
    assert link.turn_s == 0.0
    with pytest.raises(UserError, match=r"link a>b: only 1 of 2 sizes could be measured .* when they are idle"):
        Hops({4096: -0.0001, 2**20: 0.001}, 0.0).link("a", "b", one_machine=False)


def test_survivors_of_the_same_size_are_made_once() -> None:
    network, inputs = Passing(), Passing().encode([[0, 4096]])
    first, second = (network.run(inputs, 1, ()).survivors for _ in range(2))
    assert first.arrays["hidden"] is second.arrays["hidden"]
    assert first.arrays["hidden"].nbytes == 4096


def test_a_node_without_a_free_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def get(reference: object, timeout: float) -> None:
        raise ray.exceptions.GetTimeoutError

    nodes = {name: {"CPU": 1.0} for name in ("1" * 56, "2" * 56)}
    actor = SimpleNamespace(open=SimpleNamespace(remote=lambda: None))
    monkeypatch.setattr("isobatch.deployments.ray_facts.nodes_by_id", lambda: nodes)
    monkeypatch.setattr(
        ray, "remote", lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda device: actor))
    )
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    with pytest.raises(UserError, match=r"no CPU of node 1{56} was free, .* within 120 s: end what runs there, or run"):
        list(between_nodes({"cpu"}, SIZES))


def test_a_profile_keeps_links_and_a_later_one_replaces_that_between_the_same_kinds(tmp_path: Path) -> None:
    slow, fast, inside = Link("v100", "v100", 1e6, 0.1), Link("v100", "v100", 1e9, 0.0), Link("v100", "v100", 1e10, 0.0)
    inside = replace(inside, one_machine=True)
    known = Profile("toy", (table(),), ExitProfile(SURVIVAL), ("link v100>v100: slow",), links=(slow, inside))
    new = replace(known, links=(fast,), notes=("link v100>v100: fast",))
    save(known.joined_by(new), tmp_path / "profile.json")
    after = load(tmp_path / "profile.json")
    assert after.links == (fast, inside)
    assert after.notes == ("link v100>v100: fast",)


def test_measured_links_replace_the_catalogues_where_they_were_measured() -> None:
    devices = fleet("v100=1,k80=1")
    measured = [Link("v100", "k80", 5e6, 0.2), Link("k80", "k80", 7e9, 0.1, 0.4, one_machine=True)]
    network = {(link.source, link.target): link for link in links_between(devices, measured=measured)}
    inside = {(x.source, x.target): x for x in links_between(devices, one_machine=True, measured=measured)}
    plain = {(link.source, link.target): link for link in links_between(devices)}
    assert network == plain | {("v100", "k80"): measured[0]}
    assert inside["k80", "k80"] == measured[1]
    assert inside["v100", "k80"] != measured[0]
    declared = links_between(devices, gbit_per_s={"v100>k80": 8.0}, measured=measured)
    assert replace(measured[0], bytes_per_s=1e9) in declared, "what a user declares goes first"


def test_plans_that_are_made_at_the_start_count_measured_links(tmp_path: Path) -> None:
    """The two kinds are fast in different blocks, so a plan sends survivors from one to the other if that is quick."""
    early, path = table(), tmp_path / "profile.json"
    late = replace(early, kind="k80", block_s=tuple(row[::-1] for row in early.block_s))
    fields = {"profile": str(path), "backend": "virtual", "slo_ms": 60_000, "devices": {early.kind: 2, late.kind: 2}}
    slow = Link(early.kind, late.kind, 1e3, 5.0), Link(late.kind, early.kind, 1e3, 5.0)
    for measured, most_kinds in (((), 2), (slow, 1)):
        save(Profile("toy", (early, late), ExitProfile(SURVIVAL), links=measured), path)
        graph = read_graph(checked(AppConfig, fields))
        assert max(len(pipeline.placements) for pipeline in graph.plan.pipelines) == most_kinds
    assert graph.facts.links[early.kind, late.kind] == slow[0]


def test_the_command_adds_links_to_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobatch.cluster.commands.profile_inputs.address_file", lambda: tmp_path / "no Ray")
    link = Link("cpu", "cpu", 1e9, 0.001, 0.001, one_machine=True)
    calls: list[tuple[int, ...]] = []

    others = ExitProfile((1.0, 0.9, 0.9, 0.9))

    def measured(device: str, kind: str, sizes: tuple[int, ...]) -> tuple[Link, str]:
        calls.append(sizes)
        save(replace(load(out), exits=others), out)
        return link, "link cpu>cpu in one machine: 4 KiB 1.00 ms"

    monkeypatch.setattr("isobatch.cluster.commands.profile_inputs.in_one_machine", measured)
    out = tmp_path / "profile.json"
    with pytest.raises(UserError, match="--links adds to a profile, and there is no"):
        ran("profile", "demo", "--links", "--out", out)
    save(Profile("demo", (replace(table(), kind="cpu"),), ExitProfile(SURVIVAL)), out)
    with pytest.raises(UserError, match="is for classifiers"):
        ran("profile", "llm-demo", "--links", "--out", out)
    for option, value in {"--data": "a.csv", "--timing-s": 5, "--largest": 8, "--backend": "onnx"}.items():
        with pytest.raises(UserError, match=f"{option} is not read by --links"):
            ran("profile", "demo", "--links", "--out", out, option, value)
    output = ran("profile", "demo", "--links", "--out", out, "--device", "cpu")
    assert (load(out).links, load(out).exits) == ((link,), others), "what others add meanwhile stays"
    assert calls == [links.sizes_up_to(table().largest * max(table().hidden_bytes))]
    assert "1.00 ms and 1000 MB/s" in output
    assert "the link in one machine counts with --one-machine" in output
