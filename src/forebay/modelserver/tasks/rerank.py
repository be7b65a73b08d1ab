"""`POST /v1/rerank` in the format of Cohere and Jina, for models of the task `rerank`.

Inputs: `QUERY` and `DOCUMENT` (BYTES, one of each per row). Outputs: `SCORE` (FP32, one per row, higher is better);
optionally `TOKENS`. Scores are returned as the model gives them.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from forebay.core.serving.values import Tensor
from forebay.modelserver.tasks.contract import Answer, Job, Results, Task
from forebay.modelserver.tasks.tensors import as_array, strings, token_count
from forebay.wire.openai_fields import (
    boolean,
    decode,
    ignored_text,
    integer,
    invalid,
    nested,
    read,
    shape_of,
    shaped,
    text,
)

DOCUMENTS_MAX: Final = 1000
"""Cohere's limit on documents per request."""
QUERY: Final = "QUERY"
DOCUMENT: Final = "DOCUMENT"
SCORE: Final = "SCORE"
TOKENS: Final = "TOKENS"

_encode = msgspec.json.Encoder().encode
_TEXT = text(1)
_DOCUMENT = {"text": _TEXT}


def read_body(body: bytes, _: bytes) -> Job:
    """Parse a request body into a job. Raises `Refusal`."""
    given = BODY(decode(body), "")
    documents: list[str] = given["documents"]
    query: str = given["query"]
    returned = documents if given.get("return_documents", False) else None
    best = given.get("top_n", len(documents))

    def inputs(low: int, high: int) -> tuple[Tensor, ...]:
        shape = (high - low, 1)
        return strings(QUERY, [query] * (high - low), shape), strings(DOCUMENT, documents[low:high], shape)

    return Job(given["model"], inputs, lambda results: _answer(results, best, returned), len(documents), "documents")


def _documents(value: Any, path: str) -> list[str]:
    if type(value) is not list or not 0 < len(value) <= DOCUMENTS_MAX:
        invalid(path, f"an array of 1 to {DOCUMENTS_MAX} documents", value)
    return [_document(one, f"{path}[{i}]") for i, one in enumerate(value)]


def _document(value: Any, path: str) -> str:
    found: str = read(value, path, _DOCUMENT, ("text",))["text"] if type(value) is dict else _TEXT(value, path)
    return found


def _answer(results: Results, best: int, documents: Sequence[str] | None) -> Answer:
    scores = np.concatenate([as_array(tensor).ravel() for tensor in results.tensors(SCORE)])
    order = np.argsort(-scores, kind="stable")[:best].tolist()
    found = []
    for i in order:
        entry: dict[str, Any] = {"index": i, "relevance_score": float(scores[i])}
        if documents is not None:
            entry["document"] = {"text": documents[i]}
        found.append(entry)
    tokens = token_count(results.tensors(TOKENS))
    body = {"object": "list", "model": results.model, "results": found, "usage": {"total_tokens": tokens}}
    return Answer(_encode(body), tokens=tokens)


shaped(_documents, {"type": "array", "minItems": 1, "maxItems": DOCUMENTS_MAX})
BODY: Final = nested(
    {
        "model": text(1),
        "query": _TEXT,
        "documents": _documents,
        "top_n": integer(1, DOCUMENTS_MAX),
        "return_documents": boolean,
        "user": ignored_text,
    },
    ("model", "query", "documents"),
)
TASK: Final[Task] = Task("rerank", read_body, (SCORE,), (TOKENS,), shape_of(BODY))
