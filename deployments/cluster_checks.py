"""Checks a Ray cluster's settings for an application, and reports the first problem in one sentence."""

from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from isobatch.deployments.config import AppConfig
from isobatch.deployments.sources import is_url
from isobatch.profiles.errors import UserError

PATHS = ("model", "plan", "profile")  # the fields of a configuration that are paths


@dataclass(frozen=True)
class ClusterState:
    """The address that HTTP listens on, whether Serve is set to encrypt it, and the addresses of the nodes."""

    http_host: str
    encrypts: bool
    nodes: Collection[str]


def check_cluster(config: AppConfig, cluster: ClusterState) -> None:
    """Raise UserError if fronts or replicas could never be reached, or could not read their files."""
    for name in PATHS:
        path = getattr(config, name)
        if path and not is_url(path) and not Path(path).is_absolute():
            raise UserError(
                f"args: {name} = {path!r} must be an absolute path, because each node reads it: `isobatch deploy FILE` "
                "takes paths relative to the file's folder, and `isobatch serve FILE --out NEW` writes absolute ones"
            )
    check_http(cluster.http_host, cluster.encrypts, cluster.nodes)


def check_http(host: str, encrypts: bool, nodes: Collection[str]) -> None:
    if encrypts:
        raise UserError("http_options: ssl_*: Serve's HAProxy speaks no TLS: put a load balancer with TLS before it")
    if len(set(nodes)) > 1 and is_loopback(host):
        addresses = ", ".join(sorted(set(nodes)))
        raise UserError(
            f"http_options: host = {host}: fronts on other nodes could not be reached ({addresses}): write 0.0.0.0, "
            "and shut Serve down once, because it reads this only when it starts"
        )


def is_loopback(host: str) -> bool:
    """
    >>> is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("node-7")
    (True, True, False, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
