"""Responses of the infer endpoint: a JSON document, followed by the bytes of binary outputs."""

import heapq
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Buffer, InferResponse, Tensor
from forebay.wire.oip import tensors
from forebay.wire.oip.fields import invalid
from forebay.wire.oip.infer_document import Told, ToldOutput
from forebay.wire.oip.infer_request import Asked

CLASSIFIED_ELEMENTS_MAX: Final = 1_000_000
"""Elements of one row that are searched for the best classes: Triton's limit."""
CLASSIFIED_AT_ONCE_MAX: Final = 1 << 14
"""Fewer elements are classified in milliseconds, whatever their number of classes."""
_SORTED: Final = 32
"""An element that becomes a class costs as much as it takes to look at this many."""
KNOWN_MAX: Final = 256
"""Documents that are kept as written."""
KNOWN_BYTES_MAX: Final = 4096
"""Size of each."""
_UNCLASSIFIABLE: Final = frozenset({Datatype.BOOL, Datatype.FP16, Datatype.BF16, Datatype.BYTES})
_FLOATS: Final = frozenset({Datatype.FP32, Datatype.FP64})

Labels = Callable[[str], Sequence[str]]
"""Returns the labels of an output's classes."""


class Written:
    """A response. `buffers` follow the JSON; they belong to the response and are valid as long as it exists."""

    __slots__ = ("buffers", "json")

    def __init__(self, json: bytes, buffers: list[Buffer]) -> None:
        self.json = json
        self.buffers = buffers


_encode = msgspec.json.Encoder().encode
_known: Final[dict[tuple[object, ...], bytes]] = {}
"""Responses with the same binary outputs have the same document, which is written once."""


def check_json_size(response: InferResponse, asked: Asked, most: int) -> None:
    """Reject a response with more than `most` bytes of tensors to be written as JSON. Raises `Refused`."""
    size = 0
    for tensor in response.outputs:
        form = asked.forms.get(tensor.name, asked.others)
        if form.binary or form.classes or form.target is not None:
            continue
        size += len(tensor.data)
        if size > most:
            raise invalid(
                f"output '{tensor.name}' makes it {size} bytes of tensors to be written as JSON, more than {most}. "
                f"Ask for it with 'binary_data': true, or use --http-max-json-output-size to increase the limit."
            )


def write_infer(
    response: InferResponse,
    asked: Asked,
    *,
    batches: bool,
    labels: Labels,
    wanted: Callable[[], bool] = tensors.always,
) -> Written:
    """Write a response, and into shared memory the outputs that go there. Raises `Refused`.

    `batches`: the first dimension of outputs is the batch. `wanted`: whether the client still waits.
    """
    if asked.is_binary and not (response.id or response.parameters):
        return _written(response)
    outputs: list[ToldOutput] = []
    buffers: list[Buffer] = []
    forms, others = asked.forms, asked.others
    for tensor in response.outputs:
        form = forms.get(tensor.name, others)
        if form.classes:
            tensor = classified(tensor, form.classes, batches=batches, labels=labels)  # noqa: PLW2901 - as wanted
        name, datatype, shape, data = tensor.name, tensor.datatype, tensor.shape, tensor.data
        if form.binary:
            outputs.append(_binary(tensor))
            if data:
                buffers.append(data)
            continue
        output = ToldOutput(name, datatype, shape)
        if form.target is not None:
            form.target.put(name, data)
        else:
            output.data = msgspec.Raw(tensors.unpack(name, datatype, data, _elements(shape), wanted))
        outputs.append(output)
    return Written(_encode(_document(response, outputs)), buffers)


def _document(response: InferResponse, outputs: list[ToldOutput]) -> Told:
    return Told(
        response.id or msgspec.UNSET,
        response.model,
        response.version,
        response.parameters or msgspec.UNSET,
        outputs,
    )


def _written(response: InferResponse) -> Written:
    """A response without id and parameters whose outputs are all binary."""
    parts: list[object] = [response.model, response.version]
    buffers: list[Buffer] = []
    for tensor in response.outputs:
        data = tensor.data
        size = len(data)
        parts += (tensor.name, tensor.datatype, tensor.shape, size)
        if size:
            buffers.append(data)
    key = tuple(parts)
    json = _known.get(key)
    if json is None:
        json = _encode(_document(response, [_binary(tensor) for tensor in response.outputs]))
        if len(json) <= KNOWN_BYTES_MAX:
            if len(_known) >= KNOWN_MAX:
                _known.clear()
            _known[key] = json
    return Written(json, buffers)


def _binary(tensor: Tensor) -> ToldOutput:
    output = ToldOutput(tensor.name, tensor.datatype, tensor.shape)
    output.parameters = {"binary_data_size": len(tensor.data)}
    return output


def classified(tensor: Tensor, classes: int, *, batches: bool, labels: Labels) -> Tensor:
    """The best classes of each row as BYTES `score:index` or `score:index:label`. Raises `Refused`."""
    name, datatype, shape, data = tensor.name, tensor.datatype, tensor.shape, tensor.data
    if datatype in _UNCLASSIFIABLE:
        raise invalid(f"class result not available for output due to unsupported type '{datatype}'")
    rows = shape[0] if batches and shape else 0
    elements = _elements(shape[1:] if rows else shape)
    if elements > CLASSIFIED_ELEMENTS_MAX:
        raise invalid("classification output tensor too large")
    if len(data) != tensors.byte_size(datatype, elements * max(1, rows)):
        raise Refused(Kind.INTERNAL, f"output tensor shape does not match size of output for '{name}'")
    scores = tensors.numbers(datatype, data)
    form = "%f" if datatype in _FLOATS else "%d"
    names = labels(name)
    found: list[str] = []
    for at in range(0, len(scores), elements or 1):
        for index in heapq.nlargest(classes, range(elements), key=scores[at : at + elements].__getitem__):
            label = f":{names[index]}" if index < len(names) and names[index] else ""  # an empty label counts as none
            found.append(f"{form % scores[at + index]}:{index}{label}")
    count = min(classes, elements)
    return Tensor(name, Datatype.BYTES, (rows, count) if rows else (count,), tensors.pack_strings(found))


def classifies_long(tensor: Tensor, classes: int) -> bool:
    """Whether the event loop should not wait until a tensor has been classified."""
    return _elements(tensor.shape) * min(classes, _SORTED) > CLASSIFIED_AT_ONCE_MAX * _SORTED


def _elements(shape: Sequence[int]) -> int:
    elements = 1
    for dim in shape:
        elements *= dim
    return elements
