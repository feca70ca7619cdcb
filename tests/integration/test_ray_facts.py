"""What ray_facts takes for granted, asked of a Ray that runs; the unit tests of ray_facts ask the rest."""

import os
from pathlib import Path

from isobatch.cluster.serving.local import LocalRay
from isobatch.deployments import ray_facts, resources
from isobatch.deployments.processes import descendants

Local = tuple[LocalRay, str]


def test_signals_to_our_group_pass_ray_by_and_it_starts_nothing_in_vain(local: Local) -> None:
    commands = {each: Path(f"/proc/{each}/cmdline").read_text() for each in descendants(os.getpid())}
    for name in ("gcs_server", "raylet/raylet"):
        (process,) = [each for each, command in commands.items() if name in command.partition("\0")[0]]
        assert os.getpgid(process) != os.getpgid(0)
    assert not [command for command in commands.values() if "monitor.py" in command]


def test_nodes_say_what_they_have_and_what_is_left(local: Local) -> None:
    (node,), (free,) = ray_facts.nodes(), ray_facts.free_resources()
    assert node["CPU"] >= 1
    assert all(amount <= node[name] + 1e-6 for name, amount in free.items())
    assert resources.devices_on([node])["cpu"] == int(node["CPU"])


def test_a_text_is_kept_until_it_is_forgotten(local: Local) -> None:
    assert ray_facts.recall("nobody") is None
    for text in ("first", "second: ä"):
        ray_facts.remember("somebody", text)
        assert ray_facts.recall("somebody") == text
    ray_facts.forget("somebody")
    assert ray_facts.recall("somebody") is None


def test_serve_has_a_client_that_deploys(local: Local) -> None:
    ray, _ = local
    ray.serving.result()
    client = ray_facts.serve_client()
    for name in ("deploy_apps", "wait_for_proxies_serving", "_controller"):
        assert hasattr(client, name), f"Serve's client has no {name} any more: mend serving.applications, ray_facts"
