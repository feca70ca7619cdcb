"""A served network, as the shell of its front knows it: HTTP, gRPC and their limits are the same for every network."""

from collections.abc import Callable
from typing import Any, Protocol

from isobatch.deployments.config import ServedConfig
from isobatch.deployments.front import shortcut
from isobatch.deployments.front.bodies import ARRIVING
from isobatch.deployments.front.proxy import Burden, ProxyLimit, Refusing, servers_at
from isobatch.deployments.ray_settings import haproxy_socket


class GuardedNetwork(Protocol):
    """The network behind a front."""

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> ServedConfig: ...

    @property
    def key(self) -> bytes | None:
        """The key that requests must show, if there is one."""
        ...

    @property
    def most_calls(self) -> int:
        """The most gRPC calls at once: more than are admitted, since refusals have reasons."""
        ...

    async def missing(self) -> list[str]:
        """The parts of the network that have no replica now."""
        ...

    async def stats(self) -> dict[str, Any]:
        """The content of /stats."""
        ...

    def burden(self) -> Burden:
        """The load of this front, for the limits of the proxies before it."""
        ...

    def watch(self, proxy: Refusing) -> None:
        """Count the requests that a proxy before this front refuses from now on."""
        ...


def limit_http(burden: Callable[[], Burden], watch: Callable[[Refusing], None], slo_ms: float | None = None) -> None:
    """Let Serve's HAProxy, if there is one, refuse requests beyond a limit that follows the load of this front."""
    if socket := haproxy_socket():
        limit = ProxyLimit(socket, burden, lambda: servers_at(socket, shortcut.port), slo_ms)
        ARRIVING.places = lambda: limit.value
        limit.start()
        watch(limit)
