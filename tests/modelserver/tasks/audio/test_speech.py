"""Speech: text in, chunks of an audio file out as they are produced."""

import asyncio
import json
from base64 import b64decode
from typing import Any

import pytest
from tests.modelserver.tasks.audio.rig import FakeAudioModels, response, speaking, texts
from tests.net.rig import run, until

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, InferResponse
from forebay.modelserver.tasks import response_stream
from forebay.modelserver.tasks.audio.speak import FORMATS

BODY = {"model": "m", "input": "Hello.", "voice": "alloy"}


def speech_in_two_chunks(_: InferRequest) -> list[InferResponse | None]:
    """A file in two pieces."""
    return [response(AUDIO=texts(b"RIFF\0")), response(AUDIO=texts(b"\xffmore", b"!")), None]


def ask(body: dict[str, Any], model: Any = speech_in_two_chunks) -> tuple[Any, FakeAudioModels]:
    """The answer to a body, and what the model was asked."""
    shelf = FakeAudioModels("speak", ("AUDIO",), model)
    got: list[Any] = []

    async def main() -> None:
        async with speaking(shelf) as client:
            got.append(await client.post("/speech", json={**BODY, **body}))

    run(main())
    return got[0], shelf


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_speech_has_the_requested_format(format: str | None) -> None:
    answer, shelf = ask({} if format is None else {"response_format": format})
    assert answer.content == b"RIFF\0\xffmore!"
    assert answer.headers["content-type"] == FORMATS[format or "mp3"].decode()
    assert shelf.requests[0].parameters == {"format": format or "mp3", "voice": "alloy"}
    assert bytes(shelf.requests[0].inputs[0].data) == b"\6\0\0\0Hello."


def test_voice_and_speed_are_passed_to_the_model() -> None:
    _, shelf = ask({"voice": {"id": "joe"}, "speed": 2, "instructions": "", "user": "u"})
    assert shelf.requests[0].parameters == {"format": "mp3", "voice": "joe", "speed": 2.0}


def test_speech_can_be_streamed_as_events() -> None:
    answer, _ = ask(
        {"stream_format": "sse"}, lambda request: [response(AUDIO=texts()), *speech_in_two_chunks(request)]
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert [b64decode(event["audio"]) for event in events[:-1]] == [b"RIFF\0", b"\xffmore!"]
    assert events[-1] == {"type": "speech.audio.done"}


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_failure_before_the_first_chunk_is_an_error_response(stream_format: str) -> None:
    failed = Refused(Kind.INVALID_ARGUMENT, "voice: 'bob' is not here")
    answer, _ = ask({"stream_format": stream_format}, lambda _: [InferResponse("m", "1", "", error=failed)])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "voice")


def test_failure_during_an_event_stream_aborts_it() -> None:
    failed = InferResponse("m", "1", "", error=Refused(Kind.INTERNAL, "hoarse"))
    with pytest.raises(Exception, match="peer closed"):
        ask({"stream_format": "sse"}, lambda request: [speech_in_two_chunks(request)[0], failed])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": "x" * 4097}, "input"),
        ({"voice": 1}, "voice"),
        ({"voice": ""}, "voice"),
        ({"voice": {"name": "x"}}, "voice.name"),
        ({"speed": 0.1}, "speed"),
        ({"speed": 4.1}, "speed"),
        ({"response_format": "midi"}, "response_format"),
        ({"stream_format": "film"}, "stream_format"),
        ({"instructions": "Whisper."}, "instructions"),
        ({"model": None}, "model"),
        ({"pitch": 1}, "pitch"),
    ],
)
def test_invalid_field_is_named_in_the_error(fields: dict[str, Any], param: str) -> None:
    answer, shelf = ask(fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not shelf.requests


SIZE = 1 << 20


def test_slow_client_receives_the_complete_file() -> None:
    shelf = FakeAudioModels("speak", ("AUDIO",), lambda _: [*[response(AUDIO=texts(b"x" * SIZE))] * 16, None])
    got = 0

    async def main() -> None:
        nonlocal got
        async with speaking(shelf) as client, client.stream("POST", "/speech", json=BODY) as answer:
            async for piece in answer.aiter_raw():
                got += len(piece)
                await asyncio.sleep(0)

    run(main())
    assert got == 16 * SIZE


def test_stalled_client_is_disconnected_at_the_buffer_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_stream, "HELD_BYTES_MAX", 4 * SIZE)
    shelf = FakeAudioModels("speak", ("AUDIO",), lambda _: [*[response(AUDIO=texts(b"x" * SIZE))] * 40, None])

    async def main() -> None:
        async with speaking(shelf) as client, client.stream("POST", "/speech", json=BODY) as answer:
            await until(lambda: shelf.tickets[0].cancelled)
            with pytest.raises(Exception, match="peer closed"):
                await answer.aread()

    run(main())
