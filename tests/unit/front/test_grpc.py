"""The Open Inference Protocol over gRPC: the answers and sentences of HTTP, and the published field numbers."""

import asyncio
import re
import threading
import time
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
import uvloop

from isobatch.deployments.front import grpc_proxy
from isobatch.deployments.front.open_inference.messages import SERVICE, message
from isobatch.deployments.front.service import Service
from tests.helpers.asking import until
from tests.helpers.grpc_client import asked
from tests.helpers.grpc_proxy import refusal
from tests.helpers.toy_model import OVERFLOWS

PAIRS = [[4, 7], [0, 3]]
QUESTIONS = [f"Server{each}" for each in ("Live", "Ready", "Metadata")]
QUESTIONS += [f"Model{each}" for each in ("Ready", "Metadata", "Config", "Statistics")]


def pairs(datatype: str = "INT64", shape: tuple[int, ...] = (2, 2), **contents: Any) -> dict[str, Any]:
    tensor = {"name": "inputs", "datatype": datatype, "shape": shape, "contents": contents}
    known = datatype not in ("BYTES", "x" * 100_000)
    raw = [] if contents or not known else [np.array(PAIRS, datatype.lower().replace("fp", "float")).tobytes()]
    return {"model_name": "toy", "id": "7", "inputs": [tensor], "raw_input_contents": raw}


def labels(reply: Any) -> list[int]:
    at = [output.name for output in reply.outputs].index("label")
    return list(np.frombuffer(reply.raw_output_contents[at], "<i8"))


def classified(output: str = "scores", **count: Any) -> dict[str, Any]:
    wanted = {"name": output, "parameters": [{"key": "classification", "value": count}]}
    return pairs() | {"outputs": [wanted]}


@pytest.fixture(autouse=True)
def loop() -> Any:
    """As Serve has it."""
    return uvloop.new_event_loop


async def test_values_come_raw_or_one_by_one_and_only_the_requested_outputs_come_back() -> None:
    values, requests = [4, 7, 0, 3], [pairs(), pairs("INT8"), pairs("UINT64")]
    requests += [
        pairs(int64_contents=values),
        pairs("INT16", int_contents=values),
        pairs("UINT8", uint_contents=values),
    ]
    kinds = {"label": "INT64", "score": "FP32", "exit_block": "INT64", "name": "BYTES"}
    async with asked() as client:
        for each in requests:
            reply = await client.ask("ModelInfer", **each)
            assert labels(reply) == [7, 3]
            assert (reply.model_name, reply.model_version, reply.id) == ("toy", "1", "7")
            assert {each.name: each.datatype for each in reply.outputs} == kinds
        reply = await client.ask("ModelInfer", **pairs(), outputs=[{"name": "exit_block"}])
    assert [each.name for each in reply.outputs] == ["exit_block"]
    assert np.frombuffer(reply.raw_output_contents[0], "<i8").tolist() == [3, 0]


async def test_the_best_labels_of_each_input_are_texts() -> None:
    outputs = [*classified(int64_param=2)["outputs"], {"name": "exit_block"}]
    async with asked() as client:
        reply = await client.ask("ModelInfer", **pairs(), outputs=outputs)
    texts = b"0.690568:7:7", b"0.034381:0:0", b"0.690568:3:3", b"0.034381:0:0"
    kinds = [(each.name, each.datatype, list(each.shape)) for each in reply.outputs]
    assert kinds == [("scores", "BYTES", [2, 2]), ("exit_block", "INT64", [2])]
    assert reply.raw_output_contents[0] == b"".join(b"\x0c\0\0\0" + text for text in texts)


async def test_health_metadata_configuration_and_statistics() -> None:
    async with asked() as client:
        assert (await client.ask("ServerLive")).live
        assert (await client.ask("ServerReady")).ready
        assert [(await client.ask("ModelReady", name=name)).ready for name in ("toy", "other")] == [True, False]
        assert "statistics" in (await client.ask("ServerMetadata")).extensions
        about = await client.ask("ModelMetadata", name="toy", version="1")
        assert ([each.name for each in about.inputs], list(about.versions)) == (["inputs"], ["1"])
        config = (await client.ask("ModelConfig", name="toy")).config
        assert config.max_batch_size == 256
        (promise,) = config.parameters
        assert (promise.key, promise.value.string_value) == ("promise", "nothing is promised about losses by exits")
        await client.ask("ModelInfer", **pairs())
        (statistics,) = (await client.ask("ModelStatistics")).model_stats
        assert (statistics.inference_count, statistics.execution_count) == (2, 1)
        times = statistics.inference_stats
        assert times.success.ns > times.compute_infer.ns > 0
        assert times.success.count == times.queue.count == 1


WRONG = [
    (pairs() | {"model_name": "other"}, "NOT_FOUND", "there is no model 'other'"),
    (pairs() | {"inputs": []}, "INVALID_ARGUMENT", "one tensor"),
    (pairs(shape=(2, 3)), "INVALID_ARGUMENT", "does not hold INT64 of shape [2, 3]"),
    (pairs("FP16", fp32_contents=[1.0]), "INVALID_ARGUMENT", "raw_input_contents only"),
    (pairs(int64_contents=[0, -1] * 2), "INTERNAL", "RuntimeError"),
    (pairs() | {"outputs": [{"name": "logits"}]}, "INVALID_ARGUMENT", "no output 'logits'"),
    (classified("label", int64_param=3), "INVALID_ARGUMENT", "of output 'label': this output has no score"),
    (classified(int64_param=-1), "INVALID_ARGUMENT", "= -1 of output 'scores': the number must be 1 or"),
    (classified(int64_param=0), "INVALID_ARGUMENT", "= 0 of output 'scores': the number must be 1 or"),
    (classified(string_param="3"), "INVALID_ARGUMENT", "must be an int64_param, a number of labels, not"),
    (classified(bool_param=True), "INVALID_ARGUMENT", "parameters.classification must be an int64_param"),
    (pairs(int64_contents=[0, 1] * 2, shape=(1, 4)), "INVALID_ARGUMENT", "must be [block, label]"),
    (pairs() | {"model_name": "x" * 100_000}, "NOT_FOUND", ""),
    (pairs("FP32", shape=(5_000_000, 0)), "INVALID_ARGUMENT", ""),
    (pairs("BYTES", shape=(5_000_000, 0)), "INVALID_ARGUMENT", ""),
    (pairs(shape=(1,) * 5000), "INVALID_ARGUMENT", ""),
    (pairs(shape=(1, 10**18)), "INVALID_ARGUMENT", ""),
    (pairs("x" * 100_000), "INVALID_ARGUMENT", ""),
    (pairs("FP32", shape=(1, 2), fp32_contents=[float("nan"), 1]), "INVALID_ARGUMENT", ""),
    (pairs("INT64", int64_contents=[1] * 100_000), "INVALID_ARGUMENT", ""),
    (pairs() | {"id": "x" * 5000}, "INVALID_ARGUMENT", ""),
    (pairs() | {"outputs": [{"name": "label"}] * 100}, "INVALID_ARGUMENT", ""),
    (pairs() | {"outputs": [{}] * 500_000}, "INVALID_ARGUMENT", ""),
    (pairs() | {"raw_input_contents": [b""] * 500_000}, "INVALID_ARGUMENT", ""),
    (pairs(int64_contents=[OVERFLOWS, 1] * 2), "INVALID_ARGUMENT", ""),
    (pairs("BYTES", bytes_contents=[b"a", b"\xff"] * 2), "INVALID_ARGUMENT", "[2, 2]: value 1 is no text in UTF-8"),
    (
        pairs("BYTES", bytes_contents=[]) | {"raw_input_contents": [b"\1\0\0\0\xff" * 4]},
        "INVALID_ARGUMENT",
        "[2, 2]: value 0 is no text in UTF-8",
    ),
]


async def test_wrong_requests_are_refused_soon_and_in_short_with_the_sentences_of_http() -> None:
    async with asked() as client:
        for request, code, sentence in WRONG:
            began_s = time.process_time()
            error = await refusal(client.ask("ModelInfer", **request))
            details = error.details() or ""
            assert (error.code().name, sentence in details) == (code, True), error
            assert len(details) <= 1024
            assert time.process_time() - began_s < 5


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        ({"max_inside": 1}, "2 inputs in one request: 1 are allowed"),
        ({"max_inputs": 1}, "2 inputs in one request: 1 are allowed"),
        ({"max_body_bytes": 40}, "RESOURCE_EXHAUSTED"),
    ],
)
async def test_limits_hold_for_the_open_inference_protocol_too(limit: dict[str, int], sentence: str) -> None:
    async with asked(**limit) as client:
        assert sentence in str(await refusal(client.ask("ModelInfer", **pairs())))


async def test_metadata_has_a_limit_and_the_connection_lives_on() -> None:
    async with asked() as client:
        error = await refusal(client.ask("ModelInfer", **pairs(), _metadata=(("x-long", "x" * 30_000),)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(error.details() or "") <= 1024
        assert labels(await client.ask("ModelInfer", **pairs())) == [7, 3]
        await refusal(client.ask("ModelInfer", **pairs(), _metadata=(("x-long", "x" * 200_000),)))
        # HAProxy has ended a connection that says so much.
        assert labels(await client.ask("ModelInfer", **pairs())) == [7, 3]


async def test_calls_in_work_of_one_connection_are_limited(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_proxy, "CALLS", 2)
    seen, answer = [], Service.answer

    async def counted(*args: Any) -> Any:
        seen.append(args)
        return await answer(*args)

    monkeypatch.setattr(Service, "answer", counted)
    async with asked(slo_ms=60_000) as client:
        held.set()
        await client.ask("ModelInfer", **pairs())  # by then who asks on this connection knows the limit
        held.clear()
        seen.clear()
        calls = [asyncio.create_task(client.ask("ModelInfer", **pairs())) for _ in range(5)]
        await until(lambda: len(seen) == 2)
        await asyncio.sleep(0.2)
        assert len(seen) == 2, "the others wait at the client"
        held.set()
        assert [labels(await call) for call in calls] == [[7, 3]] * 5
        for _ in range(40):  # none of them is refused, however soon it comes after an answer
            await asyncio.gather(*(client.ask("ServerLive") for _ in range(5)))


async def test_connections_are_limited_and_those_that_are_there_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_proxy, "CONNECTIONS", 12)  # two for the first address
    async with asked() as client:
        await client.ask("ServerLive")
        port = client.service.config.grpc_port
        result = []
        for _ in range(5):
            with suppress(OSError):  # it may be ended as soon as it is there
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
                if await asyncio.wait_for(reader.read(1), 1):
                    result.append(writer)
        assert len(result) <= 1
        assert labels(await client.ask("ModelInfer", **pairs())) == [7, 3]
        for writer in result:
            writer.close()


@pytest.mark.parametrize(
    "within",
    [
        {"_timeout_s": 0.1},
        {"_metadata": (("x-deadline-ms", "100"),)},
        {"parameters": [{"key": "timeout", "value": {"int64_param": 100_000}}]},
    ],
)
async def test_a_deadline_may_be_told_in_three_ways(within: dict[str, Any], held: Any) -> None:
    """The one thread is busy until it is let go: what waits behind must be told meanwhile, and not be computed."""
    async with asked(slo_ms=60_000) as client:
        busy = asyncio.create_task(client.ask("ModelInfer", **pairs()))
        await until(lambda: held.launches)
        error = await refusal(client.ask("ModelInfer", **pairs(), **within))
        held.set()
        await busy
        (statistics,) = (await client.ask("ModelStatistics")).model_stats
        assert statistics.inference_count == 2
    # Where the machine itself is slow, it is refused before it waits, for the same reason.
    assert re.match("DEADLINE_EXCEEDED|UNAVAILABLE: refused: the deadline", f"{error.code().name}: {error.details()}")


@pytest.mark.parametrize("value", [{"string_param": "100"}, {"bool_param": True}])
async def test_a_timeout_of_another_type_is_refused(value: dict[str, Any]) -> None:
    async with asked() as client:
        error = await refusal(client.ask("ModelInfer", **pairs(), parameters=[{"key": "timeout", "value": value}]))
    assert error.code().name == "INVALID_ARGUMENT"
    assert "timeout must be an int64_param" in error.details()


async def test_a_stream_answers_in_order_and_survives_a_refusal() -> None:
    request = message("ModelInferRequest")
    wrong = request(**pairs() | {"model_name": "other", "id": "9"})
    async with asked() as client:
        first, second, third = await client.stream(
            request(**pairs()), wrong, request(**pairs(int64_contents=[3, 1] * 2))
        )
    assert [labels(reply.infer_response) for reply in (first, third)] == [[7, 3], [1, 1]]
    assert ("no model 'other'" in second.error_message, second.infer_response.id) == (True, "9")


GARBAGE = b"\xff\x01\x02"


async def test_a_message_that_cannot_be_decoded_is_refused_and_counted_and_the_stream_goes_on() -> None:
    request = message("ModelInferRequest")
    long = request(**pairs() | {"model_name": "x" * 100_000, "id": "9" * 100_000})
    async with asked() as client:
        for method in QUESTIONS:
            error = await refusal(client.say(method, GARBAGE))
            assert (error.code().name, "this is no" in (error.details() or "")) == ("INVALID_ARGUMENT", True)
        first, second, third, fourth = await client.stream(
            GARBAGE, request(**pairs()), long, request(**pairs(int64_contents=[3, 1] * 2))
        )
        assert "this is not a ModelInferRequest" in first.error_message
        assert labels(second.infer_response) == [7, 3]
        assert "there is no model" in third.error_message
        assert max(len(third.error_message), len(third.infer_response.id)) <= 1024
        assert labels(fourth.infer_response) == [1, 1]
        await refusal(client.say("ModelInfer", GARBAGE))
        counts = (await client.service.stats())["requests"]
        assert counts == {"answered": 2, "refused": 3, "failed": 0, "abandoned": 0}
        error = await refusal(client.say("Nothing", b""))
        assert (error.code().name, "there is no method" in (error.details() or "")) == ("UNIMPLEMENTED", True)


async def test_compressed_messages_are_read_within_the_limit() -> None:
    long = pairs() | {"parameters": [{"key": "x", "value": {"string_param": "x" * 100_000}}]}
    request, response = message("ModelInferRequest"), message("ModelInferResponse")
    async with asked(max_body_bytes=10_000) as client:
        for kind in ("Gzip", "Deflate"):
            reply = await client.say("ModelInfer", request(**pairs()).SerializeToString(), grpc.Compression[kind])
            assert labels(response.FromString(reply)) == [7, 3]
        error = await refusal(client.say("ModelInfer", request(**long).SerializeToString(), grpc.Compression.Gzip))
        assert error.code().name == "RESOURCE_EXHAUSTED"


async def test_a_key_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_KEY", "open sesame")
    async with asked(api_key_variable="TOY_KEY") as client:
        assert (await client.ask("ServerLive")).live
        for call in (client.ask("ModelInfer", **pairs()), client.ask("ModelStatistics"), client.stream()):
            error = await refusal(call)
            assert (error.code().name, "asks for a key" in (error.details() or "")) == ("UNAUTHENTICATED", True)
        key = (("authorization", "Bearer open sesame"),)
        assert labels(await client.ask("ModelInfer", **pairs(), _metadata=key)) == [7, 3]


def test_numbers_and_types_are_those_of_the_standard() -> None:
    published = pytest.importorskip("tritonclient.grpc").service_pb2.DESCRIPTOR
    service = published.services_by_name[SERVICE.rpartition(".")[2]]
    for name in ("ModelInfer", "ModelMetadata", "ModelConfig", "ModelStatistics", "ServerMetadata", "ModelReady"):
        method = service.methods_by_name[name]
        agrees(message(f"{name}Request").DESCRIPTOR, method.input_type)
        agrees(message(f"{name}Response").DESCRIPTOR, method.output_type)
    agrees(message("ModelStreamInferResponse").DESCRIPTOR, service.methods_by_name["ModelStreamInfer"].output_type)


def agrees(ours: Any, theirs: Any) -> None:
    for field in ours.fields:
        other = theirs.fields_by_name[field.name]
        assert (field.number, field.type, field.is_repeated) == (other.number, other.type, other.is_repeated), (
            field.name
        )
        if field.message_type:
            agrees(field.message_type, other.message_type)
