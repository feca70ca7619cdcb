"""What an attacker may send: whatever is right, with something wrong in it. A case is all that its `Random` decides."""

import copy
import json
import struct
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, TypeVar

import numpy as np

from isobatch.deployments.front.open_inference.messages import message
from isobatch.deployments.transport.connection import frame
from isobatch.deployments.transport.exchange import Drop, Fetch
from isobatch.deployments.transport.replica_connection import EndIfStuck, Key

T = TypeVar("T")
Case = Callable[[Random], T]
Headers = dict[str, str]

STRANGE: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, 10**30, 2**63, float("nan"), float("inf"), "", "1", "x" * 3000, "\ud800", "\0",
    [], {}, [[]], [[[[]]]], [None], [{}], {"": {}}, ["x"] * 300, [0] * 300, [[0, 1]] * 300, [5_000_000, 0], [2**62, 2],
]  # fmt: skip
PLACES = ("id", "inputs", "outputs", "parameters", "shape", "data", "datatype", "name", "binary_data_size", "timeout")
HEADERS = {
    "content-length": ["0", "-1", "x", "9" * 5000, "99999999"],
    "content-encoding": ["gzip", "deflate", "br", "\xff", "gzip, gzip"],
    "x-deadline-ms": ["nan", "0", "1e300", "-5", "x" * 9000, "250", "1e-300"],
    "inference-header-content-length": ["9" * 5000, "0", "17", "-1", "²", "1_0"],
    "x-api-key": ["", "x" * 9000],
    "authorization": ["Bearer", "Bearer x", "bearer \xff"],
    "content-type": ["text/plain", "\0"],
}
PIECES = [b"\0", b"\xff", b"[", b'"', b"9" * 30, b"\x80\x80", b"{"]

PREDICT = {"inputs": [[4, 7], [0, 3]]}
V2 = {
    "id": "7",
    "inputs": [{"name": "inputs", "shape": [2, 2], "datatype": "INT64", "data": [[4, 7], [0, 3]]}],
    "outputs": [
        {"name": "label", "parameters": {"binary_data": True}},
        {"name": "score"},
        {"name": "scores", "parameters": {"classification": 2}},
    ],
    "parameters": {"timeout": 1_000_000, "binary_data_output": False},
}


def changed(valid: Any, random: Random) -> Any:
    """One to three places of it are something else, are gone, or are there twice."""
    whole = [copy.deepcopy(valid)]
    for _ in range(random.randint(1, 3)):
        holder: Any = whole
        place: Any = 0
        while isinstance(holder[place], (list, dict)) and holder[place] and random.randrange(5):
            holder = holder[place]
            place = random.choice(sorted(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
        how = random.randrange(6)
        if how == 0 and isinstance(holder, dict):
            del holder[place]
        elif how == 1 and isinstance(holder[place], dict):
            holder[place][random.choice(PLACES)] = copy.deepcopy(random.choice(STRANGE))
        elif how == 2:
            holder[place] = [copy.deepcopy(holder[place])] * 2
        else:
            holder[place] = copy.deepcopy(random.choice(STRANGE))
    return whole[0]


def with_one_odd(valid: Any, random: Random) -> Any:
    """One value in it, at any depth, is another."""
    whole = [copy.deepcopy(valid)]
    holder: Any = whole
    place: Any = 0
    while isinstance(holder[place], (list, dict)) and holder[place]:
        holder = holder[place]
        place = random.choice(sorted(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
    holder[place] = odd(holder[place], random)
    return whole[0]


def odd(value: Any, random: Random) -> Any:
    """Another value, mostly of the same type."""
    strange = copy.deepcopy(random.choice(STRANGE))
    if not random.randrange(4):
        return strange
    match value:
        case bool():
            return not value
        case int() | float():
            return random.choice([0, 1, 2, value + 1, 2 * value, value / 3, -value, 0.5, 1e-9, 10**6])
        case str():
            return random.choice([f"{value}-2", value.upper(), value[:1], value[::-1], "all", "cpu", "json"])
        case list() | dict():
            return strange
    return random.choice([1, 0.5, 40, True, "cpu", "24000-24099", "auto", {"cpu": 1}])  # of a field without a value


def damaged(valid: bytes, random: Random) -> bytes:
    """Up to four bytes are others, a piece is missing or there many times, or the end is missing."""
    content = bytearray(valid)
    for _ in range(random.randint(0, 4)):
        at, how = random.randrange(max(1, len(content))), random.randrange(5)
        if how == 0:
            del content[at : at + random.randint(1, 20)]
        elif how == 1:
            content[at:at] = content[at : at + 20] * random.choice([1, 2, 100])
        elif how == 2:
            del content[at:]
        else:
            content[at : at + 1] = random.choice(PIECES)
    return bytes(content)


def noise(random: Random) -> bytes:
    return random.randbytes(random.randrange(40))


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def headers(random: Random) -> Headers:
    """One of them is strange, in every second case."""
    name = random.choice(sorted(HEADERS))
    return {name: random.choice(HEADERS[name])} if random.randrange(2) else {}


def predict(random: Random) -> tuple[bytes, Headers]:
    extreme = [b"", b"[" * 50_000, b'{"inputs":' * 20_000, b"\xff\xfe", b'{"inputs": 1e400}', b"9" * 5000]
    bodies: list[Case[bytes]] = [
        lambda random: as_json(changed(PREDICT, random)),
        partial(damaged, as_json(PREDICT)),
        lambda random: random.choice(extreme),
        noise,
    ]
    return random.choice(bodies)(random), headers(random)


def v2_json(random: Random) -> tuple[bytes, Headers]:
    body = as_json(changed(V2, random)) if random.randrange(3) else damaged(as_json(V2), random)
    return body, headers(random)


def v2_binary(random: Random) -> tuple[bytes, Headers]:
    """JSON, then bytes; and what the header says of them."""
    kind = random.choice(["INT64", "INT32", "FP32", "FP16", "BYTES", "BOOL", "UINT8"])
    texts = b"".join(struct.pack("<I", len(text)) + text for text in (b"ab", b"c", b"", b"d"))
    dtype = kind.lower().replace("fp", "float")
    raw = texts if kind == "BYTES" else np.array([[4, 7], [0, 3]]).astype(dtype).tobytes()
    raw = damaged(raw, random) if random.randrange(2) else raw
    fields = {"name": "inputs", "shape": [2, 2], "datatype": kind, "parameters": {"binary_data_size": len(raw)}}
    whole = V2 | {"inputs": [fields]}
    text = as_json(changed(whole, random) if random.randrange(2) else whole)
    end = random.choice([len(text)] * 4 + [0, 1, len(text) + 1, len(text) + len(raw), 10**18])
    return text + raw, {"inference-header-content-length": str(end)}


def _grpc_request(**changes: Any) -> bytes:
    tensor = {"name": "inputs", "datatype": "INT64", "shape": (2, 2), "contents": {"int64_contents": [4, 7, 0, 3]}}
    fields = {"model_name": "toy", "id": "7", "inputs": [tensor | changes.pop("tensor", {})]} | changes
    sent: bytes = message("ModelInferRequest")(**fields).SerializeToString()
    return sent


GRPC = [
    _grpc_request(),
    _grpc_request(model_name="x" * 20_000),
    _grpc_request(id="x" * 20_000),
    _grpc_request(tensor={"shape": (5_000_000, 0), "datatype": "BYTES"}),
    _grpc_request(tensor={"shape": (2**62, 2)}),
    _grpc_request(tensor={"shape": (1,) * 3000}),
    _grpc_request(tensor={"contents": {"fp32_contents": [float("nan")] * 4}, "datatype": "FP32"}),
    _grpc_request(tensor={"contents": {"bytes_contents": [b"\xff"] * 4}, "datatype": "BYTES"}),
    _grpc_request(raw_input_contents=[np.array([[4, 7], [0, 3]]).tobytes()]),
    _grpc_request(raw_input_contents=[b""] * 5000),
    _grpc_request(outputs=[{"name": "label"}] * 5000),
    _grpc_request(outputs=[{"name": "scores", "parameters": [{"key": "classification", "value": {"int64_param": 2}}]}]),
    _grpc_request(parameters=[{"key": "timeout", "value": {"int64_param": -(2**62)}}]),
]
# Of a decoder: a request of OpenAI's interface, and one over gRPC
COMPLETION = {"model": "tiny", "prompt": "1+1=", "max_tokens": 3, "stop": ["."], "stream": False, "seed": 7}
_TEXT_TENSOR = {"datatype": "BYTES", "shape": (1,)}


def text_infer(prompt: bytes) -> bytes:
    fields = {"text_input": prompt, "sampling_parameters": b'{"max_tokens": 3}'}
    inputs = [_TEXT_TENSOR | {"name": name, "contents": {"bytes_contents": [each]}} for name, each in fields.items()]
    sent = message("ModelInferRequest")(model_name="tiny", inputs=inputs, outputs=[{"name": "text_output"}])
    serialized: bytes = sent.SerializeToString()
    return serialized


TEXT_INFER = text_infer(b"1+1=")
METHODS = ["ModelInfer"] * 6 + ["ModelReady", "ServerMetadata", "ModelStatistics", "ModelConfig"]


def grpc_message(random: Random) -> bytes:
    return damaged(random.choice(GRPC), random) if random.randrange(4) else noise(random)


def grpc_call(random: Random) -> tuple[str, bytes]:
    return random.choice(METHODS), grpc_message(random)


def grpc_stream(random: Random) -> list[bytes]:
    """The last one is right."""
    return [*(grpc_message(random) for _ in range(random.randint(1, 4))), GRPC[0]]


INFER = "/v2/models/toy/infer"
# Of all cases so many, to this path.
HTTP: dict[str, tuple[float, str, Case[tuple[bytes, Headers]]]] = {
    "predict": (0.20, "/predict", predict),
    "v2_json": (0.20, INFER, v2_json),
    "v2_binary": (0.10, INFER, v2_binary),
}
_HTTP = [
    b'POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{"inputs": [[0, 3]]}',
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"HEAD /v2/health/ready HTTP/1.0\r\n\r\n",
    b'POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n14\r\n{"inputs": [[0, 3]]}\r\n0\r\n\r\n',
    b"POST /v2/models/toy/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n{}",
    b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: x\r\n" + b"X-Y: z\r\n" * 200 + b"\r\n",
    b'POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\nContent-Length: 5\r\n\r\n{"inputs": [[0, 3]]}',
]
_FRAMES = [frame(each) for each in (Key("0" * 32), EndIfStuck(5.0), Fetch([("k", [1, 2])]), Drop(["k"]))]


def _one_of(valid: Sequence[bytes], random: Random) -> bytes:
    return damaged(random.choice(valid), random) if random.randrange(8) else noise(random)


raw_http = partial(_one_of, _HTTP)
frames = partial(_one_of, _FRAMES)  # for the ports of replicas


def file(text: bytes, value: Any, random: Random, whole: Callable[[Any], bytes] = as_json) -> bytes:
    """A file with this text, which holds this value: mostly whole, with one odd value, so that it is read to its end.

    `whole` writes a value as a file.
    """
    how = random.randrange(6)
    if how == 0:
        return damaged(text, random)
    return whole(changed(value, random) if how == 1 else with_one_odd(value, random))
