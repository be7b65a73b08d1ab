"""Triton's generate extension: inputs and outputs of a model as plain fields of a JSON object.

Fields that are not named like an input are parameters. A field is one element or a list; the shape is the model's.
"""

from typing import Any, Final

import msgspec

from forebay.core.serving.config import VARIABLE, Datatype, ModelConfig, TensorSpec
from forebay.core.serving.values import InferRequest, InferResponse, Tensor
from forebay.wire.oip import tensors
from forebay.wire.oip.fields import NOT_OBJECT, document, invalid, parameter, string
from forebay.wire.oip.infer_request import NAMES_MAX

PARAMETERS: Final = "parameters"
"""The field that holds further parameters."""

_encode = msgspec.json.Encoder().encode


def read_generate(config: ModelConfig, version: str, body: bytes, *, tensor_bytes_max: int) -> InferRequest:
    """Parse a request; its inputs may take at most `tensor_bytes_max` bytes together. Raises `Refused`."""
    if not body:
        raise invalid("failed to parse the request JSON buffer: The document is empty. at 0")
    fields = document(body)
    request = InferRequest(config.name, version, "", ())
    if "id" in fields:
        request.id = string(fields.pop("id"), "Unable to parse 'id'")
    if PARAMETERS in fields:
        if config.input(PARAMETERS) is not None:
            raise invalid(f"Keyword '{PARAMETERS}' for nested schema also given as input tensor name")
        nested = fields.pop(PARAMETERS)
        if type(nested) is not dict:
            raise invalid(f"Expected JSON object for keyword: '{PARAMETERS}': {NOT_OBJECT}")
        for name in nested.keys() & fields.keys():
            if config.input(name) is not None:
                raise invalid(f"Converting keyword: '{PARAMETERS}': input '{name}' already exists in request")
        fields = {**nested, **fields}
    if len(fields) > NAMES_MAX:
        raise invalid(f"a request may have at most {NAMES_MAX} inputs and parameters")
    inputs: list[Tensor] = []
    taken = 0
    for name, value in fields.items():
        spec = config.input(name)
        if spec is None:
            request.parameters[name] = parameter(name, value)
            continue
        tensor = _read_input(spec, value, batches=config.max_batch > 0)
        taken += len(tensor.data)
        if taken > tensor_bytes_max:
            raise invalid(
                f"request size of {taken - len(tensor.data)} bytes with input '{name}' of size {len(tensor.data)} "
                f"bytes exceeds the maximum allowed input size of {tensor_bytes_max}. Use --http-max-input-size to "
                f"increase the limit."
            )
        inputs.append(tensor)
    request.inputs = tuple(inputs)
    return request


def write_generate(response: InferResponse, *, tensor_bytes_max: int) -> bytes:
    """One response as JSON: outputs, parameters, and the model's name and version. Raises `Refused`.

    `tensor_bytes_max` is the limit on all outputs together.
    """
    size = sum([len(tensor.data) for tensor in response.outputs])
    if size > tensor_bytes_max:
        raise invalid(
            f"the outputs have {size} bytes, over the limit of {tensor_bytes_max} for JSON. Ask the infer "
            f"endpoint for binary_data, or use --http-max-json-output-size to increase the limit."
        )
    fields: dict[str, Any] = {}
    for tensor in response.outputs:
        elements = 1
        for dim in tensor.shape:
            elements *= dim
        data = tensors.unpack(tensor.name, tensor.datatype, tensor.data, elements)
        fields[tensor.name] = msgspec.Raw(data[1:-1] if elements == 1 else data)
    fields |= response.parameters
    fields |= {"model_name": response.model, "model_version": response.version}
    if response.id:
        fields["id"] = response.id
    return _encode({name: fields[name] for name in sorted(fields)})


def event(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % data


def _read_input(spec: TensorSpec, value: Any, *, batches: bool) -> Tensor:
    if spec.datatype in (Datatype.FP16, Datatype.BF16):
        raise invalid(
            f"receiving {spec.datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {spec.name}"
        )
    values = tensors.flatten(spec.datatype, value)
    shape = _shape(spec, len(values), batches=batches)
    if spec.datatype is Datatype.BYTES:
        return Tensor(spec.name, spec.datatype, shape, tensors.pack_strings(values))
    return Tensor(spec.name, spec.datatype, shape, tensors.pack_numbers(spec.name, spec.datatype, values))


def _shape(spec: TensorSpec, elements: int, *, batches: bool) -> tuple[int, ...]:
    """The model's shape, with its innermost variable dimension as large as the element count requires."""
    shape = [VARIABLE, *spec.dims] if batches else list(spec.dims)
    left = elements
    for dim in shape:
        if dim != VARIABLE:
            if dim == 0 or left % dim:
                raise _unshaped(spec)
            left //= dim
    for at in reversed(range(len(shape))):
        if shape[at] == VARIABLE:
            shape[at], left = left, 1
    if left != 1:
        raise _unshaped(spec)
    return tuple(shape)


def _unshaped(spec: TensorSpec) -> Exception:
    return invalid(f"The schema can not convert input '{spec.name}' to tensor with proper shape")
