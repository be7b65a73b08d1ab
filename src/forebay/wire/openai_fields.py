"""Readers of JSON fields: each takes a value and returns it checked, or raises a Refusal that names the field.

A table `name -> Reader` describes an object; every refusal names the field, what was found and what is allowed. Every
reader has a shape, the JSON Schema of what it accepts: the published API description is built from these.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import msgspec

from forebay.core.errors import Code, Refusal
from forebay.wire.documents import CROWDED, crowded, unreadable

Reader = Callable[[Any, str], Any]
"""Takes the decoded value and its path (`messages[1].content`)."""
Shape = dict[str, Any]
"""A JSON Schema (2020-12). It may be wider than its reader, never narrower."""

SHOWN_CHARS_MAX = 60
PARTS_MAX = 1024
METADATA_PAIRS_MAX, METADATA_KEY_CHARS_MAX, METADATA_VALUE_CHARS_MAX = 16, 64, 512
PATH_CHARS_MAX = 120
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
}


def shaped(reader: Reader, shape: Shape) -> Reader:
    """Register the shape of a reader; returns the reader."""
    _SHAPES[reader] = shape
    return reader


def shape_of(reader: Reader) -> Shape:
    """The registered shape of a reader. Raises KeyError if there is none."""
    return _SHAPES[reader]


def object_shape(fields: Mapping[str, Reader], required: tuple[str, ...] = ()) -> Shape:
    """The shape of what `read` accepts."""
    properties = {
        name: shape_of(reader) if name in required else _or_null(shape_of(reader)) for name, reader in fields.items()
    }
    shape: Shape = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**shape, "required": list(required)} if required else shape


def array_shape(items: Shape, items_min: int, items_max: int | None = None) -> Shape:
    """The shape of an array."""
    shape: Shape = {"type": "array", "items": items, "minItems": items_min}
    return shape if items_max is None else {**shape, "maxItems": items_max}


def _or_null(shape: Shape) -> Shape:
    if "enum" in shape:
        return {**shape, "enum": [*shape["enum"], None]} if None not in shape["enum"] else shape
    if isinstance(shape.get("type"), str):
        return {**shape, "type": [shape["type"], "null"]}
    return {"anyOf": [*shape["anyOf"], {"type": "null"}]} if "anyOf" in shape else shape


def decode(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body."""
    if crowded(body):
        raise Refusal(Code.INVALID_REQUEST, CROWDED)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(Code.INVALID_JSON, f"The body is not valid JSON: {unreadable(body, error)}.") from None
    except RecursionError:
        raise Refusal(Code.INVALID_JSON, "The body is nested too deeply.") from None
    if type(value) is not dict:
        raise Refusal(Code.INVALID_REQUEST, f"The body must be a JSON object, found {shown(value)}.")
    return value


def shown(value: Any) -> str:
    """A value as error texts show it: its type, and the value itself if short."""
    kind = _KINDS.get(type(value), "an object")
    match value:
        case None:
            return kind
        case bool():
            return f"{str(value).lower()} ({kind})"
        case str():
            cut = value if len(value) <= SHOWN_CHARS_MAX else value[:SHOWN_CHARS_MAX] + "…"
            return f"{cut!r} ({kind})"
        case int() | float():
            text = repr(value)
            return f"{text if len(text) <= SHOWN_CHARS_MAX else 'a huge number'} ({kind})"
        case list() | dict():
            return f"{kind} of {len(value)} items"
    return kind


def invalid(path: str, expected: str, value: Any) -> NoReturn:
    """Reject a value of the wrong type or out of range."""
    raise Refusal(
        Code.INVALID_REQUEST, f"Invalid value for '{path}': expected {expected}, found {shown(value)}.", _cut(path)
    )


def unsupported(path: str, text: str) -> NoReturn:
    """Reject a parameter that is valid but not supported."""
    raise Refusal(Code.UNSUPPORTED_PARAMETER, f"'{path}' is not supported: {text}", _cut(path))


def missing(path: str) -> NoReturn:
    """Reject an object that lacks a required field."""
    raise Refusal(Code.INVALID_REQUEST, f"Missing required parameter: '{path}'.", path)


def read(value: Any, path: str, fields: Mapping[str, Reader], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """The checked fields of an object. An optional field that is null counts as absent."""
    if type(value) is not dict:
        invalid(path, "an object", value)
    checked: dict[str, Any] = {}
    for name, found in value.items():
        where = f"{path}.{name}" if path else name
        reader = fields.get(name)
        if reader is None:
            cut = _cut(where)
            raise Refusal(Code.INVALID_REQUEST, f"Unrecognized request argument supplied: {cut}", cut)
        if found is not None:
            checked[name] = reader(found, where)
        elif name in required:
            invalid(where, "a value", None)
    for name in required:
        if name not in checked:
            missing(f"{path}.{name}" if path else name)
    return checked


def nested(fields: Mapping[str, Reader], required: tuple[str, ...] = ()) -> Reader:
    """A reader of an object."""

    def reader(value: Any, path: str) -> dict[str, Any]:
        return read(value, path, fields, required)

    return shaped(reader, object_shape(fields, required))


def number(low: float, high: float, *, above: bool = False) -> Reader:
    """A reader of a number in [low, high], or in (low, high] with `above`."""
    expected = f"a number above {low:g}, at most {high:g}" if above else f"a number from {low:g} to {high:g}"

    def reader(value: Any, path: str) -> float:
        if type(value) not in (int, float) or not low <= value <= high or (above and value == low):
            invalid(path, expected, value)
        return float(value)

    return shaped(reader, {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high})


def integer(low: int, high: int) -> Reader:
    """A reader of a whole number in [low, high]."""
    expected = f"an integer from {low} to {high}"

    def reader(value: Any, path: str) -> int:
        if type(value) is not int or not low <= value <= high:
            invalid(path, expected, value)
        return value

    return shaped(reader, {"type": "integer", "minimum": low, "maximum": high})


def boolean(value: Any, path: str) -> bool:
    """True or false."""
    if type(value) is not bool:
        invalid(path, "a boolean", value)
    return value


def text(chars_min: int = 0, chars_max: int | None = None) -> Reader:
    """A reader of a string, with optional length limits."""
    expected = "a string"
    if chars_min or chars_max:
        expected += (
            f" of {chars_min} characters or more"
            if chars_max is None
            else f" of {chars_min} to {chars_max} characters"
        )

    def reader(value: Any, path: str) -> str:
        if type(value) is not str or len(value) < chars_min or (chars_max is not None and len(value) > chars_max):
            invalid(path, expected, value)
        return value

    shape: Shape = {"type": "string"}
    if chars_min:
        shape["minLength"] = chars_min
    if chars_max is not None:
        shape["maxLength"] = chars_max
    return shaped(reader, shape)


def one_of(*allowed: str) -> Reader:
    """A reader of one of some strings."""
    expected = " or ".join(f"'{word}'" for word in allowed)

    def reader(value: Any, path: str) -> str:
        if type(value) is not str or value not in allowed:
            invalid(path, expected, value)
        return value

    return shaped(reader, {"enum": list(allowed)})


def only(*allowed: Any) -> Reader:
    """A reader of an unsupported parameter: accepts only the values under which it changes nothing."""
    hint = " or ".join(msgspec.json.encode(one).decode() for one in allowed)

    def reader(value: Any, path: str) -> Any:
        if not any(type(value) is type(one) and value == one for one in allowed):
            unsupported(path, f"found {shown(value)}; leave it out{' or send ' + hint if hint else ''}.")
        return value

    return shaped(reader, {"enum": [*allowed, None]})  # readers are not called for the null of an optional field


def texts(part: Reader, words: str = "text parts") -> Reader:
    """A reader of a string, or an array of parts, each of whose text `part` returns; texts are joined by newlines."""
    expected = f"a string or an array of 1 to {PARTS_MAX} {words}"

    def reader(value: Any, path: str) -> str:
        if type(value) is str:
            return value
        if type(value) is not list or not 0 < len(value) <= PARTS_MAX:
            invalid(path, expected, value)
        return "\n".join([part(one, f"{path}[{i}]") for i, one in enumerate(value)])

    return shaped(reader, {"anyOf": [{"type": "string"}, array_shape(shape_of(part), 1, PARTS_MAX)]})


def ignored_text(value: Any, path: str) -> None:
    """A string that is checked and ignored."""
    _ANY_TEXT(value, path)


def anything(value: Any, path: str) -> None:
    """Accepts fields that an earlier response carried and a prompt has no place for."""


def metadata(value: Any, path: str) -> dict[str, str]:
    """OpenAI's metadata: a few short strings."""
    if type(value) is not dict or len(value) > METADATA_PAIRS_MAX:
        invalid(path, f"an object of at most {METADATA_PAIRS_MAX} strings", value)
    for key, one in value.items():
        _METADATA_KEY(key, f"{path} (a key)")
        _METADATA_VALUE(one, f"{path}.{key}")
    return value


def format_name(value: Any, path: str) -> str:
    """The name of a response format."""
    if type(value) is not str or not 0 < len(value) <= 64 or not value.isascii() or value.strip(_NAME_CHARS):
        invalid(path, "1 to 64 letters, digits, underscores or dashes", value)
    return value


def json_schema(value: Any, path: str) -> str:
    """A JSON Schema, as text."""
    if type(value) is not dict:
        invalid(path, "a JSON Schema (an object)", value)
    try:
        return msgspec.json.encode(value).decode()
    except (OverflowError, RecursionError):
        invalid(path, "a JSON Schema of moderate depth and integers of at most 64 bits", value)


_SHAPES: Final[dict[Reader, Shape]] = {
    boolean: {"type": "boolean"},
    ignored_text: {"type": "string"},
    anything: {},
    metadata: {
        "type": "object",
        "maxProperties": METADATA_PAIRS_MAX,
        "propertyNames": {"minLength": 1, "maxLength": METADATA_KEY_CHARS_MAX},
        "additionalProperties": {"type": "string", "maxLength": METADATA_VALUE_CHARS_MAX},
    },
    format_name: {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    json_schema: {"type": "object"},
}
_NAME_CHARS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
_ANY_TEXT = text()
_METADATA_KEY, _METADATA_VALUE = text(1, METADATA_KEY_CHARS_MAX), text(0, METADATA_VALUE_CHARS_MAX)


def _cut(path: str) -> str:
    return path if len(path) <= PATH_CHARS_MAX else path[:PATH_CHARS_MAX] + "…"
