"""What the two fronts, HTTP and gRPC, and the models behind them say to each other.

Tensors are bytes all the way: only JSON and the backends turn them into numbers.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Refused

Parameter = bool | int | float | str
Buffer = bytes | bytearray | memoryview


class Tensor(NamedTuple):
    """A value. `data` is row-major and little-endian; BYTES elements have their length before them (4 bytes)."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    data: Buffer


class Front(StrEnum):
    """How a request has come to a model server."""

    INSIDE = ""
    HTTP = "HTTP"
    GRPC = "GRPC"


class InferRequest(msgspec.Struct):
    """One inference as a front has read it: well-formed, but not yet checked against the model."""

    model: str
    version: str
    """As given; empty: the latest that is served."""
    id: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...] = ()
    """Names of the outputs that are asked for; empty: all. Forms of outputs are the front's affair."""
    parameters: dict[str, Parameter] = {}
    """Without those that have a field here."""
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    """0 or empty: no sequence."""
    sequence_start: bool = False
    sequence_end: bool = False
    deadline: float = 0.0
    """When the answer is worth nothing any more: seconds of CLOCK_MONOTONIC; 0: it keeps its worth."""
    front: Front = Front.INSIDE
    came_ns: int = 0
    """When the front began to read it, of CLOCK_MONOTONIC; 0: no front has."""


class InferResponse(msgspec.Struct):
    """One answer. A request of a decoupled model may have many, or none (`outputs` empty, final)."""

    model: str
    version: str
    id: str
    outputs: tuple[Tensor, ...] = ()
    parameters: dict[str, Parameter] = {}
    error: Refused | None = None


OnResponse = Callable[[InferResponse | None, bool], None]
"""Hears of each response; True with the last one, which may be None where nothing but the end is left to tell."""


class Ticket(Protocol):
    """A request under way."""

    def cancel(self) -> None:
        """Nobody waits for it any more; nothing is called after this."""
