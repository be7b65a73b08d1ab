"""Error responses."""

from time import monotonic
from typing import Final

import structlog

from forebay.core.errors import Code, Refusal
from forebay.core.serving.errors import Kind, Refused
from forebay.net.exchange import Exchange
from forebay.net.replica_protocol import DEADLINE, GATEWAY, RETRYABLE
from forebay.wire import http1
from forebay.wire.errors import error_body
from forebay.wire.oip import documents
from forebay.wire.oip.fields import invalid

DEADLINE_DIGITS_MAX: Final = 9


def deadline_of(exchange: Exchange) -> float:
    """Deadline of a request, in seconds of CLOCK_MONOTONIC; 0: none. Raises `Refused`."""
    given = exchange.header(DEADLINE)
    if given is None:
        return 0.0
    if not given.isdigit() or len(given) > DEADLINE_DIGITS_MAX:
        text = f"expected an integer in milliseconds, at most {DEADLINE_DIGITS_MAX} digits."
        raise invalid(f"'{DEADLINE.decode()}': {text}")
    return monotonic() + int(given) / 1e3


def refuse(exchange: Exchange, refused: Refused, *headers: http1.Header) -> None:
    """Respond with an error of the protocol."""
    if refused.retry_after_s:
        headers = (*headers, (b"retry-after", b"%d" % refused.retry_after_s))
    if may_retry(exchange, refused):
        body = error_body(Refusal(Code.OVERLOADED, refused.text))
        exchange.respond(refused.http_status, [http1.JSON, RETRYABLE, *headers], body)
        return
    exchange.respond(refused.http_status, [http1.JSON, *headers], documents.error(refused.text))


def may_retry(exchange: Exchange, refused: Refused) -> bool:
    """Whether the client is a gateway, which may retry on another replica."""
    return refused.kind is Kind.UNAVAILABLE and exchange.header(GATEWAY) == b"1"


def refuse_method(exchange: Exchange, allowed: bytes) -> None:
    """Respond to a method that the path does not support."""
    exchange.respond(405, [http1.JSON, (b"allow", allowed)], documents.error("Method Not Allowed"))


def fail(exchange: Exchange, log: structlog.stdlib.BoundLogger, error: Exception) -> None:
    """Respond to a request that failed because of a bug of ours."""
    log.error("request handling failed", path=exchange.path[:200], exc_info=error)
    if exchange.started:
        exchange.abort()
    else:
        exchange.respond(500, [http1.JSON], documents.error("internal error"))
