"""Routes of the protocol's HTTP form."""

import re
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

from forebay.core.serving.errors import Kind, Refused
from forebay.wire.oip.fields import INT64_MAX, invalid

CACHED_TARGETS_MAX: Final = 2048
CACHED_TARGET_BYTES_MAX: Final = 512


class Endpoint(StrEnum):
    """The endpoint of a path."""

    SERVER = "server"
    LIVE = "live"
    READY = "ready"
    MODEL = "model"
    MODEL_READY = "model_ready"
    CONFIG = "config"
    STATISTICS = "stats"
    INFER = "infer"
    GENERATE = "generate"
    GENERATE_STREAM = "generate_stream"
    TRACE = "trace/setting"
    LOGGING = "logging"
    INDEX = "index"
    LOAD = "load"
    UNLOAD = "unload"
    SYSTEM_MEMORY = "systemsharedmemory"
    CUDA_MEMORY = "cudasharedmemory"


class Route(NamedTuple):
    """A parsed path."""

    endpoint: Endpoint
    model: str = ""
    version: str = ""
    """A number without leading zeros; empty: the latest."""
    action: str = ""
    """Of shared memory: status, register or unregister."""
    region: str = ""


_FIXED: Final = {
    "/v2": Route(Endpoint.SERVER),
    "/v2/health/live": Route(Endpoint.LIVE),
    "/v2/health/ready": Route(Endpoint.READY),
    "/v2/models/stats": Route(Endpoint.STATISTICS),
    "/v2/logging": Route(Endpoint.LOGGING),
    "/v2/trace/setting": Route(Endpoint.TRACE),
}
_MODEL: Final = re.compile(
    r"/v2/models/([^/]+)(?:/versions/([0-9]+))?"
    r"(?:/(infer|generate|generate_stream|ready|config|stats|trace/setting))?"
)
_REPOSITORY: Final = re.compile(r"/v2/repository(?:/([^/]+))?/(?:(index)|models/([^/]+)/(load|unload))")
_MEMORY: Final = re.compile(
    r"/v2/(systemsharedmemory|cudasharedmemory)(?:/region/([^/]+))?/(status|register|unregister)"
)
_OF_MODEL: Final = {"": Endpoint.MODEL, "ready": Endpoint.MODEL_READY} | {
    each.value: each
    for each in (
        Endpoint.INFER, Endpoint.GENERATE, Endpoint.GENERATE_STREAM, Endpoint.CONFIG, Endpoint.STATISTICS,
        Endpoint.TRACE,
    )
}  # fmt: skip


def route(target: bytes) -> Route:
    """The route of a request target (path and query). Raises `Refused`."""
    return _cached(target) if len(target) <= CACHED_TARGET_BYTES_MAX else _route(target)


def _route(target: bytes) -> Route:
    path = target.partition(b"?")[0].decode("latin-1")
    if (fixed := _FIXED.get(path)) is not None:
        return fixed
    if (found := _MODEL.fullmatch(path)) is not None:
        model, version, kind = found.groups("")
        if not (version and kind == Endpoint.TRACE):
            return Route(_OF_MODEL[kind], unquote(model), _version(version))
    elif (found := _REPOSITORY.fullmatch(path)) is not None:
        repository, index, model, action = found.groups("")
        if index:
            return Route(Endpoint.INDEX)
        if repository:
            raise Refused(Kind.UNSUPPORTED, "'repository_name' specification is not supported")
        return Route(Endpoint(action), unquote(model))
    elif (found := _MEMORY.fullmatch(path)) is not None:
        memory, region, action = found.groups("")
        return Route(Endpoint(memory), action=action, region=unquote(region))
    raise Refused(Kind.NOT_FOUND, "Not Found")


_cached = lru_cache(maxsize=CACHED_TARGETS_MAX)(_route)


def _version(given: str) -> str:
    if len(given) > len(str(INT64_MAX)) or int(given or 0) > INT64_MAX:
        raise invalid(
            f"failed to get model version from specified version string '{given[:100]}' (details: stol), "
            f"version should be an integral value > 0"
        )
    return given.lstrip("0") or given[:1]
