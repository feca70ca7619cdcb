"""What `isobatch kubernetes` writes: KubeRay and Kubernetes would take it, and it has what the Serve file needs."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from isobatch.cluster.cli import app
from isobatch.cluster.serving.capacity import check_capacity
from isobatch.cluster.serving.kubernetes import GKE
from isobatch.cluster.serving.serve_file import serve_file
from isobatch.deployments.resources import KIND, Resources
from isobatch.optimizer.plan import Placement, Plan, Split
from isobatch.profiles.files import Profile, save
from isobatch.profiles.latency import LatencyTable
from tests.helpers.ray_service import KUBERNETES, RayCluster, RayService, check_pod
from tests.helpers.tiny_networks import hugging_face

BLOCKS = 4


def table(kind: str) -> LatencyTable:
    rows, sizes = ((0.001,) * BLOCKS, (0.002,) * BLOCKS), (64,) * BLOCKS
    return LatencyTable(kind, (1, 8), rows, ((0.0,) * BLOCKS,) * 2, 0.0005, sizes, sizes, "made up")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    hugging_face("bert").save_pretrained(tmp_path / "my-bert")
    blocks = [Split(0, 1, 8), Split(1, BLOCKS, 8)]
    plan = Plan((Placement("t4", 2, (blocks[0],)), Placement("l4", 1, (blocks[1],))))
    (tmp_path / "plan.json").write_text(plan.to_json())
    save(Profile("my-bert", (table("t4"), table("l4"))), tmp_path / "profile.json")
    files = {"model": "my-bert", "plan": "plan.json", "profile": "profile.json", "grpc_port": 8001}
    served = {"name": "shop", "import_path": "isobatch.deployments.app:build", "args": files}
    path = "isobatch.cluster.controller.app:build"
    controller = {"name": "c", "import_path": path, "route_prefix": "/c", "args": {"application": "shop"}}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump({"applications": [served, controller]}))
    return tmp_path / "serve.yaml"


def run(file: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["kubernetes", str(file), "--image", "i:1", "--storage-class", "rwx", *more])


def cluster(file: Path, *more: str) -> RayCluster:
    _, service = yaml.safe_load_all(run(file, *more).stdout)
    return RayService.model_validate(service).spec.rayClusterConfig


def nodes(cluster: RayCluster) -> dict[str, int]:
    """How many of each kind."""
    return {group.groupName: group.replicas for group in cluster.workerGroupSpecs}


def test_each_kind_of_device_gets_its_nodes_and_the_file_its_paths_there(file: Path) -> None:
    import kubernetes_validate
    from ray.serve.schema import ServeDeploySchema

    done = run(file)
    assert done.exit_code == 0, done.output
    volume, service = yaml.safe_load_all(done.stdout)
    kubernetes_validate.validate(volume, KUBERNETES, strict=True)
    assert volume["spec"]["storageClassName"] == "rwx"
    spec = RayService.model_validate(service).spec
    cluster = spec.rayClusterConfig
    assert nodes(cluster) == {"t4": 2, "l4": 1}
    for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs):
        check_pod(group.template)
        assert group.template["spec"]["containers"][0]["image"] == "i:1"
    for group in cluster.workerGroupSpecs:
        assert group.labels == {KIND: group.groupName}
        assert group.template["spec"]["nodeSelector"][GKE].endswith(group.groupName)
    assert f"the image needs {file.parent}/plan.json as /models/plan.json" in done.stderr
    content = yaml.safe_load(spec.serveConfigV2)
    ServeDeploySchema.model_validate(content)
    served, controller = content["applications"]
    assert (served["args"]["model"], served["args"]["plan"]) == ("/models/my-bert", "/models/plan.json")
    assert content["http_options"]["host"] == served["args"]["grpc_host"] == "0.0.0.0"
    assert served["args"]["api_key_variable"] == controller["args"]["api_key_variable"] == "ISOBATCH_KEY"
    assert controller["args"]["memory"] == "/memory"


def test_a_plan_inside_the_models_folder_stays_there_in_the_image(file: Path) -> None:
    for name in ("plan.json", "profile.json"):
        (file.parent / name).rename(file.parent / "my-bert" / name)
    file.write_text(file.read_text().replace("plan: ", "plan: my-bert/").replace("profile: ", "profile: my-bert/"))
    _, service = yaml.safe_load_all(run(file).stdout)
    arguments = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    paths = [arguments[name] for name in ("model", "plan", "profile")]
    assert paths == ["/models/my-bert", "/models/my-bert/plan.json", "/models/my-bert/profile.json"]


@pytest.mark.parametrize(
    ("fields", "cpus"),
    [
        ({}, {"t4": 3, "cpu": 3}),
        ({"cpus_per_replica": 4}, {"t4": 3, "cpu": 5}),
        ({"front_replicas": 7}, {"t4": 4, "cpu": 4}),
    ],
)
def test_pods_have_the_cpus_that_replicas_and_fronts_need(
    file: Path, fields: dict[str, int], cpus: dict[str, int]
) -> None:
    placements = Placement("t4", 2, (Split(0, 1, 8),)), Placement("cpu", 1, (Split(1, BLOCKS, 8),))
    (file.parent / "plan.json").write_text(Plan(placements).to_json())
    save(Profile("my-bert", (table("t4"), table("cpu"))), file.parent / "profile.json")
    content = yaml.safe_load(file.read_text())
    content["applications"][0]["args"] |= fields
    file.write_text(yaml.safe_dump(content))
    pods = list[Resources]()
    for group in cluster(file).workerGroupSpecs:
        resources = group.template["spec"]["containers"][0]["resources"]
        assert resources["requests"]["cpu"] == resources["limits"]["cpu"] == str(cpus[group.groupName])
        gpu = {"GPU": 1.0, "accelerator_type:T4": 1.0} if group.groupName == "t4" else {}
        pods += [{"CPU": float(resources["limits"]["cpu"])} | gpu] * group.replicas
    check_capacity(serve_file(file, {}), pods)


def test_replicas_that_share_devices_get_as_few_nodes(file: Path) -> None:
    placements = Placement("t4", 2, (Split(0, 1, 8),)), Placement("l4/2", 3, (Split(1, BLOCKS, 8),))
    (file.parent / "plan.json").write_text(Plan(placements).to_json())
    save(Profile("my-bert", (table("t4"), table("l4/2"))), file.parent / "profile.json")
    assert nodes(cluster(file)) == {"t4": 2, "l4": 2}


def test_devices_on_which_replicas_stand_by_have_nodes_and_other_applications_nodes_of_their_own(file: Path) -> None:
    """The arbiter may give any of them to the application."""
    content = yaml.safe_load(file.read_text())
    shop, controller = content["applications"]
    alone = shop | {"name": "alone", "route_prefix": "/alone", "args": shop["args"] | {"grpc_port": 8002}}
    shop["args"]["standby"] = {"t4": 3}
    file.write_text(yaml.safe_dump({"applications": [shop, controller, alone]}))
    assert nodes(cluster(file)) == {"t4": 5, "l4": 2}


def test_kinds_that_a_controller_may_request_have_nodes_that_the_autoscaler_adds(file: Path) -> None:
    assert cluster(file).enableInTreeAutoscaling is None
    save(Profile("my-bert", (table("t4"), table("l4"), table("a100"))), file.parent / "profile.json")
    content = yaml.safe_load(file.read_text())
    content["applications"][1]["args"] |= {"goal": "cost", "grow_to": {"t4": 6, "a100": 1}}
    file.write_text(yaml.safe_dump(content))
    groups = cluster(file).workerGroupSpecs
    counts = {each.groupName: (each.minReplicas, each.replicas, each.maxReplicas) for each in groups}
    assert counts == {"t4": (2, 2, 6), "l4": (1, 1, 1), "a100": (0, 0, 1)}
    assert cluster(file).enableInTreeAutoscaling
    assert cluster(file).autoscalerOptions == {"version": "v2"}


def test_no_file_of_the_application_is_replaced(file: Path) -> None:
    for each in (file, file.parent / "plan.json"):
        assert f"cannot write {each}: this command uses that file" in str(run(file, "--out", str(each)).exception)


def test_http_listens_where_the_pods_are_asked(file: Path) -> None:
    file.write_text(file.read_text() + "http_options: {port: 9000}\n")
    _, service = yaml.safe_load_all(run(file).stdout)
    content = yaml.safe_load(service["spec"]["serveConfigV2"])
    groups = service["spec"]["rayClusterConfig"]
    pods = [each["template"]["spec"] for each in (groups["headGroupSpec"], *groups["workerGroupSpecs"])]
    ports = {each["containerPort"] for pod in pods for each in pod["containers"][0]["ports"] if each["name"] == "serve"}
    assert ports == {content["http_options"]["port"]}
    file.write_text(file.read_text().replace("grpc_port: 8001", "grpc_port: 8000"))
    assert "port = 8000: HTTP and gRPC cannot have the same" in str(run(file).exception)


def test_nodes_that_are_labelled_otherwise_are_named(file: Path) -> None:
    groups = cluster(file, "--nodes", "l4=nvidia.com/gpu.product:NVIDIA-L4").workerGroupSpecs
    assert {"nvidia.com/gpu.product": "NVIDIA-L4"} in [group.template["spec"]["nodeSelector"] for group in groups]


def test_nodes_without_a_gpu_are_chosen_by_their_label_too(file: Path) -> None:
    placements = Placement("t4", 2, (Split(0, 1, 8),)), Placement("cpu", 1, (Split(1, BLOCKS, 8),))
    (file.parent / "plan.json").write_text(Plan(placements).to_json())
    save(Profile("my-bert", (table("t4"), table("cpu"))), file.parent / "profile.json")
    for more, selector in (((), {}), (("--nodes", "cpu=pool:cheap"), {"pool": "cheap"})):
        (group,) = (each for each in cluster(file, *more).workerGroupSpecs if each.groupName == "cpu")
        pod = group.template["spec"]
        assert pod["nodeSelector"] == selector
        assert set(pod["containers"][0]["resources"]["limits"]) == {"cpu", "memory"}


@pytest.mark.parametrize(
    ("replaced", "by", "more", "sentence"),
    [
        ("", "", ["--nodes", "l4"], "write KIND=LABEL:VALUE"),
        ("", "", ["--nodes", "L4=a:b"], "--nodes L4: the file has no such devices, only l4, t4"),
        ("plan: plan.json", "name: it", [], "it has neither plan: nor devices:"),
        ("plan: plan.json", "plan: my-bert/plan.json", [], "cannot read"),
    ],
)
def test_what_is_wrong_is_one_sentence(file: Path, replaced: str, by: str, more: list[str], sentence: str) -> None:
    file.write_text(file.read_text().replace(replaced, by))
    done = run(file, *more)
    assert sentence in str(done.exception)


def test_a_file_with_applications_of_other_programs_alone_names_no_nodes(file: Path) -> None:
    file.write_text("applications: [{name: other, import_path: 'shop:app'}]")
    assert "the file has no application of isobatch" in str(run(file).exception)


def test_a_file_is_written_whole(file: Path) -> None:
    """The one before is replaced, not written over."""
    out, before = file.with_name("cluster.yaml"), file.with_name("before.yaml")
    out.write_text("before")
    before.hardlink_to(out)
    assert run(file, "--out", str(out)).exit_code == 0
    assert before.read_text() == "before"
    assert out.read_text() == run(file).stdout
