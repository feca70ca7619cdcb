"""The objects of Kubernetes for a Serve file: a RayService with a group of nodes for each kind of device, and a volume.

cluster/kuberay.yaml and cluster/volume.yaml are the patterns; the Serve file, its plans, an image and a storage class
fill them in.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import ceil
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from isobatch.cluster.serving.serve_file import (
    ServeFile,
    arbiters,
    check_ports,
    classifiers,
    config_of,
    controllers,
    served,
)
from isobatch.deployments.cluster_checks import PATHS
from isobatch.deployments.config import ServedConfig
from isobatch.deployments.ray_facts import drained_s
from isobatch.deployments.resources import KIND
from isobatch.deployments.sources import is_url, local
from isobatch.optimizer.plan import read_plan
from isobatch.profiles.devices import whole_kind
from isobatch.profiles.errors import UserError

PATTERNS = Path(__file__).resolve().parents[1]
MODELS = PurePosixPath("/models")  # where the image has the files of the user
KEY_VARIABLE = "ISOBATCH_KEY"
PORT = 8000  # of HTTP in cluster/kuberay.yaml
FORGETS_S = 30  # how long Kubernetes may need to send a pod no more requests
# GKE's labels. Nodes of other clusters have others, which `nodes` names.
GKE = "cloud.google.com/gke-accelerator"
_GKE_NAMES = {
    "k80": "nvidia-tesla-k80", "p100": "nvidia-tesla-p100", "v100": "nvidia-tesla-v100", "t4": "nvidia-tesla-t4",
    "l4": "nvidia-l4", "a100": "nvidia-a100-80gb", "h100": "nvidia-h100-80gb", "h200": "nvidia-h200-141gb",
}  # fmt: skip
CPU = "cpu"


def objects(
    content: ServeFile, image: str, storage_class: str, nodes: Mapping[str, tuple[str, str]]
) -> list[dict[str, Any]]:
    """The volume and the RayService, as `kubectl apply` takes them. `nodes`: their labels, by the kind of devices."""
    if not (configs := [config_of(application) for application in served(content)]):
        raise UserError("the file has no application of isobatch: write the RayService yourself")
    volume, service = (yaml.safe_load((PATTERNS / name).read_text()) for name in ("volume.yaml", "kuberay.yaml"))
    volume["spec"]["storageClassName"] = storage_class
    spec, cluster = service["spec"], service["spec"]["rayClusterConfig"]
    ends_s = int(drained_s(max(config.drain_s for config in configs)) + FORGETS_S)
    spec["serveConfigV2"] = yaml.safe_dump(_inside(content), sort_keys=False)
    spec["rayClusterDeletionDelaySeconds"] = ends_s
    pattern = cluster["workerGroupSpecs"][0]
    counts, most = _devices(configs), _whole(_growth(content))
    if unknown := sorted(nodes.keys() - {*counts, *most}):
        raise UserError(
            f"--nodes {unknown[0]}: the file has no such devices, only {', '.join(sorted({*counts, *most}))}"
        )
    cluster["workerGroupSpecs"] = [
        _group(pattern, kind, counts[kind], max(counts[kind], most[kind]), nodes) for kind in sorted({*counts, *most})
    ]
    fronts = ceil(sum(config.front_cpus for config in configs) / counts.total())  # of one pod
    for group in cluster["workerGroupSpecs"]:
        cpus = fronts + max(_cpus(config, group["groupName"]) for config in configs)
        for bound in group["template"]["spec"]["containers"][0]["resources"].values():
            bound["cpu"] = str(max(cpus, int(bound["cpu"])))
    if most:
        cluster |= {"enableInTreeAutoscaling": True, "autoscalerOptions": {"version": "v2"}}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        pod["terminationGracePeriodSeconds"] = ends_s
        pod["containers"][0]["image"] = image
    return [volume, service]


def files(content: ServeFile) -> dict[str, str]:
    """What the image must have below /models: the path there of each file and folder here."""
    configs = map(config_of, served(content))
    named = dict.fromkeys(getattr(config, name) for config in configs for name in PATHS)
    paths = [path for path in named if path and not is_url(path)]
    here = {path: str(_there(Path(path), [Path(each) for each in paths])) for path in paths}
    if doubled := [there for there, count in Counter(here.values()).items() if count > 1]:
        both = " and ".join(path for path, there in here.items() if there == doubled[0])
        raise UserError(f"{both} would both be {doubled[0]} in the image: give them different names")
    return here


def _there(path: Path, paths: Sequence[Path]) -> PurePosixPath:
    """The place of a file or folder in the image. What is inside another of the paths is copied with that one.

    >>> _there(Path("/here/bert/plan.json"), [Path("/here/bert"), Path("/here/bert/plan.json")])
    PurePosixPath('/models/bert/plan.json')
    """
    outermost = next(each for each in (*reversed(path.parents), path) if each in paths)
    return MODELS / outermost.name / path.relative_to(outermost)


def as_yaml(documents: Sequence[dict[str, Any]]) -> str:
    """Texts of several lines stay readable, and equal parts are written out."""
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False)
    return text


def _devices(configs: Sequence[ServedConfig]) -> Counter[str]:
    """The number of devices of each kind: those that the file grants an application, or else those of its plan.

    Applications share the devices of standby replicas.
    """
    alone, together, standby = Counter[str](), Counter[str](), Counter[str]()
    for config in configs:
        stands_by = Counter(getattr(config, "standby", {}))
        standby |= stands_by  # the larger count of each kind
        devices = together if stands_by else alone
        granted = getattr(config, "devices", None)
        if isinstance(granted, dict):
            devices.update(granted)
        elif config.plan:
            devices.update(read_plan(local(config.plan)).devices())
        else:
            raise UserError(f"{config.name or 'an application'} has neither plan: nor devices: which nodes is it for?")
    return _whole(alone) + (_whole(together) | standby)


def _cpus(config: ServedConfig, whole: str) -> int:
    """The CPUs of an application's replicas on one device, which no other application uses at the same time."""
    needs = {kind: each for kind, _, each in config.replica_groups() if whole_kind(kind)[0] == whole}
    needs = needs or {whole: config.replica_needs(whole)}  # devices may come that the plan does not have
    together = getattr(config, "sharers", 1)  # applications whose replicas stand by on the device
    return max(ceil(together * whole_kind(kind)[1] * each["CPU"]) for kind, each in needs.items())


def _growth(content: ServeFile) -> Counter[str]:
    """The number of devices of each kind up to which controllers may request some."""
    growth = Counter[str]()
    for controller in controllers(content):
        growth.update((controller.get("args") or {}).get("grow_to") or {})
    return growth


def _whole(devices: Counter[str]) -> Counter[str]:
    wholes = Counter[str]()
    for kind, count in devices.items():
        whole, sharers = whole_kind(kind)
        wholes[whole] += ceil(count / sharers)
    return wholes


def _inside(content: ServeFile) -> ServeFile:
    """The Serve file as it is in the image: with paths there, reached from outside, with a key, ports and a volume."""
    there = files(content)
    inside = deepcopy(content) | {"proxy_location": "EveryNode"}
    inside["http_options"] |= {"host": "0.0.0.0", "port": PORT}
    for application in served(inside):
        given = application["args"]
        moved = {name: there[given[name]] for name in PATHS if given.get(name) in there}
        reached = {"grpc_host": "0.0.0.0"} if "grpc_port" in given else {}
        application["args"] = given | moved | reached | {"api_key_variable": KEY_VARIABLE}
    for application in classifiers(inside):
        application["args"].setdefault("ports", "24000-24099")
    for controller in controllers(inside):
        controller["args"] = controller["args"] | {"memory": "/memory", "api_key_variable": KEY_VARIABLE}
    for arbiter in arbiters(inside):
        arbiter["args"] |= {"api_key_variable": KEY_VARIABLE}
    check_ports(inside)
    return inside


def _group(
    pattern: dict[str, Any], kind: str, count: int, most: int, nodes: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """Nodes with one device of this kind each; the autoscaler may add some up to `most`."""
    group = deepcopy(pattern)
    group |= {"groupName": kind, "replicas": count, "minReplicas": count, "maxReplicas": most, "labels": {KIND: kind}}
    pod = group["template"]["spec"]
    label = nodes.get(kind) or ((GKE, _GKE_NAMES[kind]) if kind in _GKE_NAMES else None)
    if label is None and kind != CPU:
        raise UserError(f"{kind}: the label of nodes with this device is not known: give --nodes {kind}=LABEL:VALUE")
    pod["nodeSelector"] = dict([label] if label else ())
    if kind == CPU:
        for bound in pod["containers"][0]["resources"].values():
            bound.pop("nvidia.com/gpu", None)
    return group


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def labels(texts: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Labels of nodes as a user writes them.

    >>> labels(["l4=nvidia.com/gpu.product:NVIDIA-L4"])
    {'l4': ('nvidia.com/gpu.product', 'NVIDIA-L4')}
    """
    labels = {}
    for text in texts:
        kind, _, label = text.partition("=")
        name, _, value = label.partition(":")
        if not (kind and name and value):
            raise UserError(f"--nodes {text!r}: write KIND=LABEL:VALUE, as in l4=nvidia.com/gpu.product:NVIDIA-L4")
        labels[kind] = (name, value)
    return labels
