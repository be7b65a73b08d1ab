"""Edge cases of documents, parameters and paths that no endpoint test reaches."""

import json
from typing import Any

import pytest

from forebay.core.serving.errors import Kind, Refused
from forebay.wire.oip import documents
from forebay.wire.oip.control import read_load, read_region, read_unload
from forebay.wire.oip.fields import document, load, member
from forebay.wire.oip.ports import MemoryKind, Region
from forebay.wire.oip.route import CACHED_TARGET_BYTES_MAX, Endpoint, Route, route


def test_quotes_in_errors_are_truncated() -> None:
    assert len(documents.error("x" * 10**6)) == documents.ERROR_CHARS_MAX + len('{"error":""}')


def test_cuda_regions_have_their_own_fields() -> None:
    region = Region(MemoryKind.CUDA, "r", 64, device=1, handle=bytes(64))
    assert documents.regions([region]) == [{"name": "r", "device_id": 1, "byte_size": 64}]


def test_non_object_bodies_have_no_fields() -> None:
    assert document(b"") == document(b"[1]") == {}
    assert load(b" [NaN]") != [1]
    with pytest.raises(Refused, match="non-existing object member 'x'"):
        member([], "x")
    assert member({"x": 1}, "x") == 1


@pytest.mark.parametrize("value", [1, "1", "\u0661", None, 1.5, True])
def test_versions_are_digits(value: Any) -> None:
    body = json.dumps({"parameters": {"version": value}}).encode()
    if value in (1, "1") and value is not True:
        assert read_unload(body) == (False, "1")
        assert read_load(body) == {"version": "1"}
        return
    with pytest.raises(Refused, match="Unable to parse 'version'"):
        read_unload(body)


def test_load_files_must_be_base64() -> None:
    def body(text: str) -> bytes:
        return json.dumps({"parameters": {"file:1/m": text}}).encode()

    assert read_load(body("b25u\r\neA==")) == {"file:1/m": b"onnx"}
    for wrong in ("%%%", "b25u!eA==", "b25ueA", "\u00e9"):
        with pytest.raises(Refused, match=r"^'file:1/m' is not base64$"):
            read_load(body(wrong))


def test_unwrapped_cuda_handle_is_read() -> None:
    body = json.dumps({"raw_handle": "AAAA" * 22, "byte_size": 1, "device_id": 0}).encode()
    with pytest.raises(Refused, match="'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"):
        read_region(MemoryKind.CUDA, "r", body)
    with pytest.raises(Refused, match="Unable to parse 'raw_handle'"):
        read_region(MemoryKind.CUDA, "r", b'{"raw_handle":1}')
    with pytest.raises(Refused, match="'raw_handle' is not base64"):
        read_region(MemoryKind.CUDA, "r", b'{"raw_handle":"A"}')


PATHS = [
    (b"/v2", Route(Endpoint.SERVER)),
    (b"/v2/models/stats", Route(Endpoint.STATISTICS)),
    (b"/v2/models/m/stats", Route(Endpoint.STATISTICS, "m")),
    (b"/v2/models/a%2Fb/versions/0/infer", Route(Endpoint.INFER, "a/b", "0")),
    (b"/v2/models/m/versions/007?x=/", Route(Endpoint.MODEL, "m", "7")),
    (b"/v2/models/m/trace/setting", Route(Endpoint.TRACE, "m")),
    (b"/v2/repository/models/m/load", Route(Endpoint.LOAD, "m")),
    (b"/v2/repository/index", Route(Endpoint.INDEX)),
    (b"/v2/cudasharedmemory/region/r/status", Route(Endpoint.CUDA_MEMORY, action="status", region="r")),
    (b"/v2/models/" + b"m" * CACHED_TARGET_BYTES_MAX, Route(Endpoint.MODEL, "m" * CACHED_TARGET_BYTES_MAX)),
]


@pytest.mark.parametrize(("target", "wanted"), PATHS)
def test_paths_are_parsed(target: bytes, wanted: Route) -> None:
    assert route(target) == route(target) == wanted


@pytest.mark.parametrize(
    "target", [b"", b"*", b"/v2/", b"//v2", b"/v2/models/m/", b"/v2/models/m/versions/", b"\xff"]
)
def test_other_paths_are_not_found(target: bytes) -> None:
    with pytest.raises(Refused) as refused:
        route(target)
    assert (refused.value.kind, refused.value.text) == (Kind.NOT_FOUND, "Not Found")
