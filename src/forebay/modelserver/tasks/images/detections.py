"""`POST /v1/images/detections` for models of the task `detect-objects`.

Outputs, one entry per object: `LABEL` (BYTES; empty: no object), `SCORE` (FP32) and `BOX` (FP32: left, top, right and
bottom in pixels), highest score first.
"""

from collections.abc import Iterator
from typing import Any, Final

from forebay.modelserver.tasks.contract import Results, Task
from forebay.modelserver.tasks.images.body import Options, image_task, pixels, rounded, rows
from forebay.wire.openai_fields import integer, number

LABEL: Final = "LABEL"
SCORE: Final = "SCORE"
BOX: Final = "BOX"
THRESHOLD_DEFAULT: Final = 0.5
OBJECTS_MAX: Final = 1000
SIDES: Final = ("xmin", "ymin", "xmax", "ymax")
"""Names as in Hugging Face's pipelines."""


def _describe(results: Results, options: Options) -> Iterator[dict[str, Any]]:
    least = options.get("threshold", THRESHOLD_DEFAULT)
    count = options.get("max_objects", OBJECTS_MAX)
    outputs = (rows(results, LABEL, texts=True), rows(results, SCORE), rows(results, BOX))
    for labels, scores, boxes in zip(*outputs, strict=True):
        found = [
            {
                "label": label,
                "score": rounded(score),
                "box": dict(zip(SIDES, pixels(box), strict=True)),
            }
            for label, score, box in zip(labels, scores, boxes, strict=True)
            if label and score >= least
        ]
        yield {"objects": found[:count]}


TASK: Final[Task] = image_task(
    "detect-objects",
    {"threshold": number(0, 1), "max_objects": integer(1, OBJECTS_MAX)},
    _describe,
    (LABEL, SCORE, BOX),
)
