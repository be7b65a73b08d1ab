"""What a gateway reads of a request's body: the model, the prompt as it stands, and how long the answer may be.

The body is scanned once and nothing is decoded that is not needed. The prompt is the same bytes for a worker.
"""

import re
from typing import Final

import msgspec

from forebay.core.errors import Code, Refusal
from forebay.wire.apis.prompt import Fields, Prompt
from forebay.wire.documents import unreadable

DIGITS_MAX: Final = 9
ZERO: Final = 0x30
NO_TEXT: Final = memoryview(b"")
CODING: Final = b"content-encoding"
AS_IT_IS: Final = (b"", b"identity")
CODING_CHARS_MAX: Final = 32
FIELD: Final = re.compile(r"(?:required field `|at `\$\.)([^`]*)`")


class Wanted:
    """What routing needs of a body; the replica checks all fields, these again.

    `text` is the JSON of what the model is to read; `limit` the most tokens that the answer may have, 0 if none is
    given, or one that the replica refuses. There are so many `choices` of it. Requests with the same `sequence` need
    state that one replica holds. Tokens are estimated by `text_bytes`, less than `text` has where that is a picture.
    """

    __slots__ = ("choices", "limit", "model", "sequence", "stream", "text", "text_bytes")

    def __init__(
        self,
        model: str,
        text: memoryview = NO_TEXT,
        *,
        stream: bool = False,
        limit: int = 0,
        choices: int = 1,
        sequence: bytes = b"",
        text_bytes: int = -1,
    ) -> None:
        self.model = model
        self.text = text
        self.stream = stream
        self.limit = limit
        self.choices = choices
        self.sequence = sequence
        self.text_bytes = text_bytes if text_bytes >= 0 else len(text) or 1


_decode = msgspec.json.Decoder(Fields).decode
_decode_prompt = msgspec.json.Decoder(Prompt).decode


def wanted(body: bytes) -> Wanted:
    """Read a body. Raises `Refusal`."""
    try:
        fields = _decode(body)
    except msgspec.ValidationError as error:
        field = FIELD.search(str(error))
        raise Refusal(Code.INVALID_REQUEST, f"{error}.", field[1] if field else None) from None
    except msgspec.DecodeError as error:
        raise Refusal(Code.INVALID_JSON, f"The body is not valid JSON: {unreadable(body, error)}.") from None
    except UnicodeDecodeError:
        raise Refusal(Code.INVALID_JSON, "The body is not valid UTF-8.") from None
    except RecursionError:
        raise Refusal(Code.INVALID_JSON, "The body is nested too deeply.") from None
    limit = _number(fields.max_completion_tokens or fields.max_tokens or fields.max_output_tokens)
    choices = max(1, _number(fields.n), _number(fields.best_of))
    return Wanted(fields.model, _text(fields), stream=fields.stream is True, limit=limit, choices=choices)


def coded(refusal: Refusal, coding: bytes | None) -> Refusal:
    """A refusal of a body in plainer words, if it is no JSON because it is compressed; `coding` is how."""
    if refusal.code is not Code.INVALID_JSON or coding is None or coding.strip().lower() in AS_IT_IS:
        return refusal
    name, shown = CODING.decode(), coding[:CODING_CHARS_MAX].decode("latin-1")
    text = f"The body is compressed (`{name}: {shown}`); send it uncompressed, without that header."
    return Refusal(Code.UNSUPPORTED_ENCODING, text, name)


def prompt_text(body: bytes) -> memoryview:
    """The JSON of what the model is to read. Raises msgspec.DecodeError or UnicodeDecodeError for what is no JSON."""
    return _text(_decode_prompt(body))


def _text(body: Prompt) -> memoryview:
    """One text, in the order in which the model reads, wherever the fields stand in the body."""
    text = memoryview(body.messages or body.prompt or body.input)
    first = body.system or body.instructions
    return memoryview(b"".join((memoryview(first), text))) if first else text


def _number(given: msgspec.Raw) -> int:
    """A whole number; 0 for anything else, and for one that no replica takes."""
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
