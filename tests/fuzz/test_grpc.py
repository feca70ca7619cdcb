"""What is wrong in gRPC and at the ports of a replica, as in tests/fuzz/test_http.py."""

import pytest

from tests.fuzz import cases
from tests.fuzz.attack import AT_ONCE, attack, within_memory
from tests.fuzz.clients import judged_honest, raw
from tests.fuzz.served import Served


def test_grpc(served: Served) -> None:
    async def act(sent: tuple[str, bytes]) -> str:
        return await served.grpc.unary(*sent)

    within_memory("grpc", lambda: served.run(attack("grpc", 0.05, cases.grpc_call, act, AT_ONCE)))


def test_grpc_streams(served: Served) -> None:
    within_memory(
        "grpc_streams", lambda: served.run(attack("grpc_streams", 0.02, cases.grpc_stream, served.grpc.stream, AT_ONCE))
    )


@pytest.mark.parametrize("which", ["orders", "exchange"])
def test_replica_sockets(served: Served, which: str) -> None:
    port = served.orders_port if which == "orders" else served.exchange_port

    async def act(sent: bytes) -> str:
        await raw(port, sent)
        assert not served.orders.gate.authorized
        return "no order taken"

    within_memory(which, lambda: served.run(attack(which, 0.02, cases.frames, act, AT_ONCE)))


def test_the_honest_client_was_right_and_was_not_kept_waiting(served: Served) -> None:
    judged_honest("honest_grpc", served.honest)
