"""`POST /v1/images/ocr` for models of the task `read-text`.

Outputs, one entry per line in reading order: `TEXT` (BYTES), `SCORE` (FP32) and `BOX` (FP32, four corners in pixels,
clockwise from the top left).
"""

from collections.abc import Iterator
from typing import Any, Final

from forebay.modelserver.tasks.contract import Results, Task
from forebay.modelserver.tasks.images.body import Options, image_task, pixels, rounded, rows
from forebay.wire.openai_fields import number

TEXT: Final = "TEXT"
SCORE: Final = "SCORE"
BOX: Final = "BOX"


def _describe(results: Results, options: Options) -> Iterator[dict[str, Any]]:
    least = options.get("threshold", 0.0)
    outputs = (rows(results, TEXT, texts=True), rows(results, SCORE), rows(results, BOX))
    for texts, scores, boxes in zip(*outputs, strict=True):
        lines = [
            {"text": text, "score": rounded(score), "box": pixels(box)}
            for text, score, box in zip(texts, scores, boxes, strict=True)
            if text and score >= least
        ]
        yield {"text": "\n".join(line["text"] for line in lines), "lines": lines}


TASK: Final[Task] = image_task("read-text", {"threshold": number(0, 1)}, _describe, (TEXT, SCORE, BOX))
