"""Outputs that take long to classify: in a thread, in order, and not too many at once."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.modelserver.rpc.rig import Rig, infer_request, rig, until
from tests.net.rig import run
from tritonclient.grpc import service_pb2 as pb

from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.rpc import calls
from forebay.wire.oip.infer_answer import CLASSIFIED_AT_ONCE_MAX

MANY = CLASSIFIED_AT_ONCE_MAX + 1
SIZE = 4 * MANY


def classified(model: str = "echo", **more: Any) -> Any:
    """A request whose output takes long to classify."""
    message = infer_request(model, bytes(SIZE), [MANY], **more)
    message.outputs.add(name="OUT").parameters["classification"].int64_param = MANY
    return message


def told(answers: list[Any]) -> list[tuple[str, int, bool | str]]:
    """Id, number of outputs or of classes, and whether it is the last, or the error."""
    found = []
    for answer in answers:
        inside = answer.infer_response
        count = inside.outputs[0].shape[0] if inside.outputs else 0
        last = answer.error_message or inside.parameters["triton_final_response"].bool_param
        found.append((inside.id, count, last))
    return found


async def others_are_answered(it: Rig) -> bool:
    """Whether the server does something else meanwhile."""
    return bool((await it.stub.ServerLive(pb.ServerLiveRequest())).live)


def test_other_requests_are_answered_while_a_large_output_is_classified(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it, asyncio.TaskGroup() as group:
            context = it.front.context
            await context.apart.acquire()
            call = it.stub.ModelInfer(classified(id="1"))
            streamed = group.create_task(it.stream([classified(id="2"), infer_request("echo", id="3")]))
            await until(lambda: context.waiting_bytes == 2 * SIZE)
            assert await others_are_answered(it)
            context.apart.release()
            assert (await call).outputs[0].shape == [MANY]
            assert told(await streamed) == [("2", MANY, True), ("3", 4, True)]
            await until(lambda: not context.waiting_bytes)

    run(main())


def test_responses_do_not_overtake_one_that_is_being_classified(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            found = await it.stream([classified("split", id="1"), classified("twice", id="2")])
            assert told(found) == [("1", MANY, False), ("2", MANY, False), ("2", MANY, True)]

    run(main())


def test_a_model_that_is_unloaded_meanwhile_has_given_its_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise Refused(Kind.UNAVAILABLE, "unloaded")

    async def main() -> None:
        async with rig(tmp_path) as it, asyncio.TaskGroup() as group:
            context = it.front.context
            await context.apart.acquire()
            message = classified("batches")
            message.inputs[0].shape[:] = [1, MANY]
            alone, streamed = it.stub.ModelInfer(message), group.create_task(it.stream([message]))
            await until(lambda: context.waiting_bytes == 2 * SIZE)
            monkeypatch.setattr(it.models, "labels", gone)
            context.apart.release()
            found = [await alone, (await streamed)[0].infer_response]
            assert [each.raw_output_contents[0].count(b":1:dog") for each in found] == [1, 1]

    run(main())


@pytest.mark.interpreted
def test_too_many_large_outputs_to_classify_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "WAITING_BYTES_MAX", SIZE)

    async def main() -> None:
        async with rig(tmp_path) as it:
            context = it.front.context
            await context.apart.acquire()
            first = it.stub.ModelInfer(classified())
            await until(lambda: context.waiting_bytes == SIZE)
            refused = ("UNAVAILABLE", "too many large outputs are being classified")
            assert await it.code("ModelInfer", classified()) == refused
            assert told(await it.stream([classified(id="1")])) == [("1", 0, refused[1])]
            context.apart.release()
            assert (await first).outputs[0].shape == [MANY]

    run(main())


def test_outputs_of_calls_that_have_ended_are_not_classified(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            context = it.front.context
            await context.apart.acquire()
            stream = it.stub.ModelStreamInfer(timeout=20)
            await stream.write(classified())
            call = it.stub.ModelInfer(classified())
            await until(lambda: context.waiting_bytes == 2 * SIZE)
            call.cancel()
            stream.cancel()
            assert await others_are_answered(it)
            context.apart.release()
            await until(lambda: not context.waiting_bytes)
            assert await stream.code() is grpc.StatusCode.CANCELLED

    run(main())
