"""Settings with which an application on a cluster could never be reached are refused before it starts."""

import pytest

from isobatch.deployments.cluster_checks import ClusterState, check_cluster
from isobatch.deployments.config import AppConfig, parse
from isobatch.profiles.errors import UserError

ONE, TWO = ("10.0.0.1",), ("10.0.0.1", "10.0.0.2")
FINE = AppConfig(model="/models/it")


@pytest.mark.parametrize("around", [ClusterState("127.0.0.1", False, ONE), ClusterState("0.0.0.0", False, TWO)])
def test_clusters_that_can_be_reached_are_accepted(around: ClusterState) -> None:
    check_cluster(FINE, around)
    check_cluster(AppConfig(model="s3://models/it"), around)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_several_nodes_cannot_reach_a_loopback(host: str) -> None:
    with pytest.raises(UserError, match=r"could not be reached \(10\.0\.0\.1, 10\.0\.0\.2\): write 0\.0\.0\.0"):
        check_cluster(FINE, ClusterState(host, False, TWO))


def test_tls_of_serve_itself_is_refused() -> None:
    with pytest.raises(UserError, match="put a load balancer with TLS before it"):
        check_cluster(FINE, ClusterState("0.0.0.0", True, ONE))


@pytest.mark.parametrize("name", ["model", "plan", "profile"])
def test_relative_paths_are_refused_since_each_node_has_its_own(name: str) -> None:
    config = parse({"profile": "/p.json"} | {name: "here.json"})
    with pytest.raises(UserError, match=f"{name} = 'here.json' must be an absolute path"):
        check_cluster(config, ClusterState("0.0.0.0", False, ONE))
