"""Large tensors that are read into memory that models' processes can map, and bodies that are not."""

import asyncio
import contextlib
import gc
import gzip
import random
import weakref

import msgspec
import pytest
from tests.modelserver.http.rig import fp32, json_of, parts, rig
from tests.net.rig import peer, post, run, until

from forebay.modelserver.http import inferring
from forebay.modelserver.process.segments import ALIGN, STAGED_BYTES_MIN, where


@pytest.fixture(autouse=True, params=["at once", "in a thread"])
def _where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are read at once, or in a thread, as if they were long."""
    if request.param == "in a thread":
        monkeypatch.setattr(inferring, "UNPACKED_AT_ONCE_BYTES_MAX", 0)
        monkeypatch.setattr(inferring, "JSON_AT_ONCE_BYTES_MAX", 0)


@pytest.mark.parametrize("raw", [False, True])
def test_large_binary_tensors_are_read_into_memory_that_models_can_map(raw: bool) -> None:
    data = bytes(range(256)) * 3000

    async def main() -> None:
        async with rig() as it:
            document = {
                "inputs": [fp32(None, [len(data) // 4], binary_data_size=len(data))],
                "parameters": {"binary_data_output": True},
            }
            for _ in range(2):
                answer = await it.infer("echo", b"" if raw else document, data)
                assert parts(answer)[1] == data
            for request in it.models.requests:
                place = where(memoryview(request.inputs[0].data))
                assert place is not None
                assert place[1] % ALIGN == 0

    run(main())


def test_large_bodies_of_other_kinds_stay_where_they_are_read() -> None:
    async def main() -> None:
        async with rig() as it:
            numbers = [0.5] * 100_000
            assert json_of(await it.infer("echo", {"inputs": [fp32(numbers, [100_000])]}))["outputs"]
            document = {"inputs": [fp32(None, [50_000], binary_data_size=200_000)]}
            text = msgspec.json.encode({**document, "parameters": {"binary_data_output": True}})
            packed = gzip.compress(text + random.Random(0).randbytes(200_000))
            assert len(packed) > STAGED_BYTES_MIN
            head = {"Inference_Header_Content_Length": str(len(text)), "Content_Encoding": "gzip"}
            assert (await it.ask("POST", "/v2/models/echo/infer", packed, **head)).status == 200
            assert [where(memoryview(each.inputs[0].data)) for each in it.models.requests] == [None, None]
            for length in ("-1", "1000001", "9" * 30):
                head = {"Inference_Header_Content_Length": length}
                refused = await it.ask("POST", "/v2/models/echo/infer", bytes(1_000_000), **head)
                assert "inference header size should be in range (0, 1000000)" in json_of(refused)["error"]

    run(main())


def test_large_bodies_of_other_endpoints_are_read_whatever_their_headers() -> None:
    async def main() -> None:
        async with rig() as it:
            parameters = {"config": "{" + " " * STAGED_BYTES_MIN + "}"}
            body = msgspec.json.encode({"parameters": parameters})
            loaded = await it.ask(
                "POST", "/v2/repository/models/echo/load", body, Inference_Header_Content_Length=str(len(body))
            )
            assert loaded.status == 200
            assert it.models.loads == [("echo", parameters)]

    run(main())


def test_inputs_of_a_failed_request_are_freed_with_it() -> None:
    async def main() -> None:
        async with rig() as it:
            document = {"inputs": [fp32(None, [50_000], binary_data_size=200_000)]}
            gc.disable()
            assert (await it.infer("wrong", document, bytes(200_000))).status == 503
            gone = weakref.ref(memoryview(it.models.requests.pop().inputs[0].data).obj)
            await asyncio.sleep(0)
            gc.enable()
            assert gone() is None

    run(main())


@pytest.mark.interpreted
def test_bodies_that_wait_to_be_read_in_a_thread_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    body = msgspec.json.encode({"inputs": [fp32([0.5] * 1000, [1000])]})
    monkeypatch.setattr(inferring, "UNPACKED_AT_ONCE_BYTES_MAX", 0)
    monkeypatch.setattr(inferring, "JSON_AT_ONCE_BYTES_MAX", 0)
    monkeypatch.setattr(inferring, "WAITING_BODIES_BYTES_MAX", 2 * len(body))

    async def main() -> None:
        async with rig() as it, contextlib.AsyncExitStack() as leaving:
            reading = it.front._infer
            await reading._apart.acquire()
            waiting = [await leaving.enter_async_context(peer(it.server.port)) for _ in range(2)]
            for each in waiting:
                each.send(post(body, target=b"/v2/models/echo/infer"))
            await until(lambda: reading.reading_bytes == 2 * len(body))
            refused = await it.ask("POST", "/v2/models/echo/infer", body)
            assert (refused.status, "too many large requests" in json_of(refused)["error"]) == (503, True)
            reading._apart.release()
            assert [(await each.answer()).status for each in waiting] == [200, 200]
            assert reading.reading_bytes == 0

    run(main())
