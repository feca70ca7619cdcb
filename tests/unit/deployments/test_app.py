"""The deployments that Serve gets."""

from pathlib import Path
from typing import Any

import pytest

from experiments.serve.fleet import profile
from isobatch.deployments.config import AppConfig
from isobatch.profiles.files import save


@pytest.mark.parametrize("drain_s", [1.0, 60.0])
def test_a_deployer_is_not_killed_before_its_fronts_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drain_s: float
) -> None:
    """Only the end of a deployer ends the replicas, and it waits for the fronts. Serve lets these drain for longer than
    they ask for."""
    from ray.serve._private import constants
    from ray.serve._private.deploy_utils import deploy_args_to_deployment_info

    from isobatch.deployments import app

    monkeypatch.setattr(constants, "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", 30.0)
    monkeypatch.setattr("ray.serve._private.deploy_utils.RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", 30.0)
    monkeypatch.setattr("ray.serve._private.deploy_utils.RAY_SERVE_ENABLE_DIRECT_INGRESS", True)
    monkeypatch.setattr(app, "cluster_state", lambda: None)
    monkeypatch.setattr(app, "check_cluster", lambda config, state: None)
    for name in ("nodes", "free_resources"):
        monkeypatch.setattr(app, name, list)
    save(profile(0.3), tmp_path / "virtual.json")
    path = str(tmp_path / "virtual.json")
    config = AppConfig(profile=path, devices={"v100": 2}, backend="virtual", drain_s=drain_s)

    def ends_within_s(deployment: Any, ingress: bool) -> float:
        """As Serve's controller reads it."""
        encoded = deployment._deployment_config.to_proto_bytes(), deployment._replica_config.to_proto_bytes()
        deployed = deploy_args_to_deployment_info(deployment.name, *encoded, "", "shop", ingress)
        return float(deployed.deployment_config.graceful_shutdown_timeout_s)

    front = app.build(config)._bound_deployment
    deployer = front.init_args[1]._bound_deployment
    assert deployer.name == "deployer"
    assert ends_within_s(deployer, ingress=False) >= ends_within_s(front, ingress=True) + drain_s
    assert ends_within_s(front, ingress=True) == max(35.0, drain_s)
