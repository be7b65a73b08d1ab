"""Server reflection, over a real channel and from bytes alone."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from tests.modelserver.rpc.rig import Rig, rig
from tests.net.rig import run
from tests.wire.http2.peer import window

from forebay.modelserver.rpc import reflection
from forebay.modelserver.rpc.described import REFLECTION, REQUEST, RESPONSE, Described
from forebay.wire.http2 import frames as h2
from forebay.wire.http2.grpc import framed, packed

SERVICES = ["grpc.health.v1.Health", *(f"{each}.ServerReflection" for each in REFLECTION)]
DESCRIBED = Described()


def path(package: str) -> str:
    return f"/{package}.ServerReflection/ServerReflectionInfo"


def question(package: str = REFLECTION[0], **asked: Any) -> bytes:
    return bytes(DESCRIBED.message(f"{package}.{REQUEST}")(**asked).SerializeToString())


async def ask(it: Rig, package: str, questions: Sequence[bytes], **options: Any) -> list[Any]:
    """All answers of a stream."""

    async def sent() -> AsyncIterator[bytes]:
        for each in questions:
            yield each

    response = DESCRIBED.message(f"{package}.{RESPONSE}")
    call = it.channel.stream_stream(path(package), response_deserializer=response.FromString)
    return [answer async for answer in call(sent(), **options)]


@pytest.mark.parametrize("package", REFLECTION)
def test_client_can_build_every_listed_service(tmp_path: Path, package: str) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            (listed,) = await ask(it, package, [question(package, host="here", list_services="*")])
            assert listed.valid_host == listed.original_request.host == "here"
            names = [each.name for each in listed.list_services_response.service]
            assert names == [*SERVICES, "inference.GRPCInferenceService"]
            answers = await ask(it, package, [question(package, file_containing_symbol=name) for name in names])
            for name, answer in zip(names, answers, strict=True):
                pool = DescriptorPool()
                for raw in reversed(answer.file_descriptor_response.file_descriptor_proto):
                    pool.AddSerializedFile(raw)
                assert pool.FindServiceByName(name).methods

    run(main())


def test_health_service_matches_its_descriptor(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            answer = DESCRIBED.message("grpc.health.v1.HealthCheckResponse")
            check = it.channel.unary_unary("/grpc.health.v1.Health/Check", response_deserializer=answer.FromString)
            assert (await check(b"")).status == answer.ServingStatus.Value("SERVING")

    run(main())


@pytest.mark.parametrize(
    ("asked", "files"),
    [
        ({"file_by_filename": "grpc_service.proto"}, ["grpc_service.proto", "model_config.proto"]),
        ({"file_by_filename": "model_config.proto"}, ["model_config.proto"]),
        ({"file_containing_symbol": "inference.ModelConfig"}, ["model_config.proto"]),
        (
            {"file_containing_symbol": "inference.GRPCInferenceService.ModelInfer"},
            ["grpc_service.proto", "model_config.proto"],
        ),
        ({"file_containing_symbol": "grpc.health.v1.HealthCheckResponse"}, ["grpc/health/v1/health.proto"]),
        ({"file_by_filename": "google/protobuf/descriptor.proto"}, 5),
        ({"file_by_filename": "../../etc/passwd"}, 5),
        ({"file_containing_symbol": "google.protobuf.FileDescriptorProto"}, 5),
        ({"file_containing_symbol": ""}, 5),
        ({"file_containing_symbol": "inference"}, 5),
        ({"file_containing_extension": {"containing_type": "inference.ModelConfig", "extension_number": 1}}, 5),
        ({"all_extension_numbers_of_type": "inference.ModelConfig"}, []),
        ({"all_extension_numbers_of_type": "inference.None"}, 5),
        ({}, 3),
    ],
    ids=str,
)
def test_query_returns_files_or_an_error(asked: dict[str, Any], files: list[str] | int) -> None:
    raw = reflection.Answers(DESCRIBED, REFLECTION[0]).answer(question(**asked))
    answer = DESCRIBED.message(f"{REFLECTION[0]}.{RESPONSE}").FromString(raw)
    if isinstance(files, int):
        assert (answer.error_response.error_code, bool(answer.error_response.error_message)) == (files, True)
    else:
        found = answer.file_descriptor_response.file_descriptor_proto
        assert [FileDescriptorProto.FromString(each).name for each in found] == files
        assert not answer.HasField("error_response")


def test_queries_on_an_open_stream_are_answered_one_by_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            call = it.channel.stream_stream(path(REFLECTION[1]))()
            for _ in range(2):
                await call.write(question(file_by_filename="none"))
                assert b"not found" in await call.read()
            await call.done_writing()
            assert await call.read() == grpc.aio.EOF
            assert await ask(it, REFLECTION[0], []) == []

    run(main())


def test_queries_can_be_compressed(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            raw = await it.raw()
            asked = packed(question(file_by_filename="none"), b"gzip")
            raw.ask(1, asked + asked, path=path(REFLECTION[0]), grpc_encoding="gzip")
            for _ in range(2):
                assert b"not found" in await raw.until(h2.DATA)
            await raw.until(h2.HEADERS)
            raw.ask(3, asked[:-1], path=path(REFLECTION[0]), grpc_encoding="gzip")
            assert b"the stream ends within a message" in await raw.until(h2.HEADERS)

    run(main())


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"\xff", "INVALID_ARGUMENT"), (bytes(reflection.QUESTION_BYTES_MAX + 1), "RESOURCE_EXHAUSTED")],
    ids=["no message", "too long"],
)
def test_invalid_query_ends_the_stream(tmp_path: Path, data: bytes, code: str) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(it, REFLECTION[0], [question(list_services=""), data])
            assert refused.value.code().name == code

    run(main())


@pytest.mark.interpreted
def test_client_not_reading_its_responses_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflection, "UNSENT_BYTES_MAX", 100_000)

    async def main() -> None:
        async with rig(tmp_path) as it:
            raw = await it.raw()
            raw.ask(1, framed(question(file_by_filename="grpc_service.proto")) * 30, path=path(REFLECTION[0]))
            for _ in range(4):  # the window that HTTP/2 begins with
                await raw.until(h2.DATA)
            raw.send(window(0, 2**24), window(1, 2**24))
            found = await raw.until(h2.HEADERS)
            assert b"does not read its responses" in found

    run(main())


def test_reflection_streams_end_at_shutdown(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            call = it.channel.stream_stream(path(REFLECTION[0]))()
            await call.write(question(list_services=""))
            assert b"GRPCInferenceService" in await call.read()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(it.front.stop(10))
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()
                assert refused.value.code().name == "UNAVAILABLE"
                await it.channel.close()

    run(main())
