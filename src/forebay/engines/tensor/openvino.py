"""OpenVINO models: compiled once, with an inference request per instance; all share the weights.

Reads OpenVINO IR (.xml with its .bin), and formats that OpenVINO converts while reading: ONNX, TensorFlow Lite,
PaddlePaddle and TensorFlow files.
"""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino

from forebay.core.serving.config import VARIABLE, Datatype, ModelConfig, TensorSpec
from forebay.engines.tensor.arrays import DTYPES, as_bytes, as_text, check_states, states_of
from forebay.engines.tensor.batch import answers
from forebay.engines.tensor.measures import Family
from forebay.engines.tensor.onnx_model.file import outside
from forebay.engines.tensor.protocol import (
    Array,
    BackendFailed,
    BadInput,
    CallModel,
    Emit,
    Loaded,
    Request,
    Response,
)
from forebay.engines.tensor.ragged import Ragged

FILE_DEFAULT: Final = "model.xml"
ELEMENT_TYPES: Final = {
    "boolean": Datatype.BOOL,
    "u8": Datatype.UINT8,
    "u16": Datatype.UINT16,
    "u32": Datatype.UINT32,
    "u64": Datatype.UINT64,
    "i8": Datatype.INT8,
    "i16": Datatype.INT16,
    "i32": Datatype.INT32,
    "i64": Datatype.INT64,
    "f16": Datatype.FP16,
    "f32": Datatype.FP32,
    "f64": Datatype.FP64,
    "bf16": Datatype.BF16,
    "string": Datatype.BYTES,
}
"""OpenVINO's names."""
COUNTS: Final = ("INFERENCE_NUM_THREADS", "COMPILATION_NUM_THREADS")
"""Integer parameters of Triton's OpenVINO backend that are passed on unchanged."""
INT32: Final = np.iinfo(np.int32)
"""The CPU plugin computes INT64 and UINT64 with 32 bits (and FP64 as FP32): larger numbers would be truncated
silently."""
LONG: Final = (DTYPES[Datatype.INT64], DTYPES[Datatype.UINT64])
CHAR_BYTES: Final = 4
PADDED_BYTES_MAX: Final = 1 << 30
"""Strings reach OpenVINO in an array in which each takes the space of the longest, `CHAR_BYTES` per character."""


class OpenVinoBackend:
    """A compiled model; `execute` of one instance is called by one thread at a time."""

    def load(self, config: ModelConfig, folder: Path, instance: int, call: CallModel) -> Loaded:
        file = folder / (config.model_file or FILE_DEFAULT)
        if not file.exists():
            raise BackendFailed(f"model '{config.name}': there is no file {file.name} in {folder}")
        if file.suffix == ".onnx":
            for problem in outside(file):
                raise BackendFailed(f"model '{config.name}': {problem}")
        try:
            core = openvino.Core()
            model = core.read_model(file)
            _free_batch(model, config)
            self._inputs = {_name(port, place): port for place, port in enumerate(model.inputs)}
            self._outputs = {_name(port, place): port for place, port in enumerate(model.outputs)}
            if not self._outputs:
                raise BackendFailed(f"model '{config.name}': {file.name} describes a model without outputs")
            device = config.parameters.get("TARGET_DEVICE", "CPU")
            self._cuts = device == "CPU"
            self._ragged = Ragged(config, version=folder.name, cpu=self._cuts)
            loaded = Loaded(_specs(self._inputs), _specs(self._outputs), measures=self._ragged.measures)
            self._compiled = core.compile_model(model, device, _properties(config))
            self._places = {name: place for place, name in enumerate(self._outputs)}
            self._requests: dict[int, Any] = {}
        except BackendFailed:
            raise
        except Exception as error:  # the library raises RuntimeError, ValueError and exceptions of its own
            raise BackendFailed(
                f"model '{config.name}': {file.name} cannot be loaded: {_error_text(error)}"
            ) from error
        self._bf16 = frozenset(spec.name for spec in loaded.inputs if spec.datatype is Datatype.BF16)
        self._answers = answers(config, self._outputs)
        self._config, self._states = config, states_of(config)
        return loaded

    def execute(self, instance: int, requests: Sequence[Request], emit: Emit) -> Sequence[Response | None]:
        request = self._requests.get(instance)
        if request is None:  # instances may be added while the model is served
            request = self._requests[instance] = self._compiled.create_infer_request()
        return self._ragged.execute(requests, self._answers, partial(self._run, request), emit)

    def measured(self) -> tuple[Family, ...]:
        return self._ragged.measured()

    def close(self) -> None:
        del self._requests, self._compiled, self._inputs, self._outputs

    def _run(self, request: Any, feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        missing = [name for name in self._inputs if name not in feed]
        if missing:
            raise BadInput(f"input '{missing[0]}' is missing")
        tensors = [self._tensor(name, feed[name]) for name in self._inputs]
        try:
            for place, tensor in enumerate(tensors):
                request.set_input_tensor(place, tensor)
            request.infer()
        except Exception as error:  # the library raises RuntimeError, ValueError and exceptions of its own
            raise RuntimeError(_error_text(error)) from error
        made = {name: _array(request.get_output_tensor(self._places[name])) for name in wanted}
        check_states(self._states, made, self._config)
        return made

    def _tensor(self, name: str, array: Array) -> Any:
        """A tensor over the array's memory where possible: not if it is read-only, or of a type that numpy does not
        have.
        """
        if array.dtype.hasobject:
            text = as_text(array, name)
            flat = text.ravel().tolist()
            if any(each.endswith("\0") for each in flat):
                raise BadInput(f"input '{name}' holds a string that ends in a zero byte, which OpenVINO would drop")
            if CHAR_BYTES * len(flat) * max(map(len, flat), default=0) > PADDED_BYTES_MAX:
                raise BadInput(
                    f"input '{name}' holds strings of too different lengths: padded to the longest, as OpenVINO gets "
                    f"them, they take more than {PADDED_BYTES_MAX} bytes"
                )
            return openvino.Tensor(text.astype(np.str_))
        if name in self._bf16:
            return openvino.Tensor(array, openvino.Shape(array.shape), openvino.Type.bf16)
        long = self._cuts and array.dtype in LONG and array.size > 0
        if long and (array.max() > INT32.max or array.min() < INT32.min):
            raise BadInput(f"input '{name}' holds numbers beyond 32 bits, with which OpenVINO computes on a CPU")
        return openvino.Tensor(array, shared_memory=array.flags.writeable)


def _array(tensor: Any) -> Array:
    """A copy: the instance's next inference overwrites the memory."""
    name = tensor.element_type.get_type_name()
    if name == "string":
        return as_bytes(np.asarray(tensor.str_data))
    if name == "bf16":
        return np.array(tensor.data).view(DTYPES[Datatype.BF16]).reshape(tuple(tensor.shape))
    return np.array(tensor.data)


def _error_text(error: Exception) -> str:
    """The last line of an error: those before it are locations in OpenVINO's source."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _name(port: Any, place: int) -> str:
    """Name of an input or output; made up for formats without names."""
    names = sorted(port.get_names())
    return str(port.get_any_name()) if names else f"{port.node.get_friendly_name()}:{place}"


def _specs(ports: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    found = []
    for name, port in ports.items():
        kind = port.get_element_type().get_type_name()
        if kind not in ELEMENT_TYPES:
            raise BackendFailed(f"tensor '{name}' has elements of {kind}, which the protocol cannot carry")
        shape = port.get_partial_shape()
        dims = tuple(VARIABLE if size.is_dynamic else size.get_length() for size in shape)
        found.append(TensorSpec(name, ELEMENT_TYPES[kind], dims))
    return tuple(found)


def _free_batch(model: Any, config: ModelConfig) -> None:
    """Make the first dimension of all inputs variable if the model batches but its file fixes the batch size."""
    if not config.max_batch or config.parameters.get("SKIP_OV_DYNAMIC_BATCHSIZE", "").upper() == "YES":
        return
    shapes = {port: port.get_partial_shape() for port in model.inputs}
    if any(not len(shape) for shape in shapes.values()) or all(shape[0].is_dynamic for shape in shapes.values()):
        return
    for shape in shapes.values():
        shape[0] = VARIABLE
    model.reshape(shapes)


def _properties(config: ModelConfig) -> dict[str, Any]:
    """Properties, by their names in Triton's OpenVINO backend (its README, "Parameters").

    By default one stream per instance, sharing the cores.
    """
    given = config.parameters
    cores = len(os.sched_getaffinity(0))
    found: dict[str, Any] = {"INFERENCE_NUM_THREADS": cores, "NUM_STREAMS": str(min(config.instance_count, cores))}
    if given.get("PERFORMANCE_HINT"):
        found = {"PERFORMANCE_HINT": given["PERFORMANCE_HINT"].upper(), "INFERENCE_NUM_THREADS": cores}
    for name in COUNTS:
        if name in given:
            if not given[name].isdecimal():
                raise BackendFailed(f"parameter {name} is {given[name]!r}; it must be a whole number")
            found[name] = int(given[name])
    if given.get("NUM_STREAMS"):
        found["NUM_STREAMS"] = given["NUM_STREAMS"].upper()
    if given.get("HINT_BF16", "").upper() == "YES":
        found["INFERENCE_PRECISION_HINT"] = "bf16"
    return found
