"""`isobatch doctor`: checks everything around the program, with a line for each check."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import typer
from packaging.requirements import Requirement

from profiles.errors import UserError

LEAST_SHARED_BYTES = 256 << 20  # Ray keeps what processes share there
LEAST_FREE_BYTES = 2 << 30
SHARED = Path("/dev/shm")
HOST = "127.0.0.1"
PORTS = {8000: "--port", 8001: "--grpc-port"}
CheckResult = tuple[str, str]  # the result, and what to do; empty where nothing is wrong


@dataclass(frozen=True)
class Finding:
    """What was checked and the result; `wrong` says what to do, and is empty where nothing is wrong."""

    what: str
    result: str
    wrong: str


def doctor() -> None:
    """Check Python, packages, GPUs, Ray, HAProxy, ports, cache and memory. The exit code is 1 if anything is wrong.

    Example: [bold]isobatch doctor[/]
    """
    from rich.console import Console

    console, wrong = Console(soft_wrap=True, highlight=False), False
    for finding in findings():
        mark = "[bold red]wrong[/]" if finding.wrong else "[green]well[/] "
        console.print(mark, end=" ")
        console.print(f"{finding.what}: {finding.wrong or finding.result}", markup=False)
        wrong = wrong or bool(finding.wrong)
    if wrong:
        raise typer.Exit(1)


def findings() -> Iterator[Finding]:
    """Run one check after the other; the error of a check is its result."""
    for what, look in LOOKS.items():
        try:
            yield Finding(what, *look())
        except (UserError, OSError, ImportError) as error:
            yield Finding(what, "", str(error).strip().partition("\n")[0])


def _python() -> CheckResult:
    wrong = "" if sys.version_info >= (3, 11) else "isobatch needs Python 3.11 or newer"
    return f"{sys.version.split()[0]}, {os.cpu_count()} processors", wrong


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
    return f"{len(wanted)} packages", "; ".join(wrong) and f"{'; '.join(wrong)}: install isobatch anew"


def _devices() -> CheckResult:
    import torch

    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(number) for number in range(count))
    if not count and shutil.which("nvidia-smi"):
        return f"torch {torch.__version__}", "there is a driver, but torch sees no GPU: is it a CPU build?"
    return f"torch {torch.__version__}, {names or 'no GPU: networks run on the CPU'}", ""


def _ray() -> CheckResult:
    from cluster.serving.local import running_cluster

    installed = f"ray {version('ray')}"
    if address := running_cluster():
        return installed, f"a cluster runs at {address}: 'ray stop', or 'isobatch deploy' onto it"
    return f"{installed}, no cluster in the way", ""


def _ports() -> CheckResult:
    from cluster.serving.ports import is_free

    taken = [f"{port} is taken ({option} names another)" for port, option in PORTS.items() if not is_free(HOST, port)]
    return " and ".join(map(str, PORTS)), "; ".join(taken)


def _proxy() -> CheckResult:
    from deployments.ray_settings import haproxy_program

    if program := haproxy_program():
        return program, "" if os.access(program, os.X_OK) else f"{program} cannot be run"
    return "", "it is missing: install ray[serve] again, which brings it"


def _files() -> CheckResult:
    from cluster.serving.haproxy import MAX_CONNECTIONS
    from deployments.front.proxy import allowed_connections

    return f"enough for {allowed_connections(MAX_CONNECTIONS):,} connections", ""


def _cache() -> CheckResult:
    from deployments.folders import cache_directory

    return _room(cache_directory(), LEAST_FREE_BYTES)


def _shared() -> CheckResult:
    return _room(SHARED, LEAST_SHARED_BYTES) if SHARED.is_dir() else (f"no {SHARED}: Ray uses files instead", "")


def _temporary() -> CheckResult:
    with tempfile.TemporaryDirectory() as folder:
        return _room(Path(folder).parent, LEAST_FREE_BYTES)


def _room(folder: Path, least_bytes: int) -> CheckResult:
    free = shutil.disk_usage(folder).free
    few = f"{free / 2**30:.1f} GiB are free in {folder}, {least_bytes / 2**30:g} are wanted"
    return f"{folder}, {free / 2**30:.1f} GiB free", few if free < least_bytes else ""


LOOKS: dict[str, Callable[[], CheckResult]] = {
    "python": _python,
    "packages": _packages,
    "devices": _devices,
    "ray": _ray,
    "haproxy": _proxy,
    "ports": _ports,
    "open files": _files,
    "cache": _cache,
    "temporary files": _temporary,
    "shared memory": _shared,
}
