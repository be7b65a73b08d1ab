"""Encoding of ModelInfer responses."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import Buffer, InferResponse, Parameter, Tensor
from forebay.modelserver.ports import Models, ModelView
from forebay.modelserver.rpc.requests import Wanted
from forebay.wire.http2.grpc import MESSAGE_BYTES_MAX
from forebay.wire.oip.infer_answer import classified, classifies_long

FINAL: Final = "triton_final_response"
"""Parameter of every response on a stream: whether it is the last one of its request."""
RAW_BYTES_MAX: Final = MESSAGE_BYTES_MAX - 2**20
"""Limit of all outputs of a response, leaving room for its other fields."""
_RAW: Final = b"\x32"
"""Tag of each `raw_output_contents` entry: field 6, length-delimited."""


class Writer:
    """Encodes the responses to one request.

    Outputs and their bytes are concatenated in protobuf's encoding by hand: the library would copy every tensor three
    times, and describing a small tensor takes it longer than all the rest of a response.
    """

    __slots__ = ("_labels", "_models", "_view", "_wanted")

    def __init__(self, models: Models, view: ModelView, wanted: Mapping[str, Wanted]) -> None:
        self._models = models
        self._view = view
        self._wanted = wanted
        self._labels: dict[str, Sequence[str]] = {}
        """Labels by output, as far as they have been looked up."""

    def write(self, response: InferResponse) -> bytes:
        """Encode a ModelInferResponse; outputs for shared memory are written there.

        Keeps no reference to the response's buffers. Raises `Refused`, the response's own error included.
        """
        if response.error is not None:
            raise response.error
        parts: list[Buffer] = [_named(response)]
        raw: list[Buffer] = []
        wanted, size = self._wanted, 0
        for tensor in response.outputs:
            form = wanted.get(tensor.name) if wanted else None
            if form is not None and form.classes:
                tensor = self._classified(tensor, form.classes)  # noqa: PLW2901 - as wanted
            name, data = tensor.name, tensor.data
            parts.append(_described(name, tensor.datatype, tensor.shape))
            if form is not None and form.target is not None:
                form.target.put(name, data)
                data = b""  # clients expect one entry per output
            count = data.nbytes if isinstance(data, memoryview) else len(data)
            raw += (_RAW, varint(count), data)
            size += count
        if size > RAW_BYTES_MAX:
            text = f"Response has byte size {size} which exceeds gRPC's byte size limit"
            raise Refused(Kind.INVALID_ARGUMENT, f"{text} {MESSAGE_BYTES_MAX}.")
        parts += raw
        return b"".join(parts)

    def takes_long(self, response: InferResponse) -> bool:
        """Whether the event loop should not wait until the response has been encoded."""
        wanted = self._wanted
        if not wanted or response.error is not None:
            return False
        for tensor in response.outputs:
            form = wanted.get(tensor.name)
            if form is not None and form.classes and classifies_long(tensor, form.classes):
                return True
        return False

    def look_up(self, response: InferResponse) -> None:
        """Get from the model what encoding the response takes: it may be unloaded before. Raises `Refused`."""
        for tensor in response.outputs:
            form = self._wanted.get(tensor.name)
            if form is not None and form.classes:
                self._find_labels(tensor.name)

    def _find_labels(self, output: str) -> Sequence[str]:
        labels = self._labels.get(output)
        if labels is None:
            view = self._view
            labels = self._labels[output] = self._models.labels(view.config.name, view.version, output)
        return labels

    def _classified(self, tensor: Tensor, classes: int) -> Tensor:
        return classified(tensor, classes, batches=self._view.config.max_batch > 0, labels=self._find_labels)


def set_parameters(field: Any, parameters: Mapping[str, Parameter]) -> None:
    """Put parameters into a map field."""
    for name, value in parameters.items():
        entry = field[name]
        if isinstance(value, bool):
            entry.bool_param = value
        elif isinstance(value, int):
            entry.int64_param = value
        elif isinstance(value, float):
            entry.double_param = value
        else:
            entry.string_param = value


def varint(value: int) -> bytes:
    """A length in protobuf's varint encoding."""
    if value < 128:
        return bytes((value,))
    found = bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _named(response: InferResponse) -> bytes:
    """All fields of a response except its outputs."""
    if not response.parameters and not response.id:
        return _of_model(response.model, response.version)
    message = pb.ModelInferResponse(model_name=response.model, model_version=response.version, id=response.id)
    if response.parameters:
        set_parameters(message.parameters, response.parameters)
    return message.SerializeToString()  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _of_model(name: str, version: str) -> bytes:
    return pb.ModelInferResponse(model_name=name, model_version=version).SerializeToString()  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def _described(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """Metadata of an output."""
    message = pb.ModelInferResponse()
    message.outputs.add(name=name, datatype=datatype, shape=shape)
    return message.SerializeToString()  # type: ignore[no-any-return]
