"""Errors of task endpoints: what clients are told, and what is only logged."""

import re
from typing import Final

import structlog

from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.tasks.contract import ContractViolation
from forebay.net.exchange import Exchange
from forebay.net.replica_protocol import RETRYABLE
from forebay.obs.clock import random_hex
from forebay.wire import http1
from forebay.wire.errors import error_body, id_headers

_CODES: Final = {
    Kind.NOT_FOUND: Code.MODEL_NOT_FOUND,
    Kind.UNAVAILABLE: Code.OVERLOADED,
    Kind.DEADLINE_EXCEEDED: Code.DEADLINE_EXCEEDED,
    Kind.INTERNAL: Code.INTERNAL,
    Kind.UNKNOWN: Code.INTERNAL,
}
"""All other kinds are client errors."""
TEXT_CHARS_MAX: Final = 4000
"""Of an error: it may repeat what the client has sent."""
_NAMED: Final = re.compile(r"([a-z_]+(?:\[\])?)(?:\[([0-9]{1,6})\])?: ")
_INSIDE: Final = re.compile(r"(?:\[request id: [^]]*\] )?(?:in ensemble '[^']*', (?:step of model '[^']*': )?)*")
"""The protocol's prefixes of a model's own text: request id, ensemble and step."""
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_TOLD: Final = re.compile(rb"(?:^|\n)x-request-id: ([^\r]+)\r\n")
"""Among the headers that every response of a replica has."""


class Failure(Refusal):
    """A model has failed, for a `reason` that is only logged: it may contain file names or request content."""

    def __init__(self, text: str, reason: str = "") -> None:
        super().__init__(Code.INTERNAL, text)
        self.reason = reason


class Crowded(Refusal):
    """There is no capacity for a request now; clients may retry after `retry_after_s`."""

    def __init__(self, code: Code, text: str, retry_after_s: int) -> None:
        super().__init__(code, text)
        self.retry_after_s = retry_after_s


def failed(model: str, reason: str) -> Failure:
    """The error for a model that reported a failure."""
    return Failure(f"The model '{model}' failed; the log has the request id.", reason)


def contract_violated(model: str, violation: ContractViolation) -> Failure:
    """The error for a model whose output violates its task's contract."""
    return Failure(f"The model '{model}' violates the contract of its task: {violation}.")


def translated(refused: Refused, param: str, model: str, rows: range | None = None) -> Refusal:
    """Convert an error of the protocol into one of this API; `param` is the field that the client must change.

    A model may name the offending option itself, `language: …`, or the item in its inference, `image[1]: …`. `rows`
    are the rows of that inference; None: the job has only one.
    """
    code = _CODES.get(refused.kind, Code.INVALID_REQUEST)
    if code is Code.INTERNAL:
        return failed(model, refused.text)
    text = _INSIDE.sub("", refused.text[:TEXT_CHARS_MAX], count=1)
    if refused.retry_after_s and code in (Code.OVERLOADED, Code.DEADLINE_EXCEEDED):
        return Crowded(code, text, refused.retry_after_s)
    if code is Code.MODEL_NOT_FOUND:
        return Refusal(code, text, param)
    if code is not Code.INVALID_REQUEST:
        return Refusal(code, text)
    return _located(text, param, rows)


def _located(text: str, param: str, rows: range | None) -> Refusal:
    """A model's complaint, with the field and, if known, the item in it."""
    named = _NAMED.match(text)
    if named is None:
        one = rows is not None and len(rows) == 1
        return Refusal(Code.INVALID_REQUEST, text, f"{param}[{rows[0]}]" if rows is not None and one else param)
    name, at = named[1], int(named[2] or 0)
    if name == param and rows is not None and at < len(rows) and (named[2] or len(rows) == 1):
        name = f"{name}[{rows[at]}]"
    return Refusal(Code.INVALID_REQUEST, f"{name}: {text[named.end() :]}", name)


def refuse(exchange: Exchange, refusal: Refusal, log: structlog.stdlib.BoundLogger, *headers: http1.Header) -> None:
    """Respond with an error. Server errors are also logged, with the request id in the response."""
    row = TABLE[refusal.code]
    more = [*headers, RETRYABLE] if row.retry else [*headers]
    if isinstance(refusal, Crowded):
        more.append((b"retry-after", b"%d" % refusal.retry_after_s))
    if row.status == 500:
        id = note(exchange, log, refusal)
        more += id_headers(id) if _TOLD.search(exchange.extra) is None else []
    exchange.respond(row.status, [http1.JSON, *more], error_body(refusal, exchange.path))


def note(exchange: Exchange, log: structlog.stdlib.BoundLogger, refusal: Refusal) -> bytes:
    """Log a failure. Returns the request id: the one that the response has, the client's, or a new one."""
    told = _TOLD.search(exchange.extra)
    given = told[1] if told is not None else exchange.header(b"x-request-id") or b""
    id = given if _REQUEST_ID.fullmatch(given) else f"req-{random_hex(8)}".encode()
    reason = refusal.reason if isinstance(refusal, Failure) else ""
    facts = {"request_id": id.decode(), "path": exchange.path[:200]}
    log.error("request failed", **facts, problem=refusal.text, reason=reason, exc_info=refusal.__cause__)
    return id
