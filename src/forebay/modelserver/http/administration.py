"""Endpoints that change the server: the repository, shared memory, and the settings of tracing and logging."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from forebay.modelserver.http.answering import refuse_method
from forebay.modelserver.ports import Models
from forebay.net.exchange import Exchange
from forebay.wire import http1
from forebay.wire.oip import documents
from forebay.wire.oip.control import read_index, read_load, read_region, read_unload
from forebay.wire.oip.fields import load
from forebay.wire.oip.ports import MemoryKind, Regions, Settings
from forebay.wire.oip.route import Endpoint, Route

Later = Callable[[Exchange, Coroutine[Any, Any, None]], None]
"""Responds to an exchange once the work is done."""
STATUS: Final = "status"
REGISTER: Final = "register"


class Administration:
    """Handlers of those endpoints. They raise `Refused`."""

    def __init__(self, models: Models, regions: Regions, settings: Settings, later: Later) -> None:
        self._models = models
        self._regions = regions
        self._settings = settings
        self._later = later

    def index(self, exchange: Exchange, _: Route) -> None:
        """List the repository index."""
        self._later(exchange, self._index(exchange, ready_only=read_index(exchange.body)))

    async def _index(self, exchange: Exchange, *, ready_only: bool) -> None:
        if not ready_only:
            await self._models.refresh()
        found = self._models.index(ready_only)
        entries = [documents.index_entry(each.name, each.version, each.state, each.reason) for each in found]
        exchange.respond(200, [http1.JSON], documents.encode(entries))

    def load(self, exchange: Exchange, asked: Route) -> None:
        """Load or reload a model."""
        self._later(exchange, self._models.load(asked.model, read_load(exchange.body)))

    def unload(self, exchange: Exchange, asked: Route) -> None:
        """Unload a model."""
        dependents, version = read_unload(exchange.body)
        self._later(exchange, self._models.unload(asked.model, dependents, version))

    def memory(self, exchange: Exchange, asked: Route) -> None:
        """Register, unregister or list shared memory regions."""
        kind = MemoryKind.SYSTEM if asked.endpoint is Endpoint.SYSTEM_MEMORY else MemoryKind.CUDA
        allowed = b"GET" if asked.action == STATUS else b"POST"
        if exchange.method != allowed:
            refuse_method(exchange, allowed)
            return
        body = b""
        if asked.action == STATUS:
            body = documents.encode(documents.regions(self._regions.status(kind, asked.region)))
        elif asked.action == REGISTER:
            self._regions.register(read_region(kind, asked.region, exchange.body))
        else:
            self._regions.unregister(kind, asked.region)
        exchange.respond(200, [http1.JSON], body)

    def trace(self, exchange: Exchange, asked: Route) -> None:
        """Show or change trace settings."""
        settings, model = self._settings, asked.model
        if exchange.method not in (b"GET", b"POST"):
            refuse_method(exchange, b"GET, POST")
            return
        if exchange.method == b"POST":
            settings.change_trace(model, _changes(exchange.body))
        exchange.respond(200, [http1.JSON], documents.encode(settings.trace(model)))

    def logging(self, exchange: Exchange, _: Route) -> None:
        """Show or change log settings."""
        settings = self._settings
        if exchange.method not in (b"GET", b"POST"):
            refuse_method(exchange, b"GET, POST")
            return
        if exchange.method == b"POST":
            settings.change_logging(_changes(exchange.body))
        exchange.respond(200, [http1.JSON], documents.encode(settings.logging()))


def _changes(body: bytes) -> Mapping[str, Any]:
    value = load(body)
    return value if type(value) is dict else {}
