"""Encodes traced requests and their ensemble steps as JSON objects with Triton's names."""

from collections.abc import Iterator, Sequence
from math import prod
from time import monotonic_ns
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from forebay.core.serving.config import ELEMENT_BYTES, Datatype
from forebay.core.serving.values import Front, InferResponse, Tensor
from forebay.modelserver.models.running.call import Call
from forebay.wire.oip import tensors

INPUT: Final = "TENSOR_QUEUE_INPUT"
OUTPUT: Final = "TENSOR_BACKEND_OUTPUT"
TRACED_ELEMENTS_MAX: Final = 1000
TRACED_TENSORS_MAX: Final = 10_000
"""Later ones of a decoupled request are not traced."""
TRACED_BYTES_MAX: Final = 65_536
"""Larger tensors, and strings of more bytes, are traced without their data."""
_encode = msgspec.json.Encoder().encode
Stamps = list[tuple[str, int]]
_FRONTS: Final = {
    Front.HTTP: ("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"),
    Front.GRPC: ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END"),
}
"""Triton's names for the timestamps of a front."""
_COMPLETE: Final = "INFER_RESPONSE_COMPLETE"


class Passage(NamedTuple):
    """Passage of a request through its front, on CLOCK_MONOTONIC. Network time is in neither timestamp."""

    front: Front
    came_ns: int
    """When the front began to read the request, which had arrived completely."""
    sent_ns: int
    """When the front had taken the response; 0: no response, or an immediate error."""


class TracedTensor(NamedTuple):
    """A traced tensor with its own copy of the data."""

    activity: str
    tensor: Tensor


def kept(activity: str, given: Sequence[Tensor]) -> list[TracedTensor]:
    """Copies of tensors for tracing."""
    return [
        TracedTensor(
            activity,
            each.copied() if _is_small(each) else Tensor(each.name, each.datatype, each.shape, b""),
        )
        for each in given
    ]


def _is_small(tensor: Tensor) -> bool:
    """Whether its elements are traced. Those of an invalid request need not match its shape."""
    count = prod(tensor.shape)
    if not 0 <= count <= TRACED_ELEMENTS_MAX:
        return False
    if tensor.datatype is Datatype.BYTES:
        return len(tensor.data) <= TRACED_BYTES_MAX
    return len(tensor.data) == count * ELEMENT_BYTES[tensor.datatype]


class Traced(Protocol):
    """A finished request or step."""

    @property
    def model(self) -> str:
        """Name of the model."""

    @property
    def version(self) -> str:
        """Version of the model, as far as known."""

    @property
    def id(self) -> str:
        """Id of the request."""

    @property
    def call(self) -> Call | None:
        """None: it was rejected at once."""

    @property
    def tensors(self) -> Sequence[TracedTensor]:
        """Traced tensors."""

    @property
    def steps(self) -> Sequence["Step"]:
        """Steps of an ensemble, in the order in which they began."""


class Step:
    """One run of an ensemble step, which may be an ensemble itself. Implements `running.call.Watch`."""

    __slots__ = ("_keep", "call", "end_ns", "first_ns", "id", "model", "steps", "tensors", "version")

    def __init__(self, call: Call, *, tensors: bool) -> None:
        request = call.request
        self._keep = tensors
        self.call = call
        self.model, self.version, self.id = request.model, request.version, request.id
        self.first_ns = self.end_ns = 0
        self.tensors = kept(INPUT, request.inputs) if tensors else []
        self.steps: list[Step] = []

    def step(self, call: Call) -> "Step":
        """The step runs a step of its own."""
        step = Step(call, tensors=self._keep)
        self.steps.append(step)
        return step

    def on_step_response(self, response: InferResponse | None, final: bool) -> None:
        """A response of the step, or its end."""
        if response is not None:
            if not self.first_ns:
                self.first_ns = monotonic_ns()
                self.version = response.version or self.version
            if self._keep and len(self.tensors) < TRACED_TENSORS_MAX:
                self.tensors += kept(OUTPUT, response.outputs)
        if final:
            self.end_ns = monotonic_ns()

    def forget(self) -> None:
        """Break the reference cycle with the call, so that both are freed without the garbage collector."""
        self.call.watch = None
        for step in self.steps:
            step.forget()


def trace(numbers: Iterator[int], seen: Traced, end_ns: int, passage: Passage | None = None) -> bytes:
    """Encode one request as comma-separated objects; times are CLOCK_MONOTONIC."""
    return b",".join(map(_encode, _objects(numbers, seen, end_ns, 0, passage)))


def _objects(
    numbers: Iterator[int], seen: Traced, end_ns: int, parent: int, passage: Passage | None = None
) -> Iterator[dict[str, Any]]:
    number = next(numbers)
    stamps = [] if seen.call is None else _stamps(seen.call, seen, end_ns)
    if passage is not None:
        start, end, send, sent = _FRONTS[passage.front]
        read_ns = end_ns if seen.call is None else seen.call.started_ns
        # must come first: tools recognise the front by it
        yield _times(number, [(start, passage.came_ns), (end, read_ns)])
        if passage.sent_ns:
            stamps[-1:] = [(_COMPLETE, end_ns), *stamps[-1:], (send, end_ns), (sent, passage.sent_ns)]
    head: dict[str, Any] = {"id": number, "model_name": seen.model, "model_version": _version(seen.version)}
    if seen.id:
        head["request_id"] = seen.id
    if parent:
        head["parent_id"] = parent
    yield head
    if stamps:
        yield _times(number, stamps)
    for activity, tensor in seen.tensors:
        yield _tensor(number, activity, tensor)
    for step in seen.steps:
        yield from _objects(numbers, step, step.end_ns or end_ns, number)


def _times(number: int, stamps: Stamps) -> dict[str, Any]:
    return {"id": number, "timestamps": [{"name": name, "ns": ns} for name, ns in stamps]}


def _stamps(call: Call, seen: Traced, end_ns: int) -> Stamps:
    output_ns = end_ns - call.spent.output_ns
    input_ns = output_ns - call.spent.infer_ns
    stamps = [
        ("REQUEST_START", call.started_ns),
        ("QUEUE_START", call.queued_ns),
        ("COMPUTE_START", input_ns - call.spent.input_ns),
        ("COMPUTE_INPUT_END", input_ns),
        ("COMPUTE_OUTPUT_START", output_ns),
        ("COMPUTE_END", end_ns),
        ("REQUEST_END", end_ns),
    ]
    if seen.steps or not any(call.spent):  # an ensemble, or rejected, cancelled, or answered from the cache
        return [stamps[0], stamps[1], stamps[-1]]
    return stamps


def _version(text: str) -> int:
    return int(text) if text.isdigit() else -1


def _tensor(number: int, activity: str, tensor: Tensor) -> dict[str, Any]:
    return {
        "id": number,
        "activity": activity,
        "tensor": {
            "name": tensor.name,
            "data": _values(tensor),
            "shape": ",".join(map(str, tensor.shape)),
            "dtype": tensor.datatype,
        },
    }


def _values(tensor: Tensor) -> str:
    """Comma-separated elements; half-precision floats are omitted."""
    if not tensor.data or tensor.datatype in (Datatype.FP16, Datatype.BF16):
        return ""
    if tensor.datatype is Datatype.BYTES:
        try:
            return ",".join(f'"{bytes(each).decode(errors="replace")}"' for each in tensors.split(tensor.data))
        except ValueError:
            return ""
    return ",".join(map(str, tensors.numbers(tensor.datatype, tensor.data)))
