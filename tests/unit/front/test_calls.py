"""A connection from HAProxy on which calls of gRPC come as HTTP/1.1."""

import asyncio
import socket

from isobatch.deployments.front.calls import Call, CallConnection

PATH = "/inference.GRPCInferenceService/ServerLive"
EMPTY = b"5\r\n\0\0\0\0\0\r\n0\r\n"  # one message without a byte


def call_with(*headers: str, trailers: str = "") -> bytes:
    lines = [f"POST {PATH} HTTP/1.1", "host: here", "transfer-encoding: chunked", *headers, "", ""]
    return "\r\n".join(lines).encode() + EMPTY + trailers.encode() + b"\r\n"


async def test_trailers_of_a_client_are_no_metadata_of_this_call_or_of_the_next() -> None:
    seen = list[dict[bytes, bytes]]()

    async def live(call: Call) -> bytes:
        await call.request()
        seen.append(dict(call.headers))
        return b""

    ours, haproxy = socket.socketpair()
    haproxy.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.connect_accepted_socket(lambda: CallConnection({PATH: live}, None, (), 1024), ours)
    first = call_with("x-client-address: 10.0.0.1", trailers="x-client-address: 10.0.0.7\r\nx-request-start: 1\r\n")
    for call in (first, call_with("x-client-address: 10.0.0.2")):
        await loop.sock_sendall(haproxy, call)
        answer = b""
        while b"grpc-status: 0" not in answer:
            answer += await asyncio.wait_for(loop.sock_recv(haproxy, 4096), 5)
    haproxy.close()
    assert [headers[b"x-client-address"] for headers in seen] == [b"10.0.0.1", b"10.0.0.2"]
    assert not any(b"x-request-start" in headers for headers in seen)
