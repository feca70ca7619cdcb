"""Looks at everything around the program that a first hour may stumble over, and says what is wrong in a line each."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from profiles.errors import UserError

LEAST_SHARED_BYTES = 256 << 20  # Ray keeps what processes share there
LEAST_FREE_BYTES = 2 << 30
SHARED = Path("/dev/shm")
PORTS = {8000: "--port", 8001: "--grpc-port"}


@dataclass(frozen=True)
class Finding:
    """What was checked and the result; `wrong` says what to do, and is empty where nothing is wrong."""

    what: str
    result: str
    wrong: str = ""


def findings() -> Iterator[Finding]:
    """Run one check after the other; the error of a check is its result."""
    for what, look in LOOKS.items():
        try:
            yield look(what)
        except (UserError, OSError, ImportError) as error:
            yield Finding(what, "", str(error).strip().partition("\n")[0])


def _python(what: str) -> Finding:
    result = f"{sys.version.split()[0]}, {os.cpu_count()} processors"
    return Finding(what, result, "" if sys.version_info >= (3, 11) else "isobatch needs Python 3.11 or newer")


def _packages(what: str) -> Finding:
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
    return Finding(what, f"{len(wanted)} packages", "; ".join(wrong) and f"{'; '.join(wrong)}: install isobatch anew")


def _devices(what: str) -> Finding:
    import torch

    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(number) for number in range(count))
    if not count and shutil.which("nvidia-smi"):
        return Finding(
            what, f"torch {torch.__version__}", "there is a driver, but torch sees no GPU: is it a CPU build?"
        )
    return Finding(what, f"torch {torch.__version__}, {names or 'no GPU: networks run on the CPU'}")


def _ray(what: str) -> Finding:
    from cluster.serving.local import running_cluster

    if address := running_cluster():
        return Finding(
            what, f"ray {version('ray')}", f"a cluster runs at {address}: 'ray stop', or 'isobatch deploy' onto it"
        )
    return Finding(what, f"ray {version('ray')}, no cluster in the way")


def _ports(what: str) -> Finding:
    from cluster.serving.ports import is_free

    taken = [
        f"{port} is taken ({option} names another)" for port, option in PORTS.items() if not is_free("127.0.0.1", port)
    ]
    return Finding(what, " and ".join(map(str, PORTS)), "; ".join(taken))


def _proxy(what: str) -> Finding:
    from deployments.ray_settings import haproxy_program

    if program := haproxy_program():
        return Finding(what, program, "" if os.access(program, os.X_OK) else f"{program} cannot be run")
    return Finding(what, "", "it is missing: install ray[serve] again, which brings it")


def _cache(what: str) -> Finding:
    from deployments.folders import cache_directory

    return _room(what, cache_directory(), LEAST_FREE_BYTES)


def _shared(what: str) -> Finding:
    if not SHARED.is_dir():
        return Finding(what, f"no {SHARED}: Ray uses files instead")
    return _room(what, SHARED, LEAST_SHARED_BYTES)


def _temporary(what: str) -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        return _room(what, Path(folder).parent, LEAST_FREE_BYTES)


def _room(what: str, folder: Path, least_bytes: int) -> Finding:
    free = shutil.disk_usage(folder).free
    few = f"{free / 2**30:.1f} GiB are free in {folder}, {least_bytes / 2**30:g} are wanted"
    return Finding(what, f"{folder}, {free / 2**30:.1f} GiB free", few if free < least_bytes else "")


LOOKS: dict[str, Callable[[str], Finding]] = {
    "python": _python,
    "packages": _packages,
    "devices": _devices,
    "ray": _ray,
    "haproxy": _proxy,
    "ports": _ports,
    "cache": _cache,
    "temporary files": _temporary,
    "shared memory": _shared,
}
