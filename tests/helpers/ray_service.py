"""What KubeRay 1.7 reads of a RayService: its fields, and no others. To be compared with its types at each release."""

import copy
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

KUBERNETES = "1.33"
Pod = dict[str, Any]  # a PodTemplate: checked by Kubernetes' own schema


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AuthOptions(_Strict):
    mode: Literal["token", "disabled"]
    secretName: str | None = None  # noqa: N815 (KubeRay's spelling, here and below)


class Group(_Strict):
    resources: dict[str, str] = {}
    labels: dict[str, str] = {}
    rayStartParams: dict[str, str] = {}  # noqa: N815
    template: Pod


class HeadGroup(Group):
    serviceType: str | None = None  # noqa: N815
    headService: dict[str, Any] | None = None  # noqa: N815
    enableIngress: bool | None = None  # noqa: N815


class WorkerGroup(Group):
    groupName: str  # noqa: N815
    replicas: int = Field(ge=0)
    minReplicas: int = Field(ge=0)  # noqa: N815
    maxReplicas: int = Field(ge=0)  # noqa: N815
    idleTimeoutSeconds: int | None = None  # noqa: N815
    numOfHosts: int = 1  # noqa: N815
    suspend: bool | None = None
    priority: int | None = None
    scaleStrategy: dict[str, Any] | None = None  # noqa: N815


class RayCluster(_Strict):
    rayVersion: str  # noqa: N815
    authOptions: AuthOptions  # noqa: N815
    tlsOptions: dict[str, Any] | None = None  # noqa: N815
    networkPolicy: dict[str, Any] | None = None  # noqa: N815
    enableInTreeAutoscaling: bool | None = None  # noqa: N815
    autoscalerOptions: dict[str, Any] | None = None  # noqa: N815
    gcsFaultToleranceOptions: dict[str, Any] | None = None  # noqa: N815
    headServiceAnnotations: dict[str, str] | None = None  # noqa: N815
    headGroupSpec: HeadGroup  # noqa: N815
    workerGroupSpecs: list[WorkerGroup]  # noqa: N815


class ClusterUpgradeOptions(_Strict):
    maxSurgePercent: int = 100  # noqa: N815
    stepSizePercent: int  # noqa: N815
    intervalSeconds: int  # noqa: N815
    gatewayClassName: str  # noqa: N815


class UpgradeStrategy(_Strict):
    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]
    clusterUpgradeOptions: ClusterUpgradeOptions | None = None  # noqa: N815


class Spec(_Strict):
    serveConfigV2: str  # noqa: N815
    rayClusterConfig: RayCluster  # noqa: N815
    upgradeStrategy: UpgradeStrategy | None = None  # noqa: N815
    rayClusterDeletionDelaySeconds: int | None = Field(None, ge=0)  # noqa: N815
    serveService: dict[str, Any] | None = None  # noqa: N815
    excludeHeadPodFromServeSvc: bool = False  # noqa: N815
    suspend: bool | None = None
    managedBy: str | None = None  # noqa: N815


class RayService(_Strict):
    apiVersion: Literal["ray.io/v1"]  # noqa: N815
    kind: Literal["RayService"]
    metadata: dict[str, Any]
    spec: Spec


def check_pod(template: Pod) -> None:
    """As Kubernetes does; it knows every field."""
    import kubernetes_validate

    pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "it"}, "template": copy.deepcopy(template)}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
