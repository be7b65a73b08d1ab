"""`POST /v1/audio/speech` in OpenAI's format, for models of the task `speak`.

Inputs: `TEXT` (BYTES, one text) and the request parameters `format`, `speed` and `voice`. Output: `AUDIO` (BYTES), a
file in that format; decoupled models give it in chunks, which are sent as they come.
"""

from base64 import b64encode
from typing import Any, Final

import msgspec

from forebay.core.errors import Refusal
from forebay.core.serving.values import InferResponse, Tensor
from forebay.modelserver.tasks.contract import Answer, Job, Results, Stream, Task
from forebay.modelserver.tasks.tensors import as_bytes, strings
from forebay.wire.errors import error_event
from forebay.wire.openai_fields import (
    decode,
    ignored_text,
    invalid,
    nested,
    number,
    one_of,
    only,
    shape_of,
    shaped,
    text,
)

TEXT: Final = "TEXT"
AUDIO: Final = "AUDIO"
INPUT_CHARS_MAX: Final = 4096
"""OpenAI's limit."""
SPEED_MIN: Final = 0.25
SPEED_MAX: Final = 4.0
FORMATS: Final = {
    "mp3": b"audio/mpeg",
    "opus": b"audio/opus",
    "aac": b"audio/aac",
    "flac": b"audio/flac",
    "wav": b"audio/wav",
    "pcm": b"audio/pcm",
}
"""Formats with their content types. PCM is 16-bit little-endian, mono, at 24 kHz."""
EVENTS: Final = b"text/event-stream; charset=utf-8"

_encode = msgspec.json.Encoder().encode
_NAME = text(1, 64)
_VOICE = {"id": _NAME}


def _voice(value: Any, path: str) -> str:
    if type(value) is dict:
        found: str = nested(_VOICE, ("id",))(value, path)["id"]
        return found
    if type(value) is not str:
        invalid(path, "the name of a voice, or an object with its 'id'", value)
    name: str = _NAME(value, path)
    return name


BODY: Final = nested(
    {
        "model": text(1),
        "input": text(1, INPUT_CHARS_MAX),
        "voice": shaped(_voice, {"anyOf": [{"type": "string"}, {"type": "object"}]}),
        "response_format": one_of(*FORMATS),
        "speed": number(SPEED_MIN, SPEED_MAX),
        "stream_format": one_of("audio", "sse"),
        "instructions": only(""),
        "user": ignored_text,
    },
    ("model", "input"),
)


def read(body: bytes, _: bytes) -> Job:
    """Parse a request body into a job. Raises `Refusal`."""
    given = BODY(decode(body), "")
    format = given.get("response_format", "mp3")
    tensors = (strings(TEXT, [given["input"]], (1, 1)),)

    def inputs(_low: int, _high: int) -> tuple[Tensor, ...]:
        return tensors

    options = {name: given[name] for name in ("speed", "voice") if name in given}
    stream = _AS_EVENTS if given.get("stream_format") == "sse" else Stream(FORMATS[format], piece_of)
    return Job(given["model"], inputs, _whole, parameters={"format": format, **options}, stream=stream)


def piece_of(response: InferResponse) -> bytes:
    """The audio bytes in a response. Raises `ValueError` if its tensor is malformed."""
    return b"".join([piece for tensor in response.outputs if tensor.name == AUDIO for piece in as_bytes(tensor)])


def _whole(results: Results) -> Answer:
    raise AssertionError("speech is always sent as it is made")


def _event_of(response: InferResponse) -> bytes:
    piece = piece_of(response)
    if not piece:
        return b""
    return b"data: %b\n\n" % _encode({"type": "speech.audio.delta", "audio": b64encode(piece).decode()})


def _done() -> bytes:
    return b'data: {"type":"speech.audio.done"}\n\n'


def _failed(refusal: Refusal) -> bytes:
    return error_event(refusal.code, refusal.text)


_AS_EVENTS: Final = Stream(EVENTS, _event_of, _done, _failed)
TASK: Final[Task] = Task("speak", read, (AUDIO,), shape=shape_of(BODY))
