"""Fields of the protocol's JSON documents, and the words that Triton has for what is wrong with them."""

import json
import math
from typing import Any, Final

import msgspec

from forebay.core.serving.errors import Kind, Refused
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
"""JSON in which every value has to be looked at, as there is a NaN or something wrong: for 64 MiB that takes seconds,
in which no other thread runs."""
VALUES_MAX: Final = 1_000_000
"""In a longer document, but for the data of tensors: while they are made to objects, nobody else gets an answer."""
CROWDED: Final = f"more than {VALUES_MAX} values in JSON are not read here"
STRICTLY: Final = (
    f"NaN and Infinity are read in JSON of up to {ODD_BYTES_MAX} bytes; please use the binary data format"
)

_any = msgspec.json.Decoder().decode


def invalid(text: str) -> Refused:
    """A request that is not as it should be.

    Triton answers many of them with INTERNAL, as its JSON reader knows no other kind; a client cannot tell those
    from failures of the server, so here they are all INVALID_ARGUMENT, with Triton's text.
    """
    return Refused(Kind.INVALID_ARGUMENT, text)


def load(data: bytes | memoryview | msgspec.Raw) -> Any:
    """A JSON document; NaN, Infinity and -Infinity are numbers, as Triton reads and writes them. Raises `Refused`.

    In a long one there may be neither them nor very many values.
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
    """Whether JSON is so long and has so many values that others would have to wait until it is read."""
    if len(text) <= ODD_BYTES_MAX:
        return False
    return text.count(b",") + text.count(b"[") + text.count(b"{") > VALUES_MAX


def strictly(error: Exception) -> Refused:
    """The refusal of a long document that cannot be read quickly."""
    return invalid(f"failed to parse the request JSON buffer: {error}. {STRICTLY}")


def document(body: bytes) -> dict[str, Any]:
    """A body that should be an object: anything else has no fields, and neither has an empty body."""
    value = load(body) if body else {}
    return value if type(value) is dict else {}


def unsigned(value: Any, what: str) -> int:
    """An integer of 64 bits without sign; `what` begins the text of the error."""
    if type(value) is not int or not 0 <= value <= UINT64_MAX:
        raise invalid(f"{what}: {NOT_UNSIGNED}")
    return value


def boolean(value: Any, what: str) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise invalid(f"{what}: {NOT_BOOLEAN}")
    return value


def string(value: Any, what: str) -> str:
    """A string."""
    if type(value) is not str:
        raise invalid(f"{what}: {NOT_STRING}")
    return value


def member(fields: Any, name: str) -> Any:
    """A field that must be there. Raises `Refused`."""
    if type(fields) is not dict or name not in fields:
        raise invalid(f"Unable to parse '{name}': {ABSENT.format(name)}")
    return fields[name]


def parameter(name: str, value: Any) -> bool | int | float | str:
    """The value of a parameter that the protocol gives no meaning. Integers of more than 64 bits become floats."""
    if type(value) is int:
        if -INT64_MAX - 1 <= value <= INT64_MAX:
            return value
        value = as_float(value)
    if type(value) in (str, bool, float):
        return value  # type: ignore[no-any-return]  # one of the three
    raise invalid(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def as_float(value: int) -> float:
    """The nearest float. Raises `Refused` if none is near."""
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
            json.dumps(value, ensure_ascii=False).encode()  # half a character can be read, but never be written again
    except json.JSONDecodeError as error:
        raise _unreadable(f"{error.msg}.", error.pos) from None
    except UnicodeDecodeError as error:
        raise _unreadable("Invalid encoding in string.", error.start) from None
    except UnicodeEncodeError:
        raise _unreadable("The surrogate pair in string is invalid.", 0) from None
    except RecursionError:
        raise _unreadable("Nested too deeply.", 0) from None
    except ValueError:  # an integer with more digits than Python is willing to read
        raise _unreadable("Number too big to be stored in double.", 0) from None
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(digits)
    return value


def _unreadable(text: str, at: int) -> Refused:
    return invalid(f"failed to parse the request JSON buffer: {text} at {at}")
