"""Transcripts, and their encoding in each of the response formats of OpenAI's API."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from forebay.core.serving.values import InferResponse
from forebay.modelserver.tasks.audio.languages import name_of
from forebay.modelserver.tasks.contract import JSON, Answer, ContractViolation
from forebay.modelserver.tasks.tensors import as_array, as_bytes, as_texts

TEXT: Final = "TEXT"
TIMES: Final = "TIMES"
DETAILS: Final = "DETAILS"
LANGUAGE: Final = "LANGUAGE"
DURATION: Final = "DURATION"
PLAIN: Final = b"text/plain; charset=utf-8"

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_words = partial(msgspec.convert, type=list[dict[str, Any]])


class Segment(NamedTuple):
    """A segment of speech. Times are seconds from the start of the file."""

    text: str
    start_s: float
    end_s: float
    details: dict[str, Any]
    """Further fields of the verbose format; includes `words` if requested."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A complete transcript. `language` is empty and `duration_s` 0 if the model does not report them."""

    segments: Sequence[Segment]
    language: str
    duration_s: float

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join([segment.text for segment in self.segments]).strip()

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object for audio."""
        return {"type": "duration", "seconds": self.duration_s}


def segments_of(response: InferResponse) -> list[Segment]:
    """Segments in one response. Raises `ValueError` or `ContractViolation` if its tensors are malformed."""
    found = {tensor.name: tensor for tensor in response.outputs}
    if TEXT not in found:
        raise ContractViolation(f"it gave no '{TEXT}'")
    texts = as_texts(found[TEXT])
    times = [(0.0, 0.0)] * len(texts)
    details: list[dict[str, Any]] = [{} for _ in texts]
    if TIMES in found:
        times = [(round(start, 3), round(end, 3)) for start, end in as_array(found[TIMES]).reshape(-1, 2).tolist()]
    if DETAILS in found:
        details = [_details(each) for each in as_bytes(found[DETAILS])]
    if not len(texts) == len(times) == len(details):
        counts = f"{len(texts)} '{TEXT}', {len(times)} '{TIMES}' and {len(details)} '{DETAILS}'"
        raise ContractViolation(f"it gave {counts}; every segment has one of each")
    return [Segment(text, *span, more) for text, span, more in zip(texts, times, details, strict=True)]


def _details(document: bytes) -> dict[str, Any]:
    try:
        found = _decode(document)
        _words(found.get("words", []))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = f"it gave '{DETAILS}' that are not a JSON object, or whose 'words' are not a list of objects"
        raise ContractViolation(text) from None
    return found


def transcript_of(responses: Sequence[InferResponse]) -> Transcript:
    """The transcript from all responses to a request. Raises as `segments_of`."""
    segments: list[Segment] = []
    language, duration_s = "", 0.0
    for response in responses:
        segments += segments_of(response)
        for tensor in response.outputs:
            if tensor.name == LANGUAGE:
                language = as_texts(tensor)[0]
            elif tensor.name == DURATION:
                duration_s = round(float(as_array(tensor).ravel()[0]), 3)
    return Transcript(segments, language, duration_s)


def as_json(found: Transcript) -> Answer:
    """The text in a JSON object."""
    return Answer(_encode({"text": found.text, "usage": found.usage}))


def as_text(found: Transcript) -> Answer:
    """Plain text."""
    return Answer(f"{found.text}\n".encode(), PLAIN)


def as_subtitles(found: Transcript) -> Answer:
    """SubRip: numbered cues."""
    cues = [f"{number}\n{_cue(segment, ',')}\n" for number, segment in enumerate(found.segments, 1)]
    return Answer("\n".join(cues).encode(), PLAIN)


def as_web_subtitles(found: Transcript) -> Answer:
    """WebVTT."""
    return Answer("\n".join(["WEBVTT\n", *(_cue(segment, ".") + "\n" for segment in found.segments)]).encode(), PLAIN)


def as_verbose(found: Transcript, *, task: str, segments: bool, words: bool) -> Answer:
    """All known fields, with segments, words, or both."""
    body: dict[str, Any] = {
        "task": task,
        "language": name_of(found.language),
        "duration": found.duration_s,
        "text": found.text,
    }
    if words:
        body["words"] = [word for segment in found.segments for word in segment.details.get("words", ())]
    if segments:
        body["segments"] = [
            {"id": number, "start": each.start_s, "end": each.end_s, "text": each.text}
            | {name: value for name, value in each.details.items() if name != "words"}
            for number, each in enumerate(found.segments)
        ]
    return Answer(_encode({**body, "usage": found.usage}), JSON)


def _cue(segment: Segment, point: str) -> str:
    text = segment.text.strip().replace("-->", "->")
    return f"{_clock(segment.start_s, point)} --> {_clock(segment.end_s, point)}\n{text}"


def _clock(time_s: float, point: str) -> str:
    seconds, milliseconds = divmod(round(time_s * 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{milliseconds:03}"
