"""All task endpoints, by path."""

from collections.abc import Mapping
from typing import Final

from forebay.modelserver.tasks import classify, embed, rerank
from forebay.modelserver.tasks.audio import speak, transcribe
from forebay.modelserver.tasks.contract import Task
from forebay.modelserver.tasks.images import classifications, detections, segmentations
from forebay.modelserver.tasks.images import texts as written

TASKS: Final[Mapping[str, Task]] = {
    "/v1/embeddings": embed.TASK,
    "/v1/rerank": rerank.TASK,
    "/v1/classify": classify.TASK,
    "/v1/audio/transcriptions": transcribe.TRANSCRIPTION,
    "/v1/audio/translations": transcribe.TRANSLATION,
    "/v1/audio/speech": speak.TASK,
    "/v1/images/classifications": classifications.TASK,
    "/v1/images/detections": detections.TASK,
    "/v1/images/segmentations": segmentations.TASK,
    "/v1/images/ocr": written.TASK,
}
