"""The part of the Open Inference Protocol that a gateway answers itself: its own health, and what it serves.

Requests that would change a model server, or concern a single one, are rejected with the reason.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from forebay import __version__
from forebay.core.errors import Code, Refusal
from forebay.net.exchange import Exchange
from forebay.wire import http1

EXTENSIONS: Final = (
    "classification", "sequence", "model_configuration", "binary_tensor_data", "parameters", "statistics", "generate",
)  # fmt: skip
"""Extensions of the protocol by model servers that work through a gateway."""
SERVER: Final = msgspec.json.encode({"name": "forebay", "version": __version__, "extensions": EXTENSIONS})
FIXED: Final = (
    "Models cannot be loaded or unloaded through a gateway: change the cluster file and run `forebay reload`."
)
ONE_SERVER: Final = "This concerns a single model server, and a gateway fronts several. Ask a model server itself."
ALONE: Final = ("/v2/systemsharedmemory", "/v2/cudasharedmemory", "/v2/logging", "/v2/trace", "/v2/models/stats")

Answer = tuple[int, http1.Headers, bytes]
Listing = Callable[[Exchange], Mapping[str, bool]]
"""Returns whether each model that the caller may use is ready. Raises `Refusal`."""


def answer(exchange: Exchange, path: str, models: Listing, *, ready: bool) -> Answer:
    """Status, headers and body for a path under `/v2` that is not for a model. Raises `Refusal`."""
    asks = exchange.method in (b"GET", b"HEAD")
    match path:
        case "/v2" | "/v2/":
            _require(asks, path, "GET")
            return 200, [http1.JSON], SERVER
        case "/v2/health/live":
            _require(asks, path, "GET")
            return 200, [], b""
        case "/v2/health/ready":
            _require(asks, path, "GET")
            return 200 if ready else 503, [], b""
        case "/v2/repository/index":
            _require(exchange.method == b"POST", path, "POST")
            return 200, [http1.JSON], msgspec.json.encode([_entry(*each) for each in models(exchange).items()])
    if path.startswith("/v2/repository/"):
        raise Refusal(Code.METHOD_NOT_ALLOWED, FIXED)
    if path.startswith(ALONE) or path.endswith("/trace/setting"):
        raise Refusal(Code.NOT_FOUND, ONE_SERVER)
    raise Refusal(Code.NOT_FOUND, f"No such path: {path[:256]}")


def _require(good: bool, path: str, method: str) -> None:
    if not good:
        raise Refusal(Code.METHOD_NOT_ALLOWED, f"{path} takes {method}.")


def _entry(name: str, ready: bool) -> dict[str, Any]:
    return {"name": name, "state": "READY" if ready else "UNAVAILABLE"}
