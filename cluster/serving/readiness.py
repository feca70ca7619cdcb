"""What is missing on a running cluster for a Serve file: each node is asked, and each answer is judged in sentences."""

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from cluster.serving.serve_file import ROOT, ServeFile, decoders, grpc_addresses, ours
from deployments.cluster_checks import PATHS, check_http
from deployments.config import AppConfig, checked, parse
from deployments.decoding.config import DecoderConfig
from deployments.folders import content_of
from deployments.ray_facts import each_node, serve_client
from deployments.ray_settings import NODE_SETTINGS, PROXY_PROGRAM
from profiles.errors import UserError

CODE = ("profiles", "optimizer", "deployments", "cluster")


@dataclass(frozen=True)
class NodeNeeds:
    """What every node needs."""

    files: Sequence[str]
    variables: Sequence[str]  # names in the environment
    ports: Sequence[int]


@dataclass(frozen=True)
class NodeHas:
    """What one node has. `files` are hashes, "" where there is nothing."""

    versions: Mapping[str, str]
    code: str  # a hash of isobatch itself
    files: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str | None] = field(default_factory=dict)
    unset: Sequence[str] = ()
    taken: Sequence[int] = ()
    no_proxy: str = ""  # why HAProxy cannot run there


def check_nodes(content: ServeFile) -> None:
    """Raise UserError about the first thing that a node lacks, or has otherwise than this one."""
    wanted = wanted_by(content)
    here = look(wanted)
    found = each_node(look, wanted)
    check_http(content["http_options"]["host"], encrypts=False, nodes=[address for address, _ in found])
    for address, there in found:
        if isinstance(there, Exception):
            reason = f"{type(there).__name__}: {there}".strip().splitlines()[-1]
            raise UserError(f"node {address}: isobatch is not installed there as it is here ({reason})")
        for wrong in missing(here, there):
            raise UserError(f"node {address}: {wrong}")


def wanted_by(content: ServeFile) -> NodeNeeds:
    configs: list[AppConfig | DecoderConfig] = [parse(application["args"]) for application in ours(content)]
    configs += [checked(DecoderConfig, application["args"]) for application in decoders(content)]
    files = [path for config in configs for name in PATHS if (path := getattr(config, name))]
    variables = [config.api_key_variable for config in configs if config.api_key_variable]
    ports = [int(content["http_options"]["port"]), *(port for _, port in grpc_addresses(content))]
    return NodeNeeds(files, variables, [] if serve_client() else ports)


def look(wanted: NodeNeeds) -> NodeHas:
    """What this node has. It runs on every node, as a task of Ray, so with the environment that Ray was started in."""
    program = os.environ.get(PROXY_PROGRAM, "")
    return NodeHas(
        {"Python": ".".join(map(str, sys.version_info[:2])), "ray": version("ray"), "torch": version("torch")},
        _code(),
        {path: _hash_of(Path(path)) for path in wanted.files},
        {name: os.environ.get(name) for name in NODE_SETTINGS},
        [name for name in wanted.variables if not os.environ.get(name)],
        [port for port in wanted.ports if not _is_free(port)],
        "" if os.access(program, os.X_OK) else f"{PROXY_PROGRAM} is {program!r}",
    )


def missing(here: NodeHas, there: NodeHas) -> Iterator[str]:
    """Sentences on what a node lacks, beside the node where they are written; the first are the most likely causes."""
    yield from _unprepared(there)
    for name, ours_is in here.versions.items():
        if there.versions.get(name) != ours_is:
            yield f"{name} is {there.versions.get(name)} there and {ours_is} here: install the same everywhere"
    if there.code != here.code:
        yield "isobatch itself is another version there: install the same everywhere"
    for path, ours_is in here.files.items():
        if not there.files.get(path):
            yield f"{path} is not there: copy it to the same path on every node, or to a shared volume"
        elif there.files[path] != ours_is:
            yield f"{path} has another content there: copy it anew to every node"


def _unprepared(there: NodeHas) -> Iterator[str]:
    prepare = 'start Ray there behind  eval "$(isobatch environment)"'
    for name, value in NODE_SETTINGS.items():
        if (set_to := there.settings.get(name)) != value:
            yield f"{name} is {'not set' if set_to is None else set_to} where it should be {value}: {prepare}"
    if there.no_proxy:
        yield f"HAProxy cannot run there ({there.no_proxy}): {prepare}"
    for name in there.unset:
        yield f"the environment variable {name} is not set there: set it before Ray starts"
    for port in there.taken:
        yield f"port {port} is taken there: end what listens, or name another port"


def _code() -> str:
    digest = sha256()
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _hash_of(path: Path) -> str:
    if path.is_dir():
        return content_of(path) or "a folder without weights"
    return sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
