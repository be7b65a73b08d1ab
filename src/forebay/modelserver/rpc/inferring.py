"""ModelInfer: one request, one response."""

from time import monotonic_ns
from typing import Final

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Front, InferResponse, Ticket
from forebay.modelserver.rpc.calls import Head, Link, RpcContext, Unary, forward
from forebay.modelserver.rpc.requests import parse, read_request
from forebay.modelserver.rpc.responses import Writer
from forebay.wire.http2.grpc import Place
from forebay.wire.http2.streams import Stream

_DECOUPLED: Final = "ModelInfer RPC doesn't support models with decoupled transaction policy"


class Inference(Unary):
    """A request in flight that gets one response."""

    __slots__ = ("_count", "_error", "_found", "_long", "_ticket", "_writer")

    def __init__(self, context: RpcContext, session: Link, stream: Stream, head: Head) -> None:
        super().__init__(context, session, stream, head)
        self._writer: Writer
        self._ticket: Ticket | None = None
        self._found = b""
        self._long: InferResponse | None = None
        """Copy of a response that takes long to encode."""
        self._error: Exception | None = None
        self._count = 0

    def on_message(self, message: bytes | memoryview) -> None:
        """Submit the request to the models. Raises `Refused`."""
        came_ns = monotonic_ns()
        read, raw = parse(message)
        models = self.context.models
        view = models.view(read.model_name, read.model_version)
        if view.config.decoupled:
            raise Refused(Kind.UNSUPPORTED, _DECOUPLED)
        asked = read_request(read, raw, view.config, self.context.regions)
        head = self.head
        if head.forwarded:
            forward(head, asked.request)
        if head.timeout_s is not None:
            asked.request.deadline = self.context.loop.time() + head.timeout_s
        asked.request.front, asked.request.came_ns = Front.GRPC, came_ns
        self._writer = Writer(models, view, asked.wanted)
        self._ticket = models.infer(asked.request, self.on_response)

    def _place(self) -> Place | None:
        return self.context.place

    def on_gone(self) -> None:
        """Cancel the request."""
        if self._ticket is not None:
            self._ticket.cancel()

    def on_response(self, response: InferResponse | None, final: bool) -> None:
        """Keep the response; send it when it is final."""
        if self.over:
            return
        if response is not None:
            self._count += 1
            if self._error is None and self._count == 1:
                try:
                    if self._writer.takes_long(response):
                        self._writer.look_up(response)
                        self._long = self.context.kept(response)
                    else:
                        self._found = self._writer.write(response)
                except Refused as refused:
                    self._error = refused.with_traceback(None)  # which refers to this
                # supervisor: a bug in writing one response must not affect the model's other callbacks
                except Exception as error:
                    self._error = error
        if not final:
            return
        if self._error is None and self._count != 1:
            self._error = Refused(Kind.INTERNAL, f"expected a single response, got {self._count}")
        if self._error is not None:
            self.fail(self._error)
        elif self._long is not None:
            self.context.tasks.create_task(self._reply_later(self._long))
        else:
            self.reply(self._found)

    async def _reply_later(self, response: InferResponse) -> None:
        try:
            found = await self.context.write(self._write, response)
        except Exception as error:  # supervisor: a bug costs one call
            self.fail(error)
        else:
            if not self.over:
                self.reply(found)

    def _write(self, response: InferResponse) -> bytes:
        if self.over:
            raise Refused(Kind.CANCELLED, "the call has ended")
        return self._writer.write(response)
