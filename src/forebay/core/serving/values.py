"""Requests and responses between the two front ends, HTTP and gRPC, and the models.

Tensors stay raw bytes throughout: only JSON and the backends convert them to numbers.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Refused

Parameter = bool | int | float | str
Buffer = bytes | bytearray | memoryview


class Tensor:  # noqa: PLW1641 - its data may change
    """A tensor. `data` is row-major and little-endian; each BYTES element is preceded by its length (4 bytes)."""

    __slots__ = ("data", "datatype", "name", "shape")

    def __init__(self, name: str, datatype: Datatype, shape: tuple[int, ...], data: Buffer) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.data = data

    def __eq__(self, other: object) -> bool:
        """Whether name, type, shape and data are equal."""
        if not isinstance(other, Tensor):
            return NotImplemented
        alike = self.name == other.name and self.datatype == other.datatype and self.shape == other.shape
        return alike and self.data == other.data

    def named(self, name: str) -> "Tensor":
        """A copy under another name, sharing the data."""
        return Tensor(name, self.datatype, self.shape, self.data)

    def shaped(self, shape: tuple[int, ...]) -> "Tensor":
        """A copy in another shape, sharing the data."""
        return Tensor(self.name, self.datatype, shape, self.data)

    def copied(self) -> "Tensor":
        """A copy with its own data, which may be kept."""
        return Tensor(self.name, self.datatype, self.shape, bytes(self.data))


class Front(StrEnum):
    """The front end through which a request came to the model server."""

    INSIDE = ""
    HTTP = "HTTP"
    GRPC = "GRPC"


class InferRequest:
    """One inference as parsed by a front end: well-formed, but not yet validated against the model."""

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
        """Names of the requested outputs; empty: all. Output formats are handled by the front end."""
        self.parameters: dict[str, Parameter] = {} if parameters is None else parameters
        """Without those that have a field here."""
        self.priority = priority
        self.timeout_us = timeout_us
        self.sequence_id = sequence_id
        """0 or empty: no sequence."""
        self.sequence_start = sequence_start
        self.sequence_end = sequence_end
        self.deadline = deadline
        """After this time the response is useless: seconds of CLOCK_MONOTONIC; 0: no deadline."""
        self.front = Front.INSIDE
        self.came_ns = 0
        """When the front end began to read it, CLOCK_MONOTONIC; 0: no front end did."""


class InferResponse:
    """One response. A request of a decoupled model may have many, or none (`outputs` empty, final)."""

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
        """A copy with its own data, which may be kept."""
        outputs = tuple([tensor.copied() for tensor in self.outputs])
        return InferResponse(self.model, self.version, self.id, outputs, parameters=self.parameters, error=self.error)


OnResponse = Callable[[InferResponse | None, bool], None]
"""Called with each response; True with the last one, which may be None if only the end remains to be signalled."""


class Ticket(Protocol):
    """A request in flight."""

    def cancel(self) -> None:
        """Cancel it; no callback is called after this."""
