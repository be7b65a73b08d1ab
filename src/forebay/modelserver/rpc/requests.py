"""Parsing of ModelInfer requests. The error texts are Triton's."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tritonclient.grpc import service_pb2 as pb

from forebay.core.serving.config import Datatype, ModelConfig
from forebay.core.serving.errors import Refused
from forebay.core.serving.values import Buffer, InferRequest, Parameter, Tensor
from forebay.modelserver.regions import SharedRegions, Target
from forebay.modelserver.rpc.walking import check_fields, split
from forebay.wire.oip.fields import UINT64_MAX, invalid
from forebay.wire.oip.infer_request import DIMS_MAX
from forebay.wire.oip.tensors import LENGTH_BYTES, log_prefix

EMPTY_FINAL: Final = "triton_enable_empty_final_response"
"""The only parameter starting with `triton_` that clients may set."""
RESERVED_PREFIX: Final = "triton_"
DROP_OLDEST: Final = "forebay_drop_oldest"
"""On a stream: how many requests may wait behind running ones before the oldest is dropped. An extension of ours."""
_DATATYPES: Final = {datatype.value: datatype for datatype in Datatype}
_D = Datatype
_CONTENTS: Final[tuple[tuple[str, Mapping[Datatype, str]], ...]] = (
    ("bool_contents", {_D.BOOL: "B"}),
    ("int_contents", {_D.INT32: "i", _D.INT8: "b", _D.INT16: "h"}),
    ("int64_contents", {_D.INT64: "q"}),
    ("uint_contents", {_D.UINT32: "I", _D.UINT8: "B", _D.UINT16: "H"}),
    ("uint64_contents", {_D.UINT64: "Q"}),
    ("fp32_contents", {_D.FP32: "f"}),
    ("fp64_contents", {_D.FP64: "d"}),
    ("bytes_contents", {_D.BYTES: ""}),
)
"""Typed contents fields: the datatypes that each may carry, with their array codes. Triton's error text names the
first as the expected one.
"""

_AS_SENT: Final = {_D.BOOL: 1, _D.FP32: 4, _D.FP64: 8}
"""Datatypes whose typed contents are encoded like the tensor, with their bytes per element."""


class Wanted(NamedTuple):
    """How a client wants an output, if not as raw bytes."""

    classes: int = 0
    """Number of top classes to return instead of the tensor; 0: return the tensor."""
    target: Target | None = None
    """Shared memory to write the output to, instead of the response."""


class Asked(NamedTuple):
    """A request with its response options."""

    request: InferRequest
    wanted: Mapping[str, Wanted]
    """By output name; outputs not listed are returned as raw bytes."""
    empty_final: bool
    """On a stream: an end without a response is signalled by an empty response."""
    drop_oldest: int | None
    """See DROP_OLDEST; None: nothing is dropped."""


_NOTHING: Final[Mapping[str, Wanted]] = {}
_parse: Final[Any] = pb.ModelInferRequest.FromString


def parse(message: bytes | memoryview) -> tuple[Any, Sequence[Buffer]]:
    """A ModelInferRequest, and its raw contents, which are views of `message` if that is large.

    Raises `BadMessage`, and DecodeError of the parser.
    """
    rest, raw = split(message)
    check_fields(rest)
    found = _parse(rest)
    return found, raw or found.raw_input_contents


def read_request(message: Any, raw: Sequence[Buffer], config: ModelConfig, memory: SharedRegions) -> Asked:
    """Read a ModelInferRequest and its raw contents for a model with that configuration. Raises `Refused`."""
    request = InferRequest(message.model_name, message.model_version, message.id, ())
    empty_final, drop_oldest = False, None
    if message.parameters:
        empty_final, drop_oldest = _read_parameters(message.parameters, request)
    given = message.inputs
    datatypes: dict[str, Datatype] = {}
    for each in given:
        name = each.name
        if name in datatypes:
            raise invalid(f"{log_prefix(request.id)}input '{name}' already exists in request")
        datatype = _DATATYPES.get(each.datatype)
        if datatype is None:
            raise _unknown_datatype(name, request.id, config)
        datatypes[name] = datatype
    inputs: list[Tensor] = []
    raw_count, at = len(raw), 0
    for each, (name, datatype) in zip(given, datatypes.items(), strict=True):
        data: Buffer | None = _read_shared(each, request.model, memory) if each.parameters else None
        if data is None:
            if each.HasField("contents"):
                if raw_count:
                    text = "contents field must not be specified when using raw_input_contents"
                    raise invalid(f"{text} for '{name}' for model '{request.model}'")
                data = _read_contents(each, datatype, request.model)
            elif at < raw_count:
                data = raw[at]
                at += 1
            else:
                text = f"unable to find data for input tensor '{name}' for model '{request.model}' in request."
                raise invalid(text)
        if len(each.shape) > DIMS_MAX:
            text = f"invalid shape for input '{name}': {len(each.shape)} dimensions are more than {DIMS_MAX}"
            raise invalid(text)
        inputs.append(Tensor(name, datatype, tuple(each.shape), data))
    request.inputs = tuple(inputs)
    wanted = _NOTHING
    if message.outputs:
        wanted = _read_outputs(message.outputs, memory)
        request.outputs = _names(message.outputs, request.id)
    return Asked(request, wanted, empty_final, drop_oldest)


# --- parameters


def _read_parameters(parameters: Mapping[str, Any], request: InferRequest) -> tuple[bool, int | None]:
    """Put parameters into the request; returns `empty_final` and `drop_oldest`."""
    empty_final, drop_oldest = False, None
    custom: dict[str, Parameter] = {}
    for name, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if name == "sequence_id":
            _require(kind, name, "int64_param", "string_param")
            request.sequence_id = value.string_param if kind == "string_param" else value.int64_param & UINT64_MAX
        elif name == "sequence_start":
            _require(kind, name, "bool_param")
            request.sequence_start = value.bool_param
        elif name == "sequence_end":
            _require(kind, name, "bool_param")
            request.sequence_end = value.bool_param
        elif name == "priority":
            _require(kind, name, "int64_param", "uint64_param")
            request.priority = getattr(value, kind)
            if request.priority < 0:
                raise invalid("invalid value for 'priority', expected value >= 0.")
        elif name == "timeout":
            _require(kind, name, "int64_param")
            request.timeout_us = value.int64_param & UINT64_MAX
        elif name == EMPTY_FINAL:
            _require(kind, name, "bool_param")
            empty_final = value.bool_param
        elif name == DROP_OLDEST:
            _require(kind, name, "int64_param")
            drop_oldest = value.int64_param
            if drop_oldest < 0:
                raise invalid(f"invalid value for '{DROP_OLDEST}', expected value >= 0.")
        elif name.startswith(RESERVED_PREFIX):
            raise invalid(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                f"starting with 'triton_' are allowed: {EMPTY_FINAL}"
            )
        else:
            if kind not in ("int64_param", "bool_param", "string_param", "double_param"):
                text = (
                    f"invalid value type for '{name}' parameter, expected int64_param, bool_param, or string_param."
                )
                raise invalid(text)
            custom[name] = getattr(value, kind)
    if custom:
        request.parameters = custom
    return empty_final, drop_oldest


def _require(kind: str | None, name: str, *allowed: str) -> None:
    if kind not in allowed:
        raise invalid(f"invalid value type for '{name}' parameter, expected {' or '.join(allowed)}.")


# --- inputs and outputs


def _read_contents(given: Any, datatype: Datatype, model: str) -> Buffer:
    """Typed contents as bytes; empty if no field is set, which validation rejects later."""
    contents, data = given.contents, b""
    what = f"unexpected explicit tensor data for input tensor '{given.name}' for model '{model}'"
    for field, codes in _CONTENTS:
        values = getattr(contents, field)
        if not values:
            continue
        if data:
            raise invalid(f"{what}, binary data was already supplied.")
        code = codes.get(datatype)
        if code is None:
            raise invalid(f"{what} of type '{next(iter(codes))}', expected datatype '{datatype}'")
        size = len(values) * _AS_SENT.get(datatype, 0)
        if size:
            data = _as_sent(contents, size)
            if data:
                continue
        try:
            data = array(code, values).tobytes() if code else _packed(values)
        except OverflowError:
            raise invalid(f"input '{given.name}' has a value that {datatype} cannot hold") from None
    return data


def _as_sent(contents: Any, size: int) -> bytes:
    """The tensor of that size in an encoded message, if that has nothing else; else empty. Reading the numbers one by
    one takes forty times as long, during which no other request is served."""
    message: bytes = contents.SerializeToString()
    head = 1 + (size.bit_length() + 6) // 7  # the tag, and the size
    return message[head:] if len(message) == head + size else b""


def _packed(values: Sequence[bytes]) -> bytes:
    parts: list[bytes] = []
    for value in values:
        parts += (len(value).to_bytes(LENGTH_BYTES, "little"), value)
    return b"".join(parts)


def _read_shared(given: Any, model: str, memory: SharedRegions) -> memoryview | None:
    """The bytes of an input in shared memory; None: it is not in shared memory."""
    place = _read_place(given)
    if place is None:
        return None
    if given.HasField("contents"):
        text = f"unexpected 'content' provided when using shared memory for input tensor '{given.name}'"
        raise invalid(f"{text} for model '{model}'")
    return memory.read(*place)


def _names(outputs: Sequence[Any], id: str) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for each in outputs:
        if each.name in names:
            raise invalid(f"{log_prefix(id)}output '{each.name}' already exists in request")
        names[each.name] = None
    return tuple(names)


def _read_outputs(outputs: Sequence[Any], memory: SharedRegions) -> Mapping[str, Wanted]:
    wanted: dict[str, Wanted] = {}
    for each in outputs:
        if not each.parameters:
            continue
        place = _read_place(each)
        classes = 0
        if "classification" in each.parameters:
            classes = _read_classes(each.parameters["classification"])
            if place is not None:
                raise invalid("output can't set both 'shared_memory_region' and 'classification'")
        if place is not None:
            wanted[each.name] = Wanted(target=memory.target(*place))
        elif classes:
            wanted[each.name] = Wanted(classes)
    return wanted


def _read_classes(value: Any) -> int:
    if value.WhichOneof("parameter_choice") != "int64_param":
        raise invalid("invalid value type for 'classification' parameter, expected int64_param")
    if value.int64_param <= 0:
        raise invalid("invalid value for 'classification' parameter, expected >= 0")
    return int(value.int64_param)


def _read_place(given: Any) -> tuple[str, int, int] | None:
    """Region, offset and size in a tensor's parameters; None: no region is named."""
    parameters, name = given.parameters, given.name
    has_region = "shared_memory_region" in parameters
    region, offset, size = "", 0, 0
    if has_region:
        region = _place_value(parameters, "shared_memory_region", "string_param", name)
    for key in ("shared_memory_offset", "shared_memory_byte_size"):
        if key in parameters:
            if not has_region:
                text = f"'{key}' can not be specified without 'shared_memory_region' parameter for tensor '{name}'"
                raise invalid(text)
            value = _place_value(parameters, key, "int64_param", name) & UINT64_MAX
            offset, size = (value, size) if key == "shared_memory_offset" else (offset, value)
    if not has_region:
        return None
    if "shared_memory_byte_size" not in parameters:
        text = "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter"
        raise invalid(f"{text} for tensor '{name}'")
    return region, offset, size


def _place_value(parameters: Mapping[str, Any], key: str, kind: str, tensor: str) -> Any:
    value = parameters[key]
    if value.WhichOneof("parameter_choice") != kind:
        raise invalid(f"invalid value type for '{key}' parameter for tensor '{tensor}', expected {kind}.")
    return getattr(value, kind)


def _unknown_datatype(name: str, id: str, config: ModelConfig) -> Refused:
    spec = config.input(name)
    if spec is None:
        return invalid(f"unexpected inference input '{name}' for model '{config.name}'")
    return invalid(
        f"{log_prefix(id)}inference input '{name}' data-type is '<invalid>', but model '{config.name}' expects "
        f"'{spec.datatype}'"
    )
