"""The server of the calls: who answers what, limits, draining."""

import asyncio
import re
import ssl
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog
from tritonclient.grpc import service_pb2 as pb

from forebay.modelserver.ports import Models
from forebay.modelserver.regions import SharedRegions
from forebay.modelserver.rpc.administration import Administration
from forebay.modelserver.rpc.calls import Answering, Call, Desk, Maker, Method, Methods
from forebay.modelserver.rpc.health import SERVICE as HEALTH
from forebay.modelserver.rpc.health import Check, Watch
from forebay.modelserver.rpc.inferring import Inference
from forebay.modelserver.rpc.streaming import Streaming
from forebay.net.http2 import Http2Server, Keepalive
from forebay.wire.http2.grpc import MESSAGE_BYTES_MAX
from forebay.wire.oip.ports import Settings

SERVICE: Final = "inference.GRPCInferenceService"


@dataclass(frozen=True, slots=True)
class RpcOptions:
    """How a front is set up."""

    name: str = "forebay"
    version: str = ""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    """Of a request; gRPC has no more."""
    compression: str = "none"
    """Of answers: none, deflate or gzip."""
    forwarded_headers: re.Pattern[str] | None = None
    """Headers whose name has that in it become parameters of requests."""
    keepalive: Keepalive = field(default_factory=Keepalive)
    tls: ssl.SSLContext | None = None


class RpcFront:
    """Listens from `start` to `stop`."""

    def __init__(
        self,
        models: Models,
        regions: SharedRegions,
        settings: Settings,
        *,
        tasks: asyncio.TaskGroup,
        log: structlog.stdlib.BoundLogger,
        options: RpcOptions,
    ) -> None:
        packing = b"" if options.compression == "none" else options.compression.encode()
        desk = Desk(models, regions, log, tasks, options.message_bytes_max, packing, options.forwarded_headers)
        desk.methods = _methods(Administration(models, regions, settings, options.name, options.version))
        self._options = options
        self._server = Http2Server(desk.read, desk.begin, options.keepalive)

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises OSError if the port cannot be had."""
        await self._server.start(host, port, self._options.tls)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, let those under way finish within the grace, cut off the others."""
        if grace_s:
            for call in self._server.takers():
                assert isinstance(call, Call)
                call.on_drain()
            await self._server.drain(grace_s)
        self._server.close()


def _methods(administration: Administration) -> Methods:
    """By path. Methods have the names of the protocol; ours are the same in snake case."""
    found: dict[bytes, Maker] = {
        f"/{HEALTH}/Check".encode(): Check,
        f"/{HEALTH}/Watch".encode(): Watch,
    }
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        make: Maker
        match method.name:
            case "ModelInfer":
                make = Inference
            case "ModelStreamInfer":
                make = Streaming
            case name:
                read = getattr(pb, method.input_type.name).FromString
                make = partial(Answering, Method(read, getattr(administration, _snake(name))))
        found[f"/{SERVICE}/{method.name}".encode()] = make
    return found


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
