"""Requests and responses in the Python model API, and calls to other models.

Error texts are those of Triton's Python backend, which models and their tests may rely on.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final, Protocol

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Kind
from forebay.engines.tensor.arrays import datatype_of
from forebay.engines.tensor.protocol import Act, Array, CallModel, Emit, Parameter, Request, Response
from forebay.engines.tensor.python.host import current
from forebay.engines.tensor.python.tensors import Tensor, TritonModelException, as_integer, as_text

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1
TRITONSERVER_REQUEST_RELEASE_ALL: Final = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: Final = 2

_KINDS: Final = (
    Kind.UNKNOWN,
    Kind.INTERNAL,
    Kind.NOT_FOUND,
    Kind.INVALID_ARGUMENT,
    Kind.UNAVAILABLE,
    Kind.UNSUPPORTED,
    Kind.ALREADY_EXISTS,
    Kind.CANCELLED,
)
"""By their numbers in Triton's C API."""


SILENT: Final = "the model gave no message"
"""Text of an error without one: an empty text would mean no error."""


class TritonError:
    """An error in a response."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)
    __slots__ = ("_code", "_message")

    def __init__(self, message: str | bytes, code: int = INTERNAL) -> None:
        self._message = as_text(message, "message") if isinstance(message, bytes) else str(message)
        self._code = as_integer(code, "code")

    def message(self) -> str:
        """The error text."""
        return self._message

    def code(self) -> int:
        """The error code: one of the constants of this class."""
        return self._code

    def kind(self) -> Kind:
        """The error kind in the protocol's terms."""
        return _KINDS[self._code] if 0 <= self._code < len(_KINDS) else Kind.INTERNAL


class PreferredMemory:
    """Preferred location of a called model's outputs. Accepted without effect: they are in CPU memory."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.kind, self.device_id = preferred_memory_type, preferred_device_id


class InferenceTrace:
    """Trace of a request; not supported yet."""

    def get_context(self) -> str | None:
        """The OpenTelemetry context as JSON; None: there is no trace."""
        return None


class InferenceResponse:
    """Outputs, or an error instead."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._tensors = list(output_tensors)
        for tensor in self._tensors:
            if tensor is None:
                raise TritonModelException("Output tensor for inference response should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"output_tensors must be a list of Tensor; it holds {type(tensor)}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error must be a TritonError, not {type(error)}")
        self._error = error
        self._parameters = _checked(parameters)

    def output_tensors(self) -> list[Tensor]:
        """The outputs."""
        return self._tensors

    def has_error(self) -> bool:
        """Whether there is an error instead of outputs."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, if any."""
        return self._error

    def parameters(self) -> str:
        """The parameters as a JSON object."""
        return json.dumps(self._parameters)

    def values(self, wanted: Sequence[str]) -> Response:
        """Convert for the server, with the wanted outputs only (empty: all)."""
        if self._error is not None:
            text = self._error.message() or SILENT
            return Response(error=text, kind=self._error.kind(), parameters=self._parameters)
        outputs = {tensor.name(): tensor.data() for tensor in self._tensors if not wanted or tensor.name() in wanted}
        return Response(outputs, parameters=self._parameters)


class InferenceRequest:
    """A request to this model, or one that it sends to another model."""

    def __init__(  # noqa: PLR0917 - as models call it
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError("InferenceRequest needs inputs, requested_output_names and model_name")
        self._id, self._model = as_text(request_id, "request_id"), as_text(model_name, "model_name")
        self._inputs = list(inputs)
        self._wanted = tuple(as_text(name, "a requested output name") for name in requested_output_names)
        about = f"for request with id '{self._id}' and model name '{self._model}' should not be empty."
        if any(tensor is None for tensor in self._inputs):
            raise TritonModelException(f"Input tensor {about}")
        if "" in self._wanted:
            raise TritonModelException(f"Requested output name {about}")
        if not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        exact = as_text if isinstance(correlation_id, str) else as_integer
        self._correlation_id = exact(correlation_id, "correlation_id")
        self._version, self._flags = as_integer(model_version, "model_version"), as_integer(flags, "flags")
        self._timeout_us = as_integer(timeout, "timeout")
        self._parameters = _checked(parameters)
        self._sender: InferenceResponseSender | None = None
        self._release = TRITONSERVER_REQUEST_RELEASE_ALL

    @classmethod
    def served(cls, request: Request, inputs: list[Tensor], sender: "InferenceResponseSender") -> "InferenceRequest":
        """A request to this model."""
        made = cls.__new__(cls)
        made._id, made._correlation_id = request.id, request.correlation_id
        made._inputs, made._wanted = inputs, sender.names
        made._flags = request.start * TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        made._flags |= request.end * TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
        made._timeout_us, made._parameters = request.timeout_us, request.parameters
        made._sender, made._release = sender, TRITONSERVER_REQUEST_RELEASE_ALL
        made._model, made._version = current.host.name, -1
        return made

    def inputs(self) -> list[Tensor]:
        """The inputs."""
        return self._inputs

    def request_id(self) -> str:
        """The client's id of the request."""
        return self._id

    def correlation_id(self) -> int | str:
        """The sequence of the request; 0 or empty: none."""
        return self._correlation_id

    def flags(self) -> int:
        """Flags for the start and end of a sequence."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Set the flags for the start and end of a sequence."""
        self._flags = flags

    def timeout(self) -> int:
        """The client's timeout, in microseconds; 0: none."""
        return self._timeout_us

    def parameters(self) -> str:
        """The parameters as a JSON object, of a client's request without spaces and `\\u` escapes, as in Triton."""
        if self._sender is None:
            return json.dumps(dict(self._parameters))
        return json.dumps(dict(self._parameters), separators=(",", ":"), ensure_ascii=False)

    def trace(self) -> InferenceTrace:
        """The trace of the request."""
        return InferenceTrace()

    def requested_output_names(self) -> set[str]:
        """Requested outputs: all if the client names none."""
        return set(self._wanted)

    def get_response_sender(self) -> "InferenceResponseSender":
        """The sender of responses, which may outlive `execute`."""
        if self._sender is None:
            raise TritonModelException("A request of another model has no response sender.")
        return self._sender

    def is_cancelled(self) -> bool:
        """Whether the request was cancelled."""
        return self._sender is not None and self._sender.is_cancelled()

    def set_release_flags(self, flags: int) -> None:
        """With `TRITONSERVER_REQUEST_RELEASE_RESCHEDULE`, the request comes again in a later batch."""
        self._release = flags

    @property
    def rescheduled(self) -> bool:
        """Whether the request should come again."""
        return self._release == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def exec(self, decoupled: bool = False) -> "InferenceResponse | ResponseIterator":
        """Run the request; `decoupled`: it may have any number of responses."""
        call = current.host.call
        if call is None:
            raise TritonModelException("BLS is only supported during the 'execute' function.")
        responses = ResponseIterator(self._model)
        twice = self._twice()
        if twice:
            responses.fail(
                f"Model {self._model} - Error when running inference: [request id: {self._id or '<id_unknown>'}] "
                f"input '{twice}' already exists in request"
            )
        else:
            responses.begin(call, self._version, self._request())
        return responses if decoupled else responses.only()

    def async_exec(self, decoupled: bool = False) -> "asyncio.Future[InferenceResponse | ResponseIterator]":
        """Awaitable version of `exec`."""
        return asyncio.get_running_loop().run_in_executor(None, self.exec, decoupled)

    def _twice(self) -> str:
        """Name of an input given more than once; empty: there is none."""
        names = [tensor.name() for tensor in self._inputs]
        return next((name for name in names if names.count(name) > 1), "")

    def _request(self) -> Request:
        return Request(
            self._id,
            {tensor.name(): tensor.data() for tensor in self._inputs},
            self._wanted,
            self._parameters,
            self._correlation_id,
            start=bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            end=bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
            timeout_us=self._timeout_us,
            bf16=frozenset(tensor.name() for tensor in self._inputs if tensor.datatype is Datatype.BF16),
        )


class ResponseIterator:
    """The responses of another model as they arrive. They can be iterated again."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._coming: SimpleQueue[tuple[Response, bool]] = SimpleQueue()
        self._read: list[InferenceResponse] = []
        self._at = 0
        self._ended = False
        self._withdraw: Callable[[], None] | None = None

    def begin(self, call: CallModel, version: int, request: Request) -> None:
        """Call the model. Errors become its response."""
        try:
            self._withdraw = call(
                self._model, version, request, lambda response, final: self._coming.put((response, final))
            )
        except (OSError, RuntimeError) as error:  # the connection to the server is gone
            self.fail(str(error))

    def fail(self, text: str) -> None:
        """Make this error the only response, because the model cannot be called."""
        self._coming.put((Response(error=text), True))

    def only(self) -> InferenceResponse:
        """The single response of a non-decoupled model. Blocks."""
        first = self._next()
        if not self._ended:
            extra = self._next()
            if not self._ended or extra.output_tensors():
                self.cancel()
                text = (
                    f"Model {self._model} is using the decoupled. The current BLS request call doesn't support "
                    "models using the decoupled transaction policy. Please use 'decoupled=True' argument to the "
                    "'exec' or 'async_exec' calls for decoupled models.'"
                )
                return InferenceResponse(error=TritonError(text))
        return first

    def cancel(self) -> None:
        """Cancel the call: its last response is an error (CANCELLED), unless that has already arrived."""
        if self._withdraw is not None and not self._ended:
            self._withdraw()

    def __iter__(self) -> Iterator[InferenceResponse]:
        if self._ended and self._at >= len(self._read):
            self._at = 0
        return self

    def __next__(self) -> InferenceResponse:
        if not self._ended:
            found = self._next()
            self._read.append(found)
            self._at = len(self._read)
            return found
        if self._at >= len(self._read):
            raise StopIteration
        self._at += 1
        return self._read[self._at - 1]

    def _next(self) -> InferenceResponse:
        response, self._ended = self._coming.get()
        return _read(response)


def ask(
    act: Act, model: str, version: int, parameters: Mapping[str, Parameter], inputs: Mapping[str, Array]
) -> Response:
    """Send a request other than inference to the server, and wait for it. Raises `TritonModelException`."""
    call = current.host.administer
    if call is None:
        raise TritonModelException(f"{act}: other models can only be reached until `finalize` has ended.")
    answers: SimpleQueue[Response] = SimpleQueue()
    try:
        request = Request("", dict(inputs), (), parameters)
        call(as_text(model, "model_name"), version, request, lambda response, _: answers.put(response), act)
    except (OSError, RuntimeError) as error:  # the connection to the server is gone
        raise TritonModelException(str(error)) from error
    answer = answers.get()
    if answer.error:
        raise TritonModelException(answer.error)
    return answer


class InferenceResponseSender:
    """Sends the responses of one request, from any thread. The request ends when the sender is garbage-collected."""

    __slots__ = (
        "_check",
        "_closed",
        "_decoupled",
        "_emit",
        "_index",
        "_lock",
        "_reaper",
        "_request",
        "_sent",
        "names",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        index: int,
        emit: Emit,
        *,
        decoupled: bool,
        names: tuple[str, ...],
        check: "Check",
        reaper: "SenderReaper",
    ) -> None:
        self._request, self._index, self._emit, self._decoupled = request, index, emit, decoupled
        self._check, self._reaper = check, reaper
        self.names = request.wanted or names
        self._lock = threading.Lock()
        self._sent = 0
        self._closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; the flag `TRITONSERVER_RESPONSE_COMPLETE_FINAL` makes it the last, or without one ends the
        request.
        """
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(f"response must be an InferenceResponse, not {type(response)}")
        shown = None if response is None else self._check(response.values(self.names))
        self.count(response, flags)  # what cannot be encoded is not counted: the batch's error answers the request
        self._emit(self._index, shown, flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        """Whether the request was cancelled."""
        return self._request.cancelled()

    def count(self, response: InferenceResponse | None, flags: int) -> None:
        """Count a response. Raises `TritonModelException` if it is not allowed."""
        with self._lock:
            if not self._decoupled and response is not None and self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            if not self._decoupled and response is None and not self._sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a "
                    "response."
                )
            if self._closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self._closed = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
            self._sent += 1

    def close(self) -> bool:
        """Allow no more responses. Returns whether some were still allowed."""
        with self._lock:
            was, self._closed = not self._closed, True
            return was

    def __del__(self) -> None:
        if self.close():
            text = "" if self._decoupled or self._sent else "The model has not answered the request."
            self._reaper.put(partial(self._emit, self._index, Response(error=text) if text else None, True))


class SenderReaper:
    """Ends requests whose senders were garbage-collected, in a thread of its own.

    A sender may be collected anywhere, even inside another's `emit`, so it must not block there.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sender-reaper", daemon=True)
        self._thread.start()

    def put(self, end: Callable[[], None]) -> None:
        """Schedule a call."""
        self._queue.put(end)

    def stop(self) -> None:
        """Run the remaining calls and stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (end := self._queue.get()) is not None:
            end()


class Check(Protocol):
    """Validates a response before it is sent."""

    def __call__(self, response: Response) -> Response:
        """The response, or an error instead."""


def _read(response: Response) -> InferenceResponse:
    if response.error:
        kind = Kind.UNAVAILABLE if response.kind == Kind.DEADLINE_EXCEEDED else response.kind
        number = _KINDS.index(kind) if kind in _KINDS else TritonError.INTERNAL
        return InferenceResponse(error=TritonError(response.error, number))
    tensors = []
    for name, array in response.outputs.items():
        datatype = Datatype.BF16 if name in response.bf16 else datatype_of(array)
        assert datatype is not None  # it comes from the server, which has validated it
        tensors.append(Tensor.of(name, array, datatype))
    return InferenceResponse(tensors, parameters=response.parameters)


def _checked(parameters: Mapping[str, Parameter] | None) -> Mapping[str, Parameter]:
    checked: dict[str, Parameter] = {}
    for name, value in (parameters or {}).items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise TritonModelException(f"parameter '{name}' is no integer of 64 bits")
        exact = as_text(value, "value") if isinstance(value, str) else int(value)
        checked[as_text(name, "name")] = value if isinstance(value, bool) else exact
    return checked
