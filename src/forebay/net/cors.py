"""CORS: which response headers a browser needs before it lets a page of another origin read a response.

See the Fetch standard (fetch.spec.whatwg.org, "HTTP-CORS protocol"). API keys are headers that the page itself sets,
so credentials, in the standard's sense, are never allowed.
"""

import re
from collections.abc import Iterable
from typing import Final

from forebay.net.exchange import Exchange
from forebay.wire import http1

ANY_ORIGIN: Final = "*"
AGE_S: Final = 7200
"""How long a browser may cache a preflight response: the most that any browser honours."""


LOCAL: Final = re.compile(rb"https?://(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
"""Origins of pages that this machine serves."""
APPS: Final = re.compile(rb"(?!https?:)[a-z][a-z0-9+.-]*://.*", re.IGNORECASE)
"""Origins of applications and browser extensions, which were installed: `app://…`, `vscode-webview://…`."""


def is_foreign(origin: bytes) -> bool:
    """Whether a request with this `origin` may be made by any web page: pages can POST to this machine unasked."""
    return LOCAL.fullmatch(origin) is None and APPS.fullmatch(origin) is None


class Cors:
    """The origins (`https://app.example`) whose pages may use an API; `*`: all."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self._any_origin = ANY_ORIGIN.encode() in self._origins

    def allows(self, origin: bytes) -> bool:
        """Whether pages of this origin may use the API."""
        return self._any_origin or origin in self._origins

    def answers(self, exchange: Exchange) -> bool:
        """Add the CORS headers to the response. True if the request was a preflight, which is then answered."""
        origin = exchange.header(b"origin")
        if origin is None:
            return False
        if self._any_origin:
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
        if not self._any_origin and origin not in self._origins:
            return []
        headers = [(b"access-control-allow-methods", b"GET, POST"), (b"access-control-max-age", b"%d" % AGE_S)]
        asked = exchange.header(b"access-control-request-headers")
        if asked:  # by name: `*` would not cover `authorization`
            headers.append((b"access-control-allow-headers", asked))
        return headers
