"""The server of the calls: who answers what, limits, draining."""

import asyncio
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import structlog
from tritonclient.grpc import service_pb2 as pb

from forebay.core.model import TlsSpec
from forebay.modelserver.ports import Models
from forebay.modelserver.regions import SharedRegions
from forebay.modelserver.rpc import reflection
from forebay.modelserver.rpc.administration import Administration
from forebay.modelserver.rpc.calls import MESSAGES_BYTES_MAX, Answering, Call, Desk, Maker, Method, Methods
from forebay.modelserver.rpc.described import Described
from forebay.modelserver.rpc.health import SERVICE as HEALTH
from forebay.modelserver.rpc.health import Check, Watch
from forebay.modelserver.rpc.inferring import Inference
from forebay.modelserver.rpc.streaming import Streaming
from forebay.net.http2 import HTTP_2, Http2Server, Keepalive
from forebay.net.tls import CertificateReloader
from forebay.wire.http2.grpc import MESSAGE_BYTES_MAX
from forebay.wire.oip.ports import Settings

SERVICE: Final = "inference.GRPCInferenceService"


class RpcTls(NamedTuple):
    """The files that a listener is encrypted with. What they hold is followed as it changes."""

    server: TlsSpec
    clients: str | None = None
    """The authorities of which clients need a certificate; None: they need none."""


@dataclass(frozen=True, slots=True)
class RpcOptions:
    """How a front is set up."""

    name: str = "forebay"
    version: str = ""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    """Of a request; gRPC has no more."""
    messages_bytes_max: int = MESSAGES_BYTES_MAX
    """Of messages that have come in part, of all calls together."""
    compression: str = "none"
    """Of answers: none, deflate or gzip."""
    forwarded_headers: re.Pattern[str] | None = None
    """Headers whose name has that in it become parameters of requests."""
    keepalive: Keepalive = field(default_factory=Keepalive)
    tls: RpcTls | None = None


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
        self.desk = desk = Desk(
            models, regions, log, tasks, options.message_bytes_max, packing, options.forwarded_headers
        )
        desk.room.bytes_max = options.messages_bytes_max
        desk.methods = _methods(Administration(models, regions, settings, options.name, options.version))
        tls = options.tls
        self._renewal = (
            None if tls is None else CertificateReloader(tls.server, log, clients=tls.clients, protocols=HTTP_2)
        )
        self._tasks = tasks
        self._following: asyncio.Task[None] | None = None
        self._server = Http2Server(desk.read, desk.begin, options.keepalive)

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises OSError if the port cannot be had, and `BadPair`."""
        renewal = self._renewal
        await self._server.start(host, port, None if renewal is None else renewal.start())
        if renewal is not None:
            self._following = self._tasks.create_task(renewal.follow())

    @property
    def certificate_ends_s(self) -> float | None:
        """When the certificate in use ends, seconds since the epoch; None: none is in use."""
        return None if self._renewal is None or self._following is None else self._renewal.expires_s

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, let those under way finish within the grace, cut off the others."""
        if self._following is not None:
            self._following.cancel()
        if grace_s:
            for call in self._server.handlers():
                assert isinstance(call, Call)
                call.on_drain()
            await self._server.drain(grace_s)
        self._server.close()


def _methods(administration: Administration) -> Methods:
    """By path. Methods have the names of the protocol; ours are the same in snake case."""
    found: dict[bytes, Maker] = {
        f"/{HEALTH}/Check".encode(): Check,
        f"/{HEALTH}/Watch".encode(): Watch,
        **reflection.methods(Described()),
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
