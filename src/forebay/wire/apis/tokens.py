"""Tokenization: `/v1/tokenize` and `/v1/detokenize`, in vLLM's format."""

from dataclasses import dataclass
from typing import Final

import msgspec

from forebay.core.errors import Code, Refusal
from forebay.wire.openai_fields import Reader, boolean, decode, missing, nested, text
from forebay.wire.openai_request import messages, tokens

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """`POST /v1/tokenize`: a text, or messages, which are rendered into the prompt of a chat request.

    `special`: add the model's special tokens around a text, if it has any.
    """

    model: str
    content: str | tuple[dict[str, str], ...]
    special: bool = True


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """`POST /v1/detokenize`."""

    model: str
    tokens: tuple[int, ...]


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Parse a tokenize request. Raises `Refusal`."""
    given = TOKENIZE_BODY(decode(body), "")
    if "prompt" in given and "messages" in given:
        raise Refusal(Code.INVALID_REQUEST, "Send 'prompt' or 'messages', not both.", "messages")
    content = given.get("prompt", given.get("messages"))
    if content is None:
        missing("prompt")
    return TokenizeRequest(given["model"], content, given.get("add_special_tokens", True))


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Parse a detokenize request. Raises `Refusal`."""
    given = DETOKENIZE_BODY(decode(body), "")
    return DetokenizeRequest(given["model"], given["tokens"])


def tokenize_body(ids: tuple[int, ...], context_tokens: int) -> bytes:
    """The tokens of a text, their count, and the model's context length."""
    return _encode({"tokens": ids, "count": len(ids), "max_model_len": context_tokens})


def detokenize_body(content: str) -> bytes:
    """The text of the tokens."""
    return _encode({"prompt": content})


_TOKENIZE: Final[dict[str, Reader]] = {
    "model": text(1),
    "prompt": text(1),
    "messages": messages,
    "add_special_tokens": boolean,
}
_DETOKENIZE: Final[dict[str, Reader]] = {"model": text(1), "tokens": tokens}
TOKENIZE_BODY: Final = nested(_TOKENIZE, ("model",))
DETOKENIZE_BODY: Final = nested(_DETOKENIZE, ("model", "tokens"))
