"""What a gateway reads of a request's body: the model, the prompt as it stands, and how long the answer may be.

The body is scanned once and nothing is decoded that is not needed.
"""

import re
from typing import Final

import msgspec

from forebay.core.errors import Code, Refusal
from forebay.wire.apis.prompt import NOTHING, Prompt, put_in_order

DIGITS_MAX: Final = 9
FIELD: Final = re.compile(r"(?:required field `|at `\$\.)([^`]*)`")


class Wanted(Prompt, gc=False):
    """The fields that routing needs, beside the prompt; the replica checks all the others, and these again."""

    model: str
    stream: bool | None = None
    max_tokens: msgspec.Raw = NOTHING
    max_completion_tokens: msgspec.Raw = NOTHING
    max_output_tokens: msgspec.Raw = NOTHING

    @property
    def limit(self) -> int:
        """The most tokens that the answer may have; 0 if none is given, or one that the replica refuses."""
        digits = bytes(self.max_completion_tokens or self.max_tokens or self.max_output_tokens)
        return int(digits) if digits.isdigit() and len(digits) <= DIGITS_MAX else 0


_decode = msgspec.json.Decoder(Wanted).decode


def wanted(body: bytes) -> Wanted:
    """Read a body. Raises `Refusal`."""
    try:
        request = _decode(body)
    except msgspec.ValidationError as error:
        field = FIELD.search(str(error))
        raise Refusal(Code.INVALID_REQUEST, f"{error}.", field[1] if field else None) from None
    except msgspec.DecodeError as error:
        raise Refusal(Code.INVALID_JSON, f"The body is not valid JSON: {error}.") from None
    except UnicodeDecodeError:
        raise Refusal(Code.INVALID_JSON, "The body is not valid UTF-8.") from None
    except RecursionError:
        raise Refusal(Code.INVALID_JSON, "The body is nested too deeply.") from None
    put_in_order(request)
    return request
