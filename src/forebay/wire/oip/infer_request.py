"""Requests of the infer endpoint: a JSON document, followed by the bytes of binary tensors.

Tensors in the body are not copied but are views of it. Whether they fit the model, and whether their byte counts
match their shapes, is checked by the models, as for requests that arrive in other ways.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from forebay.core.serving.config import VARIABLE, Datatype, ModelConfig
from forebay.core.serving.errors import Refused
from forebay.core.serving.values import Buffer, InferRequest, Parameter, Tensor
from forebay.wire.documents import UNREADABLE
from forebay.wire.oip import tensors
from forebay.wire.oip.fields import (
    ABSENT,
    NOT_ARRAY,
    NOT_STRING,
    ODD_BYTES_MAX,
    UINT64_MAX,
    boolean,
    invalid,
    load,
    parameter,
    strictly,
    string,
    unsigned,
)
from forebay.wire.oip.infer_document import NO_DATA, Given, GivenInput, GivenOutput, Long
from forebay.wire.oip.ports import Memory, Target

LENGTH_HEADER: Final = "Inference-Header-Content-Length"
"""How many bytes of a body are JSON; the rest is binary tensors."""
LENGTH_DIGITS_MAX: Final = 18
DIMS_MAX: Final = 1024
"""Of a shape in a request. No array library supports more than 64; checking millions would block other requests."""
STRINGS_MAX: Final = 1_000_000
"""Elements of a BYTES tensor in JSON."""
NAMES_MAX: Final = 10_000
"""Inputs, outputs or parameters of one request."""
OBJECTS_MAX: Final = 4 * NAMES_MAX + 2
"""JSON objects in a long request: inputs and outputs with their parameters, the request and its parameters."""
FIELDS_BYTES_MAX: Final = 1 << 20
"""Of a long request, all fields but the data of its tensors."""
KNOWN_MAX: Final = 256
"""Documents that are kept as read."""
KNOWN_BYTES_MAX: Final = 1024
"""Size of each."""
RESERVED: Final = frozenset({
    "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output",
})  # fmt: skip
"""Parameters that the protocol defines."""
RESERVED_PREFIX: Final = "triton_"


class Form(NamedTuple):
    """The form in which a client wants an output."""

    binary: bool = False
    classes: int = 0
    """How many best classes with their scores to return instead of the tensor; 0: the tensor."""
    target: Target | None = None
    """Where the bytes are written instead of into the response."""


JSON_FORM: Final = Form()
BINARY_FORM: Final = Form(binary=True)


class Asked:  # not a NamedTuple: compiled code creates native objects without the interpreter
    """A request and the forms of its outputs: without `forms`, all have the form `others`."""

    __slots__ = ("forms", "is_binary", "others", "request")

    def __init__(self, request: InferRequest, forms: Mapping[str, Form], others: Form) -> None:
        self.request = request
        self.forms = forms
        self.others = others
        self.is_binary = all(form is BINARY_FORM for form in forms.values()) if forms else others is BINARY_FORM
        """Whether all outputs are wanted in binary."""


class _Known:
    """A document as it was read, whose tensors are all binary."""

    __slots__ = ("asked", "sizes")

    def __init__(self, asked: Asked, sizes: list[int]) -> None:
        self.asked = asked
        self.sizes = sizes
        """Bytes of each input."""


_known: Final[dict[bytes, _Known]] = {}
"""Most clients send the same document again and again, with other tensors: it is read once."""

_NO_FIELDS: Final[dict[str, Any]] = {}
_NO_FORMS: Final[dict[str, Form]] = {}
_DATATYPES: Final = {datatype.value: datatype for datatype in Datatype}


_decode = msgspec.json.Decoder(Given).decode
_decode_long = msgspec.json.Decoder(Long).decode
_any = msgspec.json.Decoder().decode


def json_length(header: bytes | None, body_bytes: int) -> int | None:
    """The value of the header `Inference-Header-Content-Length`; None if it is absent. Raises `Refused`."""
    if header is None:
        return None
    if not header.removeprefix(b"-").isdigit():
        raise invalid(f"Unable to parse {LENGTH_HEADER}, got: {header[:100].decode('latin-1')}")
    length = int(header) if len(header) <= LENGTH_DIGITS_MAX else -1
    if not 0 <= length <= body_bytes:
        raise invalid(
            f"inference header size should be in range (0, {body_bytes}), got: {header[:100].decode('latin-1')}"
        )
    return length


def read_infer(
    model: str,
    version: str,
    body: Buffer,
    json_bytes: int | None,
    memory: Memory,
    *,
    json_bytes_max: int,
    strings_max: int = STRINGS_MAX,
) -> Asked:
    """Parse a request whose first `json_bytes` bytes (None: all) are JSON. Raises `Refused`.

    `json_bytes_max` limits the JSON, and the bytes of each tensor given in it; `strings_max` the elements of each
    BYTES tensor given in it. Binary tensors are checked by the models.
    """
    size = len(body) if json_bytes is None else json_bytes
    if size > json_bytes_max:
        raise invalid(
            f"request JSON size of {size} bytes exceeds the maximum allowed input size of {json_bytes_max} bytes. "
            f"Use --http-max-input-size to increase the limit."
        )
    view = memoryview(body)
    written = b""
    if size < len(body) and size <= KNOWN_BYTES_MAX:
        written = bytes(view[:size])
        known = _known.get(written)
        if known is not None:
            return _repeated(known, model, version, view, size)
    document = _read_document(body if size == len(body) else view[:size])
    request = InferRequest(model, version, "", ())
    if document.id is not msgspec.UNSET:
        request.id = string(document.id, "Unable to parse 'id'")
    others = JSON_FORM
    if document.parameters is not msgspec.UNSET and read_parameters(document.parameters, request):
        others = BINARY_FORM
    if len(document.inputs) > NAMES_MAX or len(document.outputs) > NAMES_MAX or len(request.parameters) > NAMES_MAX:
        raise _too_many()
    limits = (json_bytes_max, strings_max)
    inputs = []
    sizes = []
    names = set()
    at = size
    for each in document.inputs:
        start = at
        tensor, at = _read_input(each, request, view, at, memory=memory, limits=limits)
        sizes.append(at - start)
        inputs.append(tensor)
        names.add(tensor.name)
        if len(names) != len(inputs):
            raise invalid(f"{tensors.log_prefix(request.id)}input '{tensor.name}' already exists in request")
    if at != len(body):
        raise invalid(f"unexpected additional input data for model '{model}'")
    request.inputs = tuple(inputs)
    forms = _read_outputs(document.outputs, request, memory) if document.outputs else _NO_FORMS
    asked = Asked(request, forms, others)
    if written and all(sizes):
        _remember(written, asked, sizes)
    return asked


def _remember(written: bytes, asked: Asked, sizes: list[int]) -> None:
    """Keep a document of binary tensors, unless it belongs to this request alone."""
    request = asked.request
    if request.id or request.sequence_id or any(form.target is not None for form in asked.forms.values()):
        return
    if len(_known) >= KNOWN_MAX:
        _known.clear()
    inputs = tuple([Tensor(tensor.name, tensor.datatype, tensor.shape, b"") for tensor in request.inputs])
    kept = InferRequest(
        "", "", "", inputs, request.outputs,
        parameters=dict(request.parameters), priority=request.priority, timeout_us=request.timeout_us,
        sequence_start=request.sequence_start, sequence_end=request.sequence_end,
    )  # fmt: skip
    _known[written] = _Known(Asked(kept, asked.forms, asked.others), sizes)


def _repeated(known: _Known, model: str, version: str, body: memoryview, at: int) -> Asked:
    """A request whose document was read before; its tensors begin at `at`. Raises `Refused`."""
    asked = known.asked
    kept = asked.request
    inputs = []
    for index, size in enumerate(known.sizes):
        tensor = kept.inputs[index]
        end = at + size
        if end > len(body):
            raise _too_short(tensor.name, end - len(body), model)
        inputs.append(Tensor(tensor.name, tensor.datatype, tensor.shape, body[at:end]))
        at = end
    if at != len(body):
        raise invalid(f"unexpected additional input data for model '{model}'")
    request = InferRequest(
        model, version, "", tuple(inputs), kept.outputs,
        parameters=dict(kept.parameters) if kept.parameters else None, priority=kept.priority,
        timeout_us=kept.timeout_us, sequence_start=kept.sequence_start, sequence_end=kept.sequence_end,
    )  # fmt: skip
    return Asked(request, asked.forms, asked.others)


def read_raw(config: ModelConfig, version: str, body: Buffer) -> Asked:
    """Parse a request without any JSON: its body is the only input of the model. Raises `Refused`."""
    prefix = tensors.log_prefix("")
    if len(config.inputs) != 1:
        raise invalid(
            f"{prefix}Raw request must only have 1 input (found 1) to be deduced but got {len(config.inputs)} inputs "
            f"in '{config.name}' model configuration"
        )
    spec = config.inputs[0]
    shape = [1] * (config.max_batch > 0)
    variable, elements = -1, 1
    for dim in spec.dims:
        if dim != VARIABLE:
            elements *= dim
        elif variable != -1:
            raise invalid(
                f"{prefix}The shape of the raw input '{spec.name}' can not be deduced because there are more than "
                f"one variable-sized dimension"
            )
        else:
            variable = len(shape)
        shape.append(dim)
    data: Buffer = body
    if spec.datatype is Datatype.BYTES:
        if variable != -1 or elements != 1:
            raise invalid(f"{prefix}For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
        data = tensors.prefixed(body)
    elif variable != -1:
        one_bytes = tensors.byte_size(spec.datatype, elements)
        shape[variable] = len(body) // one_bytes if one_bytes else 0
    tensor = Tensor(spec.name, spec.datatype, tuple(shape), data)
    return Asked(InferRequest(config.name, version, "", (tensor,)), _NO_FORMS, BINARY_FORM)


def read_parameters(parameters: Any, request: InferRequest) -> bool:
    """Store the parameters in the request; returns whether outputs should be binary. Raises `Refused`."""
    if type(parameters) is not dict:
        raise invalid("failed to get request params.: attempt to get members for non-object")
    binary = False
    custom: dict[str, Parameter] = {}
    for name, value in parameters.items():
        if name == "sequence_id":
            if type(value) is not int or not 0 <= value <= UINT64_MAX:
                string(value, "Unable to parse 'sequence_id'")
            request.sequence_id = value
        elif name == "sequence_start":
            request.sequence_start = boolean(value, "Unable to parse 'sequence_start'")
        elif name == "sequence_end":
            request.sequence_end = boolean(value, "Unable to parse 'sequence_end'")
        elif name == "priority":
            request.priority = unsigned(value, "Unable to parse 'priority'")
        elif name == "timeout":
            request.timeout_us = unsigned(value, "Unable to parse 'timeout'")
        elif name == "binary_data_output":
            binary = boolean(value, "Unable to parse 'binary_data_output'")
        elif name.startswith(RESERVED_PREFIX):
            raise invalid(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        else:
            custom[name] = parameter(name, value)
    if custom:
        request.parameters = custom
    return binary


# --- inputs and outputs


def _read_input(
    given: GivenInput, request: InferRequest, body: memoryview, at: int, *, memory: Memory, limits: tuple[int, int]
) -> tuple[Tensor, int]:
    """The input, and where in the body the next binary one begins."""
    parameters = given.parameters if type(given.parameters) is dict else _NO_FIELDS
    in_json, binary = given.data is not NO_DATA, "binary_data_size" in parameters
    shared = "shared_memory_region" in parameters
    if in_json + binary + shared != 1:
        raise _not_one_source(in_json, binary, shared)
    if not shared and len(parameters) > binary:
        _read_range(parameters)
    name, datatype, shape = _read_head(given)
    data: Buffer
    if binary:
        end = at + unsigned(parameters["binary_data_size"], "Unable to parse 'binary_data_size'")
        if end > len(body):
            raise _too_short(name, end - len(body), request.model)
        data = body[at:end]
        at = end
    elif shared:
        data = memory.read(*_read_place(parameters))
    else:
        data = _read_data(name, datatype, shape, given.data, limits)
    return Tensor(name, datatype, shape, data), at


def _read_head(given: GivenInput) -> tuple[str, Datatype, tuple[int, ...]]:
    name = given.name
    if type(name) is not str:
        raise _missing("name", name, NOT_STRING)
    if type(given.datatype) is not str:
        raise _missing("datatype", given.datatype, NOT_STRING)
    datatype = _DATATYPES.get(given.datatype)
    if datatype is None:
        raise invalid(f"invalid datatype for input {name}")
    shape = given.shape
    if type(shape) is not list:
        raise _missing("shape", shape, NOT_ARRAY)
    if len(shape) > DIMS_MAX:
        raise invalid(f"invalid shape for input '{name}': {len(shape)} dimensions are more than {DIMS_MAX}")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= UINT64_MAX:
            unsigned(dim, "Unable to parse 'shape'")
    return name, datatype, tuple(shape)


def _read_data(
    name: str, datatype: Datatype, shape: tuple[int, ...], data: msgspec.Raw, limits: tuple[int, int]
) -> bytes:
    tensor_bytes_max, strings_max = limits
    elements = tensors.count(name, shape)
    if elements == 0:
        return b""
    size = tensors.byte_size(datatype, elements)
    if size > tensor_bytes_max:
        raise invalid(
            f"JSON input '{name}' has a byte_size ({size} bytes) that exceeds the maximum allowed value of "
            f"{tensor_bytes_max} bytes. Use --http-max-input-size to increase the limit."
        )
    if datatype is Datatype.BYTES and elements > strings_max:
        raise invalid(
            f"JSON input '{name}' has {elements} string elements, more than the {strings_max} that "
            f"--max-string-elements allows"
        )
    return tensors.pack(name, datatype, data, elements)


def _read_place(parameters: Mapping[str, Any]) -> tuple[str, int, int]:
    name = string(parameters["shared_memory_region"], "Unable to parse 'shared_memory_region'")
    offset, size = _read_range(parameters)
    return name, offset, size


def _read_range(parameters: Mapping[str, Any]) -> tuple[int, int]:
    """Offset and size in shared memory; both must be numbers even if no region is given."""
    offset = unsigned(parameters.get("shared_memory_offset", 0), "Unable to parse 'shared_memory_offset'")
    size = unsigned(parameters.get("shared_memory_byte_size", 0), "Unable to parse 'shared_memory_byte_size'")
    return offset, size


def _read_outputs(given: list[GivenOutput], request: InferRequest, memory: Memory) -> dict[str, Form]:
    forms: dict[str, Form] = {}
    for each in given:
        parameters = each.parameters if type(each.parameters) is dict else _NO_FIELDS
        form = JSON_FORM
        if parameters:
            form = _read_form(parameters, memory)
        name = each.name
        if type(name) is not str:
            raise _missing("name", name, NOT_STRING)
        if name in forms:
            raise invalid(f"{tensors.log_prefix(request.id)}output '{name}' already exists in request")
        forms[name] = form
    request.outputs = tuple(forms)
    return forms


def _read_form(parameters: Mapping[str, Any], memory: Memory) -> Form:
    classes = 0
    if "classification" in parameters:
        classes = unsigned(parameters["classification"], "Unable to set 'classification'")
    binary = boolean(parameters.get("binary_data", False), "Unable to parse 'binary_data'")
    if "shared_memory_region" not in parameters:
        if len(parameters) > ("binary_data" in parameters):
            _read_range(parameters)
        return BINARY_FORM if binary and not classes else Form(binary, classes)
    for taken, what in (("classification" in parameters, "classification"), (binary, "binary_data")):
        if taken:
            raise invalid(f"Output can't set both 'shared_memory_region' and '{what}'")
    return Form(target=memory.target(*_read_place(parameters)))


# --- invalid and unusual documents


def _read_document(data: Buffer) -> Given:
    if len(data) > ODD_BYTES_MAX:
        return _read_long(memoryview(data))
    try:
        return _decode(data)
    except UNREADABLE:
        return _read_slowly(load(data))


def _read_long(data: memoryview) -> Given:
    """Parse so that few objects are created, whatever the document: meanwhile no other request is answered."""
    if tensors.exceeds(data, b"{", OBJECTS_MAX):
        raise _too_many()
    try:
        long = _decode_long(data)
        fields = [field for i in long.inputs for field in (i.name, i.datatype, i.shape, i.parameters)]
        fields += [field for o in long.outputs for field in (o.name, o.parameters)]
        if sum([len(memoryview(field)) for field in (long.id, long.parameters, *fields)]) > FIELDS_BYTES_MAX:
            raise invalid(f"the fields of a long request other than 'data' may have at most {FIELDS_BYTES_MAX} bytes")
        inputs = [
            GivenInput(_value(i.name), _value(i.datatype), _value(i.shape), _value(i.parameters), i.data)
            for i in long.inputs
        ]
        outputs = [GivenOutput(_value(o.name), _value(o.parameters)) for o in long.outputs]
        return Given(inputs, outputs, _value(long.id), _value(long.parameters))
    except UNREADABLE as error:
        raise strictly(error) from None


def _value(given: msgspec.Raw) -> Any:
    """The value of a field. Raises one of `UNREADABLE`."""
    return msgspec.UNSET if given is NO_DATA else _any(given)


def _read_slowly(document: Any) -> Given:
    """Parse field by field, for documents that are invalid or contain a NaN."""
    fields = document if type(document) is dict else _NO_FIELDS
    read = Given([])
    read.id = fields.get("id", msgspec.UNSET)
    read.parameters = fields.get("parameters", msgspec.UNSET)
    for each in _array(fields, "inputs"):
        parts = each if type(each) is dict else _NO_FIELDS
        data = _raw(parts["data"]) if "data" in parts else NO_DATA
        read.inputs.append(GivenInput(**{name: parts[name] for name in _HEAD if name in parts}, data=data))
    for each in _array(fields, "outputs") if "outputs" in fields else ():
        parts = each if type(each) is dict else _NO_FIELDS
        read.outputs.append(GivenOutput(**{name: parts[name] for name in ("name", "parameters") if name in parts}))
    return read


_HEAD: Final = ("name", "datatype", "shape", "parameters")


def _too_short(name: str, lacking: int, model: str) -> Refused:
    return invalid(f"unexpected size for input '{name}', expecting {lacking} additional bytes for model '{model}'")


def _too_many() -> Refused:
    return invalid(f"a request may have at most {NAMES_MAX} inputs, outputs or parameters")


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def _array(fields: Mapping[str, Any], name: str) -> list[Any]:
    if name not in fields:
        raise _missing(name, msgspec.UNSET, NOT_ARRAY)
    value = fields[name]
    if type(value) is not list:
        raise _missing(name, value, NOT_ARRAY)
    return value


def _missing(name: str, value: Any, otherwise: str) -> Refused:
    """The error for a field that is missing, or else has the wrong type."""
    return invalid(f"Unable to parse '{name}': {ABSENT.format(name) if value is msgspec.UNSET else otherwise}")


def _not_one_source(in_json: bool, binary: bool, shared: bool) -> Refused:
    given = [
        name
        for there, name in ((in_json, "'data'"), (binary, "'binary_data_size'"), (shared, "'shared_memory_region'"))
        if there
    ]
    return invalid(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        f"'shared_memory_region' in 'parameters'. But {'set ' + ' '.join(given) if given else 'no field is set'}"
    )
