"""What a gateway reads from a request body: the model, the raw prompt, and the output token limit.

The body is scanned once, and only what is needed is decoded. A worker sees the same prompt bytes.
"""

import re
from typing import Final

import msgspec

from forebay.core.errors import Code, Refusal
from forebay.wire.apis.prompt import Fields, Prompt
from forebay.wire.documents import CROWDED, LONG_BYTES, crowded, unreadable

DIGITS_MAX: Final = 9
ZERO: Final = 0x30
NO_TEXT: Final = memoryview(b"")
CODING: Final = b"content-encoding"
AS_IT_IS: Final = (b"", b"identity")
CODING_CHARS_MAX: Final = 32
SEVERAL: Final = re.compile(rb'\[\s*["\[]')
"""Start of an array of texts, or of arrays of token ids."""
FIELD: Final = re.compile(r"(?:required field `|at `\$\.)([^`]*)`")


class RequestFields:
    """What routing needs from a body. The replica validates all fields, including these.

    `text`: the JSON of the prompt. `limit`: the most output tokens; 0 if absent, or not a number that a replica
    accepts. `choices`: how many are generated in all. Requests with the same `sequence` need state held by one
    replica, which the one that `begins` it creates. Tokens are estimated from `text_bytes`, which is less than the
    length of `text` if that contains images.
    """

    __slots__ = ("begins", "choices", "limit", "model", "sequence", "stream", "text", "text_bytes")

    def __init__(
        self,
        model: str,
        text: memoryview = NO_TEXT,
        *,
        stream: bool = False,
        limit: int = 0,
        choices: int = 1,
        sequence: bytes = b"",
        begins: bool = False,
        text_bytes: int = -1,
    ) -> None:
        self.model = model
        self.text = text
        self.stream = stream
        self.limit = limit
        self.choices = choices
        self.sequence = sequence
        self.begins = begins
        self.text_bytes = text_bytes if text_bytes >= 0 else len(text) or 1


_decode = msgspec.json.Decoder(Fields).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_prompt = msgspec.json.Decoder(Prompt).decode


def request_fields(body: bytes) -> RequestFields:
    """Parse a body. Raises `Refusal`."""
    if len(body) > LONG_BYTES and crowded(body):
        raise Refusal(Code.INVALID_REQUEST, CROWDED)
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
    limit = _number(fields.max_completion_tokens) or _number(fields.max_tokens) or _number(fields.max_output_tokens)
    choices = max(1, _number(fields.n), _number(fields.best_of))
    if fields.prompt:
        choices *= _prompts(fields.prompt)
    return RequestFields(fields.model, _text(fields), stream=fields.stream is True, limit=limit, choices=choices)


def coded(refusal: Refusal, coding: bytes | None) -> Refusal:
    """Explains a body that is not JSON because it is compressed; other refusals are returned as they are."""
    return refusal if refusal.code is not Code.INVALID_JSON else compressed(coding) or refusal


def compressed(coding: bytes | None) -> Refusal | None:
    """The error for a body that is compressed, by its header `content-encoding`; None: it is not."""
    if coding is None or coding.strip().lower() in AS_IT_IS:
        return None
    name, shown = CODING.decode(), coding[:CODING_CHARS_MAX].decode("latin-1")
    text = f"The body is compressed (`{name}: {shown}`); send it uncompressed, without that header."
    return Refusal(Code.UNSUPPORTED_ENCODING, text, name)


def prompt_text(body: bytes) -> memoryview:
    """The JSON of the prompt. Raises msgspec.DecodeError or UnicodeDecodeError if the body is not JSON."""
    return _text(_decode_prompt(body))


def _text(body: Prompt) -> memoryview:
    """The prompt in the order in which the model reads it, whatever the order of the fields in the body."""
    text = memoryview(body.messages or body.prompt or body.input)
    first = body.system or body.instructions
    return memoryview(b"".join((memoryview(first), text))) if first else text


def _prompts(given: msgspec.Raw) -> int:
    """How many prompts there are, each with choices of its own: a text or an array of token ids is one."""
    if not SEVERAL.match(given):
        return 1
    return max(1, len(_decode_list(given)))


def _number(given: msgspec.Raw) -> int:
    """A whole number; 0 for anything else, and for one too large for any replica."""
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
