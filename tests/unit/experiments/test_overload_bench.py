"""The bench of overload: its calls are those of gRPC, and it judges the server by what the server was late with."""

import asyncio

import grpc
import numpy as np
import pytest

from cluster.load.generator import LoadRecord
from cluster.load.http_connection import BROKEN
from deployments.front.open_inference.messages import SERVICE, message
from experiments.overload import run
from experiments.overload.askers import grpc_asker

INPUTS = list(np.arange(2 * 600 * 64, dtype=np.float32).reshape(2, 600, 8, 8))  # of more than one frame, and window


class _Model:
    """Answers every other call."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.within_s: list[float] = []

    async def infer(self, sent: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        request = message("ModelInferRequest").FromString(sent)
        assert len(request.raw_input_contents[0]) == 600 * 64 * 4
        self.shapes.append(tuple(request.inputs[0].shape))
        self.within_s.append(context.time_remaining() or 0.0)
        if len(self.shapes) % 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "refused")
        return b"x" * 100


def _asked(model: _Model, count: int) -> LoadRecord:
    async def asked() -> LoadRecord:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(model.infer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await grpc_asker(f"127.0.0.1:{port}", "demo", INPUTS, 20_000).at(np.zeros(count))
        finally:
            await server.stop(0)

    return asyncio.run(asked())


def test_calls_reach_a_grpc_server_whole_and_its_answers_are_understood() -> None:
    model = _Model()
    record = _asked(model, 40)
    assert sorted(record.status.tolist()) == [200] * 20 + [503] * 20
    assert set(model.shapes) == {(600, 8, 8)}
    assert 10 < min(model.within_s) <= max(model.within_s) <= 20
    assert (record.ended_s >= record.sent_s).all()


def test_a_server_that_ends_leaves_calls_without_an_answer() -> None:
    async def asked() -> LoadRecord:
        def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asyncio.get_running_loop().call_later(0.05, writer.close)

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        asker = grpc_asker(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "demo", INPUTS, 500)
        try:
            return await asker.at(np.zeros(3))
        finally:
            server.close()

    assert set(asyncio.run(asked()).status.tolist()) == {BROKEN}


@pytest.mark.parametrize(("absent_s", "late"), [(0.1, 0), (0.7, 1)])
def test_an_answer_is_late_that_was_not_there_after_the_slo(absent_s: float, late: int) -> None:
    """The first is read after 0.8 s; the second is refused, and lies unread for half of its time."""
    due_s, status = np.array([1.0, 2.0]), np.array([200, 503])
    record = LoadRecord(due_s, due_s, due_s, np.array([1.8, 2.04]), status, np.array([1.0 + absent_s, 2.02]))
    seen = run._seen(record, run._Cores())
    assert (seen.late, seen.late_by_server, seen.lost) == (1, late, 0)
    assert (seen.refusal_p99_ms, seen.refusal_p99_ms_by_server) == pytest.approx((40.0, 20.0))


def test_the_worst_of_all_is_told_of_floods_and_kinds_alike() -> None:
    figures = {f"{name}_{kind}": value for name in (*run.COUNTED, *run.REFUSALS, "back_after_s", "rss_growth_mb")
               for kind, value in (("1_http", 3.0), ("64_grpc", 5.0))}  # fmt: skip
    found = run._overall(figures)
    assert found["late"] == found["late_by_server"] == 8.0
    assert found["refusal_p99_ms"] == found["refusal_p99_ms_by_server"] == 5.0
