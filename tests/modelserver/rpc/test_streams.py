"""gRPC streams: response order, errors that do not end a stream, limits, and dropped frames."""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.modelserver.rpc.raw import STREAM
from tests.modelserver.rpc.rig import FOUR, Rig, infer_request, rig, text_request, until
from tests.net.rig import run
from tests.wire.http2.peer import window

from forebay.core.serving.values import InferRequest, InferResponse, OnResponse, Tensor, Ticket
from forebay.modelserver.rpc import streaming
from forebay.wire.http2 import frames as h2
from forebay.wire.http2.grpc import framed

EMPTY_FINAL = {"triton_enable_empty_final_response": True}


def summary(answer: Any) -> tuple[str, str, bool | None]:
    """Id, text (a word, or an error), and whether the response is the last."""
    inside = answer.infer_response
    final = inside.parameters["triton_final_response"].bool_param if inside.parameters else None
    if answer.error_message:
        return inside.id, f"! {answer.error_message}", final
    words = [raw[4:].decode(errors="replace") for raw in inside.raw_output_contents]
    return inside.id, ",".join(words), final


def test_decoupled_responses_are_streamed_as_they_come(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            found = await it.stream([text_request("words", "a b", id="1")])
            assert [summary(each) for each in found] == [("1", "a", False), ("1", "b", False)]
            found = await it.stream([text_request("words", "a", id="1", parameters=EMPTY_FINAL)])
            assert [summary(each) for each in found] == [("1", "a", False), ("1", "", True)]
            assert (found[1].infer_response.model_name, found[1].infer_response.model_version) == ("words", "")
            assert await it.stream([text_request("words", "")]) == []
            found = await it.stream([text_request("words", "a fail", id="1")])
            assert [summary(each) for each in found] == [("1", "a", False), ("1", "! lost the thread", False)]

    run(main())


def test_failing_request_does_not_end_the_stream(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            messages = [
                infer_request("echo", id="1"), infer_request("none", id="2"), infer_request("echo", None, id="3"),
                infer_request("wrong", id="4"), infer_request("buggy", id="5"), infer_request("echo", id="6"),
            ]  # fmt: skip
            found = [summary(each)[:2] for each in await it.stream(messages)]
            assert [id for id, _ in found] == ["1", "2", "3", "4", "5", "6"]
            assert [text for _, text in found if text.startswith("!")] == [
                "! Request for unknown model: 'none' is not found",
                "! unable to find data for input tensor 'IN' for model 'echo' in request.",
                "! the model gave up",
                "! internal error",
            ]

    run(main())


def test_error_of_a_model_ends_the_stream_with_its_status_if_the_client_wants_that(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            words = text_request("words", "a b fail", id="3")
            ended = asyncio.Event()

            async def sent() -> AsyncIterator[Any]:
                for message in (infer_request("none", id="1"), infer_request("slow", id="2"), words):
                    yield message
                await ended.wait()

            call = it.stub.ModelStreamInfer(sent(), metadata=[("triton_grpc_error", "true")])
            found = [summary(await call.read())[:2] for _ in range(3)]
            text = "! Request for unknown model: 'none' is not found"
            assert found == [("1", text), ("3", "a"), ("3", "b")]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            ended.set()
            assert (raised.value.code().name, raised.value.details()) == ("INTERNAL", "lost the thread")
            assert it.models.tickets[0].cancelled

    run(main())


def test_a_stream_without_requests_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            assert await it.stream([]) == []

    run(main())


class HeldRequests:
    """Requests of the model `slow`, answered when a test says so."""

    def __init__(self, it: Rig) -> None:
        self.waiting: list[tuple[InferRequest, OnResponse]] = []
        self.cancelled: list[str] = []
        it.models.infer = self.infer  # type: ignore[method-assign]

    def infer(self, request: InferRequest, on_response: OnResponse) -> Ticket:
        self.waiting.append((request, on_response))
        return _Ticket(self, request.id)

    def answer(self, id: str) -> None:
        (found,) = [pair for pair in self.waiting if pair[0].id == id]
        self.waiting.remove(found)
        request, on_response = found
        on_response(
            InferResponse(request.model, "1", id, (Tensor("OUT", request.inputs[0].datatype, (4,), FOUR),)), True
        )

    @property
    def ids(self) -> list[str]:
        return [request.id for request, _ in self.waiting]


class _Ticket:
    def __init__(self, held: HeldRequests, id: str) -> None:
        self._held = held
        self._id = id

    def cancel(self) -> None:
        self._held.cancelled.append(self._id)


class ClientStream:
    """The client of a stream that is written and read step by step."""

    def __init__(self, it: Rig) -> None:
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        self.call = it.stub.ModelStreamInfer(self._sent())

    async def _sent(self) -> AsyncIterator[Any]:
        while (message := await self._out.get()) is not None:
            yield message

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._out.put_nowait(message)

    async def read(self) -> str:
        return str((await self.call.read()).infer_response.id)


def test_responses_of_non_decoupled_models_keep_request_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            held, line = HeldRequests(it), ClientStream(it)
            line.send(*(infer_request("slow", id=id) for id in "abc"), None)
            await until(lambda: held.ids == ["a", "b", "c"])
            for id in "cba":
                held.answer(id)
            assert [await line.read() for _ in range(3)] == ["a", "b", "c"]
            assert await line.call.read() is grpc.aio.EOF

    run(main())


def test_cancelled_stream_cancels_all_its_requests(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            held, line = HeldRequests(it), ClientStream(it)
            line.send(*(infer_request("slow", id=id) for id in "abc"))
            await until(lambda: held.ids == ["a", "b", "c"])
            line.call.cancel()
            await until(lambda: sorted(held.cancelled) == ["a", "b", "c"])

    run(main())


@pytest.mark.interpreted
def test_requests_in_flight_per_stream_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "UNDER_WAY_MAX", 2)

    async def main() -> None:
        async with rig(tmp_path) as it:
            held, line = HeldRequests(it), ClientStream(it)
            line.send(*(infer_request("slow", id=id) for id in "abcd"), None)
            for first, second in ("ab", "bc", "cd"):
                await until(lambda first=first, second=second: held.ids == [first, second])
                held.answer(first)
                assert await line.read() == first
            held.answer("d")
            assert await line.read() == "d"

    run(main())


@pytest.mark.interpreted
def test_responses_that_wait_for_an_earlier_one_count_as_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "UNDER_WAY_MAX", 3)

    async def main() -> None:
        async with rig(tmp_path) as it:
            held, line = HeldRequests(it), ClientStream(it)
            line.send(*(infer_request("slow", id=id) for id in "abcdef"), None)
            await until(lambda: held.ids == ["a", "b", "c"])
            held.answer("b")
            held.answer("c")
            for _ in range(20):
                await asyncio.sleep(0)
            assert held.ids == ["a"]
            held.answer("a")
            assert [await line.read() for _ in range(3)] == ["a", "b", "c"]
            await until(lambda: held.ids == ["d", "e", "f"])
            for id in "fed":
                held.answer(id)
            assert [await line.read() for _ in range(3)] == ["d", "e", "f"]
            assert await line.call.read() is grpc.aio.EOF

    run(main())


@pytest.mark.interpreted
@pytest.mark.parametrize(("limit", "most"), [("UNSENT_MAX", 20), ("UNSENT_BYTES_MAX", 20_000)])
def test_stream_of_a_slow_reader_is_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(streaming, limit, most)

    async def main() -> None:
        async with rig(tmp_path) as it:
            client = await it.raw()
            client.send(h2.settings({h2.WINDOW: 7}))
            client.ask(1, framed(text_request("words", "word " * 500).SerializeToString()), path=STREAM)
            assert b"grpc-status" not in await client.until(h2.HEADERS)
            begin = await client.until(h2.DATA)
            await until(lambda: all(ticket.cancelled for ticket in it.models.tickets))
            client.send(window(1, 2**20))
            (size,) = h2.U32.unpack_from(begin, 1)
            assert len(await client.until(h2.DATA)) == size + 5 - 7  # a message that has begun is sent whole
            assert b"grpc-status\x018" in await client.until(h2.HEADERS)
            monkeypatch.undo()
            assert len(await it.stream([text_request("words", "word " * 500)])) == 500

    run(main())


@pytest.mark.interpreted
def test_waiting_requests_hold_back_flow_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "UNDER_WAY_MAX", 2)

    async def main() -> None:
        async with rig(tmp_path) as it:
            held, client = HeldRequests(it), await it.raw()
            messages = b"".join(framed(infer_request("slow", id=str(n)).SerializeToString()) for n in range(100))
            client.ask(1, messages, path=STREAM)
            await until(lambda: held.ids == ["0", "1"])
            (link,) = it.front._server._links
            (stream,) = link._session.streams.values()
            assert stream.unread > 0
            for n in range(100):
                held.answer(str(n))
            assert stream.unread == 0
            assert b"grpc-status\x010" in (await client.until(h2.HEADERS) and await client.until(h2.HEADERS))

    run(main())


def test_invalid_message_ends_the_stream(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            held, client = HeldRequests(it), await it.raw()
            for id, (data, status) in enumerate(((framed(b"\xff"), b"\x013"), (b"\0\0\0\0\x09x", b"\x0213")), 1):
                client.ask(2 * id - 1, framed(infer_request("slow", id="a").SerializeToString()) + data, path=STREAM)
                assert b"grpc-status" + status in await client.until(h2.HEADERS)
                assert (held.cancelled, held.ids) == (["a"], ["a"])  # of the second stream nothing was begun

    run(main())


def test_stream_deadline_cancels_its_requests(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            held, client = HeldRequests(it), await it.raw()
            client.ask(1, framed(infer_request("slow", id="a").SerializeToString()), path=STREAM, grpc_timeout="1m")
            assert b"grpc-status\x014" in await client.until(h2.HEADERS)
            assert held.cancelled == ["a"]
            held.answer("a")

    run(main())


# --- frames


def frame(id: str, waiting_max: int) -> Any:
    return infer_request("slow", id=id, parameters={"forebay_drop_oldest": waiting_max})


def test_drop_oldest_drops_waiting_frames_and_keeps_response_order(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            held, line = HeldRequests(it), ClientStream(it)
            line.send(frame("a", 2))
            await until(lambda: held.ids == ["a"])
            line.send(*(frame(id, 2) for id in "bcdef"), infer_request("slow", id="z"), None)
            await until(lambda: held.ids == ["a", "z"])  # all have come
            for id in "zaef":
                await until(lambda id=id: id in held.ids)
                held.answer(id)
            answers = [await line.call.read() for _ in range(7)]
            assert [each.infer_response.id for each in answers] == list("abcdefz")
            assert [each.infer_response.id for each in answers if each.error_message] == list("bcd")
            assert it.models.dropped_ids == list("bcd")
            assert await line.call.read() is grpc.aio.EOF

    run(main())


def test_dropped_frames_release_their_pixels_before_their_response_is_due(tmp_path: Path) -> None:
    def alive() -> set[str]:
        return {each.id for each in gc.get_objects() if type(each) is InferRequest and each.id}

    async def main() -> None:
        async with rig(tmp_path) as it:
            held, line = HeldRequests(it), ClientStream(it)
            line.send(frame("a", 1))
            await until(lambda: held.ids == ["a"])
            line.send(*(frame(id, 1) for id in "bcde"), infer_request("slow", id="z"), None)
            await until(lambda: held.ids == ["a", "z"])
            assert alive() == {"a", "e", "z"}
            for id in "aez":
                await until(lambda id=id: id in held.ids)
                held.answer(id)
            assert [await line.read() for _ in range(6)] == list("abcdez")

    gc.collect()
    run(main())


def test_drop_oldest_runs_one_frame_per_instance(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            it.models.abreast = 3
            held, line = HeldRequests(it), ClientStream(it)
            line.send(*(frame(id, 1) for id in "abcdef"), infer_request("slow", id="z"), None)
            await until(lambda: held.ids == ["a", "b", "c", "z"])  # all have come
            held.answer("c")
            await until(lambda: held.ids == ["a", "b", "z", "f"])
            for id in "fzba":
                held.answer(id)
            answers = [await line.call.read() for _ in range(7)]
            assert [each.infer_response.id for each in answers] == list("abcdefz")
            assert [each.infer_response.id for each in answers if each.error_message] == list("de")

    run(main())


def test_cancelled_stream_is_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    def turns() -> int:
        return sum(type(each).__name__ == "_Turn" for each in gc.get_objects())

    async def main() -> None:
        async with rig(tmp_path) as it:
            held, line = HeldRequests(it), ClientStream(it)
            line.send(frame("a", 2), frame("b", 2), infer_request("slow", id="z"))
            await until(lambda: held.ids == ["a", "z"])
            gc.disable()
            line.call.cancel()
            await until(lambda: sorted(held.cancelled) == ["a", "z"])
            held.waiting.clear()
            try:
                await until(lambda: not turns())
            finally:
                gc.enable()

    gc.collect()
    run(main())


def test_negative_drop_oldest_is_rejected(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            (answer,) = await it.stream([frame("a", -1)])
            assert answer.error_message == "invalid value for 'forebay_drop_oldest', expected value >= 0."
            assert it.models.requests == []

    run(main())


def test_drop_oldest_of_zero_accepts_frames_only_when_idle(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            held, line = HeldRequests(it), ClientStream(it)
            line.send(frame("a", 0))
            await until(lambda: held.ids == ["a"])
            line.send(frame("b", 0), infer_request("slow", id="c"))
            await until(lambda: held.ids == ["a", "c"])
            held.answer("a")
            held.answer("c")
            assert [await line.read() for _ in range(3)] == ["a", "b", "c"]
            line.send(frame("d", 0), None)
            await until(lambda: held.ids == ["d"])
            held.answer("d")
            assert await line.read() == "d"

    run(main())


def test_rejected_frame_does_not_block_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            found = await it.stream([
                infer_request("none", id="1", parameters={"forebay_drop_oldest": 3}),
                infer_request("wrong", id="2", parameters={"forebay_drop_oldest": 3}),
                infer_request("echo", id="3", parameters={"forebay_drop_oldest": 3}),
            ])  # fmt: skip
            assert [(each.infer_response.id, bool(each.error_message)) for each in found] == [
                ("1", True), ("2", True), ("3", False),
            ]  # fmt: skip

    run(main())
