"""What a plan needs is compared with what Ray has, and what is short is named; what Ray has, by nodes and kinds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isobatch.cluster.controller.available_devices import Inventory, fitting
from isobatch.cluster.serving.capacity import check_capacity, check_machine
from isobatch.cluster.serving.serve_file import APPLICATION, CONTROLLER, DECODER
from isobatch.deployments.config import AppConfig
from isobatch.deployments.decoding.config import DecoderConfig
from isobatch.deployments.resources import KIND, by_label
from isobatch.optimizer.plan import DecodingTerms, Placement, Plan, Split
from isobatch.profiles.errors import UserError
from isobatch.profiles.exits import ExitProfile
from isobatch.profiles.files import Profile, save
from isobatch.profiles.latency import LatencyTable

ROOT = Path(__file__).parents[3]


def content(folder: Path, kind: str, replicas: int, **more: Any) -> dict[str, Any]:
    table = LatencyTable(kind, (1,), ((0.001,),), ((0.0,),), 0.0, (1,), (1,), "made up")
    save(Profile("toy", (table,), ExitProfile((1.0,))), folder / "profile.json")
    (folder / "plan.json").write_text(Plan((Placement(kind, replicas, (Split(0, 1, 1),)),)).to_json())
    arguments = {"plan": str(folder / "plan.json"), "profile": str(folder / "profile.json"), **more}
    return {
        "applications": [{"name": "a", "import_path": APPLICATION, "args": arguments}, {"import_path": "other:app"}]
    }


def test_enough_is_enough(tmp_path: Path) -> None:
    check_capacity(content(tmp_path, "cpu", 3), [{"CPU": 1.0}, {"CPU": 3.0}])
    check_capacity(content(tmp_path, "a100", 2), [{"CPU": 3.0, "GPU": 2.0, "accelerator_type:A100": 1.0}])
    check_capacity(content(tmp_path, "cpu", 3, cpus_per_replica=0), [{"CPU": 1.0}])  # as the sentence below says


def test_replicas_that_stand_by_need_room_too(tmp_path: Path) -> None:
    """The plan uses two of four devices; each replica has half of a device and of a core."""
    standing_by = content(tmp_path, "a100", 2, standby={"a100": 4}, sharers=2)
    check_capacity(standing_by, [{"CPU": 3.0, "GPU": 4.0, "accelerator_type:A100": 1.0}])
    with pytest.raises(UserError, match="CPU"):
        check_capacity(standing_by, [{"CPU": 2.0, "GPU": 4.0, "accelerator_type:A100": 1.0}])
    check_capacity(content(tmp_path, "a100", 64, backend="virtual"), [{"CPU": 2.0}])


@pytest.mark.parametrize(
    ("kind", "has", "sentence"),
    [
        ("cpu", {"CPU": 3.0}, "needs 4 CPUs with the front; this Ray has 3 CPUs, 0 GPUs: plan for fewer .*"),
        ("a100", {"CPU": 4.0}, "runs on a100; this Ray has 4 CPUs, 0 GPUs"),
        ("a100", {"CPU": 4.0, "GPU": 8.0, "accelerator_type:T4": 1.0}, "this Ray has 4 CPUs, 8 GPUs .T4."),
        ("a100", {"CPU": 4.0, "GPU": 2.0, "accelerator_type:A100": 1.0}, "needs 3 GPUs with the front"),
        # Serve gives every replica a CPU that does not say how many it wants.
        ("a100", {"CPU": 3.0, "GPU": 3.0, "accelerator_type:A100": 1.0}, "needs 4 CPUs with the front"),
    ],
)
def test_what_is_short_is_named(tmp_path: Path, kind: str, has: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_capacity(content(tmp_path, kind, 3), [has])


def test_a_label_that_no_plan_has_is_shown(tmp_path: Path) -> None:
    """Ray distinguishes small letters from capitals, and plans have small ones."""
    resources = {"CPU": 8.0, "GPU": 3.0, "accelerator_type:A100": 1.0}
    check_capacity(content(tmp_path, "a100", 3), [by_label(resources, {"Labels": {KIND: "a100"}})])
    with pytest.raises(UserError, match=r"runs on a100; this Ray has 8 CPUs, 3 GPUs \(isobatch\.io/kind=A100\)"):
        check_capacity(content(tmp_path, "a100", 3), [by_label(resources, {"Labels": {KIND: "A100"}})])


def test_a_plan_for_more_processors_than_there_are_needs_no_ray_to_be_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs 4 CPUs with the front; this machine has 3: plan for fewer devices, or"):
        check_machine(content(tmp_path, "cpu", 3), 3, lambda: 0)
    check_machine(content(tmp_path, "cpu", 3), 4, lambda: 0)
    check_machine(content(tmp_path, "cpu", 3, cpus_per_replica=0), 1, lambda: 0)
    check_machine(content(tmp_path, "a100", 64, backend="virtual"), 2, lambda: 0)
    with pytest.raises(UserError, match="needs 64 GPUs; this machine has none"):  # where other CPUs would not help
        check_machine(content(tmp_path, "a100", 64), 2, lambda: 0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is only one")
def test_only_processors_that_this_process_may_use_count(tmp_path: Path) -> None:
    script = """
import json, os, socket, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from isobatch.cluster.commands.doctor import LOOKS
from isobatch.cluster.commands.serve import run
from isobatch.cluster.simulator.cores import Cores
from isobatch.deployments.ray_settings import SETTINGS
print(SETTINGS["RAY_SERVE_HAPROXY_NBTHREAD"], LOOKS["python"]()[0].partition(", ")[2])
print([*Cores().each(lambda _: os.getpid(), [0])] == [os.getpid()])
with socket.create_server(("127.0.0.1", 0)) as taken:  # so that Ray does not start in any case
    http = {"host": "127.0.0.1", "port": taken.getsockname()[1]}
    run(json.loads(sys.argv[1]) | {"http_options": http}, False, 1.0, None)
"""
    command = [sys.executable, "-c", script, json.dumps(content(tmp_path, "cpu", 1))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["1 1 processors", "True"], done.stderr
    assert "needs 2 CPUs with the front; this machine has 1:" in done.stderr


# Several applications


def two(folder: Path, kind: str, first: int, second: int, **more: Any) -> dict[str, Any]:
    """Two applications that may use so many devices, with plans for one."""
    config = content(folder, kind, 1)["applications"][0]["args"] | more
    del config["plan"]
    applications = [
        {"name": name, "import_path": APPLICATION, "args": config | {"devices": {kind: count}}}
        for name, count in (("film", first), ("shop", second))
    ]
    return {"applications": applications}


def controller(**arguments: Any) -> dict[str, Any]:
    return {"name": "c", "import_path": CONTROLLER, "args": {"application": "shop"} | arguments}


A100S = [{"CPU": 9.0, "GPU": 2.0, "accelerator_type:A100": 1.0}, {"CPU": 9.0, "GPU": 1.0, "accelerator_type:A100": 1.0}]
PLAYED = [{"CPU": 4.0}, {"CPU": 1.0, "a100": 3.0}]


@pytest.mark.parametrize(("nodes", "more"), [(A100S, {}), (PLAYED, {"backend": "virtual"})])
def test_budgets_fit_into_the_devices(tmp_path: Path, nodes: list[dict[str, float]], more: dict[str, Any]) -> None:
    check_capacity(two(tmp_path, "a100", 1, 2, **more), nodes)
    with pytest.raises(UserError, match=r"^a100: this Ray has 3, but film may use 2 a100, shop may use 2 a100: name"):
        check_capacity(two(tmp_path, "a100", 2, 2, **more), nodes)
    check_capacity(two(tmp_path, "a100/2", 3, 3, **more), nodes)
    with pytest.raises(UserError, match=r"^a100: this Ray has 3, but film may use 3 a100/2, shop may use 4 a100/2: na"):
        check_capacity(two(tmp_path, "a100/2", 3, 4, **more), nodes)
    whole_and_shared = two(tmp_path, "a100", 2, 2, **more)
    whole_and_shared["applications"][1]["args"]["devices"] = {"a100/2": 3}
    with pytest.raises(UserError, match=r"film may use 2 a100, shop may use 3 a100/2"):
        check_capacity(whole_and_shared, nodes)
    controlled = two(tmp_path, "a100", 1, 1, **more)
    controlled["applications"].append(controller(devices={"a100": 4}))
    with pytest.raises(UserError, match="film may use 1 a100, shop may use 4 a100"):
        check_capacity(controlled, nodes)


def test_processors_are_for_all_applications_together(tmp_path: Path) -> None:
    check_capacity(two(tmp_path, "cpu", 1, 1), [{"CPU": 4.0}])
    with pytest.raises(UserError, match=r"^CPUs: this Ray has 3, but with its front film needs 2, shop needs 2: plan"):
        check_capacity(two(tmp_path, "cpu", 1, 1), [{"CPU": 3.0}])
    check_capacity(two(tmp_path, "cpu", 1, 1, cpus_per_replica=0), [{"CPU": 2.0}])
    whole = {"applications": [{"name": name, "import_path": APPLICATION, "args": {}} for name in ("film", "shop")]}
    with pytest.raises(UserError, match=r"^CPUs: this Ray has 1, but with its front film needs 1, shop needs 1: serve"):
        check_capacity(whole, [{"CPU": 1.0}])


def test_auto_is_for_an_application_that_has_the_cluster_for_itself(tmp_path: Path) -> None:
    greedy = two(tmp_path, "a100", 1, 1)
    greedy["applications"][1]["args"]["devices"] = "auto"
    with pytest.raises(UserError, match=r"^devices: auto of shop would count what film may use: name how many of each"):
        check_capacity(greedy, A100S)


def test_a_kind_may_come_for_one_application_only(tmp_path: Path) -> None:
    shared = two(tmp_path, "a100", 1, 1)["applications"]
    check_capacity({"applications": [*shared, controller(goal="cost", grow_to={"t4": 4})]}, A100S)
    for kind in ("a100", "a100/2"):
        grows = {"applications": [*shared, controller(goal="cost", grow_to={kind: 4})]}
        with pytest.raises(UserError, match=f"grow_to: {kind} may come for shop, so film cannot use that kind too"):
            check_capacity(grows, A100S)


# Decoders


def of_decoder(folder: Path, **more: Any) -> dict[str, Any]:
    return {"applications": [{"name": "llm", "import_path": DECODER, "args": {"model": str(folder), **more}}]}


def planned_decoder(folder: Path, kind: str, threads: int = 1, replicas: int = 1, **more: Any) -> dict[str, Any]:
    terms = DecodingTerms("off", 64, 8, ttft_s=1.0, tpot_s=1.0, threads=threads)
    plan = Plan((Placement(kind, replicas, (Split(0, 8, 4),)),), decoding=terms)
    (folder / "plan.json").write_text(plan.to_json())
    return of_decoder(folder, plan=str(folder / "plan.json"), **more)


@pytest.mark.parametrize("app", [DECODER, APPLICATION])
def test_cuda_where_there_is_no_gpu_is_refused_before_ray_starts_and_after(tmp_path: Path, app: str) -> None:
    fields = {"applications": [{"name": "a", "import_path": app, "args": {"model": str(tmp_path), "device": "cuda"}}]}
    sentence = "device = 'cuda': this machine has no GPU: with device cpu, processors compute the network"
    with pytest.raises(UserError, match=sentence):
        check_machine(fields, 64, lambda: 0)
    check_machine(fields, 64, lambda: 1)
    with pytest.raises(UserError, match="device = 'cuda': this Ray has 2 CPUs, 0 GPUs: with device cpu"):
        check_capacity(fields, [{"CPU": 2.0}])
    check_capacity(fields, [{"CPU": 2.0}, {"CPU": 2.0, "GPU": 1.0}])


def test_replicas_of_a_network_without_a_plan_need_a_processor_or_gpu_each(tmp_path: Path) -> None:
    def served(device: str) -> dict[str, Any]:
        args = {"model": str(tmp_path), "replicas": 3, "device": device}
        return {"applications": [{"name": "a", "import_path": APPLICATION, "args": args}]}

    with pytest.raises(UserError, match="replicas: 3 needs 3 CPUs; this machine has 2: take fewer"):
        check_machine(served("cpu"), 2, lambda: 0)
    check_machine(served("cpu"), 3, lambda: 0)
    with pytest.raises(UserError, match="replicas: 3 needs 3 GPUs; this machine has 2: take fewer"):
        check_machine(served("cuda"), 3, lambda: 2)
    check_machine(served("cuda"), 3, lambda: 3)
    with pytest.raises(UserError, match="replicas: 3 needs 3 CPUs; this Ray has 2: take fewer"):
        check_capacity(served("cpu"), [{"CPU": 1.0}, {"CPU": 1.0}])
    check_capacity(served("cpu"), [{"CPU": 1.0}, {"CPU": 2.0}])


def test_fronts_of_a_plan_that_is_made_at_the_start_are_no_replicas(tmp_path: Path) -> None:
    devices = content(tmp_path, "cpu", 1, devices={"a100": 3}, backend="virtual", front_replicas=3)
    del devices["applications"][0]["args"]["plan"]
    check_machine(devices, 2, lambda: 0)


def test_a_decoders_plan_is_served_on_its_own_kind_of_device_or_not_at_all(tmp_path: Path) -> None:
    config = planned_decoder(tmp_path, "h100")
    with pytest.raises(UserError, match=r"plan.json needs 1 GPUs; this machine has none: plan for its processors"):
        check_machine(config, 64, lambda: 0)
    with pytest.raises(UserError, match=r"plan.json runs on h100; this Ray has 4 CPUs, 8 GPUs \(T4\): plan for these"):
        check_capacity(config, [{"CPU": 4.0, "GPU": 8.0, "accelerator_type:T4": 1.0}])
    check_capacity(config, [{"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0, "accelerator_type:H100": 1.0}])
    rehearsed = planned_decoder(tmp_path, "h100", device="cpu")
    check_machine(rehearsed, 64, lambda: 0)
    check_capacity(rehearsed, [{"CPU": 4.0}])


def test_a_replica_needs_its_device_and_its_processors_on_one_node(tmp_path: Path) -> None:
    """All nodes together have enough, but not where replicas can be."""
    config = planned_decoder(tmp_path, "h100", replicas=2)
    h100, t4 = ({"CPU": 4.0, "GPU": 1.0, f"accelerator_type:{name}": 1.0} for name in ("H100", "T4"))
    with pytest.raises(UserError, match=r"needs 2 replicas on h100, each with 1 CPUs, 1 GPUs .H100. of one node; .*1"):
        check_capacity(config, [h100, t4])
    check_capacity(config, [h100, t4, h100])
    config = planned_decoder(tmp_path, "cpu", threads=3)
    with pytest.raises(UserError, match=r"needs 1 replicas on cpu, each with 3 CPUs, 0 GPUs of one node"):
        check_capacity(config, [{"CPU": 2.0}, {"CPU": 2.0}])
    check_capacity(config, [{"CPU": 2.0}, {"CPU": 3.0}])
    with pytest.raises(UserError, match=r"plan.json needs 2 GPUs; this machine has 1: plan for fewer devices"):
        check_machine(planned_decoder(tmp_path, "h100", replicas=2), 64, lambda: 1)


def test_a_replica_gets_the_processors_of_its_plans_threads_or_the_plan_is_refused(tmp_path: Path) -> None:
    settings = planned_decoder(tmp_path, "cpu", threads=3)
    with pytest.raises(UserError, match=r"plan.json needs 3 CPUs with the front; this machine has 2"):
        check_machine(settings, 2, lambda: 0)
    with pytest.raises(UserError, match=r"plan.json needs 3 CPUs with the front; this Ray has 2 CPUs"):
        check_capacity(settings, [{"CPU": 2.0}])
    check_capacity(settings, [{"CPU": 3.0}])
    (config,) = DecoderConfig.model_validate(settings["applications"][0]["args"]).per_kind().values()
    assert config.replica_options("cpu") == {"num_cpus": 3.0, "num_gpus": 0}


def test_devices_of_a_decoder_are_no_other_applications(tmp_path: Path) -> None:
    """There are enough GPUs, but not of this kind."""
    (tmp_path / "film").mkdir()
    both = content(tmp_path / "film", "l4", 1)
    both["applications"][0]["args"] |= {"plan": None, "devices": {"l4": 2}}
    nodes = [{"CPU": 9.0, "GPU": 2.0, f"accelerator_type:{name}": 1.0} for name in ("L4", "T4")]
    check_capacity(both, nodes)
    both["applications"] += planned_decoder(tmp_path, "l4", 1)["applications"]
    with pytest.raises(UserError, match=r"^l4: this Ray has 2, but a may use 2 l4, llm may use 1 l4: name fewer under"):
        check_capacity(both, nodes)
    check_capacity(both, [*nodes, nodes[0]])
    both["applications"][-1]["args"]["device"] = "cpu"  # its plan is rehearsed on processors
    check_capacity({"applications": both["applications"][-1:]}, nodes)
    both["applications"][-1]["args"].pop("device")
    both["applications"][0]["args"]["devices"] = "auto"
    with pytest.raises(UserError, match="devices: auto of a would count what llm may use"):
        check_capacity(both, [*nodes, nodes[0]])


CPU = {"CPU": 1.0, "GPU": 0.0}


def test_devices_of_a_node_that_is_gone_are_not_there():
    nodes = [{"CPU": 3.0}, {"CPU": 2.0}]
    inventory = Inventory({"cpu": 4}, lambda kind: CPU, lambda: nodes)
    assert inventory() == {"cpu": 4}
    nodes.pop()
    assert inventory() == {"cpu": 2}, "the front takes one"


def test_virtual_devices_belong_to_the_nodes_that_declare_them():
    nodes = [{"CPU": 1.0}, {"CPU": 1.0, "v100": 2.0}, {"CPU": 1.0, "v100": 1.0, "k80": 1.0}]
    inventory = Inventory({"v100": 3, "k80": 4}, lambda kind: {"CPU": 0.01}, lambda: nodes)
    assert inventory() == {"v100": 3, "k80": 1}
    nodes[:] = nodes[:2]
    assert inventory() == {"v100": 2, "k80": 0}
    nodes[:] = nodes[:1]
    assert inventory() == {"v100": 0, "k80": 0}, "though no living node says that there are such kinds"


def test_fronts_take_no_cpus_that_a_device_needs_while_there_are_others():
    needs, worker = AppConfig().replica_needs, {"CPU": 3.0, "GPU": 1.0, "accelerator_type:T4": 1.0}
    assert Inventory({"t4": 3}, needs, lambda: [worker] * 3, fronts=3)() == {"t4": 3}
    assert Inventory({"cpu": 9, "t4": 3}, needs, lambda: [worker] * 3, fronts=3)() == {"cpu": 3, "t4": 3}
    assert Inventory({"t4": 3}, needs, lambda: [worker] * 3, fronts=7)() == {"t4": 1}, "fronts come first"


def test_several_replicas_fit_on_a_shared_device():
    needs = AppConfig(cpus_per_replica=2).replica_needs
    nodes = [{"CPU": 9.0, "GPU": 1.0, "accelerator_type:T4": 1.0}]
    assert Inventory({"t4/2": 4, "cpu/2": 9}, needs, lambda: nodes)() == {"t4/2": 2, "cpu/2": 7}, "beside the front"
    declared = Inventory({"v100/2": 9}, lambda kind: {"CPU": 0.1}, lambda: [{"CPU": 4.0, "v100": 3.0}])
    assert declared() == {"v100/2": 6}


def test_gpus_are_counted_by_what_they_are_and_no_more_than_may_be_used():
    assert fitting({"cpu": 2}, {"cpu": CPU}, [{"CPU": 64.0}]) == {"cpu": 2}
    need = {kind: {"GPU": 1.0, f"accelerator_type:{kind.upper()}": 0.001} for kind in ("a100", "t4")}
    nodes = [{"GPU": 4.0, "accelerator_type:A100": 1.0, "CPU": 9.0}, {"GPU": 2.0, "accelerator_type:T4": 1.0}]
    assert fitting({"a100": 8, "t4": 1}, need, nodes) == {"a100": 4, "t4": 1}
