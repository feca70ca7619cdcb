"""What an attacker may send: whatever is right, with something wrong in it."""

import copy
import json
import struct
from typing import Any

import numpy as np
from hypothesis import strategies as st

from deployments.front.open_inference.messages import message

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

V2 = {
    "id": "7",
    "inputs": [{"name": "inputs", "shape": [2, 2], "datatype": "INT64", "data": [[4, 7], [0, 3]]}],
    "outputs": [{"name": "label", "parameters": {"binary_data": True}}, {"name": "score"}],
    "parameters": {"timeout": 1_000_000, "binary_data_output": False},
}


@st.composite
def changed(draw: st.DrawFn, valid: Any) -> Any:
    """One to three places of it are something else, are gone, or are there twice."""
    whole = [copy.deepcopy(valid)]
    for _ in range(draw(st.integers(1, 3))):
        holder: Any = whole
        place: Any = 0
        while isinstance(holder[place], (list, dict)) and holder[place] and draw(st.integers(0, 4)):
            holder = holder[place]
            place = draw(st.sampled_from(sorted(holder))) if isinstance(holder, dict) else len(holder) - 1
            place = place if isinstance(holder, dict) else draw(st.integers(0, place))
        how = draw(st.integers(0, 5))
        if how == 0 and isinstance(holder, dict):
            del holder[place]
        elif how == 1 and isinstance(holder[place], dict):
            holder[place][draw(st.sampled_from(PLACES))] = draw(st.sampled_from(STRANGE))
        elif how == 2:
            holder[place] = [copy.deepcopy(holder[place])] * 2
        else:
            holder[place] = copy.deepcopy(draw(st.sampled_from(STRANGE)))
        if not whole:
            break
    return whole[0]


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """Up to four bytes are others, a piece is missing or there twice, or the end is."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        how = draw(st.integers(0, 4))
        if how == 0:
            del content[at : at + draw(st.integers(1, 20))]
        elif how == 1:
            content[at:at] = content[at : at + 20] * draw(st.sampled_from([1, 2, 100]))
        elif how == 2:
            del content[at:]
        else:
            content[at : at + 1] = draw(st.sampled_from([b"\0", b"\xff", b"[", b'"', b"9" * 30, b"\x80\x80", b"{"]))
    return bytes(content)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


headers = st.one_of(
    st.just({}),
    st.sampled_from(sorted(HEADERS)).flatmap(
        lambda name: st.sampled_from(HEADERS[name]).map(lambda told: {name: told})
    ),
)
predict = st.one_of(
    changed({"inputs": [[4, 7], [0, 3]]}).map(as_json),
    damaged(as_json({"inputs": [[4, 7], [0, 3]]})),
    st.sampled_from([b"", b"[" * 50_000, b'{"inputs":' * 20_000, b"\xff\xfe", b'{"inputs": 1e400}', b"9" * 5000]),
    st.binary(max_size=40),
)
v2_json = st.one_of(changed(V2).map(as_json), changed(V2).map(as_json), damaged(as_json(V2)))


@st.composite
def v2_binary(draw: st.DrawFn) -> tuple[bytes, str]:
    """JSON, then bytes; and what the header says of them."""
    kind = draw(st.sampled_from(["INT64", "INT32", "FP32", "FP16", "BYTES", "BOOL", "UINT8"]))
    texts = b"".join(struct.pack("<I", len(text)) + text for text in (b"ab", b"c", b"", b"d"))
    numbers = np.array([[4, 7], [0, 3]])
    dtype = kind.lower().replace("fp", "float")
    raw = texts if kind == "BYTES" else numbers.astype(dtype).tobytes()
    raw = draw(damaged(raw)) if draw(st.booleans()) else raw
    told = {"name": "inputs", "shape": [2, 2], "datatype": kind, "parameters": {"binary_data_size": len(raw)}}
    whole = V2 | {"inputs": [told]}
    text = as_json(draw(changed(whole)) if draw(st.booleans()) else whole)
    end = draw(st.sampled_from([len(text)] * 4 + [0, 1, len(text) + 1, len(text) + len(raw), 10**18]))
    return text + raw, str(end)


def _grpc_request(**changes: Any) -> bytes:
    tensor = {"name": "inputs", "datatype": "INT64", "shape": (2, 2), "contents": {"int64_contents": [4, 7, 0, 3]}}
    fields = {"model_name": "toy", "id": "7", "inputs": [tensor | changes.pop("tensor", {})]} | changes
    sent: bytes = message("ModelInferRequest")(**fields).SerializeToString()
    return sent


_GRPC = [
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
    _grpc_request(parameters=[{"key": "timeout", "value": {"int64_param": -(2**62)}}]),
]
grpc = st.one_of(st.sampled_from(_GRPC).flatmap(damaged), st.binary(max_size=40))

_HTTP = [
    b'POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{"inputs": [[0, 3]]}',
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"HEAD /v2/health/ready HTTP/1.0\r\n\r\n",
    b'POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n14\r\n{"inputs": [[0, 3]]}\r\n0\r\n\r\n',
    b"POST /v2/models/toy/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n{}",
    b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: x\r\n" + b"X-Y: z\r\n" * 200 + b"\r\n",
    b'POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\nContent-Length: 5\r\n\r\n{"inputs": [[0, 3]]}',
]
http = st.sampled_from(_HTTP).flatmap(damaged)
