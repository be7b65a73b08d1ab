"""Errors as OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`."""

import msgspec

from forebay.core.errors import TABLE, Code, Refusal


def error_object(code: Code, text: str = "", param: str | None = None) -> dict[str, dict[str, str | None]]:
    """The error object as a value."""
    row = TABLE[code]
    return {"error": {"message": text or row.text, "type": row.kind, "param": param, "code": code.value}}


def error_body(refusal: Refusal) -> bytes:
    """The JSON body of an error answer."""
    return msgspec.json.encode(error_object(refusal.code, refusal.text, refusal.param))


def error_event(code: Code, text: str = "") -> bytes:
    """A server-sent event that ends a stream with an error."""
    return b"data: " + msgspec.json.encode(error_object(code, text)) + b"\n\n"
