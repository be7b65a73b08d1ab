"""Transcriptions and translations: forms in, transcripts in every format out."""

import json
from contextlib import suppress
from typing import Any

import httpx
import pytest
from tests.modelserver.tasks.audio.rig import FakeAudioModels, floats, response, speaking, texts
from tests.net.rig import run

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, InferResponse, Tensor

pytestmark = pytest.mark.slow

OUTPUTS = ("TEXT", "TIMES", "DETAILS", "LANGUAGE", "DURATION")
AUDIO = {"file": ("a.wav", b"RIFF")}


def transcript_in_two_segments(request: InferRequest) -> list[InferResponse | None]:
    """Two segments, one after the other, and the end."""
    about = {"LANGUAGE": texts("en"), "DURATION": floats(3725.5)}
    words = [{"word": "there", "start": 3600.0, "end": 3601.5}]
    return [
        response(TEXT=texts(" Hello"), TIMES=floats(0.0, 1.25, shape=(1, 2)), DETAILS=texts('{"seek":0}'), **about),
        response(
            TEXT=texts(" there --> you."),
            TIMES=floats(3600.0, 3725.0625, shape=(1, 2)),
            DETAILS=texts(json.dumps({"seek": 9, "words": words})),
            **about,
        ),
        response(TEXT=texts(), TIMES=floats(shape=(0, 2)), DETAILS=texts(), **about),
    ]


def ask(
    fields: dict[str, Any], path: str = "/transcriptions", model: Any = transcript_in_two_segments
) -> tuple[Any, FakeAudioModels]:
    """The answer to a form, and what the model was asked."""
    shelf = FakeAudioModels("transcribe", OUTPUTS, model)
    got: list[Any] = []

    async def main() -> None:
        async with speaking(shelf) as client:
            got.append(await client.post(path, data={"model": "m", **fields}, files=AUDIO))

    run(main())
    return got[0], shelf


@pytest.mark.parametrize(
    ("form", "kind", "body"),
    [
        (
            "json",
            "application/json",
            '{"text":"Hello there --> you.","usage":{"type":"duration","seconds":3725.5}}',
        ),
        ("text", "text/plain; charset=utf-8", "Hello there --> you.\n"),
        (
            "srt",
            "text/plain; charset=utf-8",
            "1\n00:00:00,000 --> 00:00:01,250\nHello\n\n2\n01:00:00,000 --> 01:02:05,062\nthere -> you.\n",
        ),
        (
            "vtt",
            "text/plain; charset=utf-8",
            "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nHello\n\n01:00:00.000 --> 01:02:05.062\nthere -> you.\n",
        ),
    ],
)
def test_transcript_has_the_requested_format(form: str, kind: str, body: str) -> None:
    answer, _ = ask({"response_format": form})
    assert (answer.status_code, answer.headers["content-type"], answer.text) == (200, kind, body)


SEGMENTS = [
    {"id": 0, "start": 0.0, "end": 1.25, "text": " Hello", "seek": 0},
    {"id": 1, "start": 3600.0, "end": 3725.062, "text": " there --> you.", "seek": 9},
]
WORDS = [{"word": "there", "start": 3600.0, "end": 3601.5}]


@pytest.mark.parametrize(
    ("asked", "has", "words"),
    [
        ([], {"segments": SEGMENTS}, False),
        (["segment"], {"segments": SEGMENTS}, False),
        (["word"], {"words": WORDS}, True),
        (["word", "segment"], {"segments": SEGMENTS, "words": WORDS}, True),
    ],
)
@pytest.mark.parametrize("name", ["timestamp_granularities[]", "timestamp_granularities"])
def test_verbose_json_has_the_requested_granularities(
    name: str, asked: list[str], has: dict[str, Any], words: bool
) -> None:
    answer, shelf = ask({"response_format": "verbose_json", name: asked})
    about = {"task": "transcribe", "language": "english", "duration": 3725.5, "text": "Hello there --> you."}
    assert answer.json() == {**about, **has, "usage": {"type": "duration", "seconds": 3725.5}}
    assert shelf.requests[0].parameters == ({"words": True} if words else {})


@pytest.mark.parametrize(
    ("reported", "named"), [("de", "german"), ("yue", "cantonese"), ("english", "english"), ("tlh", "tlh")]
)
def test_language_is_named_as_by_openai(reported: str, named: str) -> None:
    answer, _ = ask(
        {"response_format": "verbose_json"}, model=lambda _: [response(TEXT=texts("a"), LANGUAGE=texts(reported))]
    )
    assert answer.json()["language"] == named


def test_model_receives_the_file_and_the_options() -> None:
    given = {"language": "en", "prompt": "Names: Ærø", "temperature": "0.5", "stream": "false", "user": "u"}
    answer, shelf = ask({**given, "chunking_strategy": "auto"})
    (request,) = shelf.requests
    assert answer.status_code == 200
    assert request.inputs == (Tensor("AUDIO", Datatype.BYTES, (1,), b"\4\0\0\0RIFF"),)
    assert request.outputs == OUTPUTS
    assert request.parameters == {"language": "en", "prompt": "Names: Ærø", "temperature": 0.5}


def test_translation_has_language_english() -> None:
    answer, shelf = ask({"response_format": "verbose_json"}, "/translations")
    assert answer.json()["task"] == "translate"
    assert answer.json()["language"] == "english"
    assert shelf.requests[0].parameters == {"translate": True}


@pytest.mark.parametrize("flag", ["true", "True"])
def test_stream_sends_segments_and_then_the_full_text(flag: str) -> None:
    answer, _ = ask({"stream": flag})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert events == [
        {"type": "transcript.text.delta", "delta": "Hello"},
        {"type": "transcript.text.delta", "delta": " there --> you."},
        {"type": "transcript.text.done", "text": "Hello there --> you."},
    ]


def test_text_is_the_only_required_output() -> None:
    for form, body in (
        ("json", '{"text":"a b","usage":{"type":"duration","seconds":0.0}}'),
        ("srt", "1\n00:00:00,000 --> 00:00:00,000\na\n\n2\n00:00:00,000 --> 00:00:00,000\nb\n"),
    ):
        answer, _ = ask({"response_format": form}, model=lambda _: [response(TEXT=texts("a", " b"))])
        assert answer.text == body


def test_silence_is_an_empty_transcript() -> None:
    for form, body in (("text", "\n"), ("srt", ""), ("vtt", "WEBVTT\n")):
        answer, _ = ask({"response_format": form}, model=lambda _: [response(TEXT=texts())])
        assert (answer.status_code, answer.text) == (200, body)


@pytest.mark.parametrize(
    ("details", "says"),
    [
        ((b"no JSON", b"{}"), "are not a JSON object"),
        ((b"[]", b"{}"), "are not a JSON object"),
        ((b"\xff", b"{}"), "are not a JSON object"),
        ((b'{"words": 5}', b"{}"), "'words' are not a list"),
        ((b'{"words": [5]}', b"{}"), "'words' are not a list"),
        ((b"{}",), "2 'TEXT', 2 'TIMES' and 1 'DETAILS'"),
    ],
)
def test_model_that_violates_its_contract_is_named(details: tuple[bytes, ...], says: str) -> None:
    def wrong(_: InferRequest) -> list[InferResponse | None]:
        return [response(TEXT=texts("a", "b"), DETAILS=texts(*details))]

    answer, _ = ask({"response_format": "verbose_json"}, model=wrong)

    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert message.startswith("The model 'm' violates the contract of its task: it gave ")
    assert says in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": "0_1"}, "temperature"),
        ({"temperature": "1.5"}, "temperature"),
        ({"language": ""}, "language"),
        ({"language": "x" * 17}, "language"),
        ({"prompt": "x" * 4097}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"stream": "yes"}, "stream"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"timestamp_granularities[]": "letter", "response_format": "verbose_json"}, "timestamp_granularities[]"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]"),
        ({"include[]": "logprobs"}, "include[]"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy"),
        ({"file": "text"}, "file"),
        ({"volume": "11"}, "volume"),
        ({"model": ""}, "model"),
        ({"model": "other"}, "model"),
    ],
)
def test_invalid_field_is_named_in_the_error(fields: dict[str, Any], param: str) -> None:
    answer, shelf = ask(fields)
    assert answer.status_code == (404 if fields.get("model") == "other" else 400)
    assert answer.json()["error"]["param"] == param
    assert not shelf.requests


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], "Missing"),
        ([("file", ("a", b""))], "empty"),
        ([("file", ("a", b"a")), ("file", ("b", b"b"))], "given more than once"),
    ],
)
def test_form_without_exactly_one_audio_file_is_rejected(files: list[Any], says: str) -> None:
    shelf = FakeAudioModels("transcribe", OUTPUTS, transcript_in_two_segments)
    got: list[Any] = []

    async def main() -> None:
        async with speaking(shelf) as client:
            got.append(await client.post("/transcriptions", data={"model": "m"}, files=[("x", ("x", b"x")), *files]))

    run(main())
    assert got[0].json()["error"]["param"] == "file"
    assert says in got[0].json()["error"]["message"]


def test_option_that_comes_as_a_file_is_rejected_rather_than_ignored() -> None:
    shelf = FakeAudioModels("transcribe", OUTPUTS, transcript_in_two_segments)
    got: list[Any] = []

    async def main() -> None:
        async with speaking(shelf) as client:
            files = {**AUDIO, "prompt": ("prompt.txt", b"names")}
            got.append(await client.post("/transcriptions", data={"model": "m"}, files=files))

    run(main())
    assert (got[0].status_code, got[0].json()["error"]["param"]) == (400, "prompt")
    assert not shelf.requests


@pytest.mark.parametrize(
    ("text", "param"), [("file: not audio", "file"), ("language: unknown", "language"), ("no such thing", "file")]
)
@pytest.mark.parametrize("stream", ["true", "false"])
def test_model_error_can_name_the_invalid_field(text: str, param: str, stream: str) -> None:
    def refuse(_: InferRequest) -> list[InferResponse | None]:
        return [InferResponse("m", "1", "", error=Refused(Kind.INVALID_ARGUMENT, text))]

    answer, _ = ask({"stream": stream}, model=refuse)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_failed_stream_sends_an_error_event_and_is_aborted() -> None:
    def stumble(request: InferRequest) -> list[InferResponse | None]:
        return [
            transcript_in_two_segments(request)[0],
            InferResponse("m", "1", "", error=Refused(Kind.INTERNAL, "lost the thread")),
        ]

    shelf = FakeAudioModels("transcribe", OUTPUTS, stumble)
    got: list[bytes] = []

    async def main() -> None:
        form = {"model": "m", "stream": "true"}
        async with (
            speaking(shelf) as client,
            client.stream("POST", "/transcriptions", data=form, files=AUDIO) as answer,
        ):
            with suppress(httpx.RemoteProtocolError):
                async for piece in answer.aiter_raw():
                    got.append(piece)
                got.append(b"came to its end")

    run(main())
    assert b"The model 'm' failed" in got[-1]
    assert shelf.tickets[0].cancelled
