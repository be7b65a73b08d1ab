"""Requests of the infer endpoint: what is parsed, and what is rejected with which message."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.serving.config import Datatype, ModelConfig, TensorSpec
from forebay.core.serving.errors import Kind, Refused
from forebay.wire.oip import infer_request
from forebay.wire.oip.infer_request import BINARY_FORM, JSON_FORM, Asked, Form, json_length, read_infer, read_raw


class Nowhere:
    """Memory with one region."""

    whole = bytearray(16)

    def target(self, name: str, offset: int, size: int) -> Any:
        return self.read(name, offset, size)

    def read(self, name: str, offset: int, size: int) -> memoryview:
        if name != "r" or offset + size > 16:
            raise Refused(Kind.NOT_FOUND, "no such region")
        return memoryview(self.whole)[offset : offset + size]


FIELDS = (
    "id", "inputs", "outputs", "parameters", "priority", "timeout_us", "sequence_id", "sequence_start", "sequence_end"
)  # fmt: skip


def read(document: Any, binary: bytes = b"", limit: int = 100_000) -> Asked:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return read_infer("m", "", text + binary, len(text) if binary else None, Nowhere(), json_bytes_max=limit)


def one(**fields: Any) -> dict[str, Any]:
    """A request with one input that is right but for what is said; None leaves a field out."""
    given = {"name": "x", "datatype": "INT8", "shape": [2], "data": [1, 2], **fields}
    return {"inputs": [{name: value for name, value in given.items() if value is not None}]}


def asked(**fields: Any) -> dict[str, Any]:
    return {**one(), **fields}


def out(**parameters: Any) -> dict[str, Any]:
    return asked(outputs=[{"name": "y", "parameters": parameters}])


ID = "[request id: <id_unknown>] "
SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But"
)
UINT = "attempt to access JSON non-unsigned-integer as unsigned-integer"
STR = "attempt to access JSON non-string as string"
BOOL = "attempt to access JSON non-boolean as boolean"
ARRAY = "attempt to access JSON non-array as array"
GONE = "attempt to access non-existing object member"
R = {"shared_memory_region": "r"}
REFUSED: list[tuple[Any, str]] = [
    (b"", "failed to parse the request JSON buffer: The document is empty. at 0"),
    (b"{", "failed to parse the request JSON buffer: "),
    (b"\xff", "failed to parse the request JSON buffer: Invalid encoding in string. at 0"),
    (b"[" * 99999, "failed to parse the request JSON buffer: "),
    (b'{"inputs":%b}' % (b"9" * 5000), "failed to parse the request JSON buffer: Number too big"),
    (b'{"id":"\\udc00"}', "failed to parse the request JSON buffer: The surrogate pair in string is invalid. at 0"),
    ([], f"Unable to parse 'inputs': {GONE} 'inputs'"),
    ({}, f"Unable to parse 'inputs': {GONE} 'inputs'"),
    ({"inputs": 1}, f"Unable to parse 'inputs': {ARRAY}"),
    ({"inputs": [1]}, f"{SOURCE} no field is set"),
    (one(data=None), f"{SOURCE} no field is set"),
    (one(parameters={"binary_data_size": 2}), f"{SOURCE} set 'data' 'binary_data_size'"),
    (one(parameters={"shared_memory_region": "r"}), f"{SOURCE} set 'data' 'shared_memory_region'"),
    (one(name=None), f"Unable to parse 'name': {GONE} 'name'"),
    (one(name=1), f"Unable to parse 'name': {STR}"),
    (one(datatype=None), f"Unable to parse 'datatype': {GONE} 'datatype'"),
    (one(datatype=[]), f"Unable to parse 'datatype': {STR}"),
    (one(datatype="INT128"), "invalid datatype for input x"),
    (one(shape=None), f"Unable to parse 'shape': {GONE} 'shape'"),
    (one(shape=2), f"Unable to parse 'shape': {ARRAY}"),
    (one(shape=[-1]), f"Unable to parse 'shape': {UINT}"),
    (one(shape=[2.0]), f"Unable to parse 'shape': {UINT}"),
    (one(shape=[True]), f"Unable to parse 'shape': {UINT}"),
    (one(shape=[2**64]), f"Unable to parse 'shape': {UINT}"),
    (one(shape=[2**63]), "invalid shape for input 'x': shape [9223372036854775808] contains one or more invalid dim"),
    (one(shape=[2**40, 2**40]), "invalid shape for input 'x': shape [1099511627776,1099511627776] causes total elem"),
    (one(shape=[2**40]), "JSON input 'x' has a byte_size (1099511627776 bytes) that exceeds the maximum allowed val"),
    (one(shape=[3]), "Failed to parse 'data' field: shape does not match true shape"),
    (one(shape=[1]), "Unable to parse 'data': Shape does not match true shape of 'data' field"),
    (one(data="a"), f"Unable to parse 'data': {ARRAY}"),
    ({"inputs": one()["inputs"] * 2}, f"{ID}input 'x' already exists in request"),
    (one(data=None, parameters={"binary_data_size": -1}), f"Unable to parse 'binary_data_size': {UINT}"),
    (one(data=None, parameters={"binary_data_size": 2}), "unexpected size for input 'x', expecting 2 additional byt"),
    (one(data=None, parameters={"shared_memory_region": 1}), f"Unable to parse 'shared_memory_region': {STR}"),
    (one(data=None, parameters={**R, "shared_memory_offset": "0"}), "Unable to parse 'shared_memory_offset': "),
    (one(data=None, parameters={**R, "shared_memory_byte_size": 0.5}), "Unable to parse 'shared_memory_byte_size':"),
    (one(parameters={"shared_memory_offset": "0"}), f"Unable to parse 'shared_memory_offset': {UINT}"),
    (one(data=None, parameters={"shared_memory_region": "q"}), "no such region"),
    (asked(id=1), f"Unable to parse 'id': {STR}"),
    (asked(parameters=1), "failed to get request params.: attempt to get members for non-object"),
    (asked(parameters={"sequence_id": -1}), f"Unable to parse 'sequence_id': {STR}"),
    (asked(parameters={"sequence_start": 1}), f"Unable to parse 'sequence_start': {BOOL}"),
    (asked(parameters={"sequence_end": "x"}), f"Unable to parse 'sequence_end': {BOOL}"),
    (asked(parameters={"priority": -1}), f"Unable to parse 'priority': {UINT}"),
    (asked(parameters={"timeout": 1.5}), f"Unable to parse 'timeout': {UINT}"),
    (asked(parameters={"binary_data_output": 1}), f"Unable to parse 'binary_data_output': {BOOL}"),
    (asked(parameters={"triton_x": 1}), "parameter keys starting with 'triton_' are reserved for Triton usage and s"),
    (asked(parameters={"p": None}), "parameter 'p' has invalid type. It should be either 'int', 'bool', or 'string'"),
    (asked(parameters={"p": 10**400}), "failed to parse the request JSON buffer: Number too big to be stored in dou"),
    (one(shape=[1] * 1025), "invalid shape for input 'x': 1025 dimensions are more than 1024"),
    (asked(outputs=1), f"Unable to parse 'outputs': {ARRAY}"),
    (asked(outputs=None), f"Unable to parse 'outputs': {ARRAY}"),
    (asked(outputs=[1]), f"Unable to parse 'name': {GONE} 'name'"),
    (asked(outputs=[{"name": 1}]), f"Unable to parse 'name': {STR}"),
    (asked(outputs=[{"name": "y"}] * 2), f"{ID}output 'y' already exists in request"),
    (out(classification=-1), f"Unable to set 'classification': {UINT}"),
    (out(binary_data=1), f"Unable to parse 'binary_data': {BOOL}"),
    (out(shared_memory_byte_size=-1), f"Unable to parse 'shared_memory_byte_size': {UINT}"),
    (out(shared_memory_region="r", classification=1), "Output can't set both 'shared_memory_region' and 'classifica"),
    (out(shared_memory_region="r", binary_data=True), "Output can't set both 'shared_memory_region' and 'binary_dat"),
    (out(shared_memory_region="q"), "no such region"),
]  # fmt: skip


@pytest.mark.parametrize(("document", "text"), REFUSED)
def test_invalid_request_has_the_error_message_of_triton(document: Any, text: str) -> None:
    with pytest.raises(Refused) as refused:
        read(document)
    assert refused.value.text.startswith(text)
    assert refused.value.http_status < 500


def test_unexpected_trailing_tensor_bytes_are_rejected() -> None:
    with pytest.raises(Refused, match="unexpected additional input data for model 'm'"):
        read(one(), b"x")


def test_binary_tensors_are_views_of_the_body() -> None:
    text = json.dumps(one(data=None, parameters={"binary_data_size": 2})).encode()
    body = text + b"ab"
    tensor = read_infer("m", "3", body, len(text), Nowhere(), json_bytes_max=1000).request.inputs[0]
    assert isinstance(tensor.data, memoryview)
    assert (tensor.data.obj, bytes(tensor.data)) == (body, b"ab")


TEXT = st.sampled_from(["", "a", "b"])
NUMBER = st.integers(0, 2)
PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "priority": NUMBER, "timeout": NUMBER, "sequence_id": NUMBER, "sequence_start": st.booleans(),
        "sequence_end": st.booleans(), "binary_data_output": st.booleans(), "own": st.one_of(TEXT, NUMBER),
    },
)  # fmt: skip
INPUT = st.fixed_dictionaries(
    {
        "name": TEXT,
        "datatype": st.sampled_from(["INT8", "FP32", "NONE"]),
        "shape": st.lists(NUMBER, max_size=2),
        "parameters": st.one_of(st.builds(dict, binary_data_size=NUMBER), st.just(R)),
    }
)
OUTPUT = st.fixed_dictionaries(
    {
        "name": TEXT,
        "parameters": st.one_of(
            st.builds(dict, binary_data=st.booleans()), st.builds(dict, classification=NUMBER), st.just(R)
        ),
    }
)
DOCUMENT = st.fixed_dictionaries(
    {"inputs": st.lists(INPUT, min_size=1, max_size=2)},
    optional={"id": TEXT, "parameters": PARAMETERS, "outputs": st.lists(OUTPUT, max_size=2)},
)


def read_fields(document: Any, binary: bytes) -> Any:
    try:
        found = read(document, binary)
    except Refused as refused:
        return refused.text
    return [getattr(found.request, name) for name in FIELDS], found.forms, found.others, found.is_binary


@given(document=DOCUMENT, one=st.binary(min_size=1, max_size=4), other=st.binary(min_size=1, max_size=4))
def test_document_that_was_read_before_is_read_alike(document: Any, one: bytes, other: bytes) -> None:
    infer_request._known.clear()
    read_fields(document, one)
    again = read_fields(document, other)
    infer_request._known.clear()
    assert again == read_fields(document, other)


def test_documents_that_are_kept_are_few_small_and_of_no_single_request() -> None:
    infer_request._known.clear()
    binary = one(data=None, parameters={"binary_data_size": 2})
    for unusual in (
        {"id": "a"},
        {"parameters": {"sequence_id": 1}},
        {"outputs": [{"name": "y", "parameters": {**R, "shared_memory_byte_size": 2}}]},
        {"parameters": {"long": "x" * infer_request.KNOWN_BYTES_MAX}},
    ):
        read({**binary, **unusual}, b"ab")
    assert not infer_request._known
    for priority in range(2 * infer_request.KNOWN_MAX):
        read({**binary, "parameters": {"priority": priority}}, b"ab")
    assert len(infer_request._known) <= infer_request.KNOWN_MAX


def test_parameters_of_one_request_are_not_those_of_the_next() -> None:
    document = {**one(data=None, parameters={"binary_data_size": 2}), "parameters": {"own": 1}}
    read(document, b"ab").request.parameters["header"] = "first"
    read(document, b"ab").request.parameters["header"] = "second"
    assert read(document, b"ab").request.parameters == {"own": 1}


def test_shared_memory_inputs_are_read_in_place() -> None:
    where = {**R, "shared_memory_offset": 14, "shared_memory_byte_size": 2}
    tensor = read(one(data=None, parameters=where)).request.inputs[0]
    assert isinstance(tensor.data, memoryview)
    assert tensor.data.obj is Nowhere.whole


def test_output_formats_are_kept_by_name() -> None:
    given = [
        {"name": "a"},
        {"name": "b", "parameters": {"binary_data": True}},
        {"name": "c", "parameters": {"classification": 3, "binary_data": True}},
        {"name": "d", "parameters": []},
    ]
    it = read(asked(outputs=given, parameters={"binary_data_output": True}))
    assert it.forms == {"a": JSON_FORM, "b": BINARY_FORM, "c": Form(True, 3), "d": JSON_FORM}
    assert it.others == BINARY_FORM
    assert it.request.outputs == ("a", "b", "c", "d")
    shared = read(out(shared_memory_region="r", shared_memory_byte_size=4)).forms["y"]
    assert isinstance(shared.target, memoryview)
    assert len(shared.target) == 4


def test_document_with_a_nan_is_parsed_completely() -> None:
    text = (
        b'{"id":"\\ud83d\\ude00","parameters":{"p":NaN},"inputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[NaN,1]}],'
        b'"outputs":[{"name":"y","parameters":{"binary_data":true}}]}'
    )
    it = read(text)
    assert (it.request.id, it.forms, it.request.inputs[0].shape) == ("\U0001f600", {"y": BINARY_FORM}, (2,))
    assert bytes(it.request.inputs[0].data) == b"\0\0\xc0\x7f\0\0\x80\x3f"


@pytest.mark.interpreted
def test_missing_number_in_a_long_document_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer_request, "ODD_BYTES_MAX", 10)
    with pytest.raises(Refused, match="NaN and Infinity are read in JSON of up to"):
        read(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[NaN]}]}')


@pytest.mark.parametrize(
    "more",
    [
        b'"outputs":[' + b",".join(b'{"name":"%d"}' % number for number in range(10_001)) + b"]",
        b'"parameters":{' + b",".join(b'"%d":0' % number for number in range(10_001)) + b"}",
    ],
    ids=["outputs", "parameters"],
)
def test_number_of_names_in_a_request_is_bounded(more: bytes) -> None:
    with pytest.raises(Refused, match="at most 10000 inputs, outputs or parameters"):
        read(b'{"inputs":[],%b}' % more, limit=1 << 20)


LONG = [
    json.dumps(one()).encode(),
    b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[2],"data":["{\\"a\\":[1]}","\\\\"]}],"id":"\\u00e9"}',
    b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"parameters":{"binary_data_size":8}}],'
    b'"parameters":{"priority":3,"own":"a"},"outputs":[{"name":"y","parameters":{"classification":2}},{"name":"z"}]}',
    b'{"inputs":[{"datatype":"FP32","shape":[1],"data":[1]}]}',
    b'{"inputs":[{"name":7,"datatype":"FP32","shape":[1],"data":[1]}]}',
    b'{"inputs":[{"name":"x","datatype":"FP32","shape":{},"data":[1]}]}',
    b'{"inputs":[],"parameters":[],"other":[{}]}',
    b'{"inputs":[],"id":5}',
]


@pytest.mark.interpreted
@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_long_document_is_parsed_like_a_short_one(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Any:
        binary = bytes(8) if b"binary_data_size" in text else b""
        try:
            asked = read(text, binary)
            return [getattr(asked.request, field) for field in FIELDS], asked.forms, asked.others
        except Refused as refused:
            return refused.text

    short = found()
    monkeypatch.setattr(infer_request, "ODD_BYTES_MAX", 10)
    assert found() == short


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"inputs":[' + b",".join([b"{}"] * 40_003) + b"]}", "at most 10000 inputs, outputs or parameters"),
        (b'{"inputs":[],"parameters":{"a":[' + b",".join([b"[]"] * 350_000) + b"]}}", "at most 1048576 bytes"),
        (b'{"inputs":[],"outputs":[{"name":"' + b"a" * 1_100_000 + b'"}]}', "at most 1048576 bytes"),
        (b'{"inputs":[],"id":"\xff\xff\xff\xff"}', "failed to parse the request JSON buffer: "),
        (b'{"inputs":[],"id":7', "failed to parse the request JSON buffer: "),
        (b"[" * 2000, "failed to parse the request JSON buffer: "),
    ],
    ids=["objects", "values", "name", "letters", "end", "depth"],
)
def test_objects_in_a_long_document_are_bounded(text: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer_request, "ODD_BYTES_MAX", 10)
    with pytest.raises(Refused, match=why):
        read(text, limit=1 << 22)


def test_zero_elements_need_no_data() -> None:
    assert read(one(shape=[0, 5], data=[])).request.inputs[0].data == b""
    assert read(one(shape=[0], data=None, parameters={"binary_data_size": 0})).request.inputs[0].shape == (0,)


LENGTHS: list[tuple[bytes | None, int | None, str]] = [
    (None, None, ""),
    (b"0", 0, ""),
    (b"10", 10, ""),
    (b"11", None, "inference header size should be in range (0, 10), got: 11"),
    (b"-1", None, "inference header size should be in range (0, 10), got: -1"),
    (b"9" * 9999, None, "inference header size should be in range (0, 10), got: 9999"),
    (b"1x", None, "Unable to parse Inference-Header-Content-Length, got: 1x"),
    (b"", None, "Unable to parse Inference-Header-Content-Length, got: "),
    ("٣".encode(), None, "Unable to parse Inference-Header-Content-Length, got: "),
    (b"\xb2", None, "Unable to parse Inference-Header-Content-Length, got: "),
]


@pytest.mark.parametrize(("header", "length", "text"), LENGTHS)
def test_the_length_header_is_a_number_within_the_body(header: bytes | None, length: int | None, text: str) -> None:
    if not text:
        assert json_length(header, 10) == length
        return
    with pytest.raises(Refused) as refused:
        json_length(header, 10)
    assert refused.value.text.startswith(text)


def config(datatype: Datatype, *dims: int, max_batch: int = 0) -> ModelConfig:
    return ModelConfig("m", "python", max_batch=max_batch, inputs=(TensorSpec("x", datatype, dims),))


def test_raw_body_has_the_shape_of_the_model() -> None:
    tensor = read_raw(config(Datatype.INT16, 2, -1, max_batch=4), "", b"x" * 12).request.inputs[0]
    assert (tensor.shape, tensor.data) == ((1, 2, 3), b"x" * 12)
    assert read_raw(config(Datatype.BYTES, 1), "", b"abc").request.inputs[0].data == b"\3\0\0\0abc"
    assert read_raw(config(Datatype.INT8, -1), "", b"").request.inputs[0].shape == (0,)
    assert read_raw(config(Datatype.INT8, 0, -1), "", b"").request.inputs[0].shape == (0, 0)
    assert read_raw(config(Datatype.INT8, 1), "", b"a").others == BINARY_FORM


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            ModelConfig("m", "python"),
            "Raw request must only have 1 input (found 1) to be deduced but got 0 inputs in 'm'",
        ),
        (config(Datatype.INT8, -1, -1), "The shape of the raw input 'x' can not be deduced because there are more"),
        (config(Datatype.BYTES, -1), "For BYTE datatype raw input 'x', the model must have input shape [1]"),
        (config(Datatype.BYTES, 2), "For BYTE datatype raw input 'x', the model must have input shape [1]"),
    ],
)
def test_raw_body_of_the_wrong_size_is_rejected(config: ModelConfig, text: str) -> None:
    with pytest.raises(Refused) as refused:
        read_raw(config, "", b"12345")
    assert refused.value.text.startswith(f"{ID}{text}")


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_binary_tensors_are_split_by_their_sizes(blobs: list[bytes]) -> None:
    inputs = [
        {"name": str(n), "datatype": "UINT8", "shape": [len(blob)], "parameters": {"binary_data_size": len(blob)}}
        for n, blob in enumerate(blobs)
    ]
    text = msgspec.json.encode({"inputs": inputs})
    it = read_infer("m", "", text + b"".join(blobs), len(text), Nowhere(), json_bytes_max=1000)
    assert [bytes(each.data) for each in it.request.inputs] == blobs


def test_json_strings_are_counted_before_they_are_parsed() -> None:
    with pytest.raises(
        Refused, match="has 1000001 string elements, more than the 1000000 that --max-string-elements"
    ):
        read(one(datatype="BYTES", shape=[1_000_001]), limit=1 << 24)
    assert len(read(one(datatype="BYTES", shape=[1], data=["a"] * 5)).request.inputs[0].data) == 2 * len("....a")
