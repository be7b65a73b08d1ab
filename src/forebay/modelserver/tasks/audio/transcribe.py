"""`POST /v1/audio/transcriptions` and `/v1/audio/translations` in OpenAI's format, for the task `transcribe`.

Inputs: `AUDIO` (BYTES, the unchanged file) and the request parameters `language`, `prompt`, `temperature`,
`translate` and `words`. Output: segments, `TEXT` (BYTES, any number); optionally `TIMES` (FP32, start and end of each
in seconds), `DETAILS` (BYTES, a JSON object for each with OpenAI's field names), `LANGUAGE` (BYTES, a code
or a name) and `DURATION` (FP32, seconds). Decoupled models may give segments one by one, for streaming.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from forebay.core.errors import Code, Refusal
from forebay.core.serving.values import InferResponse, Parameter, Tensor
from forebay.modelserver.tasks.audio.transcript import (
    DETAILS,
    DURATION,
    LANGUAGE,
    TEXT,
    TIMES,
    Segment,
    Transcript,
    as_json,
    as_subtitles,
    as_text,
    as_verbose,
    as_web_subtitles,
    segments_of,
    transcript_of,
)
from forebay.modelserver.tasks.contract import Answer, Job, Results, Stream, Task
from forebay.modelserver.tasks.tensors import strings
from forebay.wire.errors import error_event
from forebay.wire.forms.multipart import Form, read_form
from forebay.wire.openai_fields import (
    Reader,
    boolean,
    ignored_text,
    invalid,
    missing,
    number,
    object_shape,
    one_of,
    only,
    read,
    shaped,
    text,
    unsupported,
)

AUDIO: Final = "AUDIO"
FILE: Final = "file"
PROMPT_CHARS_MAX: Final = 4096
"""More than Whisper uses, which is 224 tokens."""
LANGUAGE_CHARS_MAX: Final = 16
GRANULARITIES: Final = "timestamp_granularities[]"
EVENTS: Final = b"text/event-stream; charset=utf-8"

_encode = msgspec.json.Encoder().encode
_GRANULARITY = one_of("word", "segment")


def _several(reader: Reader) -> Reader:
    def read_all(value: Any, path: str) -> list[Any]:
        return [reader(one, path) for one in value]

    return shaped(read_all, {"type": "array"})


_NUMBERS: Final = frozenset({"temperature"})
_FLAGS: Final = {"true": True, "false": False, "True": True, "False": False}
_LISTS: Final = {"timestamp_granularities": GRANULARITIES, GRANULARITIES: GRANULARITIES, "include[]": "include[]"}
"""Repeated form fields; names without brackets come from clients that encode forms incorrectly."""
TRANSLATION_FIELDS: Final[dict[str, Reader]] = {
    "model": text(1),
    "prompt": text(0, PROMPT_CHARS_MAX),
    "response_format": one_of("json", "text", "srt", "verbose_json", "vtt"),
    "temperature": number(0, 1),
    "user": ignored_text,
}
TRANSCRIPTION_FIELDS: Final[dict[str, Reader]] = {
    **TRANSLATION_FIELDS,
    "language": text(1, LANGUAGE_CHARS_MAX),
    GRANULARITIES: _several(_GRANULARITY),
    "stream": boolean,
    "chunking_strategy": only("auto"),
    "include[]": _several(only()),
}


def read_transcription(body: bytes, content_type: bytes) -> Job:
    """Parse a request body into a job. Raises `Refusal`."""
    return _job(body, content_type, TRANSCRIPTION_FIELDS, "transcribe")


def read_translation(body: bytes, content_type: bytes) -> Job:
    """As `read_transcription`, but for English text whatever language is spoken. Raises `Refusal`."""
    return _job(body, content_type, TRANSLATION_FIELDS, "translate")


def _job(body: bytes, content_type: bytes, fields: dict[str, Reader], task: str) -> Job:
    form = read_form(content_type, body)
    given = read(_values(form), "", fields, ("model",))
    file = form.files.get(FILE)
    if file is None:
        missing(FILE)
    if not file.data:
        raise Refusal(Code.INVALID_REQUEST, "'file' is empty.", FILE)
    for name in form.files:
        if name != FILE:  # such as an option that was sent with a filename: it must not seem to have been used
            text = f"Files other than '{FILE}' are not taken; found '{name[:100]}'."
            raise Refusal(Code.INVALID_REQUEST, text, name[:100])
    form_name = given.get("response_format", "json")
    granularities = given.get(GRANULARITIES) or ["segment"]
    if GRANULARITIES in given and form_name != "verbose_json":
        unsupported(GRANULARITIES, "it needs the response_format 'verbose_json'.")
    parameters: dict[str, Parameter] = {
        name: given[name] for name in ("language", "prompt", "temperature") if name in given
    }
    if task == "translate":
        parameters["translate"] = True
    if "word" in granularities:
        parameters["words"] = True
    answer = _FORMATS.get(form_name) or partial(
        as_verbose, task=task, segments="segment" in granularities, words="word" in granularities
    )
    stream = None
    if given.get("stream", False):
        if form_name not in ("json", "text"):
            unsupported("stream", f"the response_format '{form_name}' is a whole document; ask for 'json' or 'text'.")
        stream = _Telling().stream
    tensors = (strings(AUDIO, [file.data], (1, 1)),)

    def inputs(_low: int, _high: int) -> tuple[Tensor, ...]:
        return tensors

    return Job(
        given["model"],
        inputs,
        partial(_answer, answer, task),
        param=FILE,
        parameters=parameters,
        stream=stream,
    )


def _values(form: Form) -> dict[str, Any]:
    """The fields of the form, typed as in JSON. Raises `Refusal`."""
    found: dict[str, Any] = {}
    for name, values in form.fields.items():
        if name in _LISTS:
            found.setdefault(_LISTS[name], []).extend(values)
        elif len(values) > 1:
            raise Refusal(Code.INVALID_REQUEST, f"'{name}' is given more than once.", name)
        elif name in _NUMBERS:
            found[name] = _number(values[0], name)
        elif name == "stream":
            found[name] = _FLAGS.get(values[0], values[0])
        elif name == FILE:
            invalid(name, "a file (a part with a filename)", values[0])
        else:
            found[name] = values[0]
    return found


def _number(value: str, path: str) -> float:
    try:
        return msgspec.json.decode(value, type=float)
    except msgspec.DecodeError:
        invalid(path, "a number", value)


def _answer(write: Callable[[Transcript], Answer], task: str, results: Results) -> Answer:
    found = transcript_of(results.responses)
    if task == "translate":
        found = Transcript(found.segments, "english", found.duration_s)
    return write(found)


class _Telling:
    """Streams a transcript as events, one per response."""

    def __init__(self) -> None:
        self._said: list[Segment] = []
        self.stream = Stream(EVENTS, self._piece, self._last, self._failed)

    def _piece(self, response: InferResponse) -> bytes:
        fresh = segments_of(response)
        delta = "".join([segment.text for segment in fresh])
        if not self._said:
            delta = delta.lstrip()
        self._said += fresh
        return _event({"type": "transcript.text.delta", "delta": delta}) if delta else b""

    def _last(self) -> bytes:
        return _event({"type": "transcript.text.done", "text": Transcript(self._said, "", 0.0).text})

    def _failed(self, refusal: Refusal) -> bytes:
        return error_event(refusal.code, refusal.text)


def _event(document: dict[str, str]) -> bytes:
    return b"data: %b\n\n" % _encode(document)


_FORMATS: Final[dict[str, Callable[[Transcript], Answer]]] = {
    "json": as_json,
    "text": as_text,
    "srt": as_subtitles,
    "vtt": as_web_subtitles,
}
_EXTRAS: Final = (TIMES, DETAILS, LANGUAGE, DURATION)
TRANSCRIPTION: Final[Task] = Task(
    "transcribe", read_transcription, (TEXT,), _EXTRAS, object_shape(TRANSCRIPTION_FIELDS, ("model",)), forms=True
)
TRANSLATION: Final[Task] = Task(
    "transcribe", read_translation, (TEXT,), _EXTRAS, object_shape(TRANSLATION_FIELDS, ("model",)), forms=True
)
