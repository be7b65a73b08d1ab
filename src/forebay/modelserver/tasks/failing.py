"""Errors of the endpoints of tasks: what clients are told, and what only the log is."""

import re
from typing import Final

import structlog

from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.tasks.contract import Mistake
from forebay.net.exchange import Exchange
from forebay.obs.clock import random_hex
from forebay.wire import http1
from forebay.wire.errors import error_body, id_headers

RETRYABLE: Final = (b"x-forebay-retryable", b"1")
"""Tells a gateway that another replica may be asked."""
_CODES: Final = {
    Kind.NOT_FOUND: Code.MODEL_NOT_FOUND,
    Kind.UNAVAILABLE: Code.OVERLOADED,
    Kind.INTERNAL: Code.INTERNAL,
    Kind.UNKNOWN: Code.INTERNAL,
}
"""Every other kind is the client's fault."""
_NAMED: Final = re.compile(r"([a-z_]+(?:\[\])?)(?:\[([0-9]{1,6})\])?: ")
_INSIDE: Final = re.compile(r"(?:\[request id: [^]]*\] )?(?:in ensemble '[^']*', (?:step of model '[^']*': )?)*")
"""What the protocol says before the words of a model: which request of a batch, and which step of an ensemble."""
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


class Failure(Refusal):
    """A model has failed, for a `reason` that is for the log alone: it may name files, or quote the request."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(Code.INTERNAL, text)
        self.reason = reason


class Crowded(Refusal):
    """There is no room for a request now; coming back makes sense after `retry_after_s`."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(Code.OVERLOADED, refused.text)
        self.retry_after_s = refused.retry_after_s


def failed(model: str, reason: str) -> Failure:
    """A model has said that it failed."""
    return Failure(f"The model '{model}' failed; the log has the request id.", reason)


def mistaken(model: str, mistake: Mistake) -> Failure:
    """A model has given something else than its task promises."""
    return Failure(f"The model '{model}' does not do what its task promises: {mistake}.")


def translated(refused: Refused, param: str, model: str, rows: range | None = None) -> Refusal:
    """An error of the protocol as one of this API; `param` is the field that the client has to change.

    A model that takes options says itself which of them is to blame: `language: …`. Of several things in a field it
    may say which, counted within its inference: `image[1]: …`. `rows` are those of the inference; None: there is one.
    """
    code = _CODES.get(refused.kind, Code.INVALID_REQUEST)
    if code is Code.INTERNAL:
        return failed(model, refused.text)
    text = _INSIDE.sub("", refused.text, count=1)
    if refused.retry_after_s and code is Code.OVERLOADED:
        return Crowded(refused)
    if code is Code.MODEL_NOT_FOUND:
        return Refusal(code, text, param)
    if code is not Code.INVALID_REQUEST:
        return Refusal(code, text)
    return _located(text, param, rows)


def _located(text: str, param: str, rows: range | None) -> Refusal:
    """What a model finds wrong, with the field and, as far as that is known, the thing in it."""
    named = _NAMED.match(text)
    if named is None:
        one = rows is not None and len(rows) == 1
        return Refusal(Code.INVALID_REQUEST, text, f"{param}[{rows[0]}]" if rows is not None and one else param)
    name, at = named[1], int(named[2] or 0)
    if name == param and rows is not None and at < len(rows) and (named[2] or len(rows) == 1):
        name = f"{name}[{rows[at]}]"
    return Refusal(Code.INVALID_REQUEST, f"{name}: {text[named.end() :]}", name)


def refuse(exchange: Exchange, refusal: Refusal, log: structlog.stdlib.BoundLogger, *headers: http1.Header) -> None:
    """Answer with an error. What is not the client's fault is also logged, with the id that the answer has."""
    row = TABLE[refusal.code]
    more = [*headers, RETRYABLE] if row.retry else [*headers]
    if isinstance(refusal, Crowded):
        more.append((b"retry-after", b"%d" % refusal.retry_after_s))
    if row.status == 500:
        more += id_headers(note(exchange, log, refusal))
    exchange.respond(row.status, [http1.JSON, *more], error_body(refusal, exchange.path))


def note(exchange: Exchange, log: structlog.stdlib.BoundLogger, refusal: Refusal) -> bytes:
    """Log a failure. Returns the id of its request: the one that it came with, or a new one."""
    given = exchange.header(b"x-request-id") or b""
    id = given if _REQUEST_ID.fullmatch(given) else f"req-{random_hex(8)}".encode()
    reason = refusal.reason if isinstance(refusal, Failure) else ""
    facts = {"request_id": id.decode(), "path": exchange.path[:200]}
    log.error("request failed", **facts, problem=refusal.text, reason=reason, exc_info=refusal.__cause__)
    return id
