"""The operations of task endpoints on tensor models: shapes of bodies and responses.

The server parses requests with readers of its own; tests compare the two.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, UnsetType, field

from forebay.wire.openapi.answers import Closed, Count, ServerSentEvent
from forebay.wire.openapi.document import EVENTS, JSON, TEXT

FORM: Final = "multipart/form-data"
Word = Annotated[str, Meta(min_length=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
UpTo1000 = Annotated[int, Meta(ge=1, le=1000)]
Bodies = Mapping[str, type | None]


class TotalTokens(Closed):
    """Token counts of a request; 0: the model does not count them."""

    total_tokens: Count


class RerankTokens(TotalTokens):
    """Token counts of a request, and of how many documents the model has read only a part."""

    truncated_documents: Count | UnsetType = UNSET


class RerankDocument(Closed):
    """A text."""

    text: Word


class RerankRequest(Closed):
    """A query, and documents to be ranked by it."""

    model: Word
    query: Annotated[str, Meta(min_length=1, max_length=100_000)]
    documents: Annotated[list[Word | RerankDocument], Meta(min_length=1, max_length=1000)]
    top_n: UpTo1000 | UnsetType | None = UNSET
    return_documents: bool | UnsetType | None = UNSET
    truncate: bool | UnsetType | None = UNSET
    user: str | UnsetType | None = UNSET


class Reranked(Closed):
    """The score of one document; a higher score is better."""

    index: Count
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET


class RerankAnswer(Closed):
    """The documents, best first."""

    object: Literal["list"]
    model: str
    results: list[Reranked]
    usage: RerankTokens


class ClassifyRequest(Closed):
    """Texts as `input`, or files as `data` (base64)."""

    model: Word
    input: Word | list[Word] | UnsetType | None = UNSET
    data: Word | list[Word] | UnsetType | None = UNSET
    top_k: UpTo1000 | UnsetType | None = UNSET
    user: str | UnsetType | None = UNSET


class Label(Closed):
    """A label with its score."""

    label: str
    score: float | UnsetType = UNSET


class Entity(Closed):
    """A piece of a text, from character `start` to before `end`."""

    entity_group: str
    word: str
    start: Count
    end: Count
    score: float | UnsetType = UNSET


class Classified(Closed):
    """The classification of one input, or the entities in it."""

    index: Count
    labels: list[Label] | UnsetType = UNSET
    entities: list[Entity] | UnsetType = UNSET


class ClassifyAnswer(Closed):
    """The results, in the order of the inputs."""

    object: Literal["list"]
    model: str
    data: list[Classified]


class SpeechRequest(Closed):
    """A text to be spoken."""

    model: Word
    input: Annotated[str, Meta(min_length=1, max_length=4096)]
    voice: str | dict[str, str] | UnsetType | None = UNSET
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | UnsetType | None = UNSET
    speed: Annotated[float, Meta(ge=0.25, le=4)] | UnsetType | None = UNSET
    stream_format: Literal["audio", "sse"] | UnsetType | None = UNSET
    instructions: Literal[""] | UnsetType | None = UNSET
    user: str | UnsetType | None = UNSET


class TranslationForm(Closed):
    """A file with speech, in any format that the model reads; the text is English."""

    model: Word
    file: str
    prompt: Annotated[str, Meta(max_length=4096)] | UnsetType = UNSET
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | UnsetType = UNSET
    temperature: Share | UnsetType = UNSET
    user: str | UnsetType = UNSET


class TranscriptionForm(TranslationForm):
    """A file with speech, in any format that the model reads."""

    language: Annotated[str, Meta(min_length=1, max_length=16)] | UnsetType = UNSET
    granularities: list[Literal["word", "segment"]] | UnsetType = field(
        name="timestamp_granularities[]", default=UNSET
    )
    stream: bool | UnsetType = UNSET
    chunking_strategy: Literal["auto"] | UnsetType = UNSET
    include: Annotated[list[str], Meta(max_length=0)] | UnsetType = field(name="include[]", default=UNSET)


class Duration(Closed):
    """The billed amount: seconds of audio."""

    type: Literal["duration"]
    seconds: float


class Transcription(Closed):
    """The transcript. All but the text and the usage only with `verbose_json`."""

    text: str
    usage: Duration
    task: Literal["transcribe", "translate"] | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    words: list[dict[str, Any]] | UnsetType = UNSET
    segments: list[dict[str, Any]] | UnsetType = UNSET


class ImageRequest(Closed):
    """One or more images: files in base64 or as data URLs. In a form, `image` is the file itself."""

    model: Word
    image: Word | Annotated[list[Word], Meta(min_length=1, max_length=64)]
    user: str | UnsetType | None = UNSET


class ImageLabelsRequest(ImageRequest):
    """An image classification request."""

    top_k: UpTo1000 | UnsetType | None = UNSET


class ImageObjectsRequest(ImageRequest):
    """An object detection request."""

    threshold: Share | UnsetType | None = UNSET
    max_objects: UpTo1000 | UnsetType | None = UNSET


class ImageTextRequest(ImageRequest):
    """A text recognition request."""

    threshold: Share | UnsetType | None = UNSET


class Picture(Closed, kw_only=True):
    """The image, and its size in pixels if the model reports it."""

    index: Count
    width: Count | UnsetType = UNSET
    height: Count | UnsetType = UNSET


class ImageLabels(Picture, kw_only=True):
    """The labels of an image, the most confident first."""

    labels: list[Label]


class Box(Closed):
    """A rectangle, in pixels."""

    xmin: float
    ymin: float
    xmax: float
    ymax: float


class Object(Closed):
    """A detected object."""

    label: str
    score: float
    box: Box


class ImageObjects(Picture, kw_only=True):
    """The objects in an image, the most confident first."""

    objects: list[Object]


class Segment(Closed):
    """A segment of an image: its share of the area, and a grey PNG mask in base64, 255 where it is most certain."""

    label: str
    area: float
    mask: str


class ImageSegments(Picture, kw_only=True):
    """The segments of an image."""

    segments: list[Segment]


class Line(Closed):
    """A line of text; its box is four corners in pixels, clockwise from the top left."""

    text: str
    score: float
    box: list[list[float]]


class ImageText(Picture, kw_only=True):
    """The text in an image, in reading order."""

    text: str
    lines: list[Line]


class ImageLabelsAnswer(Closed):
    """In the order of the images."""

    object: Literal["list"]
    model: str
    data: list[ImageLabels]


class ImageObjectsAnswer(Closed):
    """In the order of the images."""

    object: Literal["list"]
    model: str
    data: list[ImageObjects]


class ImageSegmentsAnswer(Closed):
    """In the order of the images."""

    object: Literal["list"]
    model: str
    data: list[ImageSegments]


class ImageTextAnswer(Closed):
    """In the order of the images."""

    object: Literal["list"]
    model: str
    data: list[ImageText]


_SPEECH: Final[Bodies] = {f"audio/{name}": None for name in ("mpeg", "opus", "aac", "flac", "wav", "pcm")}
_TRANSCRIBED: Final[Bodies] = {JSON: Transcription, TEXT: None}
_EVENTS: Final[Bodies] = {EVENTS: ServerSentEvent}

TASKS: Final[Mapping[str, tuple[str, str, Bodies, Bodies]]] = {
    "/v1/rerank": (
        "rerank",
        "Rank documents by their relevance to a query.",
        {JSON: RerankRequest},
        {JSON: RerankAnswer},
    ),
    "/v1/classify": (
        "classify",
        "Classify texts or files, or find entities in texts.",
        {JSON: ClassifyRequest},
        {JSON: ClassifyAnswer},
    ),
    "/v1/audio/transcriptions": (
        "transcribe",
        "Transcribe speech. With `stream`, as events.",
        {FORM: TranscriptionForm},
        {**_TRANSCRIBED, **_EVENTS},
    ),
    "/v1/audio/translations": (
        "translate",
        "Translate speech to English text.",
        {FORM: TranslationForm},
        _TRANSCRIBED,
    ),
    "/v1/audio/speech": (
        "speak",
        "Synthesise speech: the audio file is streamed. With `stream_format: sse`, as events.",
        {JSON: SpeechRequest},
        {**_SPEECH, **_EVENTS},
    ),
    "/v1/images/classifications": (
        "classifyImages",
        "Say what is on pictures.",
        {JSON: ImageLabelsRequest, FORM: ImageLabelsRequest},
        {JSON: ImageLabelsAnswer},
    ),
    "/v1/images/detections": (
        "detectObjects",
        "Find things on pictures.",
        {JSON: ImageObjectsRequest, FORM: ImageObjectsRequest},
        {JSON: ImageObjectsAnswer},
    ),
    "/v1/images/segmentations": (
        "segmentImages",
        "Cut pictures into their parts.",
        {JSON: ImageRequest, FORM: ImageRequest},
        {JSON: ImageSegmentsAnswer},
    ),
    "/v1/images/ocr": (
        "readImages",
        "Recognise text in images.",
        {JSON: ImageTextRequest, FORM: ImageTextRequest},
        {JSON: ImageTextAnswer},
    ),
}
"""By path: id, text, bodies and responses. `/v1/embeddings` is described with the models of other servers."""
