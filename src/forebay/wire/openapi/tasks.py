"""The endpoints of tasks on tensor models, as operations of documents: shapes of bodies and answers.

Who serves them reads with readers of its own; tests hold the two against each other.
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
    """Tokens of a request; 0: the model does not count them."""

    total_tokens: Count


class RerankDocument(Closed):
    """A text."""

    text: Word


class RerankRequest(Closed):
    """Which documents fit the query best?"""

    model: Word
    query: Word
    documents: Annotated[list[Word | RerankDocument], Meta(min_length=1, max_length=1000)]
    top_n: UpTo1000 | UnsetType | None = UNSET
    return_documents: bool | UnsetType | None = UNSET
    user: str | UnsetType | None = UNSET


class Reranked(Closed):
    """How well one document fits; a higher score is better."""

    index: Count
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankAnswer(Closed):
    """The documents, best first."""

    object: Literal["list"]
    model: str
    results: list[Reranked]
    usage: TotalTokens


class ClassifyRequest(Closed):
    """Texts as `input`, or files as `data` (base64)."""

    model: Word
    input: Word | list[Word] | UnsetType | None = UNSET
    data: Word | list[Word] | UnsetType | None = UNSET
    top_k: UpTo1000 | UnsetType | None = UNSET
    user: str | UnsetType | None = UNSET


class Label(Closed):
    """A label, and how sure the model is."""

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
    """What one input is, or what is in it."""

    index: Count
    labels: list[Label] | UnsetType = UNSET
    entities: list[Entity] | UnsetType = UNSET


class ClassifyAnswer(Closed):
    """What was found, in the order of the inputs."""

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
    """What is billed: seconds of audio."""

    type: Literal["duration"]
    seconds: float


class Transcription(Closed):
    """What was said. All but the text and the usage only with `verbose_json`."""

    text: str
    usage: Duration
    task: Literal["transcribe", "translate"] | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    words: list[dict[str, Any]] | UnsetType = UNSET
    segments: list[dict[str, Any]] | UnsetType = UNSET


class ImageRequest(Closed):
    """One picture or several: files in base64 or as data URLs. In a form, `image` is the file itself."""

    model: Word
    image: Word | Annotated[list[Word], Meta(min_length=1, max_length=64)]
    user: str | UnsetType | None = UNSET


class ImageLabelsRequest(ImageRequest):
    """What is on pictures?"""

    top_k: UpTo1000 | UnsetType | None = UNSET


class ImageObjectsRequest(ImageRequest):
    """Where are things on pictures?"""

    threshold: Share | UnsetType | None = UNSET
    max_objects: UpTo1000 | UnsetType | None = UNSET


class ImageTextRequest(ImageRequest):
    """What is written on pictures?"""

    threshold: Share | UnsetType | None = UNSET


class Picture(Closed, kw_only=True):
    """The picture that was looked at, and its size in pixels if the model tells."""

    index: Count
    width: Count | UnsetType = UNSET
    height: Count | UnsetType = UNSET


class ImageLabels(Picture, kw_only=True):
    """What is on a picture, the surest first."""

    labels: list[Label]


class Box(Closed):
    """A rectangle, pixels."""

    xmin: float
    ymin: float
    xmax: float
    ymax: float


class Object(Closed):
    """A thing on a picture."""

    label: str
    score: float
    box: Box


class ImageObjects(Picture, kw_only=True):
    """What is where on a picture, the surest first."""

    objects: list[Object]


class Segment(Closed):
    """A part of a picture: its share of it, and a grey PNG in base64, 255 where it surely is."""

    label: str
    area: float
    mask: str


class ImageSegments(Picture, kw_only=True):
    """Which part of a picture is what."""

    segments: list[Segment]


class Line(Closed):
    """A line of text; its box are four corners in pixels, from the top left clockwise."""

    text: str
    score: float
    box: list[list[float]]


class ImageText(Picture, kw_only=True):
    """What is written on a picture, in the order in which one reads."""

    text: str
    lines: list[Line]


class ImageLabelsAnswer(Closed):
    """In the order of the pictures."""

    object: Literal["list"]
    model: str
    data: list[ImageLabels]


class ImageObjectsAnswer(Closed):
    """In the order of the pictures."""

    object: Literal["list"]
    model: str
    data: list[ImageObjects]


class ImageSegmentsAnswer(Closed):
    """In the order of the pictures."""

    object: Literal["list"]
    model: str
    data: list[ImageSegments]


class ImageTextAnswer(Closed):
    """In the order of the pictures."""

    object: Literal["list"]
    model: str
    data: list[ImageText]


_SPEECH: Final[Bodies] = {f"audio/{name}": None for name in ("mpeg", "opus", "aac", "flac", "wav", "pcm")}
_TRANSCRIBED: Final[Bodies] = {JSON: Transcription, TEXT: None}
_EVENTS: Final[Bodies] = {EVENTS: ServerSentEvent}

TASKS: Final[Mapping[str, tuple[str, str, Bodies, Bodies]]] = {
    "/v1/rerank": (
        "rerank",
        "Sort documents by how well they fit a query.",
        {JSON: RerankRequest},
        {JSON: RerankAnswer},
    ),
    "/v1/classify": (
        "classify",
        "Say what texts or files are, or what is in texts.",
        {JSON: ClassifyRequest},
        {JSON: ClassifyAnswer},
    ),
    "/v1/audio/transcriptions": (
        "transcribe",
        "Write down what is said. With `stream`, as events.",
        {FORM: TranscriptionForm},
        {**_TRANSCRIBED, **_EVENTS},
    ),
    "/v1/audio/translations": (
        "translate",
        "Write down in English what is said.",
        {FORM: TranslationForm},
        _TRANSCRIBED,
    ),
    "/v1/audio/speech": (
        "speak",
        "Speak a text: the file is sent as it is made. With `stream_format: sse`, as events.",
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
        "Read what is written on pictures.",
        {JSON: ImageTextRequest, FORM: ImageTextRequest},
        {JSON: ImageTextAnswer},
    ),
}
"""By path: id, text, bodies and answers. `/v1/embeddings` is described where other models serve it."""
