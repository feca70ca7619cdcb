"""The gRPC server of a front, for every network: its key, its limits, and the HAProxy before it (`grpc_proxy`).

Serve has a gRPC proxy, but its replicas would listen on every interface, and would not know the clients' deadlines
(docs/overload.md).
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from isobatch.deployments.front import grpc_proxy
from isobatch.deployments.front.answers import RefusedError
from isobatch.deployments.front.grpc_proxy import GrpcProxy
from isobatch.deployments.front.headers import NO_KEY, is_shown
from isobatch.deployments.front.open_inference.calls import abort
from isobatch.deployments.front.open_inference.messages import SERVICE
from isobatch.deployments.front.served import GuardedNetwork
from isobatch.deployments.ray_settings import haproxy_program
from isobatch.profiles.errors import UserError

Methods = Mapping[str, grpc.RpcMethodHandler]
# Methods for load balancers, which need no key.
_OPEN = {f"/{SERVICE}/{name}" for name in ("ServerLive", "ServerReady")}
# Limits of each call.
_OF_CALLS = [
    ("grpc.absolute_max_metadata_size", 16_384),  # bytes, of one call
    # With its protection, gRPC also counts calls that have just been answered, and refuses one in forty calls of a
    # client that keeps to the limit below.
    ("grpc.http.overload_protection", 0),
]
# HAProxy limits the connections of clients.
_OF_CONNECTIONS = [("grpc.max_concurrent_streams", grpc_proxy.CALLS_TO_FRONT)]


def check_port(host: str, port: int) -> None:
    """Raise `UserError` if the server cannot listen there. Replicas of this front share the port."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind((host, port))
    except OSError as error:
        reason = f"port {port} of {host} cannot be used ({error.strerror})"
        raise UserError(f"grpc_port: {reason}: stop what listens there, or choose another") from error


@asynccontextmanager
async def serving(served: GuardedNetwork, methods: Callable[[Callable[[], int]], Methods]) -> AsyncIterator[None]:
    """Serve during this context, and answer all admitted requests at its end. Without a port, there is no server.

    `methods` gets a function that returns how many requests of streams may be in the front at once.
    """
    if served.config.grpc_port is None:
        yield
        return
    proxy = _proxy(served)
    server = _server(served, proxy.socket, methods(lambda: proxy.places))
    await server.start()
    try:
        await asyncio.to_thread(proxy.open)
        yield
    finally:
        await asyncio.to_thread(proxy.drain)
        await server.stop(None)
        await asyncio.to_thread(proxy.close)


def _proxy(served: GuardedNetwork) -> GrpcProxy:
    config, program = served.config, haproxy_program()
    if program is None:
        raise UserError("grpc_port: HAProxy is missing: reinstall ray[serve], which contains it")
    proxy = GrpcProxy(program, config.grpc_host, config.grpc_port or 0, config.drain_s, served.burden)
    served.watch(proxy)
    return proxy


def _server(served: GuardedNetwork, path: Path, methods: Methods) -> Any:
    options = [("grpc.max_receive_message_length", served.config.max_body_bytes), *_OF_CALLS, *_OF_CONNECTIONS]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=served.most_calls + grpc_proxy.STREAMS)
    server.add_generic_rpc_handlers((_Handlers(served.key, methods),))
    server.add_insecure_port(f"unix:{path}")
    return server


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # gRPC has no types
    """Finds the method of a call by its name. A call without the key is refused before its message is read."""

    def __init__(self, key: bytes | None, methods: Methods) -> None:
        self._key = key
        self._methods = {f"/{SERVICE}/{name}": method for name, method in methods.items()}

    def service(self, call: Any) -> grpc.RpcMethodHandler | None:
        if self._key and call.method not in _OPEN and not _is_shown(self._key, call.invocation_metadata):
            return _REFUSED
        return self._methods.get(call.method)


def _is_shown(key: bytes, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    return is_shown(key, [(name.encode(), value.encode()) for name, value in metadata if isinstance(value, str)])


async def _refuse(requests: Any, context: Any) -> None:
    await abort(context, RefusedError(401, NO_KEY))


_REFUSED = grpc.stream_unary_rpc_method_handler(_refuse)
