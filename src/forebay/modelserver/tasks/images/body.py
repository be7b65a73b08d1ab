"""Requests and responses common to the image tasks.

Images are sent as JSON, `{"model": …, "image": …}` with base64 or a data URL, or an array of them; or as a form with
the file `image`. Models get the files unchanged (`IMAGE`, BYTES, one per row): files are decoded in the model's
process, so that a malicious file cannot hurt anyone but its sender.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from forebay.core.errors import Code, Refusal
from forebay.core.serving.config import Datatype
from forebay.core.serving.values import Tensor
from forebay.engines.tensor.protocol import Array
from forebay.modelserver.tasks.contract import Answer, Job, Results, Task
from forebay.modelserver.tasks.tensors import as_array, as_bytes, as_texts, strings
from forebay.wire.forms.base64_text import data_of
from forebay.wire.forms.multipart import Form, is_form, read_form
from forebay.wire.openai_fields import (
    Reader,
    array_shape,
    decode,
    ignored_text,
    invalid,
    missing,
    nested,
    shape_of,
    shaped,
    text,
    unsupported,
)

IMAGES_MAX: Final = 64
"""Images per request."""
FIELD: Final = "image"
IMAGE: Final = "IMAGE"
SIZE: Final = "SIZE"
"""Optional output: width and height of the image, in pixels."""
SCORE_DIGITS: Final = 6
PIXEL_DIGITS: Final = 2
_BASE64: Final = ";base64"

Options = Mapping[str, Any]
"""Further request fields, validated."""

_encode = msgspec.json.Encoder().encode
_TEXT = text(1)


def image_task(
    name: str,
    fields: Mapping[str, Reader],
    describe: Callable[[Results, Options], Iterator[dict[str, Any]]],
    outputs: tuple[str, ...],
) -> Task:
    """A task on images: `describe` yields the results for each, in order."""
    body = nested({"model": _TEXT, FIELD: _images, "user": ignored_text, **fields}, ("model", FIELD))

    def read(data: bytes, content_type: bytes) -> Job:
        given = body(_form(read_form(content_type, data)) if is_form(content_type) else decode(data), "")
        files: list[bytes] = given[FIELD]

        def inputs(low: int, high: int) -> tuple[Tensor, ...]:
            return (strings(IMAGE, files[low:high], (high - low, 1)),)

        return Job(given["model"], inputs, partial(_answer, describe, given), len(files), FIELD)

    return Task(name, read, outputs, (SIZE,), shape_of(body), forms=True)


def rows(results: Results, name: str, *, texts: bool = False) -> Iterator[Array]:
    """An output, image by image. BYTES become arrays of `object`. Nothing if the model has no such output."""
    for tensor in results.tensors(name):
        if tensor.datatype is Datatype.BYTES:
            array = np.empty(tensor.shape, object)
            array.ravel()[:] = as_texts(tensor) if texts else as_bytes(tensor)
        else:
            array = as_array(tensor)
        yield from array if results.config.max_batch else (array,)


def rounded(score: float) -> float:
    """A score rounded to its significant digits."""
    return round(float(score), SCORE_DIGITS)


def pixels(values: Array) -> list[Any]:
    """Coordinates rounded to their significant digits."""
    found: list[Any] = np.round(values.astype(np.float64), PIXEL_DIGITS).tolist()
    return found


def _images(value: Any, path: str) -> list[bytes]:
    if type(value) is not list:
        return [_image(value, path)]
    if not 0 < len(value) <= IMAGES_MAX:
        invalid(path, f"a string or an array of 1 to {IMAGES_MAX} strings", value)
    return [_image(one, f"{path}[{i}]") for i, one in enumerate(value)]


shaped(_images, {"anyOf": [shape_of(_TEXT), array_shape(shape_of(_TEXT), 1, IMAGES_MAX)]})


def _image(value: Any, path: str) -> bytes:
    """The file in a field; uploaded files are `bytes` already."""
    if type(value) is bytes:
        if not value:
            raise Refusal(Code.INVALID_REQUEST, f"'{path}' is empty.", path)
        return value
    given: str = _TEXT(value, path)
    if given.startswith(("http://", "https://")):
        unsupported(path, "images are not fetched; send the file itself, as base64 or a data URL.")
    if given.startswith("data:"):
        kind, _, given = given.partition(",")
        if not kind.endswith(_BASE64):
            invalid(path, "a data URL in base64", value)
    try:
        data = data_of(given)
    except ValueError:
        invalid(path, "base64, or a data URL in base64", value)
    return data or invalid(path, "a picture", value)


def _form(form: Form) -> dict[str, Any]:
    """The fields of the form, typed as in JSON. Raises `Refusal`."""
    found: dict[str, Any] = {}
    for name, values in form.fields.items():
        if len(values) > 1:
            raise Refusal(Code.INVALID_REQUEST, f"'{name[:100]}' is given several times.", name[:100])
        found[name] = values[0] if name in ("model", "user", FIELD) else _number(values[0])
    for name, file in form.files.items():
        if name != FIELD:
            text = f"Files other than '{FIELD}' are not taken; found '{name[:100]}'."
            raise Refusal(Code.INVALID_REQUEST, text, name[:100])
        if FIELD in found:
            raise Refusal(Code.INVALID_REQUEST, f"'{FIELD}' is given several times.", FIELD)
        found[FIELD] = file.data
    if FIELD not in found:
        missing(FIELD)
    return found


def _number(value: str) -> Any:
    """The number in a form field, else its text, which the field's reader then rejects."""
    try:
        return msgspec.json.decode(value, type=int | float)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return value


def _answer(
    describe: Callable[[Results, Options], Iterator[dict[str, Any]]], given: Options, results: Results
) -> Answer:
    sizes = [size.tolist() for size in rows(results, SIZE)]
    entries = []
    for i, found in enumerate(describe(results, given)):
        size = {"width": sizes[i][0], "height": sizes[i][1]} if sizes else {}
        entries.append({"index": i, **size, **found})
    return Answer(_encode({"object": "list", "model": results.model, "data": entries}))
