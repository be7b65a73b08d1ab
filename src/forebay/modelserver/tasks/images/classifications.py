"""`POST /v1/images/classifications` for models of the task `classify-image`.

Output: `SCORE` (FP32, one per class and row); the output's label file names the classes.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from forebay.modelserver.tasks.contract import Results, Task
from forebay.modelserver.tasks.images.body import Options, image_task, rounded, rows
from forebay.wire.openai_fields import integer

SCORE: Final = "SCORE"
LABELS_DEFAULT: Final = 5
LABELS_MAX: Final = 1000


def _describe(results: Results, options: Options) -> Iterator[dict[str, Any]]:
    count = options.get("top_k", LABELS_DEFAULT)
    labels = results.labels(SCORE)
    for scores in rows(results, SCORE):
        flat = scores.ravel()
        best = np.argsort(-flat, kind="stable")[:count].tolist()
        names = [labels[i] if i < len(labels) else str(i) for i in best]
        pairs = zip(names, flat[best], strict=True)
        yield {"labels": [{"label": name, "score": rounded(score)} for name, score in pairs]}


TASK: Final[Task] = image_task("classify-image", {"top_k": integer(1, LABELS_MAX)}, _describe, (SCORE,))
