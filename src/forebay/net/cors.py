"""Web pages as clients: what a browser wants to be told before it lets a page of another origin read an answer.

CORS of the Fetch standard (fetch.spec.whatwg.org, "HTTP-CORS protocol"). API keys are headers that the page itself
sets, so credentials, in the standard's sense, are never allowed.
"""

from collections.abc import Iterable
from typing import Final

from forebay.net.exchange import Exchange
from forebay.wire import http1

EVERYBODY: Final = "*"
AGE_S: Final = 7200
"""So long a browser need not ask again: the most that any of them heeds."""


class Cors:
    """The origins (`https://app.example`) of pages that may use an API; `*`: of all."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self._everybody = EVERYBODY.encode() in self._origins

    def answers(self, exchange: Exchange) -> bool:
        """Have its answer say whether the page may read it. True if no more than that was asked, and is answered."""
        origin = exchange.header(b"origin")
        if origin is None:
            return False
        if self._everybody:
            exchange.extra = b"access-control-allow-origin: *\r\naccess-control-expose-headers: *\r\n"
        elif origin in self._origins:
            exchange.extra = (
                b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\nvary: origin\r\n" % origin
            )
        else:
            exchange.extra = b"vary: origin\r\n"
        if exchange.method != b"OPTIONS" or exchange.header(b"access-control-request-method") is None:
            return False
        exchange.respond(204, self._permission(exchange, origin), b"")
        return True

    def _permission(self, exchange: Exchange, origin: bytes) -> list[http1.Header]:
        if not self._everybody and origin not in self._origins:
            return []
        headers = [(b"access-control-allow-methods", b"GET, POST"), (b"access-control-max-age", b"%d" % AGE_S)]
        asked = exchange.header(b"access-control-request-headers")
        if asked:  # by name: a `*` would leave out `authorization`
            headers.append((b"access-control-allow-headers", asked))
        return headers
