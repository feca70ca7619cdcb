"""Checks that every node of a running cluster meets the needs of a Serve file, and reports the others in sentences."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from isobatch.cluster.serving.ports import is_free
from isobatch.cluster.serving.serve_file import ROOT, ServeFile, config_of, grpc_addresses, served
from isobatch.deployments.cluster_checks import PATHS, check_http
from isobatch.deployments.folders import content_of, hash_of
from isobatch.deployments.ray_facts import each_node, serve_client
from isobatch.deployments.ray_settings import NODE_SETTINGS, PROXY_PROGRAM
from isobatch.deployments.sources import is_url, local
from isobatch.profiles.errors import UserError

CODE = ("profiles", "optimizer", "deployments", "cluster")  # isobatch's packages


@dataclass(frozen=True)
class NodeNeeds:
    """The files, environment variables and free ports that every node needs."""

    files: Sequence[str]
    variables: Sequence[str]
    ports: Sequence[int]
    models: Sequence[str] = ()  # URLs


@dataclass(frozen=True)
class NodeHas:
    """The state of one node. `files` are hashes; "": there is no such file."""

    versions: Mapping[str, str]
    code: str  # a hash of isobatch's own files
    files: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str | None] = field(default_factory=dict)
    unset: Sequence[str] = ()
    taken: Sequence[int] = ()
    no_proxy: str = ""  # why HAProxy cannot run there
    unfetched: str = ""  # why a model cannot be fetched there


def check_nodes(content: ServeFile) -> None:
    """Raise UserError about the first thing that a node lacks or has in another version than this node."""
    needs = needs_of(content)
    own = look(needs)
    nodes = each_node(look, needs)
    check_http(content["http_options"]["host"], encrypts=False, nodes=[address for address, _ in nodes])
    for address, state in nodes:
        if isinstance(state, Exception):
            raise UserError(f"node {address}: {_silence(state)}")
        for problem in missing(own, state):
            raise UserError(f"node {address}: {problem}")


def _silence(error: Exception) -> str:
    """Why a node did not answer."""
    from ray.exceptions import GetTimeoutError, NodeDiedError

    ended = isinstance(error, GetTimeoutError | NodeDiedError)
    problem = "it has ended or does not answer" if ended else "isobatch is not installed there as it is here"
    return f"{problem} ({f'{type(error).__name__}: {error}'.strip().splitlines()[-1]})"


def needs_of(content: ServeFile) -> NodeNeeds:
    configs = [config_of(application) for application in served(content)]
    files = [path for config in configs for name in PATHS if (path := getattr(config, name)) and not is_url(path)]
    models = [config.model for config in configs if config.model and is_url(config.model)]
    arguments = [each.get("args") or {} for each in content["applications"]]  # controllers have keys, too
    variables = [name for each in arguments if (name := each.get("api_key_variable"))]
    ports = [int(content["http_options"]["port"]), *(port for _, port in grpc_addresses(content))]
    return NodeNeeds(files, variables, [] if serve_client() else ports, models)


def look(needs: NodeNeeds) -> NodeHas:
    """The state of this node. It runs on every node as a Ray task, so in the environment in which Ray was started."""
    program = os.environ.get(PROXY_PROGRAM, "")
    return NodeHas(
        {"Python": ".".join(map(str, sys.version_info[:2])), "ray": version("ray"), "torch": version("torch")},
        hash_of(sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))),
        {path: _hash_of(Path(path)) for path in needs.files},
        {name: os.environ.get(name) for name in NODE_SETTINGS},
        [name for name in needs.variables if not os.environ.get(name)],
        [port for port in needs.ports if not is_free("0.0.0.0", port)],
        "" if os.access(program, os.X_OK) else f"{PROXY_PROGRAM} is {program!r}",
        next(filter(None, map(_unfetched, needs.models)), ""),
    )


def missing(own: NodeHas, other: NodeHas) -> Iterator[str]:
    """Sentences on what a node lacks, compared with this node. The most likely causes come first."""
    yield from _unprepared(other)
    for name, own_version in own.versions.items():
        if other.versions.get(name) != own_version:
            yield f"{name} is {other.versions.get(name)} there and {own_version} here: install the same everywhere"
    if other.code != own.code:
        yield "isobatch itself is another version there: install the same everywhere"
    if other.unfetched:
        yield other.unfetched
    for path, own_hash in own.files.items():
        if not other.files.get(path):
            yield f"{path} is not there: copy it to the same path on every node, or to a shared volume"
        elif other.files[path] != own_hash:
            yield f"{path} has another content there: copy it to every node again"


def _unprepared(other: NodeHas) -> Iterator[str]:
    remedy = 'start Ray there after  eval "$(isobatch environment)"'
    for name, value in NODE_SETTINGS.items():
        if (other_value := other.settings.get(name)) != value:
            yield f"{name} is {'not set' if other_value is None else other_value} where it should be {value}: {remedy}"
    if other.no_proxy:
        yield f"HAProxy cannot run there ({other.no_proxy}): {remedy}"
    for name in other.unset:
        yield f"the environment variable {name} is not set there: set it before Ray starts"
    for port in other.taken:
        yield f"port {port} is taken there: end the program that listens on it, or choose another port"


def _unfetched(model: str) -> str:
    """Fetch a model to this node; why it cannot be, or ""."""
    try:
        local(model)
    except UserError as error:
        return str(error)
    return ""


def _hash_of(path: Path) -> str:
    if path.is_dir():
        return content_of(path) or "a folder without weights"
    return hash_of([path]) if path.is_file() else ""
