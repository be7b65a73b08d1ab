"""`POST /v1/images/segmentations` for models of the task `segment-image`.

Outputs, one entry per segment: `LABEL` (BYTES), `AREA` (FP32, its share of the image) and `MASK` (BYTES, a grey PNG
of the image's size, 255 where the segment certainly is).
"""

from base64 import b64encode
from collections.abc import Iterator
from typing import Any, Final

from forebay.modelserver.tasks.contract import Results, Task
from forebay.modelserver.tasks.images.body import Options, image_task, rounded, rows

LABEL: Final = "LABEL"
AREA: Final = "AREA"
MASK: Final = "MASK"


def _describe(results: Results, _: Options) -> Iterator[dict[str, Any]]:
    outputs = (rows(results, LABEL, texts=True), rows(results, AREA), rows(results, MASK))
    for labels, areas, masks in zip(*outputs, strict=True):
        yield {
            "segments": [
                {"label": label, "area": rounded(area), "mask": b64encode(mask).decode()}
                for label, area, mask in zip(labels, areas, masks, strict=True)
            ]
        }


TASK: Final[Task] = image_task("segment-image", {}, _describe, (LABEL, AREA, MASK))
