"""The server of the calls: who answers what, limits, health, draining."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog
from tritonclient.grpc import service_pb2 as pb

from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.ports import Models
from forebay.modelserver.regions import SharedRegions
from forebay.modelserver.rpc.administration import Administration
from forebay.modelserver.rpc.inferring import infer
from forebay.modelserver.rpc.responses import MESSAGE_BYTES_MAX
from forebay.modelserver.rpc.streaming import Behind, Stream
from forebay.wire.oip.documents import ERROR_CHARS_MAX
from forebay.wire.oip.ports import Settings

SERVICE: Final = "inference.GRPCInferenceService"
HEALTH: Final = "grpc.health.v1.Health"
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""HealthCheckResponse: field 1, the state."""
WATCH_EVERY_S: Final = 1.0
STREAMS_MAX: Final = 10_000
"""Calls at once; more wait in their connections."""
_CODES: Final = {
    Kind.UNKNOWN: grpc.StatusCode.UNKNOWN,
    Kind.INTERNAL: grpc.StatusCode.INTERNAL,
    Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Kind.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Kind.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Kind.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Kind.CANCELLED: grpc.StatusCode.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class RpcOptions:
    """How a front is set up."""

    name: str = "forebay"
    version: str = ""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    """Of a request; gRPC has no more."""
    compression: str = "none"
    """Of answers: none, deflate or gzip."""


class RpcFront:
    """Listens from `start` to `stop`."""

    def __init__(
        self,
        models: Models,
        regions: SharedRegions,
        settings: Settings,
        *,
        log: structlog.stdlib.BoundLogger,
        options: RpcOptions,
    ) -> None:
        self._models = models
        self._regions = regions
        self._log = log
        self._options = options
        self._administration = Administration(models, regions, settings, options.name, options.version)
        self._server: Any = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises OSError if the port cannot be had."""
        options = self._options
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", options.message_bytes_max),
                ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
                ("grpc.so_reuseport", 0),  # two servers on one port would each get half of the requests
                ("grpc.max_concurrent_streams", STREAMS_MAX),
            ],
            compression=getattr(grpc.Compression, _COMPRESSION[options.compression]),
        )
        self._server.add_generic_rpc_handlers((self._calls(), self._health()))
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._server.add_insecure_port(where)
        except RuntimeError as error:
            raise OSError(f"the port cannot be had ({error})") from error
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, let those under way finish within the grace, cut off the others."""
        if self._server is not None:
            await self._server.stop(grace_s)

    # --- calls

    def _calls(self) -> Any:
        """The service. Its methods have the names of the protocol; ours are the same in snake case."""
        handlers: dict[str, Any] = {}
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            request = getattr(pb, method.input_type.name)
            response = getattr(pb, method.output_type.name)
            serve: Callable[[Any, Any], Awaitable[Any]]
            match method.name:
                case "ModelInfer":
                    serve = self._infer
                case "ModelStreamInfer":
                    serve = self._stream
                case name:
                    serve = self._answering(getattr(self._administration, _snake(name)))
            make = (
                grpc.stream_stream_rpc_method_handler
                if method.client_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            handlers[method.name] = make(serve, request.FromString, response.SerializeToString)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _answering(self, call: Callable[[Any], Any]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def serve(message: Any, context: Any) -> Any:
            try:
                answer = call(message)
                return await answer if isinstance(answer, Coroutine) else answer
            except Exception as error:  # supervisor: a mistake costs one answer
                await self._abort(context, error)

        return serve

    async def _infer(self, message: Any, context: Any) -> Any:
        try:
            return await infer(self._models, self._regions, message)
        except Exception as error:  # supervisor: a mistake costs one answer
            await self._abort(context, error)

    async def _stream(self, requests: AsyncIterator[Any], context: Any) -> None:
        try:
            await Stream(self._models, self._regions, self._log).run(requests, context.write)
        except Behind as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def _abort(self, context: Any, error: Exception) -> None:
        if isinstance(error, Refused):
            await context.abort(_CODES[error.kind], error.text[:ERROR_CHARS_MAX])
        else:
            self._log.error("request handling failed", exc_info=error)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")

    # --- health

    def _health(self) -> Any:
        """The usual health service, by its bytes: one field in each message."""
        return grpc.method_handlers_generic_handler(
            HEALTH,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
            },
        )

    async def _check(self, _: bytes, __: Any) -> bytes:
        return self._state()

    async def _watch(self, _: bytes, context: Any) -> None:
        told = b""
        while True:
            state = self._state()
            if state != told:
                told = state
                await context.write(state)
            await asyncio.sleep(WATCH_EVERY_S)

    def _state(self) -> bytes:
        return _SERVING if self._models.ready else _NOT_SERVING


_COMPRESSION: Final = {"none": "NoCompression", "deflate": "Deflate", "gzip": "Gzip"}


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
