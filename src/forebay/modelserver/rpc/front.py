"""The gRPC server: method table, limits, draining."""

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
from forebay.modelserver.rpc.calls import MESSAGES_BYTES_MAX, Answering, Call, Maker, Method, Methods, RpcContext
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
    """TLS files of a listener. They are reloaded when they change."""

    server: TlsSpec
    clients: str | None = None
    """CA certificates for client authentication; None: clients need no certificate."""


@dataclass(frozen=True, slots=True)
class RpcOptions:
    """Options of a front."""

    name: str = "forebay"
    version: str = ""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    """Size limit of a request message; also gRPC's own maximum."""
    messages_bytes_max: int = MESSAGES_BYTES_MAX
    """Limit of incomplete messages, over all calls."""
    compression: str = "none"
    """Compression of responses: none, deflate or gzip."""
    forwarded_headers: re.Pattern[str] | None = None
    """Request headers whose name matches this pattern become parameters."""
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
        self.context = context = RpcContext(
            models, regions, log, tasks, options.message_bytes_max, packing, options.forwarded_headers
        )
        context.room.bytes_max = options.messages_bytes_max
        context.methods = _methods(Administration(models, regions, settings, options.name, options.version))
        tls = options.tls
        self._renewal = (
            None if tls is None else CertificateReloader(tls.server, log, clients=tls.clients, protocols=HTTP_2)
        )
        self._tasks = tasks
        self._following: asyncio.Task[None] | None = None
        self._server = Http2Server(context.read, context.begin, options.keepalive)

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises OSError if the port is not available, and `BadPair`."""
        renewal = self._renewal
        await self._server.start(host, port, None if renewal is None else renewal.start())
        if renewal is not None:
            self._following = self._tasks.create_task(renewal.follow())

    @property
    def certificate_ends_s(self) -> float | None:
        """Expiry of the certificate in use, in seconds since the epoch; None: no certificate is in use."""
        return None if self._renewal is None or self._following is None else self._renewal.expires_s

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, let those in flight finish within the grace period, then close the rest."""
        if self._following is not None:
            self._following.cancel()
        if grace_s:
            self.context.draining = True
            for call in self._server.handlers():
                assert isinstance(call, Call)
                call.on_drain()
            await self._server.drain(grace_s)
        self._server.close()


def _methods(administration: Administration) -> Methods:
    """Call factories by path. Handlers have the protocol's method names in snake case."""
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
