"""`POST /v1/classify` for models of the task `classify`: labels of texts, of bytes, or of spans of texts.

Inputs: `INPUT` (BYTES, one text or blob per row). Outputs: `LABEL` (BYTES), any number per row, best first, shorter
rows padded with empty labels; optionally `SCORE` (FP32), the confidence. Models with outputs `START` and `END`
(integers) label spans of their text, from character `START` up to but excluding `END`: the response then has entities
like the aggregated ones of Hugging Face's pipelines.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, Final

import msgspec

from forebay.core.errors import Code, Refusal
from forebay.core.serving.values import Tensor
from forebay.modelserver.tasks.contract import Answer, ContractViolation, Job, Results, Task
from forebay.modelserver.tasks.tensors import as_array, as_texts, strings
from forebay.wire.forms.base64_text import data_of
from forebay.wire.openai_fields import (
    Reader,
    decode,
    ignored_text,
    integer,
    invalid,
    missing,
    nested,
    shape_of,
    shaped,
    text,
)

INPUTS_MAX: Final = 1000
LABELS_MAX: Final = 1000
INPUT: Final = "INPUT"
LABEL: Final = "LABEL"
SCORE: Final = "SCORE"
START: Final = "START"
END: Final = "END"

_encode = msgspec.json.Encoder().encode
_TEXT = text(1)


def read(body: bytes, _: bytes) -> Job:
    """Parse a request body into a job. Raises `Refusal`."""
    given = BODY(decode(body), "")
    if ("input" in given) == ("data" in given):
        if "input" not in given:
            missing("input")
        raise Refusal(Code.INVALID_REQUEST, "Send either 'input' (texts) or 'data' (base64), not both.", "data")
    texts: list[str] = given.get("input", [])
    rows: list[str] | list[bytes] = texts or given["data"]
    labels_max = given.get("top_k", LABELS_MAX)

    def inputs(low: int, high: int) -> tuple[Tensor, ...]:
        return (strings(INPUT, rows[low:high], (high - low, 1)),)

    return Job(
        given["model"],
        inputs,
        lambda results: _answer(results, texts, labels_max),
        len(rows),
        "input" if texts else "data",
    )


def _one_or_several(reader: Reader, kind: str) -> Reader:
    def read_all(value: Any, path: str) -> list[Any]:
        if type(value) is not list:
            return [reader(value, path)]
        if not 0 < len(value) <= INPUTS_MAX:
            invalid(path, f"a string or an array of 1 to {INPUTS_MAX} strings ({kind})", value)
        return [reader(one, f"{path}[{i}]") for i, one in enumerate(value)]

    return shaped(read_all, {"type": ["string", "array"]})


def _base64(value: Any, path: str) -> bytes:
    try:
        return data_of(_TEXT(value, path))
    except ValueError:
        invalid(path, "base64", value)


def _rows(results: Results) -> Iterator[list[dict[str, Any]]]:
    """Results row by row, without padding."""
    for part, labels in enumerate(results.tensors(LABEL)):
        names, width = as_texts(labels), labels.shape[-1]
        columns = {name: as_array(tensors[part]).ravel().tolist() for name, tensors in _extras(results)}
        for row in range(prod(labels.shape[:-1])):
            places = [at for at in range(row * width, (row + 1) * width) if names[at]]
            yield [{"label": names[at], **{key: column[at] for key, column in columns.items()}} for at in places]


def _extras(results: Results) -> Iterator[tuple[str, list[Tensor]]]:
    for key, name in (("score", SCORE), ("start", START), ("end", END)):
        if tensors := results.tensors(name):
            yield key, tensors


def _answer(results: Results, texts: list[str], labels_max: int) -> Answer:
    spans = results.config.output(START) is not None
    if spans and not texts:
        raise Refusal(Code.INVALID_REQUEST, "This model labels spans of text: send 'input'.", "data")
    entries: list[dict[str, Any]] = []
    for i, found in enumerate(_rows(results)):
        kept = found[:labels_max]
        if spans:
            if any(not 0 <= each["start"] <= each["end"] <= len(texts[i]) for each in kept):
                raise ContractViolation(f"'{START}' and '{END}' of a label are not within its text")
            kept = [
                {"entity_group": each.pop("label"), "word": texts[i][each["start"] : each["end"]], **each}
                for each in kept
            ]
        entries.append({"index": i, "entities" if spans else "labels": kept})
    return Answer(_encode({"object": "list", "model": results.model, "data": entries}))


BODY: Final = nested(
    {
        "model": text(1),
        "input": _one_or_several(_TEXT, "texts"),
        "data": _one_or_several(_base64, "base64"),
        "top_k": integer(1, LABELS_MAX),
        "user": ignored_text,
    },
    ("model",),
)
TASK: Final[Task] = Task("classify", read, (LABEL,), (SCORE, START, END), shape_of(BODY))
