"""Responses that take long to serialise as JSON or to classify: size limit, pending limit, client disconnects."""

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from tests.modelserver.http.rig import json_of, rig
from tests.net.rig import peer, post, run, until

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferResponse, Tensor
from forebay.modelserver.http.inferring import WAITING_ANSWERS
from forebay.wire.oip.infer_answer import CLASSIFIED_AT_ONCE_MAX

LONG = 300_000
"""Elements of FP32 that become JSON in a thread."""


def _long(*, binary: bool = False) -> tuple[dict[str, Any], bytes]:
    parameters = {"binary_data_size": 4 * LONG}
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [LONG], "parameters": parameters}]
    return {"inputs": inputs, "parameters": {"binary_data_output": binary}}, bytes(4 * LONG)


def test_json_response_over_the_limit_is_rejected_with_a_hint_at_binary() -> None:
    async def main() -> None:
        async with rig(json_output_bytes_max=4 * LONG - 1) as it:
            refused = await it.infer("echo", *_long())
            assert refused.status == 400
            assert f"{4 * LONG} bytes of tensors to be written as JSON" in json_of(refused)["error"]
            assert "'binary_data': true, or use --http-max-json-output-size" in json_of(refused)["error"]
            assert (await it.infer("echo", *_long(binary=True))).body.endswith(bytes(4 * LONG))
        async with rig(json_output_bytes_max=3) as it:
            assert (await it.ask("POST", "/v2/models/one/generate", b'{"prompt":"hi"}')).status == 400

    run(main())


def test_large_responses_of_one_batch_are_bounded() -> None:
    async def main() -> None:
        async with rig(json_output_bytes_max=4 * LONG) as it, contextlib.AsyncExitStack() as leaving:
            responds: list[Any] = []
            for _ in range(WAITING_ANSWERS + 2):
                client = await leaving.enter_async_context(peer(it.server.port))
                client.send(post(b'{"inputs":[]}', target=b"/v2/models/slow/infer"))
                await until(lambda: len(it.models.requests) > len(responds))
                assert it.models.waiting is not None
                responds.append((client, it.models.waiting))
            out = Tensor("OUT", Datatype.FP32, (LONG,), bytes(4 * LONG))
            for _, respond in responds:
                respond(InferResponse("slow", "1", "", (out,)), True)
            statuses = [(await client.answer()).status for client, _ in responds]
            assert sorted(statuses) == [200] * WAITING_ANSWERS + [503] * 2

    run(main())


def test_pending_large_responses_are_bounded_and_released_on_disconnect() -> None:
    async def main() -> None:
        async with rig(json_output_bytes_max=4 * LONG) as it:
            inferring = it.front._infer
            async with contextlib.AsyncExitStack() as leaving:
                await inferring._apart.acquire()
                head, body = _long()
                text = msgspec.json.encode(head)
                length = b"inference-header-content-length: %d" % len(text)
                for n in range(WAITING_ANSWERS):
                    other = await leaving.enter_async_context(peer(it.server.port))
                    other.send(post(text + body, length, target=b"/v2/models/echo/infer"))
                    await until(lambda n=n: inferring.waiting_bytes == 4 * LONG * (n + 1))  # type: ignore[misc]
                refused = await it.infer("echo", head, body)
                assert (refused.status, "too many large responses" in json_of(refused)["error"]) == (503, True)
            inferring._apart.release()
            await until(lambda: not inferring.waiting_bytes)
            assert len(json_of(await it.infer("echo", head, body))["outputs"][0]["data"]) == LONG

    run(main())


def test_outputs_with_many_classes_are_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def unloaded(*_: object) -> None:
        raise Refused(Kind.UNAVAILABLE, "unloaded")

    async def main() -> None:
        async with rig() as it:
            inferring, many = it.front._infer, CLASSIFIED_AT_ONCE_MAX + 1
            await inferring._apart.acquire()
            inputs = [
                {"name": "IN", "datatype": "FP32", "shape": [many], "parameters": {"binary_data_size": 4 * many}}
            ]
            head = {"inputs": inputs, "outputs": [{"name": "OUT", "parameters": {"classification": many}}]}
            async with asyncio.TaskGroup() as group:
                answer = group.create_task(it.infer("echo", head, bytes(4 * many)))
                await until(lambda: inferring.waiting_bytes == 4 * many)
                monkeypatch.setattr(it.models, "labels", unloaded)
                inferring._apart.release()
            assert json_of(answer.result())["outputs"][0]["shape"] == [many]

    run(main())
