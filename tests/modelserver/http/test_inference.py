"""Inference over HTTP: JSON and binary tensors, output formats, content encodings, errors."""

import gzip
import re
import struct
import threading
import zlib
from time import monotonic, monotonic_ns
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.modelserver.http.rig import Rig, fp32, json_of, parts, rig
from tests.net.rig import Answer, peer, post, run, until

from forebay.core.serving.config import Datatype
from forebay.core.serving.values import Front, InferResponse
from forebay.modelserver.http import inferring
from forebay.wire.oip.infer_request import Asked, read_infer
from forebay.wire.oip.ports import MemoryKind, Region

FOUR = struct.pack("<4f", 1, 2, 3, 4)


@pytest.fixture(autouse=True, params=["at once", "in a thread"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are read and answers are written at once, or in a thread, as if they were long."""
    if request.param == "in a thread":
        monkeypatch.setattr(inferring, "UNPACKED_AT_ONCE_BYTES_MAX", 0)
        monkeypatch.setattr(inferring, "JSON_AT_ONCE_BYTES_MAX", 0)


def test_json_response_has_triton_field_order() -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.infer("echo", {"id": "7", "inputs": [fp32([1, 2.5, -3, 4e10])]})
            assert answer.status == 200
            assert answer.headers[b"content-type"] == b"application/json"
            assert answer.body == (
                b'{"id":"7","model_name":"echo","model_version":"1","outputs":[{"name":"OUT","datatype":"FP32",'
                b'"shape":[4],"data":[1.0,2.5,-3.0,40000000000.0]}]}'
            )
            answer = await it.infer(
                "add/versions/2", {"inputs": [fp32([[1, 2, 3, 4]], [1, 4], "IN0"), fp32([4, 3, 2, 1], [1, 4], "IN1")]}
            )
            assert json_of(answer)["outputs"][0]["data"] == [5, 5, 5, 5]
            assert it.models.requests[-1].version == "2"
            assert it.models.requests[-1].front is Front.HTTP
            assert 0 < it.models.requests[-1].came_ns < monotonic_ns()

    run(main())


def test_binary_tensors_follow_the_json_in_request_and_response() -> None:
    async def main() -> None:
        async with rig() as it:
            document = {
                "inputs": [
                    fp32(name="IN", binary_data_size=16),
                    fp32([5, 6], [2], "IN1"),
                    fp32(None, [1], "IN2", binary_data_size=4),
                ],
                "parameters": {"binary_data_output": True},
            }
            answer = await it.infer("echo", document, FOUR + FOUR[:4])
            assert answer.headers[b"content-type"] == b"application/octet-stream"
            head, rest = parts(answer)
            assert [each["parameters"]["binary_data_size"] for each in head["outputs"]] == [16, 8, 4]
            assert all("data" not in each for each in head["outputs"])
            assert rest == FOUR + struct.pack("<2f", 5, 6) + FOUR[:4]

    run(main())


def test_binary_or_json_is_chosen_per_requested_output() -> None:
    async def main() -> None:
        async with rig() as it:
            document = {
                "inputs": [fp32([1, 2, 3, 4]), fp32([1], [1], "IN1")],
                "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}, {"name": "OUT1"}],
            }
            head, rest = parts(await it.infer("echo", document))
            assert head["outputs"][1] == {"name": "OUT1", "datatype": "FP32", "shape": [1], "data": [1.0]}
            assert rest == FOUR
            assert it.models.requests[0].outputs == ("OUT", "OUT1")

    run(main())


def test_empty_binary_output_has_no_json_length_header() -> None:
    async def main() -> None:
        async with rig() as it:
            document = {"inputs": [fp32([], [0])], "parameters": {"binary_data_output": True}}
            answer = await it.infer("echo", document)
            assert b"inference-header-content-length" not in answer.headers
            assert json_of(answer)["outputs"] == [
                {"name": "OUT", "datatype": "FP32", "shape": [0], "parameters": {"binary_data_size": 0}}
            ]

    run(main())


def test_parameters_reach_the_model() -> None:
    async def main() -> None:
        async with rig() as it:
            parameters = {
                "sequence_id": 42, "sequence_start": True, "sequence_end": False, "priority": 2, "timeout": 1000,
                "a": "x", "b": 1, "c": True, "d": 0.5, "e": 2**63,
            }  # fmt: skip
            answer = await it.infer("echo", {"inputs": [fp32([1], [1])], "parameters": parameters})
            request = it.models.requests[0]
            assert (request.sequence_id, request.sequence_start, request.sequence_end) == (42, True, False)
            assert (request.priority, request.timeout_us) == (2, 1000)
            assert request.parameters == {"a": "x", "b": 1, "c": True, "d": 0.5, "e": float(2**63)}
            assert json_of(answer)["parameters"] == request.parameters
            await it.infer("echo", {"inputs": [fp32([1], [1])], "parameters": {"sequence_id": "one"}})
            assert it.models.requests[1].sequence_id == "one"

    run(main())


def test_the_deadline_header_sets_the_deadline_of_a_request() -> None:
    async def main() -> None:
        async with rig() as it:
            began = monotonic()
            await it.infer("echo", {"inputs": [fp32([1], [1])]}, X_Forebay_Deadline_Ms="1500")
            assert began + 1.5 <= it.models.requests[0].deadline <= monotonic() + 1.5
            await it.infer("echo", {"inputs": [fp32([1], [1])]})
            assert it.models.requests[1].deadline == 0
            for wrong in ("soon", "-1", "9" * 10):
                answer = await it.infer("echo", {"inputs": [fp32([1], [1])]}, X_Forebay_Deadline_Ms=wrong)
                assert (answer.status, len(it.models.requests)) == (400, 2)

    run(main())


def test_classification_returns_top_classes_with_labels() -> None:
    async def main() -> None:
        async with rig() as it:
            output = {"name": "OUT", "parameters": {"classification": 2}}
            document = {"inputs": [fp32([1, 3, 2, 9, 7, 8], [2, 3])], "outputs": [output]}
            answer = json_of(await it.infer("batches", document))
            assert answer["outputs"] == [
                {
                    "name": "OUT",
                    "datatype": "BYTES",
                    "shape": [2, 2],
                    "data": ["3.000000:1:dog", "2.000000:2", "9.000000:0:cat", "8.000000:2"],
                }
            ]
            document["outputs"] = [{"name": "OUT", "parameters": {"classification": 9, "binary_data": True}}]
            head, rest = parts(await it.infer("echo", document))
            assert head["outputs"][0]["shape"] == [6]
            assert rest.startswith(b"\x0a\x00\x00\x009.000000:3\x0a")

    run(main())


@pytest.mark.interpreted
def test_parsing_a_large_request_blocks_no_others_and_stops_mattering_on_disconnect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inferring, "UNPACKED_AT_ONCE_BYTES_MAX", 0)
    monkeypatch.setattr(inferring, "JSON_AT_ONCE_BYTES_MAX", 0)
    reads, go_on = threading.Event(), threading.Event()

    def slowly(*_: object, **__: object) -> Asked:
        reads.set()
        assert go_on.wait(10)
        return read_infer(*_, **__)  # type: ignore[arg-type]

    async def main() -> None:
        async with rig() as it:
            monkeypatch.setattr(inferring, "read_infer", slowly)
            async with peer(it.server.port) as gone:
                gone.send(
                    post(msgspec.json.encode({"inputs": [fp32([1, 2, 3, 4])]}), target=b"/v2/models/echo/infer")
                )
                await until(reads.is_set)
                assert (await it.ask("GET", "/v2/health/live")).status == 200
            await until(lambda: it.server.connections == 1)
            go_on.set()
            assert (await it.infer("echo", {"inputs": [fp32([5, 6, 7, 8])]})).status == 200
            assert [bytes(each.inputs[0].data) for each in it.models.requests] == [struct.pack("<4f", 5, 6, 7, 8)]

    run(main())


def test_shared_memory_tensors_are_not_in_the_body() -> None:
    async def main() -> None:
        async with rig() as it:
            it.space.register(Region(MemoryKind.SYSTEM, "shop", 64, key="/shop"))
            it.space.memory["shop"][16:32] = FOUR
            where = {"shared_memory_region": "shop", "shared_memory_offset": 16, "shared_memory_byte_size": 16}
            back = {"shared_memory_region": "shop", "shared_memory_byte_size": 20, "shared_memory_offset": 40}
            document = {"inputs": [fp32(**where)], "outputs": [{"name": "OUT", "parameters": back}]}
            answer = await it.infer("echo", document)
            assert json_of(answer)["outputs"] == [{"name": "OUT", "datatype": "FP32", "shape": [4]}]
            assert it.space.memory["shop"][40:56] == FOUR
            back["shared_memory_byte_size"] = 12
            refused = await it.infer("echo", document)
            assert json_of(refused)["error"] == "output 'OUT' has 12 bytes, needs 16"
            where["shared_memory_offset"] = 63
            assert (await it.infer("echo", document)).status == 400

    run(main())


def test_raw_body_is_the_only_input() -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.ask("POST", "/v2/models/echo/infer", FOUR, Inference_Header_Content_Length="0")
            head, rest = parts(answer)
            assert (head["outputs"][0]["shape"], rest) == ([4], FOUR)
            await it.ask("POST", "/v2/models/one/infer", b"word", Inference_Header_Content_Length="0")
            (tensor,) = it.models.requests[-1].inputs
            assert (tensor.datatype, tensor.shape, tensor.data) == (Datatype.BYTES, (1,), b"\4\0\0\0word")
            refused = await it.ask("POST", "/v2/models/add/infer", FOUR, Inference_Header_Content_Length="0")
            assert json_of(refused)["error"].startswith(
                "[request id: <id_unknown>] Raw request must only have 1 input"
            )

    run(main())


@pytest.mark.parametrize(
    ("coding", "pack", "unpack"),
    [("gzip", gzip.compress, gzip.decompress), ("deflate", zlib.compress, zlib.decompress)],
)
def test_request_and_response_bodies_can_be_compressed(coding: str, pack: Any, unpack: Any) -> None:
    async def main() -> None:
        async with rig() as it:
            text = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[4],"parameters":{"binary_data_size":16}}]}'
            answer = await it.ask(
                "POST",
                "/v2/models/echo/infer",
                pack(text + FOUR),
                Inference_Header_Content_Length=str(len(text)),
                Content_Encoding=coding,
                Accept_Encoding=coding,
            )
            assert answer.headers[b"content-encoding"].decode() == coding
            assert b'"data":[1.0,2.0,3.0,4.0]' in unpack(answer.body)
            broken = await it.ask("POST", "/v2/models/echo/infer", pack(text)[:-9], Content_Encoding=coding)
            assert broken.status == 400
            other = await it.ask("POST", "/v2/models/echo/infer", text, Content_Encoding="br")
            assert (other.status, other.headers[b"accept-encoding"]) == (501, b"gzip, deflate")

    run(main())


def test_large_response_is_compressed_off_the_event_loop() -> None:
    async def main() -> None:
        async with rig() as it:
            size = 40_000
            document = {
                "inputs": [fp32(None, [size], binary_data_size=4 * size)],
                "parameters": {"binary_data_output": True},
            }
            answer = await it.infer("echo", document, bytes(4 * size), Accept_Encoding="gzip")
            assert len(answer.body) < size
            assert gzip.decompress(answer.body).endswith(bytes(4 * size))
            plain = await it.infer("echo", document, bytes(4 * size), Accept_Encoding="gzip, deflate")
            assert parts(plain)[1] == bytes(4 * size)

    run(main())


def test_decompressed_json_and_tensor_sizes_are_limited() -> None:
    async def main() -> None:
        async with rig(json_bytes_max=1000) as it:
            body = gzip.compress(b" " * 1001)
            refused = await it.ask("POST", "/v2/models/echo/infer", body, Content_Encoding="gzip")
            assert json_of(refused)["error"].startswith(
                "Decompressed data size exceeds the maximum allowed value of 1000"
            )
            refused = await it.infer("echo", b" " * 1001)
            assert json_of(refused)["error"].startswith("request JSON size of 1001 bytes exceeds the maximum allowed")
            refused = await it.infer("echo", {"inputs": [fp32([1], [251])]})
            assert json_of(refused)["error"].startswith("JSON input 'IN' has a byte_size (1004 bytes) that exceeds")

    run(main())


def test_matching_headers_are_forwarded_as_parameters() -> None:
    async def main() -> None:
        async with rig(forwarded_headers=re.compile("^x-|priority")) as it:
            document = {"inputs": [fp32([1], [1])]}
            await it.infer("echo", document, x_user="me", other="no", x_utf="é", x_old="\udce9")
            assert it.models.requests[0].parameters == {"x-user": "me", "x-utf": "é", "x-old": "é"}
            refused = await it.infer("echo", document, priority="1")
            assert json_of(refused) == {
                "error": "Header 'priority' is reserved for Triton usage and cannot be forwarded."
            }

    run(main())


FAILED = [
    ("words", 501, "HTTP end point doesn't support models with decoupled transaction policy"),
    ("none", 404, "Request for unknown model: 'none' is not found"),
    ("wrong", 503, "the model gave up"),
    ("odd", 500, "Failed to write 'data' field: output tensor shape does not match size of output for 'OUT'"),
    ("twice", 500, "expected a single response, got 2"),
    ("silent", 500, "expected a single response, got 0"),
]


@pytest.mark.parametrize(("model", "status", "text"), FAILED)
def test_model_error_is_returned_and_connection_stays_open(model: str, status: int, text: str) -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.infer(model, {"inputs": [fp32([1], [1])]})
            assert (answer.status, json_of(answer)) == (status, {"error": text})
            assert answer.headers.get(b"retry-after") == (b"7" if model == "wrong" else None)
            assert (await it.infer("split", {"inputs": [fp32([1], [1])]})).status == 200  # the connection goes on

    run(main())


def test_internal_error_fails_one_request_and_is_logged() -> None:
    async def main() -> None:
        async with rig() as it:
            with capture_logs() as logs:
                answer = await it.infer("buggy", {"inputs": [fp32([1], [1])]})
            assert (answer.status, json_of(answer)) == (500, {"error": "internal error"})
            assert [each["event"] for each in logs] == ["request handling failed"]

    run(main())


def test_client_disconnect_cancels_the_request() -> None:
    async def main() -> None:
        async with rig() as it:
            for n, (path, body) in enumerate(
                (("infer", b'{"inputs":[]}'), ("generate", b"{}"), ("generate_stream", b"{}"))
            ):
                async with peer(it.server.port) as leaving:
                    leaving.send(post(body, target=f"/v2/models/slow/{path}".encode()))
                    await until(lambda n=n: len(it.models.tickets) > n)  # type: ignore[misc]
                    assert not it.models.tickets[-1].cancelled
                await until(lambda: it.models.tickets[-1].cancelled)

    run(main())


# --- generate


async def generated(it: Rig, model: str, body: Any, how: str = "generate") -> Answer:
    """What a generate endpoint answers."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return await it.ask("POST", f"/v2/models/{model}/{how}", data)


def test_generate_maps_json_fields_to_inputs_and_outputs() -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await generated(
                it, "one", {"prompt": "hi", "id": "5", "parameters": {"t": 0.5, "n": 3}, "x": True}
            )
            assert (answer.status, answer.body) == (
                200,
                b'{"id":"5","model_name":"one","model_version":"1","text":"hi"}',
            )
            request = it.models.requests[0]
            assert request.parameters == {"t": 0.5, "n": 3, "x": True}
            assert request.inputs[0].shape == (1,)
            answer = await generated(it, "add", {"IN0": [1, 2, 3, 4], "IN1": [0.5, 0, 0, 0]})
            assert json_of(answer) == {"model_name": "add", "model_version": "2", "OUT": [1.5, 2, 3, 4]}
            assert it.models.requests[1].inputs[0].shape == (1, 4)

    run(main())


def test_generate_requires_exactly_one_response() -> None:
    async def main() -> None:
        async with rig() as it:
            for prompt in ("a b", ""):
                answer = await generated(it, "words", {"prompt": prompt})
                assert answer.status == 400
                assert json_of(answer)["error"].startswith("generate expects model to produce exactly 1 response")
            answer = await generated(it, "words", {"prompt": "fail now"})
            assert (answer.status, json_of(answer)) == (500, {"error": "lost the thread"})

    run(main())


def test_generate_stream_sends_responses_and_errors_as_events() -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await generated(it, "words", {"prompt": "one two fail"}, "generate_stream")
            assert answer.status == 200
            assert answer.headers[b"content-type"] == b"text/event-stream; charset=utf-8"
            assert answer.body == (
                b'data: {"model_name":"words","model_version":"1","text":"one"}\n\n'
                b'data: {"model_name":"words","model_version":"1","text":"two"}\n\n'
                b'data: {"error":"lost the thread"}\n\n'
            )
            answer = await generated(it, "words", {"prompt": "fail"}, "generate_stream")
            assert (answer.status, answer.body) == (500, b'data: {"error":"lost the thread"}\n\n')
            answer = await generated(it, "words", {"prompt": ""}, "generate_stream")
            assert (answer.status, answer.body) == (200, b"")

    run(main())


def test_responses_after_client_disconnect_are_dropped() -> None:
    async def main() -> None:
        async with rig() as it:
            for path, body in (("infer", b'{"inputs":[]}'), ("generate", b"{}"), ("generate_stream", b"{}")):
                async with peer(it.server.port) as leaving:
                    leaving.send(post(body, target=f"/v2/models/slow/{path}".encode()))
                    await until(lambda: it.models.waiting is not None)
                    tell, it.models.waiting = it.models.waiting, None
                    assert tell is not None
                await until(lambda: it.models.tickets[-1].cancelled)
                tell(InferResponse("slow", "1", ""), True)

    run(main())


def test_internal_error_during_a_stream_aborts_it() -> None:
    async def main() -> None:
        async with rig() as it:
            with capture_logs() as logs:
                async with peer(it.server.port) as other:
                    other.send(post(b'{"IN":1}', target=b"/v2/models/stumbles/generate_stream"))
                    assert not (await other.rest()).endswith(b"0\r\n\r\n")
            assert len(logs) == 1

    run(main())


def test_internal_error_in_generate_returns_500() -> None:
    async def main() -> None:
        async with rig() as it:
            for how in ("generate", "generate_stream"):
                with capture_logs() as logs:
                    answer = await generated(it, "buggy", {"IN": 1}, how)
                assert (answer.status, json_of(answer)) == (500, {"error": "internal error"})
                assert len(logs) == 1

    run(main())


UNGENERATED: list[tuple[str, Any, str]] = [
    ("one", b"", "failed to parse the request JSON buffer: The document is empty. at 0"),
    ("one", b"{", "failed to parse the request JSON buffer: "),
    ("one", {"prompt": 1}, "Unable to parse 'data': attempt to access JSON non-string as string"),
    ("one", {"prompt": ["a", "b"]}, "The schema can not convert input 'prompt' to tensor with proper shape"),
    ("one", {"parameters": 1}, "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object"),
    ("one", {"id": 1}, "Unable to parse 'id': attempt to access JSON non-string as string"),
    ("one", {"x": [1]}, "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'."),
    ("add", {"IN0": [1, 2, 3]}, "The schema can not convert input 'IN0' to tensor with proper shape"),
    ("add", {"IN0": [1, 2, 3, "4"]}, "Unable to parse 'data': attempt to access JSON non-number as double"),
]


@pytest.mark.parametrize(("model", "body", "text"), UNGENERATED)
def test_generate_rejects_invalid_bodies(model: str, body: Any, text: str) -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await generated(it, model, body)
            assert answer.status == 400
            assert json_of(answer)["error"].startswith(text)

    run(main())


def test_generate_limits_input_size_and_rejects_content_encoding() -> None:
    async def main() -> None:
        async with rig(json_bytes_max=20) as it:
            answer = await generated(it, "one", {"prompt": "a" * 17})
            assert json_of(answer)["error"].startswith(
                "request size of 0 bytes with input 'prompt' of size 21 bytes exceeds"
            )
            answer = await it.ask("POST", "/v2/models/one/generate", b"{}", Content_Encoding="gzip")
            assert json_of(answer) == {"error": "Unsupported content-encoding, only 'identity' is supported."}

    run(main())
