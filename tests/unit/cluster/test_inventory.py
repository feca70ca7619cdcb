from isobatch.cluster.controller.available_devices import Inventory, fitting

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


def test_no_more_than_may_be_used():
    assert fitting({"cpu": 2}, {"cpu": CPU}, [{"CPU": 64.0}]) == {"cpu": 2}


def test_gpus_are_counted_by_what_they_are():
    need = {kind: {"GPU": 1.0, f"accelerator_type:{kind.upper()}": 0.001} for kind in ("a100", "t4")}
    nodes = [{"GPU": 4.0, "accelerator_type:A100": 1.0, "CPU": 9.0}, {"GPU": 2.0, "accelerator_type:T4": 1.0}]
    assert fitting({"a100": 8, "t4": 1}, need, nodes) == {"a100": 4, "t4": 1}
