"""Answers that are errors."""

from time import monotonic
from typing import Final

import structlog

from forebay.core.errors import Code, Refusal
from forebay.core.serving.errors import Kind, Refused
from forebay.net.exchange import Exchange
from forebay.wire import http1
from forebay.wire.errors import error_body
from forebay.wire.oip import documents
from forebay.wire.oip.fields import invalid

GATEWAY: Final = b"x-forebay-gateway"
"""Request header `1` of a gateway."""
RETRYABLE: Final = (b"x-forebay-retryable", b"1")
"""Tells a gateway that another replica may be asked; what its client hears in the end is the gateway's affair."""

DEADLINE: Final = b"x-forebay-deadline-ms"
"""Request header: so many milliseconds after its arrival the answer is worth nothing any more."""
DEADLINE_DIGITS_MAX: Final = 9


def deadline_of(exchange: Exchange) -> float:
    """The deadline that a request names, seconds of CLOCK_MONOTONIC; 0: none. Raises `Refused`."""
    given = exchange.header(DEADLINE)
    if given is None:
        return 0.0
    if not given.isdigit() or len(given) > DEADLINE_DIGITS_MAX:
        text = f"a whole number of milliseconds is wanted, of {DEADLINE_DIGITS_MAX} digits at most."
        raise invalid(f"'{DEADLINE.decode()}': {text}")
    return monotonic() + int(given) / 1e3


def refuse(exchange: Exchange, refused: Refused, *headers: http1.Header) -> None:
    """Answer with an error of the protocol."""
    if refused.retry_after_s:
        headers = (*headers, (b"retry-after", b"%d" % refused.retry_after_s))
    if may_retry(exchange, refused):
        body = error_body(Refusal(Code.OVERLOADED, refused.text))
        exchange.respond(refused.http_status, [http1.JSON, RETRYABLE, *headers], body)
        return
    exchange.respond(refused.http_status, [http1.JSON, *headers], documents.error(refused.text))


def may_retry(exchange: Exchange, refused: Refused) -> bool:
    """Whether a gateway asks, which can let another replica do what this one has no room, or no process, for."""
    return refused.kind is Kind.UNAVAILABLE and exchange.header(GATEWAY) == b"1"


def refuse_method(exchange: Exchange, allowed: bytes) -> None:
    """Answer a request of a method that the path does not take."""
    exchange.respond(405, [http1.JSON, (b"allow", allowed)], documents.error("Method Not Allowed"))


def fail(exchange: Exchange, log: structlog.stdlib.BoundLogger, error: Exception) -> None:
    """Answer a request that met our own mistake."""
    log.error("request handling failed", path=exchange.path[:200], exc_info=error)
    if exchange.started:
        exchange.abort()
    else:
        exchange.respond(500, [http1.JSON], documents.error("internal error"))
