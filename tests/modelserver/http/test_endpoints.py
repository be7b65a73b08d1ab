"""HTTP endpoints other than inference: responses and allowed methods."""

import base64
from typing import Any

import msgspec
import pytest
from tests.modelserver.http.rig import json_of, rig
from tests.net.rig import run


def test_server_and_model_metadata_and_config() -> None:
    async def main() -> None:
        async with rig(version="9") as it:
            server = json_of(await it.ask("GET", "/v2"))
            assert (server["name"], server["version"]) == ("forebay", "9")
            assert "binary_tensor_data" in server["extensions"]
            assert json_of(await it.ask("GET", "/v2/models/add?x=1")) == {
                "name": "add",
                "versions": ["1", "2"],
                "platform": "onnxruntime_onnx",
                "inputs": [
                    {"name": "IN0", "datatype": "FP32", "shape": [-1, 4]},
                    {"name": "IN1", "datatype": "FP32", "shape": [-1, 4]},
                ],
                "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [-1, 4]}],
            }
            one = json_of(await it.ask("GET", "/v2/models/echo/versions/01"))
            assert (one["versions"], one["platform"]) == (["1"], "python")
            assert one["inputs"] == [{"name": "IN", "datatype": "FP32", "shape": [-1]}]
            assert json_of(await it.ask("GET", "/v2/models/add/config")) == {"name": "add", "max_batch_size": 8}

    run(main())


@pytest.mark.parametrize(("prefix", "status"), [("http://a:1", 200), ("HTTPS://a", 200), ("ftp://a", 404)])
def test_target_in_absolute_form_is_accepted(prefix: str, status: int) -> None:
    async def main() -> None:
        async with rig() as it:
            it.line.send(f"GET {prefix}/v2/health/live?x HTTP/1.1\r\nhost: a\r\n\r\n".encode())
            assert (await it.line.answer()).status == status

    run(main())


def test_health_endpoints_return_only_a_status() -> None:
    async def main() -> None:
        async with rig() as it:
            for path in (
                "/v2/health/live",
                "/v2/health/ready",
                "/v2/models/echo/ready",
                "/v2/models/echo/versions/1/ready",
            ):
                answer = await it.ask("GET", path)
                assert answer.status == 200
            it.models.ready = False
            assert (await it.ask("GET", "/v2/health/ready")).status == 400
            assert (await it.ask("GET", "/v2/health/live")).status == 200

    run(main())


def test_statistics_have_triton_fields() -> None:
    async def main() -> None:
        async with rig() as it:
            (stats,) = json_of(await it.ask("GET", "/v2/models/echo/versions/1/stats"))["model_stats"]
            assert list(stats) == [
                "name", "version", "last_inference", "inference_count", "execution_count", "inference_stats",
                "response_stats", "batch_stats", "memory_usage",
            ]  # fmt: skip
            assert stats["inference_stats"]["success"] == {"count": 2, "ns": 10}
            assert list(stats["inference_stats"]) == [
                "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit",
                "cache_miss",
            ]  # fmt: skip
            assert [each["batch_size"] for each in stats["batch_stats"]] == [1, 2]
            assert stats["response_stats"]["0"]["success"] == {"count": 1, "ns": 4}
            assert len(json_of(await it.ask("GET", "/v2/models/stats"))["model_stats"]) == 2

    run(main())


def test_repository_index_load_and_unload() -> None:
    async def main() -> None:
        async with rig() as it:
            assert json_of(await it.ask("POST", "/v2/repository/index")) == [
                {"name": "echo", "version": "1", "state": "READY"},
                {"name": "bad", "version": "2", "state": "UNAVAILABLE", "reason": "no file"},
                {"name": "new"},
            ]
            assert len(json_of(await it.ask("POST", "/v2/repository/any/index", b'{"ready":true}'))) == 1
            file = base64.b64encode(b"\x00model").decode().encode()
            body = b'{"parameters":{"config":"{}","file:1/model.onnx":"%b"}}' % file
            answer = await it.ask("POST", "/v2/repository/models/m%20x/load", body)
            assert answer.status == 200
            assert it.models.loads == [("m x", {"config": "{}", "file:1/model.onnx": b"\x00model"})]
            for body in (b"", b"{}", b'{"parameters":{"unload_dependents":true,"version":3}}'):
                assert (await it.ask("POST", "/v2/repository/models/m/unload", body)).status == 200
            assert it.models.unloads == [("m", False, ""), ("m", False, ""), ("m", True, "3")]

    run(main())


def test_failed_load_returns_the_reason_but_no_internal_details() -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.ask("POST", "/v2/repository/models/bad/load")
            assert (answer.status, json_of(answer)) == (
                500,
                {"error": "failed to load 'bad', no version is available"},
            )
            answer = await it.ask("POST", "/v2/repository/models/worse/load")
            assert (answer.status, json_of(answer)) == (500, {"error": "internal error"})

    run(main())


REFUSED: list[tuple[str, str, bytes, int, str]] = [
    ("GET", "/", b"", 404, "Not Found"),
    ("GET", "/v2/", b"", 404, "Not Found"),
    ("GET", "/v2/models", b"", 404, "Not Found"),
    ("GET", "/v2/models/echo/versions/x", b"", 404, "Not Found"),
    ("GET", "/v2/models/echo/versions/1/trace/setting", b"", 404, "Not Found"),
    ("GET", "/v2/models/none", b"", 404, "Request for unknown model: 'none' is not found"),
    ("GET", "/v2/models/none/ready", b"", 404, "Request for unknown model: 'none' is not found"),
    ("GET", "/v2/models/none/stats", b"", 404, "Request for unknown model: 'none' is not found"),
    ("GET", "/v2/models/echo/versions/7", b"", 404, "Request for unknown model: 'echo' version 7 is not found"),
    ("GET", "/v2/models/echo/versions/" + "9" * 30, b"", 400, "failed to get model version"),
    ("POST", "/v2", b"", 405, "Method Not Allowed"),
    ("POST", "/v2/health/live", b"", 405, "Method Not Allowed"),
    ("POST", "/v2/models/echo/config", b"", 405, "Method Not Allowed"),
    ("GET", "/v2/models/echo/infer", b"", 405, "Method Not Allowed"),
    ("GET", "/v2/repository/index", b"", 405, "Method Not Allowed"),
    ("PUT", "/v2/logging", b"", 405, "Method Not Allowed"),
    ("PUT", "/v2/trace/setting", b"", 405, "Method Not Allowed"),
    ("POST", "/v2/systemsharedmemory/status", b"", 405, "Method Not Allowed"),
    ("GET", "/v2/systemsharedmemory/region/a/register", b"", 405, "Method Not Allowed"),
    ("POST", "/v2/repository/other/models/m/load", b"", 501, "'repository_name' specification is not supported"),
    ("POST", "/v2/repository/index", b"{", 400, "failed to parse the request JSON buffer: "),
    ("POST", "/v2/repository/index", b'{"ready":1}', 400, "Invalid value for 'ready': expected a boolean"),
    ("POST", "/v2/repository/models/m/load", b'{"parameters":[]}', 400, "attempt to get members for non-object"),
    ("POST", "/v2/repository/models/m/load", b'{"parameters":{"config":1}}', 400, "Unable to parse 'config'"),
    ("POST", "/v2/repository/models/m/load", b'{"parameters":{"file:a":"\xc3\xa4"}}', 400, "'file:a' is not base64"),
    ("POST", "/v2/repository/models/m/load", b'{"parameters":{"color":1}}', 400, "parameter 'color' is unknown"),
    ("POST", "/v2/repository/models/m/unload", b'{"parameters":{"unload_dependents":1}}', 400, "Unable to parse 'un"),
    ("POST", "/v2/repository/models/m/unload", b'{"parameters":{"version":"x"}}', 400, "Unable to parse 'version'"),
    ("POST", "/v2/systemsharedmemory/register", b"{}", 400, "'region name' is necessary to register system shared"),
    ("POST", "/v2/cudasharedmemory/register", b"{}", 400, "'region name' is necessary to register cuda shared"),
    ("POST", "/v2/systemsharedmemory/region/a/register", b"", 400, "failed to parse the request JSON buffer: The d"),
    ("POST", "/v2/systemsharedmemory/region/a/register", b"[]", 400, "Shared memory register request has no 'key'"),
    ("POST", "/v2/systemsharedmemory/region/a/register", b'{"key":"/a"}', 400, "Shared memory register request has"),
    ("POST", "/v2/cudasharedmemory/region/a/register", b"{}", 400, "Shared memory register request has no"),
    ("POST", "/v2/trace/setting", b"", 400, "failed to parse the request JSON buffer: The document is empty. at 0"),
    ("POST", "/v2/trace/setting", b'{"trace_file":"x"}', 501, "trace file location can not be updated"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "status", "text"), REFUSED)
def test_invalid_request_gets_the_triton_error_text(
    method: str, path: str, body: bytes, status: int, text: str
) -> None:
    async def main() -> None:
        async with rig() as it:
            answer = await it.ask(method, path, body)
            assert answer.status == status
            assert answer.headers[b"content-type"] == b"application/json"
            assert json_of(answer)["error"].startswith(text)

    run(main())


def test_shared_memory_register_status_and_unregister() -> None:
    async def main() -> None:
        async with rig() as it:
            region = b'{"key":"/one","offset":16,"byte_size":64}'
            assert (await it.ask("POST", "/v2/systemsharedmemory/region/a/register", region)).status == 200
            assert (await it.ask("POST", "/v2/systemsharedmemory/region/b/register", region)).status == 200
            wanted: dict[str, Any] = {"name": "a", "key": "/one", "offset": 16, "byte_size": 64}
            assert json_of(await it.ask("GET", "/v2/systemsharedmemory/region/a/status")) == [wanted]
            assert len(json_of(await it.ask("GET", "/v2/systemsharedmemory/status"))) == 2
            assert json_of(await it.ask("GET", "/v2/cudasharedmemory/status")) == []
            handle = base64.b64encode(bytes(64)).decode()
            body = f'{{"raw_handle":{{"b64":"{handle}"}},"device_id":0,"byte_size":64}}'.encode()
            refused = await it.ask("POST", "/v2/cudasharedmemory/region/c/register", body)
            assert (refused.status, json_of(refused)) == (501, {"error": "no CUDA here"})
            short = body.replace(b"AAAA", b"", 1)
            refused = await it.ask("POST", "/v2/cudasharedmemory/region/c/register", short)
            assert json_of(refused)["error"].startswith("'raw_handle' must be a valid base64")
            assert (await it.ask("POST", "/v2/systemsharedmemory/region/a/unregister")).status == 200
            assert list(it.space.known) == ["b"]
            assert (await it.ask("POST", "/v2/systemsharedmemory/unregister")).status == 200
            assert not it.space.known

    run(main())


def test_trace_and_log_settings_can_be_read_and_updated() -> None:
    async def main() -> None:
        async with rig() as it:
            assert json_of(await it.ask("GET", "/v2/trace/setting")) == {"trace_level": ["OFF"]}
            changed = await it.ask("POST", "/v2/models/echo/trace/setting", b'{"trace_rate":"5"}')
            assert json_of(changed) == {"trace_level": ["OFF"], "trace_rate": "5"}
            assert json_of(await it.ask("GET", "/v2/trace/setting")) == {"trace_level": ["OFF"]}
            assert json_of(await it.ask("GET", "/v2/logging")) == {"log_info": True}
            assert json_of(await it.ask("POST", "/v2/logging", b'{"log_info":false}')) == {"log_info": False}

    run(main())


def test_unknown_http_method_gets_a_json_error() -> None:
    async def main() -> None:
        async with rig() as it:
            it.line.send(b"FOO /v2 HTTP/1.1\r\nhost: a\r\n\r\n")
            head, _, body = (await it.line.rest()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert isinstance(msgspec.json.decode(body)["error"], str)

    run(main())
