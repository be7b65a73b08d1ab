"""Field readers for the protocol's JSON documents, with Triton's error texts."""

import json
import math
from typing import Any, Final

import msgspec

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Buffer
from forebay.wire.documents import UNREADABLE

INT64_MAX: Final = 2**63 - 1
UINT64_MAX: Final = 2**64 - 1
ABSENT: Final = "attempt to access non-existing object member '{}'"
NOT_ARRAY: Final = "attempt to access JSON non-array as array"
NOT_OBJECT: Final = "attempt to access JSON non-object as object"
NOT_STRING: Final = "attempt to access JSON non-string as string"
NOT_BOOLEAN: Final = "attempt to access JSON non-boolean as boolean"
NOT_SIGNED: Final = "attempt to access JSON non-signed-integer as signed-integer"
NOT_UNSIGNED: Final = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NOT_NUMBER: Final = "attempt to access JSON non-number as double"

ODD_BYTES_MAX: Final = 4 << 20
"""Up to this size, JSON with a NaN or an error is parsed value by value: for 64 MiB that takes seconds, during which
no other thread runs."""
VALUES_MAX: Final = 1_000_000
"""Of a longer document, except tensor data: while so many objects are created, no other request is answered."""
CROWDED: Final = f"more than {VALUES_MAX} values in JSON are not read here"
STRICTLY: Final = (
    f"NaN and Infinity are read in JSON of up to {ODD_BYTES_MAX} bytes; please use the binary data format"
)

_any = msgspec.json.Decoder().decode


def invalid(text: str) -> Refused:
    """The error for an invalid request.

    Triton answers many of them with INTERNAL, as its JSON reader knows no other kind; a client cannot tell those from
    failures of the server, so here they are all INVALID_ARGUMENT, with Triton's text.
    """
    return Refused(Kind.INVALID_ARGUMENT, text)


def load(data: Buffer | msgspec.Raw) -> Any:
    """Parse a JSON document; NaN, Infinity and -Infinity are numbers, as in Triton. Raises `Refused`.

    Documents over `ODD_BYTES_MAX` may contain neither of these, nor more than `VALUES_MAX` values.
    """
    is_long = len(memoryview(data)) > ODD_BYTES_MAX
    if is_long and too_many_values(bytes(data)):
        raise invalid(f"{CROWDED}: use infer, with binary data")
    try:
        return _any(data)
    except UNREADABLE as error:
        if is_long:
            raise strictly(error) from None
        return _load_slowly(bytes(data))


def too_many_values(text: bytes) -> bool:
    """Whether JSON is so long and has so many values that parsing it would block other requests."""
    if len(text) <= ODD_BYTES_MAX:
        return False
    return text.count(b",") + text.count(b"[") + text.count(b"{") > VALUES_MAX


def strictly(error: Exception) -> Refused:
    """The error for a long document that the fast parser rejects."""
    return invalid(f"failed to parse the request JSON buffer: {error}. {STRICTLY}")


def document(body: bytes) -> dict[str, Any]:
    """Parse a body that should be an object: anything else counts as an object without fields, as does an empty
    body."""
    value = load(body) if body else {}
    return value if type(value) is dict else {}


def unsigned(value: Any, what: str) -> int:
    """An unsigned 64-bit integer; `what` begins the error text."""
    if type(value) is not int or not 0 <= value <= UINT64_MAX:
        raise invalid(f"{what}: {NOT_UNSIGNED}")
    return value


def boolean(value: Any, what: str) -> bool:
    """A boolean; `what` begins the error text."""
    if type(value) is not bool:
        raise invalid(f"{what}: {NOT_BOOLEAN}")
    return value


def string(value: Any, what: str) -> str:
    """A string; `what` begins the error text."""
    if type(value) is not str:
        raise invalid(f"{what}: {NOT_STRING}")
    return value


def member(fields: Any, name: str) -> Any:
    """A required field. Raises `Refused` if it is missing."""
    if type(fields) is not dict or name not in fields:
        raise invalid(f"Unable to parse '{name}': {ABSENT.format(name)}")
    return fields[name]


def parameter(name: str, value: Any) -> bool | int | float | str:
    """The value of a parameter that the protocol does not define. Integers of more than 64 bits become floats."""
    if type(value) is int:
        if -INT64_MAX - 1 <= value <= INT64_MAX:
            return value
        value = as_float(value)
    if type(value) in (str, bool, float):
        return value  # type: ignore[no-any-return]  # one of the three
    raise invalid(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def as_float(value: int) -> float:
    """The nearest float. Raises `Refused` if the value is out of range."""
    try:
        return float(value)
    except OverflowError:
        raise _unreadable("Number too big to be stored in double.", 0) from None


def _load_slowly(data: bytes) -> Any:
    if not data:
        raise _unreadable("The document is empty.", 0)
    try:
        text = data.decode()
        value = json.loads(text, parse_float=_finite)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate can be parsed, but not encoded again
    except json.JSONDecodeError as error:
        raise _unreadable(f"{error.msg}.", error.pos) from None
    except UnicodeDecodeError as error:
        raise _unreadable("Invalid encoding in string.", error.start) from None
    except UnicodeEncodeError:
        raise _unreadable("The surrogate pair in string is invalid.", 0) from None
    except RecursionError:
        raise _unreadable("Nested too deeply.", 0) from None
    except ValueError:  # an integer with more digits than Python converts
        raise _unreadable("Number too big to be stored in double.", 0) from None
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(digits)
    return value


def _unreadable(text: str, at: int) -> Refused:
    return invalid(f"failed to parse the request JSON buffer: {text} at {at}")
