"""What is wrong with a Ray cluster for an application, said in one sentence before anything waits for it."""

from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from deployments.config import AppConfig
from profiles.errors import UserError

PATHS = ("model", "plan", "profile")


@dataclass(frozen=True)
class ClusterState:
    """Where HTTP listens, whether Serve was told to encrypt it by itself, and the addresses of the nodes."""

    http_host: str
    encrypts: bool
    nodes: Collection[str]


def check_cluster(config: AppConfig, around: ClusterState) -> None:
    """Raise UserError about the first thing that would keep fronts or replicas from ever being reached."""
    for name in PATHS:
        path = getattr(config, name)
        if path and not Path(path).is_absolute():
            raise UserError(
                f"args: {name} = {path!r} must be an absolute path, as each node reads it by itself: write it so, or "
                "use `isobatch deploy`, which takes paths from the file's folder"
            )
    check_http(around.http_host, around.encrypts, around.nodes)


def check_http(host: str, encrypts: bool, nodes: Collection[str]) -> None:
    if encrypts:
        raise UserError("http_options: ssl_*: Serve's HAProxy speaks no TLS, end it at a load balancer before it")
    if len(set(nodes)) > 1 and is_loopback(host):
        there = ", ".join(sorted(set(nodes)))
        raise UserError(
            f"http_options: host = {host}: fronts on other nodes could not be reached ({there}): write 0.0.0.0, "
            "and shut Serve down once, as this is read when it starts"
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
