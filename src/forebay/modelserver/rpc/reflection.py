"""gRPC server reflection: services, methods and messages, for clients without our proto files.

Triton 2.51 has none; its reflection clients (grpcurl, Postman, proxies) need the proto files.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from forebay.modelserver.rpc.calls import DRAINING, Call, Head, Link, Maker, RpcContext
from forebay.modelserver.rpc.described import REFLECTION, REQUEST, RESPONSE, Described
from forebay.wire.http2.grpc import (
    INTERNAL,
    INVALID_ARGUMENT,
    NOT_FOUND,
    OK,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    BadMessage,
    Messages,
    answer_head,
    answer_tail,
    framed,
    unpacked,
)
from forebay.wire.http2.streams import Stream

QUESTION_BYTES_MAX: Final = 16_384
"""Requests are names; each is repeated in its response."""
UNSENT_BYTES_MAX: Final = 4 * 2**20
"""Limit of responses that the client has not read; beyond it the call ends. One response may have some 50 KB."""
_BEHIND: Final = "the client does not read its responses: too many are waiting to be sent"


def methods(described: Described) -> Mapping[bytes, Maker]:
    """Call factories of reflection, by path."""
    return {
        f"/{package}.ServerReflection/ServerReflectionInfo".encode(): partial(Reflecting, Answers(described, package))
        for package in REFLECTION
    }


class Answers:
    """Responses in one version of the protocol."""

    def __init__(self, described: Described, package: str) -> None:
        self._described = described
        self._request = described.message(f"{package}.{REQUEST}")
        self._response = described.message(f"{package}.{RESPONSE}")

    def answer(self, question: bytes | memoryview) -> bytes:
        """The response to a request. Raises `DecodeError`."""
        asked = self._request.FromString(question)
        answer = self._response(valid_host=asked.host, original_request=asked)
        try:
            self._fill(answer, asked)
        except KeyError:
            answer.error_response.error_code = NOT_FOUND
            answer.error_response.error_message = "not found"
        return answer.SerializeToString()  # type: ignore[no-any-return]

    def _fill(self, answer: Any, asked: Any) -> None:
        """Raises `KeyError` for unknown names."""
        described = self._described
        match asked.WhichOneof("message_request"):
            case "list_services":
                for name in described.services:
                    answer.list_services_response.service.add(name=name)
            case "file_by_filename":
                files = described.file(asked.file_by_filename)
                answer.file_descriptor_response.file_descriptor_proto.extend(files)
            case "file_containing_symbol":
                files = described.file_with(asked.file_containing_symbol)
                answer.file_descriptor_response.file_descriptor_proto.extend(files)
            case "all_extension_numbers_of_type":
                described.message(asked.all_extension_numbers_of_type)
                answer.all_extension_numbers_response.base_type_name = asked.all_extension_numbers_of_type
            case "file_containing_extension":
                raise KeyError("no message of ours has extensions")
            case _:
                answer.error_response.error_code = INVALID_ARGUMENT
                answer.error_response.error_message = "unknown kind of request"


class Reflecting(Call):
    """A stream of requests, each answered at once."""

    __slots__ = ("_answers",)

    def __init__(self, answers: Answers, context: RpcContext, session: Link, stream: Stream, head: Head) -> None:
        super().__init__(context, session, stream, head)
        self._answers = answers

    def on_data(self, data: bytes | memoryview, ended: bool) -> None:
        """Answer received requests; end after the last one."""
        super().on_data(data, ended)
        if ended and not self.over:
            self._end()
            self.session.finish(self.stream, answer_tail(OK, alone=not self.begun))
            self.session.wake()

    def on_message(self, message: bytes | memoryview) -> None:
        """Answer one request."""
        self._answer(bytes(message), False)

    def on_drain(self) -> None:
        """End the call: clients can retry on another server."""
        self.refuse(UNAVAILABLE, DRAINING)

    def _collect(self, messages: Messages, data: bytes | memoryview, ended: bool) -> None:
        messages.feed(data, self._answer)
        if ended and messages.waiting:
            raise BadMessage(INTERNAL, "the stream ends within a message")

    def _answer(self, message: bytes | memoryview, packed: bool) -> None:
        if self.over:
            return
        if packed:
            message = unpacked(message, self.head.coding, QUESTION_BYTES_MAX)
        if len(message) > QUESTION_BYTES_MAX:
            raise BadMessage(
                RESOURCE_EXHAUSTED, f"request of {len(message)} bytes; at most {QUESTION_BYTES_MAX} are allowed"
            )
        answer = self._answers.answer(message)
        session, stream = self.session, self.stream
        if not self.begun:
            self.begun = True
            session.head(stream, answer_head())
        session.send(stream, framed(answer))
        session.wake()
        if stream.queued_bytes > UNSENT_BYTES_MAX:
            self.refuse(RESOURCE_EXHAUSTED, _BEHIND)
