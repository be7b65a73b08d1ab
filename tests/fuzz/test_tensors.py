"""Bodies of the Open Inference Protocol: tensors, or a refusal that is the client's fault, never anything else."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.corpus import damaged, encoded, json_bytes, mutated, survives

from forebay.core.serving.config import ELEMENT_BYTES, Datatype, ModelConfig, TensorSpec
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Buffer, InferResponse, Tensor
from forebay.wire.oip.coding import decoded
from forebay.wire.oip.coding import encoded as coded
from forebay.wire.oip.control import read_index, read_load, read_region, read_unload
from forebay.wire.oip.documents import error
from forebay.wire.oip.generate import read_generate, write_generate
from forebay.wire.oip.infer_answer import write_infer
from forebay.wire.oip.infer_request import json_length, read_infer, read_raw
from forebay.wire.oip.ports import MemoryKind
from forebay.wire.oip.route import route
from forebay.wire.oip.tensors import split

LIMIT = 100_000
ERROR_BYTES_MAX = 16_384
SHARED = {"shared_memory_region": "r", "shared_memory_offset": 8, "shared_memory_byte_size": 8}
DOCUMENTS: list[Any] = [
    {
        "id": "7",
        "parameters": {
            "sequence_id": 1,
            "sequence_start": True,
            "priority": 1,
            "timeout": 5,
            "binary_data_output": True,
        },
        "inputs": [
            {"name": "a", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2.5], [-3, 4e10]]},
            {"name": "b", "shape": [3], "datatype": "BYTES", "data": ["x", "", "é"]},
            {"name": "c", "shape": [0], "datatype": "INT64", "data": []},
        ],
        "outputs": [
            {"name": "a", "parameters": {"binary_data": True}},
            {"name": "b", "parameters": {"classification": 2}},
        ],
    },
    {
        "inputs": [
            {"name": "a", "shape": [4], "datatype": "UINT8", "parameters": {"binary_data_size": 4}},
            {"name": "b", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}},
            {"name": "c", "shape": [2], "datatype": "FP32", "parameters": SHARED},
        ],
        "outputs": [{"name": "c", "parameters": SHARED}],
    },
]
BINARY = b"\0\1\2\3" + b"\2\0\0\0hi"
FIELDS: list[Any] = [
    {"id": "1", "text": "hello", "n": [1, 2], "stream": False, "parameters": {"t": 0.5}},
    {"text": ["a"], "n": 1},
]
CONTROL: list[Any] = [
    {"ready": True, "parameters": {"config": "{}", "file:1/m": "AAAA", "unload_dependents": True, "version": 1}},
    {"key": "/k", "offset": 0, "byte_size": 8, "raw_handle": {"b64": "AAAA" * 22}, "device_id": 0},
]
CONFIG = ModelConfig(
    "m",
    "python",
    max_batch=2,
    inputs=(TensorSpec("text", Datatype.BYTES, (1,)), TensorSpec("n", Datatype.INT32, (-1,))),
)


class Part:
    """Where an output may go."""

    def put(self, output: str, data: Buffer) -> None:
        """Take it."""


class Page:
    """Memory with one region of 16 bytes."""

    def target(self, name: str, offset: int, size: int) -> Part:
        self.read(name, offset, size)
        return Part()

    def read(self, name: str, offset: int, size: int) -> memoryview:
        if name != "r" or offset + size > 16:
            raise Refused(Kind.NOT_FOUND, "no such region")
        return memoryview(bytearray(16))[offset : offset + size]


def whole(tensor: Tensor) -> bool:
    """Whether a tensor is as long as it says."""
    elements = 1
    for dim in tensor.shape:
        assert dim >= 0
        elements *= dim
    if tensor.datatype is Datatype.BYTES:
        return len(split(tensor.data)) == elements
    return len(tensor.data) == elements * ELEMENT_BYTES[tensor.datatype]


def blamed(refused: Refused) -> None:
    """A refusal is the client's fault, and short."""
    assert refused.kind is not Kind.INTERNAL
    assert len(error(refused.text)) < ERROR_BYTES_MAX


@given(json_bytes(DOCUMENTS), mutated([BINARY]) | st.just(BINARY), st.integers(-3, 3) | st.none())
def test_an_inference_is_read_in_full_or_refused_and_can_be_answered(
    head: bytes, tail: bytes, off: int | None
) -> None:
    header = None if off is None else b"%d" % (len(head) + off)
    try:
        body = head + tail if off is not None else head
        asked = read_infer("m", "", body, json_length(header, len(body)), Page(), json_bytes_max=LIMIT)
    except Refused as refused:
        blamed(refused)
        return
    for tensor in asked.request.inputs:
        if type(tensor.data) is not bytes:
            continue
        if tensor.datatype is Datatype.BYTES:
            split(tensor.data)  # whole strings; how many there are is for models to check
        else:
            assert whole(tensor)
    assert len({tensor.name for tensor in asked.request.inputs}) == len(asked.request.inputs)
    response = InferResponse("m", "1", asked.request.id, asked.request.inputs, parameters=asked.request.parameters)
    written = survives(lambda _: write_infer(response, asked, batches=True, labels=lambda _: ("one",)), b"", Refused)
    assert written is None or json.loads(written.json)


@given(json_bytes(FIELDS))
def test_a_generation_is_read_in_full_or_refused(body: bytes) -> None:
    request = survives(lambda data: read_generate(CONFIG, "", data, tensor_bytes_max=LIMIT), body, Refused)
    if request is not None:
        assert all(whole(tensor) for tensor in request.inputs)
        response = InferResponse("m", "1", request.id, request.inputs, parameters=request.parameters)
        json.loads(write_generate(response, tensor_bytes_max=2**20))


@given(json_bytes(CONTROL), st.sampled_from(MemoryKind))
def test_changes_of_the_server_are_read_or_refused(body: bytes, kind: MemoryKind) -> None:
    survives(read_index, body, Refused)
    survives(read_load, body, Refused)
    survives(read_unload, body, Refused)
    survives(lambda data: read_region(kind, "r", data), body, Refused)


@given(st.binary(max_size=40), mutated([b"/v2/models/m/versions/1/infer", b"/v2/repository/index", b"%2F%ff%"]))
def test_headers_and_paths_are_read_or_refused(header: bytes, target: bytes) -> None:
    survives(lambda data: json_length(data, 10), header, Refused)
    survives(route, target, Refused)


@given(mutated([coded(b"gzip", b"x" * 500), coded(b"deflate", b"y" * 500)]), st.sampled_from([b"gzip", b"deflate"]))
def test_codings_are_undone_within_their_bound_or_refused(body: bytes, coding: bytes) -> None:
    data = survives(lambda given: decoded(coding, given, 600), body, Refused)
    assert data is None or len(data) <= 600


@given(st.binary(max_size=40), st.lists(st.integers(-1, 4), max_size=3), st.sampled_from(Datatype), st.integers(0, 1))
def test_a_raw_body_fits_its_model_or_is_refused(
    body: bytes, dims: list[int], datatype: Datatype, batch: int
) -> None:
    config = ModelConfig("m", "python", max_batch=batch, inputs=(TensorSpec("x", datatype, tuple(dims)),))
    asked = survives(lambda data: read_raw(config, "", data), body, Refused)
    assert asked is None or bytes(asked.request.inputs[0].data).endswith(body)


@given(damaged(DOCUMENTS).map(encoded))
def test_reading_twice_gives_the_same(body: bytes) -> None:
    def read(data: bytes) -> Any:
        request = read_infer("m", "", data, None, Page(), json_bytes_max=LIMIT).request
        return request.id, request.inputs, request.outputs, request.parameters, request.priority

    assert survives(read, body, Refused) == survives(read, body, Refused)
