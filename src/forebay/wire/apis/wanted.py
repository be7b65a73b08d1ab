"""What a gateway reads of a request's body: the model, the prompt as it stands, and how long the answer may be.

The body is scanned once and nothing is decoded that is not needed.
"""

import re
from typing import Final

import msgspec

from forebay.core.errors import Code, Refusal
from forebay.wire.apis.prompt import Fields, put_in_order

DIGITS_MAX: Final = 9
ZERO: Final = 0x30
NO_TEXT: Final = memoryview(b"")
FIELD: Final = re.compile(r"(?:required field `|at `\$\.)([^`]*)`")


class Wanted:
    """What routing needs of a body; the replica checks all fields, these again.

    `text` is the JSON of what the model is to read; `limit` the most tokens that the answer may have, 0 if none is
    given, or one that the replica refuses. Requests with the same `sequence` need state that one replica holds.
    """

    __slots__ = ("limit", "model", "sequence", "stream", "text")

    def __init__(
        self,
        model: str,
        text: memoryview = NO_TEXT,
        *,
        stream: bool = False,
        limit: int = 0,
        sequence: bytes = b"",
    ) -> None:
        self.model = model
        self.text = text
        self.stream = stream
        self.limit = limit
        self.sequence = sequence


_decode = msgspec.json.Decoder(Fields).decode


def wanted(body: bytes) -> Wanted:
    """Read a body. Raises `Refusal`."""
    try:
        fields = _decode(body)
    except msgspec.ValidationError as error:
        field = FIELD.search(str(error))
        raise Refusal(Code.INVALID_REQUEST, f"{error}.", field[1] if field else None) from None
    except msgspec.DecodeError as error:
        raise Refusal(Code.INVALID_JSON, f"The body is not valid JSON: {error}.") from None
    except UnicodeDecodeError:
        raise Refusal(Code.INVALID_JSON, "The body is not valid UTF-8.") from None
    except RecursionError:
        raise Refusal(Code.INVALID_JSON, "The body is nested too deeply.") from None
    put_in_order(fields)
    return Wanted(fields.model, fields.text, stream=fields.stream is True, limit=_limit(fields))


def _limit(fields: Fields) -> int:
    given = fields.max_completion_tokens or fields.max_tokens or fields.max_output_tokens
    if not given:
        return 0
    digits = bytes(given)
    if len(digits) > DIGITS_MAX:
        return 0
    number = 0
    for digit in digits:  # by hand: `isdigit` and `int` take several times as long, for every request
        if not ZERO <= digit < ZERO + 10:
            return 0
        number = 10 * number + digit - ZERO
    return number
