"""`POST /v1/rerank` in the format of Cohere and Jina, for models of the task `rerank`.

Inputs: `QUERY` and `DOCUMENT` (BYTES, one of each per row). Outputs: `SCORE` (FP32, one per row, higher is better);
optionally `TOKENS`, and `TRUNCATED` (BOOL, one per row: the model has read only a part of the pair). Scores are
returned as the model gives them.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from forebay.core.errors import Code, Refusal
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
QUERY_CHARS_MAX: Final = 100_000
"""The query is copied for each document: one of megabytes takes gigabytes, and blocks the event loop meanwhile."""
QUERY: Final = "QUERY"
DOCUMENT: Final = "DOCUMENT"
SCORE: Final = "SCORE"
TOKENS: Final = "TOKENS"
TRUNCATED: Final = "TRUNCATED"

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

    def answer(results: Results) -> Answer:
        return _answer(results, best, returned, _truncated(results, given.get("truncate", True)))

    return Job(given["model"], inputs, answer, len(documents), "documents")


def _truncated(results: Results, allowed: bool) -> set[int] | None:
    """The rows of which the model has read only a part; None: it does not tell. Raises `Refusal`."""
    tensors = results.tensors(TRUNCATED)
    if not tensors:
        if not allowed:
            text = f"Model '{results.model}' has no output '{TRUNCATED}', and does not tell what it truncates."
            raise Refusal(Code.UNSUPPORTED_PARAMETER, text, "truncate")
        return None
    found = np.flatnonzero(np.concatenate([as_array(tensor).ravel() for tensor in tensors])).tolist()
    if found and not allowed:
        field = f"documents[{found[0]}]"
        more = f" (so are {len(found) - 1} more)" if len(found) > 1 else ""
        text = f"'{field}' is too long for the model, together with the query{more}, and 'truncate' is false."
        raise Refusal(Code.INVALID_REQUEST, text, field)
    return set(found)


def _documents(value: Any, path: str) -> list[str]:
    if type(value) is not list or not 0 < len(value) <= DOCUMENTS_MAX:
        invalid(path, f"an array of 1 to {DOCUMENTS_MAX} documents", value)
    return [_document(one, f"{path}[{i}]") for i, one in enumerate(value)]


def _document(value: Any, path: str) -> str:
    found: str = read(value, path, _DOCUMENT, ("text",))["text"] if type(value) is dict else _TEXT(value, path)
    return found


def _answer(results: Results, best: int, documents: Sequence[str] | None, truncated: set[int] | None) -> Answer:
    scores = np.concatenate([as_array(tensor).ravel() for tensor in results.tensors(SCORE)])
    order = np.argsort(-scores, kind="stable")[:best].tolist()
    found = []
    for i in order:
        entry: dict[str, Any] = {"index": i, "relevance_score": float(scores[i])}
        if documents is not None:
            entry["document"] = {"text": documents[i]}
        if truncated and i in truncated:
            entry["truncated"] = True
        found.append(entry)
    tokens = token_count(results.tensors(TOKENS))
    usage = {"total_tokens": tokens}
    if truncated is not None:
        usage["truncated_documents"] = len(truncated)
    body = {"object": "list", "model": results.model, "results": found, "usage": usage}
    return Answer(_encode(body), tokens=tokens)


shaped(_documents, {"type": "array", "minItems": 1, "maxItems": DOCUMENTS_MAX})
BODY: Final = nested(
    {
        "model": text(1),
        "query": text(1, QUERY_CHARS_MAX),
        "documents": _documents,
        "top_n": integer(1, DOCUMENTS_MAX),
        "return_documents": boolean,
        "truncate": boolean,
        "user": ignored_text,
    },
    ("model", "query", "documents"),
)
TASK: Final[Task] = Task("rerank", read_body, (SCORE,), (TOKENS, TRUNCATED), shape_of(BODY))
