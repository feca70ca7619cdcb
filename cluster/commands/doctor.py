"""`isobatch doctor`: checks everything around the program, with a line for each check."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

import typer
from packaging.requirements import Requirement
from rich.console import Console

from isobatch.cluster.serving.capacity import Gpu, gpus_by_driver
from isobatch.deployments.folders import cache_directory
from isobatch.deployments.own_cores import usable_cores

LEAST_SHARED_BYTES = 256 << 20  # Ray keeps what processes share there
LEAST_FREE_BYTES = 2 << 30
SHARED = Path("/dev/shm")
CARDS = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"  # the vendor's number, and the first digits of its cards' class
RUNTIMES = ("onnxruntime", "onnxruntime-gpu")  # distributions of one package
ONLY_FATAL = 4  # of ONNX Runtime's severities


# By CUDA's major version: the oldest driver, and the oldest generation of GPUs with its compute capability, from the
# release notes of NVIDIA's toolkit.
CUDA_NEEDS = {12: (525, 5.0, "Maxwell"), 13: (580, 7.5, "Turing")}
CheckResult = tuple[str, str]  # the result, and what to do; empty where nothing is wrong


class Finding(NamedTuple):
    """What was checked and the result; `wrong` says what to do, and is empty where nothing is wrong."""

    what: str
    result: str
    wrong: str


def doctor() -> None:
    """Check Python, packages, GPUs, Ray, HAProxy, ports, cache and memory. The exit code is 1 if any check fails.

    Example: [bold]isobatch doctor[/]
    """
    console, wrong = Console(soft_wrap=True, highlight=False), False
    for what, result, to_do in findings():
        console.print("[bold red]fail[/]" if to_do else "[green]ok[/]  ", end=" ")
        console.print(f"{what}: {to_do or result}", markup=False)
        wrong = wrong or bool(to_do)
    if wrong:
        raise typer.Exit(1)


def findings() -> Iterator[Finding]:
    """Run one check after the other; the error of a check is its result."""
    for what, look in LOOKS.items():
        try:
            yield Finding(what, *look())
        except Exception as error:  # a package of another version may raise anything while it is imported
            yield Finding(what, "", str(error).strip().partition("\n")[0] or type(error).__name__)


def _packages() -> CheckResult:
    """Whether the installed packages are the versions that isobatch requires."""
    wanted = [Requirement(line) for line in requires("isobatch") or () if "extra ==" not in line]
    wrong = []
    for each in wanted:
        try:
            there = version(each.name)
        except PackageNotFoundError:
            wrong.append(f"{each.name} is not installed")
            continue
        if not each.specifier.contains(there, prereleases=True):
            wrong.append(f"{each.name} is {there}, wanted is {each.specifier}")
    return f"{len(wanted)} packages", "; ".join(wrong) and f"{'; '.join(wrong)}: reinstall isobatch"


def _devices() -> CheckResult:
    import torch

    installed, gpus = f"torch {torch.__version__}", gpus_by_driver()
    for gpu in gpus:
        if wrong := gpu_obstacle(gpu, torch.version.cuda):
            return installed, wrong
    if gpus and not torch.cuda.device_count():
        return installed, f"the driver shows {gpus[0].name}, but torch cannot use it: is CUDA_VISIBLE_DEVICES empty?"
    if gpus:
        return f"{installed}, {', '.join(gpu.name for gpu in gpus)}", ""
    driver = "; an NVIDIA card is here, but nvidia-smi is not: install its driver" if _has_card() else ""
    return f"{installed}, no GPU: networks run on the CPU{driver}", ""


def _has_card() -> bool:
    """Whether the machine has a display or compute card of NVIDIA's, with or without a driver."""
    return any(
        (each / "vendor").read_text().strip() == NVIDIA and (each / "class").read_text().startswith(DISPLAY)
        for each in (CARDS.iterdir() if CARDS.is_dir() else ())
    )


def gpu_obstacle(gpu: Gpu, cuda: str | None) -> str:
    """What keeps torch, built for this version of CUDA, from computing on a GPU; empty if nothing does.

    >>> gpu_obstacle(Gpu("NVIDIA L4", "570.86.15", "8.9"), "13.0")
    "NVIDIA L4: torch's CUDA 13.0 needs driver 580 or newer, this is 570.86.15"
    >>> gpu_obstacle(Gpu("Tesla V100-SXM2-16GB", "580.65.06", "7.0"), "13.0")
    "Tesla V100-SXM2-16GB: torch's CUDA 13.0 needs compute capability 7.5 (Turing), this has 7.0: docs/gpu.md"
    >>> gpu_obstacle(Gpu("NVIDIA L4", "580.65.06", "8.9"), "13.0")
    ''
    """
    if cuda is None:
        return f"{gpu.name} is here, but this torch is a CPU build: install a CUDA build, as docs/gpu.md says"
    driver, capability, generation = CUDA_NEEDS.get(int(cuda.partition(".")[0]), (0, 0.0, ""))
    if int(gpu.driver.partition(".")[0]) < driver:
        return f"{gpu.name}: torch's CUDA {cuda} needs driver {driver} or newer, this is {gpu.driver}"
    if float(gpu.capability) < capability:
        wanted = f"compute capability {capability} ({generation})"
        return f"{gpu.name}: torch's CUDA {cuda} needs {wanted}, this has {gpu.capability}: docs/gpu.md"
    return ""


def _onnx_runtime() -> CheckResult:
    """Whether there is one ONNX Runtime, which loads its CUDA provider where there is a GPU."""
    there = []
    for name in RUNTIMES:
        with suppress(PackageNotFoundError):
            there.append(f"{name} {version(name)}")
    if len(there) > 1:
        return "", f"{' and '.join(there)} overwrite each other: uninstall both, then install one"
    installed = there[0] if there else "none: networks run on torch (pip install 'isobatch[cpu]' or 'isobatch[gpu]')"
    if not (there and gpus_by_driver()):
        return installed, ""
    import onnxruntime

    from isobatch.deployments.models.onnx_session import CUDA_PROVIDER

    if CUDA_PROVIDER not in onnxruntime.get_available_providers():
        return installed, "this is a CPU build, but there is a GPU: install onnxruntime-gpu in its place"
    onnxruntime.set_default_logger_severity(ONLY_FATAL)  # what does not load is this check's result
    loaded = onnxruntime.InferenceSession(_smallest_graph(), providers=[CUDA_PROVIDER]).get_providers()
    return installed, "" if CUDA_PROVIDER in loaded else "its CUDA libraries do not load: backend onnx has no GPU"


def _smallest_graph() -> bytes:
    from onnx import TensorProto, helper

    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "smallest", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    return bytes(model.SerializeToString())


def _ray() -> CheckResult:
    from isobatch.cluster.serving.local import running_cluster, without_cluster

    installed = f"ray {version('ray')}"
    if address := running_cluster():
        return installed, f"a cluster runs at {address}: {without_cluster()}, or 'isobatch deploy' onto it"
    return f"{installed}, no cluster in the way", ""


def _ports() -> CheckResult:
    from isobatch.cluster.serving.ports import is_free
    from isobatch.cluster.serving.serve_file import GRPC_PORT, LOCALHOST, PORT

    ports = {PORT: "--port", GRPC_PORT: "--grpc-port"}
    taken = [
        f"{port} is taken ({option} names another)" for port, option in ports.items() if not is_free(LOCALHOST, port)
    ]
    return " and ".join(map(str, ports)), "; ".join(taken)


def _proxy() -> CheckResult:
    from isobatch.deployments.ray_settings import haproxy_program

    if program := haproxy_program():
        return program, "" if os.access(program, os.X_OK) else f"{program} cannot be run"
    return "", "it is missing: install ray[serve] again, which brings it"


def _files() -> CheckResult:
    from isobatch.cluster.serving.haproxy import MAX_CONNECTIONS
    from isobatch.deployments.front.proxy import allowed_connections

    return f"enough for {allowed_connections(MAX_CONNECTIONS):,} connections", ""


def _temporary() -> CheckResult:
    from isobatch.deployments.ray_facts import ray_folder

    with tempfile.TemporaryDirectory(dir=ray_folder()) as folder:
        return _room(Path(folder).parent, LEAST_FREE_BYTES)


def _room(folder: Path, least_bytes: int) -> CheckResult:
    free = shutil.disk_usage(folder).free
    few = f"{free / 2**30:.1f} GiB are free in {folder}, {least_bytes / 2**30:g} are wanted"
    return f"{folder}, {free / 2**30:.1f} GiB free", few if free < least_bytes else ""


LOOKS: dict[str, Callable[[], CheckResult]] = {
    "python": lambda: (f"{sys.version.split()[0]}, {usable_cores()} processors", ""),
    "packages": _packages,
    "devices": _devices,
    "onnx runtime": _onnx_runtime,
    "ray": _ray,
    "haproxy": _proxy,
    "ports": _ports,
    "open files": _files,
    "cache": lambda: _room(cache_directory(), LEAST_FREE_BYTES),
    "temporary files": _temporary,
    "shared memory": lambda: (
        _room(SHARED, LEAST_SHARED_BYTES) if SHARED.is_dir() else (f"no {SHARED}: Ray uses files instead", "")
    ),
}
