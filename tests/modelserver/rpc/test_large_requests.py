"""Large tensors that are put into memory that models' processes can map, and messages that are not."""

import asyncio
import random
from pathlib import Path

import grpc
import pytest
from tests.modelserver.rpc.raw import INFER, STREAM, Raw
from tests.modelserver.rpc.rig import Rig, infer_request, rig, until
from tests.net.rig import run
from tritonclient.grpc import service_pb2 as pb

from forebay.modelserver.process.segments import ALIGN, STAGED_BYTES_MIN, where
from forebay.wire.http2 import frames as h2
from forebay.wire.http2.grpc import PREFIX_BYTES, framed, packed

DATA = bytes(range(256)) * 3000
SHAPE = (len(DATA) // 4,)


def offsets(it: Rig) -> list[int | None]:
    """Of each input, where it is in such memory; None: elsewhere."""
    places = [where(memoryview(each.data)) for request in it.models.requests for each in request.inputs]
    return [None if place is None else place[1] for place in places]


def test_large_raw_contents_are_put_into_memory_that_models_can_map(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            for id in ("1", "22", "333"):
                answer = await it.stub.ModelInfer(infer_request("echo", DATA, SHAPE, id=id))
                assert answer.raw_output_contents == [DATA]
            answers = await it.stream([infer_request("echo", DATA, SHAPE, id=id) for id in ("4", "55")])
            assert [each.infer_response.raw_output_contents for each in answers] == [[DATA]] * 2
            assert [at is not None and at % ALIGN for at in offsets(it)] == [0] * 5

    run(main())


def test_all_inputs_of_a_large_request_are_where_its_message_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            request = infer_request("echo", b"1234", (1,))
            for name, data in (("B", DATA), ("C", b"5678")):
                request.inputs.add(name=name, datatype="FP32", shape=[len(data) // 4])
                request.raw_input_contents.append(data)
            await it.stub.ModelInfer(request)
            first, second, third = offsets(it)
            assert first is not None
            assert second is not None
            assert third is not None
            assert first < second < third
            assert second % ALIGN == 0
            assert [bytes(each.data or b"") for each in it.models.requests[0].inputs] == [b"1234", DATA, b"5678"]

    run(main())


def test_small_typed_and_compressed_messages_stay_where_they_are_read(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            small = DATA[: STAGED_BYTES_MIN - 1024]
            await it.stub.ModelInfer(infer_request("echo", small, (len(small) // 4,)))
            typed = infer_request("echo", None, SHAPE)
            typed.inputs[0].contents.fp32_contents.extend([0.5] * SHAPE[0])
            await it.stub.ModelInfer(typed)
            await it.stub.ModelInfer(infer_request("echo", DATA, SHAPE), compression=grpc.Compression.Gzip)
            assert offsets(it) == [None] * 3

    run(main())


@pytest.mark.parametrize("path", ["ModelInfer", "ModelStreamInfer"])
def test_large_message_that_never_ends_is_counted_and_dropped_with_its_call(tmp_path: Path, path: str) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            client = Raw(*await asyncio.open_connection("127.0.0.1", it.front.port))
            it.raws.append(client)
            message = framed(infer_request("echo", DATA, SHAPE).SerializeToString())
            client.begin(1, message[:16_000], f"/inference.GRPCInferenceService/{path}")
            client.send(h2.frame(h2.DATA, 0, 1, message[16_000:32_000]))
            room = it.front.context.room
            await until(lambda: room.taken == 32_000 - 5)
            client.send(h2.frame(h2.RST_STREAM, 0, 1, h2.U32.pack(h2.NO_ERROR)))
            await until(lambda: room.taken == 0)
            again = pb.ModelInferResponse()
            again.CopyFrom(await it.stub.ModelInfer(infer_request("echo", DATA, SHAPE)))
            assert again.raw_output_contents == [DATA]

    run(main())


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_messages_that_wait_to_be_decompressed_are_limited_over_all_calls(tmp_path: Path, path: str) -> None:
    message = packed(
        infer_request("echo", random.Random(1).randbytes(40_000), (10_000,)).SerializeToString(), b"gzip"
    )

    async def main() -> None:
        async with rig(tmp_path, messages_bytes_max=100_000) as it:
            context = it.front.context
            await context.apart.acquire()
            client = await it.raw()
            for id in (1, 3):
                client.ask(id, message, path=path, grpc_encoding="gzip")
            await until(lambda: context.room.taken == 2 * (len(message) - PREFIX_BYTES))
            client.ask(5, message, path=path, grpc_encoding="gzip")
            assert b"have over 100000 bytes" in await client.until(h2.HEADERS)
            context.apart.release()
            assert len(await client.until(h2.DATA)) > 10_000
            await until(lambda: not context.room.taken)

    run(main())
