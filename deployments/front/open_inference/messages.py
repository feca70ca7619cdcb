"""The protocol's gRPC messages, created at import without a compiler or generated files.

The service's name, and the number and type of each field, must agree with other implementations. On the wire, a `map`
is a repeated message with a key and a value.
"""

from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

# Each message with its fields: NUMBER NAME TYPE, with a star after the type of a repeated field.
_MESSAGES = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 live bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 ready bool",
    "ModelReadyRequest": "1 name string, 2 version string",
    "ModelReadyResponse": "1 ready bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 name string, 2 version string, 3 extensions string*",
    "ModelMetadataRequest": "1 name string, 2 version string",
    "ModelMetadataResponse": "1 name string, 2 versions string*, 3 platform string, "
    "4 inputs TensorMetadata*, 5 outputs TensorMetadata*",
    "TensorMetadata": "1 name string, 2 datatype string, 3 shape int64*",
    "InferParameter": "1 bool_param bool, 2 int64_param int64, 3 string_param string, 4 double_param double, "
    "5 uint64_param uint64",
    "Parameter": "1 key string, 2 value InferParameter",
    "InferTensorContents": "1 bool_contents bool*, 2 int_contents int32*, 3 int64_contents int64*, "
    "4 uint_contents uint32*, 5 uint64_contents uint64*, 6 fp32_contents float*, 7 fp64_contents double*, "
    "8 bytes_contents bytes*",
    "Tensor": "1 name string, 2 datatype string, 3 shape int64*, 4 parameters Parameter*, "
    "5 contents InferTensorContents",
    "RequestedOutput": "1 name string, 2 parameters Parameter*",
    "ModelInferRequest": "1 model_name string, 2 model_version string, 3 id string, 4 parameters Parameter*, "
    "5 inputs Tensor*, 6 outputs RequestedOutput*, 7 raw_input_contents bytes*",
    "ModelInferResponse": "1 model_name string, 2 model_version string, 3 id string, 4 parameters Parameter*, "
    "5 outputs Tensor*, 6 raw_output_contents bytes*",
    "ModelStreamInferResponse": "1 error_message string, 2 infer_response ModelInferResponse",
    "ModelConfigRequest": "1 name string, 2 version string",
    "ModelConfigResponse": "1 config ModelConfig",
    "ModelConfig": "1 name string, 2 platform string, 4 max_batch_size int32, 5 input ConfiguredTensor*, "
    "6 output ConfiguredTensor*, 14 parameters NamedParameter*, 19 model_transaction_policy ModelTransactionPolicy",
    "ModelTransactionPolicy": "1 decoupled bool",
    "NamedParameter": "1 key string, 2 value ModelParameter",
    "ModelParameter": "1 string_value string",
    "ConfiguredTensor": "1 name string",
    "ModelStatisticsRequest": "1 name string, 2 version string",
    "ModelStatisticsResponse": "1 model_stats ModelStatistics*",
    "ModelStatistics": "1 name string, 2 version string, 3 last_inference uint64, 4 inference_count uint64, "
    "5 execution_count uint64, 6 inference_stats InferStatistics",
    "InferStatistics": "1 success Duration, 2 fail Duration, 3 queue Duration, 4 compute_input Duration, "
    "5 compute_infer Duration, 6 compute_output Duration, 7 cache_hit Duration, 8 cache_miss Duration",
    "Duration": "1 count uint64, 2 ns uint64",
}


def _field(text: str) -> FieldDescriptorProto:
    number, name, kind = text.split()
    repeated = kind.endswith("*")
    kind = kind.removesuffix("*")
    field = FieldDescriptorProto(name=name, number=int(number))
    field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
    if kind in _MESSAGES:
        field.type, field.type_name = field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = field.Type.Value(f"TYPE_{kind.upper()}")
    return field


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="isobatch/inference.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        file.message_type.add(name=name).field.extend(map(_field, filter(None, fields.split(", "))))
    return file


# A separate pool, since a client of this protocol in the same process has messages with the same names.
_POOL = DescriptorPool()
_POOL.Add(_file())
# Held here, since protobuf frees a class that nothing refers to, and builds it again for the next message.
_CLASSES = {name: GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES}


def message(name: str) -> Any:
    """The class of a message.

    >>> message("ServerLiveResponse")(live=True).SerializeToString()
    b'\\x08\\x01'
    """
    return _CLASSES[name]


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# The fields of a request that hold messages, by the path of field numbers to their parent.
_NESTED: dict[tuple[int, ...], set[int]] = {(): {4, 5, 6}, (4,): {2}, (5,): {4, 5}, (5, 4): {2}, (6,): {2}, (6, 2): {2}}


def has_few_fields(sent: bytes, most: int) -> bool:
    """Whether a request is valid and has at most `most` fields. An empty field of two bytes takes hundreds in memory.

    >>> request = message("ModelInferRequest")(outputs=[{"name": "label"}] * 5).SerializeToString()
    >>> has_few_fields(request, 10), has_few_fields(request, 9), has_few_fields(b"\\xff", 9)
    (True, False, False)
    """
    try:
        return _fields_left(memoryview(sent), (), most) >= 0
    except (IndexError, ValueError):
        return False


def _fields_left(sent: memoryview, path: tuple[int, ...], left: int) -> int:
    """`left` less the number of this message's fields; negative if the message has too many."""
    at, nested = 0, _NESTED.get(path, set())
    while at < len(sent) and left >= 0:
        tag, at = _varint(sent, at)
        left -= 1
        kind, number = tag & 7, tag >> 3
        if kind == _VARINT:
            _, at = _varint(sent, at)
        elif kind == _BYTES:
            size, at = _varint(sent, at)
            if number in nested:
                left = _fields_left(sent[at : at + size], (*path, number), left)
            at += size
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"fields of kind {kind} are not of this protocol")
    return left


def _varint(sent: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = sent[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
