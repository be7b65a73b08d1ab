"""Unary gRPC calls: their responses and errors."""

import asyncio
from pathlib import Path
from time import monotonic_ns
from typing import Any

import grpc
import pytest
from tests.modelserver.rpc.raw import STREAM
from tests.modelserver.rpc.rig import FOUR, floats, infer_request, rig, text_request, until
from tests.net.rig import run
from tritonclient.grpc import service_pb2 as pb

from forebay.core.serving.values import Front, InferResponse
from forebay.wire.http2 import frames as h2
from forebay.wire.http2.grpc import framed

STATUS_200 = b"\x88"
"""As HPACK has it."""


def test_response_has_raw_contents_for_raw_and_typed_requests(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            typed = infer_request("echo", None)
            typed.inputs[0].contents.fp32_contents.extend([1, 2, 3, 4])
            for message in (infer_request("echo", id="7"), typed):
                answer = await it.stub.ModelInfer(message)
                assert (answer.model_name, answer.model_version, answer.id) == ("echo", "1", message.id)
                assert [(each.name, each.datatype, list(each.shape)) for each in answer.outputs] == [
                    ("OUT", "FP32", [4])
                ]
                assert list(answer.raw_output_contents) == [FOUR]

    run(main())


def test_parameters_reach_the_model_and_are_returned(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            custom: dict[str, Any] = {"a": True, "b": -7, "c": "x", "d": 1.5}
            reserved = {"sequence_id": 5, "sequence_start": True, "sequence_end": True, "priority": 2, "timeout": 9}
            answer = await it.stub.ModelInfer(infer_request("echo", parameters={**custom, **reserved}))
            request = it.models.requests[-1]
            assert (request.front, 0 < request.came_ns < monotonic_ns()) == (Front.GRPC, True)
            assert request.parameters == custom
            assert (request.sequence_id, request.sequence_start, request.sequence_end) == (5, True, True)
            assert (request.priority, request.timeout_us) == (2, 9)
            back = {
                name: getattr(value, value.WhichOneof("parameter_choice"))
                for name, value in answer.parameters.items()
            }
            assert back == custom
            await it.stub.ModelInfer(infer_request("echo", parameters={"sequence_id": "order"}))
            assert it.models.requests[-1].sequence_id == "order"

    run(main())


def contents(field: str, values: list[Any], datatype: str = "FP32", raw: bytes | None = None) -> Any:
    message = infer_request("echo", raw)
    message.inputs[0].datatype = datatype
    getattr(message.inputs[0].contents, field).extend(values)
    return message


def parameter(name: str, value: Any) -> Any:
    return infer_request("echo", parameters={name: value})


def shared(**parameters: Any) -> Any:
    message = infer_request("echo")
    for name, value in parameters.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(message.inputs[0].parameters[f"shared_memory_{name}"], kind, value)
    return message


def wanted(**parameters: Any) -> Any:
    message = infer_request("echo")
    message.outputs.add(name="OUT")
    for name, value in parameters.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(message.outputs[0].parameters[name], kind, value)
    return message


def twice() -> Any:
    message = infer_request("echo")
    message.inputs.append(message.inputs[0])
    return message


def output_twice() -> Any:
    message = infer_request("echo")
    message.outputs.add(name="OUT")
    message.outputs.add(name="OUT")
    return message


def uint64(name: str) -> Any:
    message = infer_request("echo")
    message.parameters[name].uint64_param = 1
    return message


INVALID = [
    (infer_request("echo", None), "unable to find data for input tensor 'IN' for model 'echo' in request."),
    (twice(), "[request id: <id_unknown>] input 'IN' already exists in request"),
    (output_twice(), "[request id: <id_unknown>] output 'OUT' already exists in request"),
    (contents("fp32_contents", [1], raw=FOUR), "contents field must not be specified when using raw_input_contents"),
    (contents("int_contents", [1]), "unexpected explicit tensor data for input tensor 'IN' for model 'echo' of type"),
    (contents("int_contents", [300], "INT8"), "input 'IN' has a value that INT8 cannot hold"),
    (
        contents("fp32_contents", [1], "FP31"),
        "[request id: <id_unknown>] inference input 'IN' data-type is '<invalid>'",
    ),
    (
        parameter("priority", "high"),
        "invalid value type for 'priority' parameter, expected int64_param or uint64_param.",
    ),
    (parameter("priority", -1), "invalid value for 'priority', expected value >= 0."),
    (parameter("timeout", 1.5), "invalid value type for 'timeout' parameter, expected int64_param."),
    (
        parameter("sequence_id", True),
        "invalid value type for 'sequence_id' parameter, expected int64_param or string",
    ),
    (parameter("triton_secret", 1), "parameter keys starting with 'triton_' are reserved for Triton usage."),
    (
        uint64("colour"),
        "invalid value type for 'colour' parameter, expected int64_param, bool_param, or string_param.",
    ),
    (shared(region="r"), "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter"),
    (shared(offset=1), "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for te"),
    (
        shared(region=1),
        "invalid value type for 'shared_memory_region' parameter for tensor 'IN', expected string_param.",
    ),
    (shared(region="r", byte_size="4"), "invalid value type for 'shared_memory_byte_size' parameter for tensor 'IN'"),
    (wanted(classification=0), "invalid value for 'classification' parameter, expected >= 0"),
    (wanted(classification="2"), "invalid value type for 'classification' parameter, expected int64_param"),
    (
        wanted(classification=2, shared_memory_region="r", shared_memory_byte_size=4),
        "output can't set both 'shared_memory_region' and 'classification'",
    ),
]


@pytest.mark.parametrize(("message", "text"), INVALID, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_invalid_request_reports_the_problem(tmp_path: Path, message: Any, text: str) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            code, found = await it.code("ModelInfer", message)
            assert (code, found[: len(text)]) == ("INVALID_ARGUMENT", text)
            assert (await it.stub.ModelInfer(infer_request("echo"))).model_name == "echo"

    run(main())


REFUSED = [
    ("ModelInfer", infer_request("none"), "NOT_FOUND", "Request for unknown model: 'none' is not found"),
    (
        "ModelInfer",
        text_request("words", "a"),
        "UNIMPLEMENTED",
        "ModelInfer RPC doesn't support models with decoupled",
    ),
    ("ModelInfer", infer_request("wrong"), "UNAVAILABLE", "the model gave up"),
    ("ModelInfer", infer_request("twice"), "INTERNAL", "expected a single response, got 2"),
    ("ModelInfer", infer_request("silent"), "INTERNAL", "expected a single response, got 0"),
    ("ModelInfer", infer_request("buggy"), "INTERNAL", "internal error"),
    ("ModelMetadata", pb.ModelMetadataRequest(name="none"), "NOT_FOUND", "Request for unknown model"),
    ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="bad"), "INTERNAL", "failed to load 'bad'"),
    ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="worse"), "INTERNAL", "internal error"),
    (
        "RepositoryIndex",
        pb.RepositoryIndexRequest(repository_name="x"),
        "UNIMPLEMENTED",
        "'repository_name' specific",
    ),
    ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="c"), "UNIMPLEMENTED", "CUDA shared memory"),
    (
        "SystemSharedMemoryRegister",
        pb.SystemSharedMemoryRegisterRequest(key="/k"),
        "INVALID_ARGUMENT",
        "'region name'",
    ),
    ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="q"), "NOT_FOUND", "Unable to find system"),
]


@pytest.mark.parametrize(("method", "message", "code", "text"), REFUSED)
def test_errors_have_grpc_status_codes(tmp_path: Path, method: str, message: Any, code: str, text: str) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            found, said = await it.code(method, message)
            assert (found, said[: len(text)]) == (code, text)

    run(main())


@pytest.mark.parametrize(("model", "told"), [("wrong", "7000"), ("silent", None)])
def test_error_has_retry_pushback_when_known(tmp_path: Path, model: str, told: str | None) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            call = it.stub.ModelInfer(infer_request(model))
            with pytest.raises(grpc.aio.AioRpcError):
                await call
            assert dict(await call.trailing_metadata()).get("grpc-retry-pushback-ms") == told

    run(main())


def test_cancelled_call_cancels_the_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            call = it.stub.ModelInfer(infer_request("slow"))
            await until(lambda: it.models.tickets)
            call.cancel()
            await until(lambda: it.models.tickets[0].cancelled)

    run(main())


def test_message_size_is_limited(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, message_bytes_max=1000) as it:
            code, _ = await it.code("ModelInfer", infer_request("echo", bytes(2000), [500]))
            assert code == "RESOURCE_EXHAUSTED"
            assert (await it.code("ModelInfer", infer_request("echo")))[0] == "OK"

    run(main())


def test_classification_returns_labels(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            message = infer_request("batches", shape=[2, 2])
            output = message.outputs.add(name="OUT")
            output.parameters["classification"].int64_param = 1
            answer = await it.stub.ModelInfer(message)
            assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("BYTES", [2, 1])
            assert answer.raw_output_contents[0].count(b":1:dog") == 2

    run(main())


def test_shared_memory_tensors_are_not_in_the_message(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            (tmp_path / "k").write_bytes(FOUR + bytes(32))
            await it.stub.SystemSharedMemoryRegister(
                pb.SystemSharedMemoryRegisterRequest(name="r", key="/k", offset=0, byte_size=48)
            )
            message = infer_request("echo", None)
            place = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
            output = message.outputs.add(name="OUT")
            for tensor, offset in ((message.inputs[0], 0), (output, 24)):
                tensor.parameters["shared_memory_region"].string_param = str(place["shared_memory_region"])
                tensor.parameters["shared_memory_byte_size"].int64_param = 16
                tensor.parameters["shared_memory_offset"].int64_param = offset
            answer = await it.stub.ModelInfer(message)
            assert list(answer.raw_output_contents) == [b""]
            assert (tmp_path / "k").read_bytes()[24:40] == FOUR
            status = await it.stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())
            assert {name: (each.key, each.offset, each.byte_size) for name, each in status.regions.items()} == {
                "r": ("/k", 0, 48)
            }
            await it.stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
            assert (await it.code("ModelInfer", message))[0] == "NOT_FOUND"
            assert not (await it.stub.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest())).regions
            await it.stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest())

    run(main())


def test_health_metadata_statistics_and_repository_index(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, version="1.2") as it:
            assert (await it.stub.ServerLive(pb.ServerLiveRequest())).live
            assert (await it.stub.ServerReady(pb.ServerReadyRequest())).ready
            server = await it.stub.ServerMetadata(pb.ServerMetadataRequest())
            assert (server.name, server.version) == ("forebay", "1.2")
            assert "statistics" in server.extensions
            ready = [(await it.stub.ModelReady(pb.ModelReadyRequest(name=name))).ready for name in ("echo", "none")]
            assert ready == [True, False]
            metadata = await it.stub.ModelMetadata(pb.ModelMetadataRequest(name="add"))
            assert [(each.name, list(each.shape)) for each in metadata.inputs] == [("IN0", [-1, 4]), ("IN1", [-1, 4])]
            assert list(metadata.versions) == ["1", "2"]
            config = await it.stub.ModelConfig(pb.ModelConfigRequest(name="batches"))
            assert (config.config.name, config.config.max_batch_size) == ("batches", 8)
            found = await it.stub.ModelStatistics(pb.ModelStatisticsRequest(name="echo"))
            (done,) = found.model_stats
            assert (done.inference_stats.success.count, done.inference_stats.success.ns) == (2, 10)
            assert [each.batch_size for each in done.batch_stats] == [1, 2]
            assert done.response_stats["0"].success.ns == 4
            index = await it.stub.RepositoryIndex(pb.RepositoryIndexRequest())
            assert [(each.name, each.state) for each in index.models] == [
                ("echo", "READY"), ("bad", "UNAVAILABLE"), ("new", ""),
            ]  # fmt: skip

    run(main())


def test_model_load_and_unload(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            load = pb.RepositoryModelLoadRequest(model_name="echo")
            load.parameters["config"].string_param = "{}"
            load.parameters["file:1/model.onnx"].bytes_param = b"onnx"
            await it.stub.RepositoryModelLoad(load)
            assert it.models.loads == [("echo", {"config": "{}", "file:1/model.onnx": b"onnx"})]
            for kind, value in (("string_param", "2"), ("int64_param", 2)):
                one = pb.RepositoryModelLoadRequest(model_name="echo")
                setattr(one.parameters["version"], kind, value)
                await it.stub.RepositoryModelLoad(one)
                assert it.models.loads.pop() == ("echo", {"version": "2"})
            unload = pb.RepositoryModelUnloadRequest(model_name="echo")
            unload.parameters["unload_dependents"].bool_param = True
            unload.parameters["version"].string_param = "2"
            await it.stub.RepositoryModelUnload(unload)
            assert it.models.unloads == [("echo", True, "2")]
            for name, kind, value, text in (
                (
                    "config",
                    "int64_param",
                    1,
                    "invalid value type for load parameter 'config', expected string_param.",
                ),
                ("file:1/x", "string_param", "1", "invalid value type for load parameter 'file:1/x', expected bytes"),
                ("colour", "string_param", "red", "unrecognized load parameter 'colour'."),
            ):
                message = pb.RepositoryModelLoadRequest(model_name="echo")
                setattr(message.parameters[name], kind, value)
                code, said = await it.code("RepositoryModelLoad", message)
                assert (code, said[: len(text)]) == ("INVALID_ARGUMENT", text)
            unload.parameters["unload_dependents"].string_param = "yes"
            assert (await it.code("RepositoryModelUnload", unload))[0] == "INVALID_ARGUMENT"

    run(main())


def test_trace_and_log_settings_can_be_read_and_updated(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            change = pb.TraceSettingRequest(model_name="echo")
            change.settings["trace_rate"].value.append("7")
            change.settings["trace_level"].value.extend(["TIMESTAMPS", "TENSORS"])
            settings = (await it.stub.TraceSetting(change)).settings
            assert list(settings["trace_level"].value) == ["TIMESTAMPS", "TENSORS"]
            assert list(settings["trace_rate"].value) == ["7"]
            change.settings["trace_rate"].value.append("8")
            assert (await it.code("TraceSetting", change))[1] == "expect only 1 value for 'trace_rate'"
            logs = pb.LogSettingsRequest()
            logs.settings["log_info"].bool_param = False
            assert not (await it.stub.LogSettings(logs)).settings["log_info"].bool_param
            logs.settings["log_verbose_level"].string_param = "1"
            assert (await it.code("LogSettings", logs))[1] == "expect int32 for 'log_verbose_level'"

    run(main())


def test_health_follows_readiness(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            check = it.channel.unary_unary("/grpc.health.v1.Health/Check")
            watch = it.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
            assert await check(b"") == b"\x08\x01"
            assert await watch.read() == b"\x08\x01"
            it.models.ready = False
            assert await check(b"") == b"\x08\x02"
            assert await watch.read() == b"\x08\x02"

    run(main())


def test_expired_health_watch_sends_only_trailers(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            raw = await it.raw()
            raw.ask(1, framed(b""), path="/grpc.health.v1.Health/Watch", grpc_timeout="20m")
            assert (await raw.until(h2.HEADERS)).startswith(STATUS_200)
            tail = await raw.until(h2.HEADERS)
            assert STATUS_200 not in tail
            assert b"Deadline Exceeded" in tail

    run(main())


def test_port_in_use_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it, rig(tmp_path) as other:
            await other.front.stop(0)
            with pytest.raises(OSError, match="in use"):
                await other.front.start("127.0.0.1", it.front.port)

    run(main())


def test_stop_waits_for_calls_in_flight(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            call = it.stub.ModelInfer(infer_request("slow"))
            await until(lambda: it.models.waiting)
            stopping = asyncio.get_running_loop().create_task(it.front.stop(20))
            await until(lambda: it.channel.get_state() is not grpc.ChannelConnectivity.CONNECTING)
            waiting = it.models.waiting
            assert waiting is not None
            waiting(InferResponse("slow", "1", "9"), True)
            assert (await call).id == "9"
            await stopping

    run(main())


def test_stop_ends_idle_streams_and_watches(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            watch = it.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
            assert await watch.read() == b"\x08\x01"
            idle, busy = it.stub.ModelStreamInfer(), it.stub.ModelStreamInfer()
            await idle.write(infer_request("echo", id="a"))
            assert (await idle.read()).infer_response.id == "a"
            await busy.write(infer_request("slow", id="b"))
            await until(lambda: it.models.waiting)
            stopping = asyncio.get_running_loop().create_task(it.front.stop(20))
            for call in (watch, idle):
                with pytest.raises(grpc.aio.AioRpcError, match="the server is shutting down"):
                    await call.read()
            waiting = it.models.waiting
            assert waiting is not None
            waiting(InferResponse("slow", "1", "b"), True)
            assert (await busy.read()).infer_response.id == "b"
            with pytest.raises(grpc.aio.AioRpcError, match="the server is shutting down"):
                await busy.read()
            await stopping

    run(main())


@pytest.mark.parametrize(("path", "data"), [(STREAM, b""), ("/grpc.health.v1.Health/Watch", bytes(5))])
def test_stream_opened_before_its_client_knows_of_the_shutdown_ends(tmp_path: Path, path: str, data: bytes) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            client = await it.raw()
            client.ask(1, framed(infer_request("slow").SerializeToString()))
            await until(lambda: it.models.waiting)
            stopping = asyncio.get_running_loop().create_task(it.front.stop(20))
            await client.until(h2.GOAWAY)
            if data:
                client.ask(3, data, path=path)
            else:
                client.begin(3, data, path)
            while b"the server is shutting down" not in await client.until(h2.HEADERS):
                pass
            stopping.cancel()

    run(main())


def test_client_receives_compressed_responses(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path, compression="gzip") as it:
            message = infer_request("echo", bytes(40_000), [10_000])
            answer = await it.stub.ModelInfer(message, compression=grpc.Compression.Gzip)
            assert floats(answer.raw_output_contents[0]) == (0.0,) * 10_000

    run(main())
