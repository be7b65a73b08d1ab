"""The tensor contract of each task: names, datatypes and shapes of its models' inputs and outputs."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from forebay.core.serving.config import Datatype

PARAMETER: Final = "forebay.task"
"""The parameter of a model's configuration that names its task."""
BYTES: Final = (Datatype.BYTES,)
"""UTF-8 texts, or files. All inputs have this type."""
FLOATS: Final = (Datatype.FP32, Datatype.FP16, Datatype.FP64)
INTEGERS: Final = (
    Datatype.INT32, Datatype.INT64, Datatype.INT16, Datatype.INT8,
    Datatype.UINT32, Datatype.UINT64, Datatype.UINT16, Datatype.UINT8,
)  # fmt: skip


class Output(NamedTuple):
    """An output: `dims` is the number of dimensions per row (None: any), `last` the size of the last one (0: any).

    `beside`: per row, it has as many elements as the first output of its task.
    """

    name: str
    datatypes: tuple[Datatype, ...]
    dims: int | None = None
    last: int = 0
    optional: bool = False
    beside: bool = False


class Contract(NamedTuple):
    """A task's inputs, each BYTES, and outputs. `by_row`: every output has one row per row of the request."""

    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    by_row: bool = True


_TOKENS: Final = Output("TOKENS", INTEGERS, 0, optional=True)
_TRUNCATED: Final = Output("TRUNCATED", (Datatype.BOOL,), 0, optional=True)
"""Whether a row was too long for the model, which has read only a part of it."""
_SIZE: Final = Output("SIZE", INTEGERS, 1, 2, optional=True)
_LABEL: Final = Output("LABEL", BYTES, 1)

CONTRACTS: Final[Mapping[str, Contract]] = {
    "embed": Contract(("TEXT",), (Output("EMBEDDING", FLOATS, 1), _TOKENS)),
    "rerank": Contract(("QUERY", "DOCUMENT"), (Output("SCORE", FLOATS, 0), _TOKENS, _TRUNCATED)),
    "classify": Contract(
        ("INPUT",),
        (
            _LABEL,
            Output("SCORE", FLOATS, 1, optional=True, beside=True),
            Output("START", INTEGERS, 1, optional=True, beside=True),
            Output("END", INTEGERS, 1, optional=True, beside=True),
        ),
    ),
    "transcribe": Contract(
        ("AUDIO",),
        (
            Output("TEXT", BYTES),
            Output("TIMES", FLOATS, optional=True),
            Output("DETAILS", BYTES, optional=True),
            Output("LANGUAGE", BYTES, optional=True),
            Output("DURATION", FLOATS, optional=True),
        ),
        by_row=False,
    ),
    "speak": Contract(("TEXT",), (Output("AUDIO", BYTES),), by_row=False),
    "classify-image": Contract(("IMAGE",), (Output("SCORE", FLOATS), _SIZE)),
    "detect-objects": Contract(
        ("IMAGE",),
        (_LABEL, Output("SCORE", FLOATS, 1, beside=True), Output("BOX", FLOATS, 2, 4, beside=True), _SIZE),
    ),
    "segment-image": Contract(
        ("IMAGE",),
        (_LABEL, Output("AREA", FLOATS, 1, beside=True), Output("MASK", BYTES, 1, beside=True), _SIZE),
    ),
    "read-text": Contract(
        ("IMAGE",),
        (
            Output("TEXT", BYTES, 1),
            Output("SCORE", FLOATS, 1, beside=True),
            Output("BOX", FLOATS, 3, 2, beside=True),
            _SIZE,
        ),
    ),
}
"""By task name."""
