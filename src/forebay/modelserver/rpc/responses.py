"""Answers of models as messages."""

from collections.abc import Mapping
from typing import Any, Final

from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferResponse, Parameter, Tensor
from forebay.modelserver.ports import Models, ModelView
from forebay.modelserver.rpc.requests import Wanted
from forebay.wire.oip.infer_answer import classified

FINAL: Final = "triton_final_response"
"""A parameter of every response on a stream: whether it is the last one of its request."""
MESSAGE_BYTES_MAX: Final = 2**31 - 1
"""gRPC's own limit."""


class Writer:
    """Fills messages with the answers to one request."""

    __slots__ = ("_models", "_view", "_wanted")

    def __init__(self, models: Models, view: ModelView, wanted: Mapping[str, Wanted]) -> None:
        self._models = models
        self._view = view
        self._wanted = wanted

    def fill(self, message: Any, response: InferResponse) -> None:
        """Copy a response into an empty ModelInferResponse, or its outputs to where they are wanted.

        Afterwards nothing refers to the response's buffers. Raises `Refused`, the response's own error included.
        """
        if response.error is not None:
            raise response.error
        message.model_name = response.model
        message.model_version = response.version
        if response.id:
            message.id = response.id
        if response.parameters:
            set_parameters(message.parameters, response.parameters)
        raw, outputs, wanted = message.raw_output_contents, message.outputs, self._wanted
        for tensor in response.outputs:
            form = wanted.get(tensor.name)
            if form is not None and form.classes:
                tensor = self._classified(tensor, form.classes)  # noqa: PLW2901 - as wanted
            name, datatype, shape, data = tensor
            outputs.add(name=name, datatype=datatype, shape=shape)
            if form is not None and form.target is not None:
                form.target.put(name, data)
                raw.append(b"")  # clients count on one entry for each output
            else:
                raw.append(bytes(data))
        if message.ByteSize() > MESSAGE_BYTES_MAX:
            text = f"Response has byte size {message.ByteSize()} which exceeds gRPC's byte size limit"
            raise Refused(Kind.INVALID_ARGUMENT, f"{text} {MESSAGE_BYTES_MAX}.")

    def _classified(self, tensor: Tensor, classes: int) -> Tensor:
        config, version = self._view.config, self._view.version
        return classified(
            tensor,
            classes,
            batches=config.max_batch > 0,
            labels=lambda output: self._models.labels(config.name, version, output),
        )


def set_parameters(field: Any, parameters: Mapping[str, Parameter]) -> None:
    """Put parameters into a map of messages."""
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
