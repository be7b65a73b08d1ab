"""What the two fronts, HTTP and gRPC, and the models behind them say to each other.

Tensors are bytes all the way: only JSON and the backends turn them into numbers.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Refused

Parameter = bool | int | float | str
Buffer = bytes | bytearray | memoryview


class Tensor:  # noqa: PLW1641 - its data may change
    """A value. `data` is row-major and little-endian; BYTES elements have their length before them (4 bytes)."""

    __slots__ = ("data", "datatype", "name", "shape")

    def __init__(self, name: str, datatype: Datatype, shape: tuple[int, ...], data: Buffer) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.data = data

    def __eq__(self, other: object) -> bool:
        """Whether it is the same value of the same name."""
        if not isinstance(other, Tensor):
            return NotImplemented
        alike = self.name == other.name and self.datatype == other.datatype and self.shape == other.shape
        return alike and self.data == other.data

    def named(self, name: str) -> "Tensor":
        """The same under another name."""
        return Tensor(name, self.datatype, self.shape, self.data)

    def shaped(self, shape: tuple[int, ...]) -> "Tensor":
        """The same in another shape."""
        return Tensor(self.name, self.datatype, shape, self.data)

    def copied(self) -> "Tensor":
        """The same with data of its own, which may be kept."""
        return Tensor(self.name, self.datatype, self.shape, bytes(self.data))


class Front(StrEnum):
    """How a request has come to a model server."""

    INSIDE = ""
    HTTP = "HTTP"
    GRPC = "GRPC"


class InferRequest:
    """One inference as a front has read it: well-formed, but not yet checked against the model."""

    __slots__ = (
        "came_ns", "deadline", "front", "id", "inputs", "model", "outputs", "parameters", "priority", "sequence_end",
        "sequence_id", "sequence_start", "timeout_us", "version",
    )  # fmt: skip

    def __init__(
        self,
        model: str,
        version: str,
        id: str,
        inputs: tuple[Tensor, ...],
        outputs: tuple[str, ...] = (),
        *,
        parameters: dict[str, Parameter] | None = None,
        priority: int = 0,
        timeout_us: int = 0,
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
        deadline: float = 0.0,
    ) -> None:
        self.model = model
        self.version = version
        """As given; empty: the latest that is served."""
        self.id = id
        self.inputs = inputs
        self.outputs = outputs
        """Names of the outputs that are asked for; empty: all. Forms of outputs are the front's affair."""
        self.parameters: dict[str, Parameter] = {} if parameters is None else parameters
        """Without those that have a field here."""
        self.priority = priority
        self.timeout_us = timeout_us
        self.sequence_id = sequence_id
        """0 or empty: no sequence."""
        self.sequence_start = sequence_start
        self.sequence_end = sequence_end
        self.deadline = deadline
        """When the answer is worth nothing any more: seconds of CLOCK_MONOTONIC; 0: it keeps its worth."""
        self.front = Front.INSIDE
        self.came_ns = 0
        """When the front began to read it, of CLOCK_MONOTONIC; 0: no front has."""


class InferResponse:
    """One answer. A request of a decoupled model may have many, or none (`outputs` empty, final)."""

    __slots__ = ("error", "id", "model", "outputs", "parameters", "version")

    def __init__(
        self,
        model: str,
        version: str,
        id: str,
        outputs: tuple[Tensor, ...] = (),
        *,
        parameters: dict[str, Parameter] | None = None,
        error: Refused | None = None,
    ) -> None:
        self.model = model
        self.version = version
        self.id = id
        self.outputs = outputs
        self.parameters: dict[str, Parameter] = {} if parameters is None else parameters
        self.error = error

    def copied(self) -> "InferResponse":
        """The same with data of its own, which may be kept."""
        outputs = tuple([tensor.copied() for tensor in self.outputs])
        return InferResponse(self.model, self.version, self.id, outputs, parameters=self.parameters, error=self.error)


OnResponse = Callable[[InferResponse | None, bool], None]
"""Hears of each response; True with the last one, which may be None where nothing but the end is left to tell."""


class Ticket(Protocol):
    """A request under way."""

    def cancel(self) -> None:
        """Nobody waits for it any more; nothing is called after this."""
