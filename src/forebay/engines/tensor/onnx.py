"""ONNX models through ONNX Runtime: one session for all instances, which run as threads and share its weights."""

import ctypes
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

from forebay.core.serving.config import VARIABLE, Datatype, ModelConfig, TensorSpec
from forebay.engines.tensor.arrays import as_bytes, as_text, check_states, states_of
from forebay.engines.tensor.batch import answers
from forebay.engines.tensor.gpus import memory_bytes, memory_fraction, on_gpu
from forebay.engines.tensor.measures import Family
from forebay.engines.tensor.onnx_model.file import outside
from forebay.engines.tensor.protocol import (
    Array,
    BackendFailed,
    CallModel,
    Emit,
    Loaded,
    Request,
    Response,
)
from forebay.engines.tensor.ragged import Ragged

FILE_DEFAULT: Final = "model.onnx"
ELEMENT_TYPES: Final = {
    "tensor(bool)": Datatype.BOOL,
    "tensor(uint8)": Datatype.UINT8,
    "tensor(uint16)": Datatype.UINT16,
    "tensor(uint32)": Datatype.UINT32,
    "tensor(uint64)": Datatype.UINT64,
    "tensor(int8)": Datatype.INT8,
    "tensor(int16)": Datatype.INT16,
    "tensor(int32)": Datatype.INT32,
    "tensor(int64)": Datatype.INT64,
    "tensor(float16)": Datatype.FP16,
    "tensor(float)": Datatype.FP32,
    "tensor(double)": Datatype.FP64,
    "tensor(bfloat16)": Datatype.BF16,
    "tensor(string)": Datatype.BYTES,
}
"""ONNX Runtime's names. Sequences, maps and optional values are not tensors: the protocol cannot carry them."""
ONNX_BFLOAT16: Final = 16
"""`TensorProto.BFLOAT16` in the ONNX format."""
LEVELS: Final = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
"""`optimization.graph.level` as Triton's ONNX Runtime backend reads it; otherwise all optimisations are on."""
CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"
CUDA_NUMBERS: Final = ("gpu_mem_limit", "do_copy_in_default_stream", "use_tf32")
CUDA_CHOICES: Final = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
}
"""GPU parameters as Triton's ONNX Runtime backend reads them, where each of these is a number; `use_tf32` is ONNX
Runtime's own (0: FP32 products are computed in FP32 instead of with TF32's 10-bit mantissa).
"""
_FAILURE = re.compile(r"^\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


class OnnxBackend:
    """One session, shared by all threads; each adds its own thread to a shared pool."""

    def load(self, config: ModelConfig, folder: Path, instance: int, call: CallModel) -> Loaded:
        self._ragged = Ragged(config, version=folder.name, cpu=not on_gpu(config, instance))
        file = folder / (config.model_file or FILE_DEFAULT)
        if file.is_dir():  # a model of several files
            file /= FILE_DEFAULT
        if not file.is_file():
            raise BackendFailed(f"model '{config.name}': there is no file {file.name} in {folder}")
        for problem in outside(file):
            raise BackendFailed(f"model '{config.name}': {problem}")
        try:
            options, providers = _options(config), _providers(config, on_gpu(config, instance))
            self._session = _session(file, options, providers)
        except BackendFailed:
            raise
        except Exception as error:  # the library's exceptions have no common base class
            raise BackendFailed(
                f"model '{config.name}': {file.name} cannot be loaded: {_error_text(error)}"
            ) from error
        if len(providers) > 1 and CUDA not in self._session.get_providers():
            raise BackendFailed(
                f"model '{config.name}': ONNX Runtime cannot use the GPU, and would compute on the CPU: CUDA or "
                "cuDNN is missing, or of another version than it needs (pip install 'onnxruntime-gpu[cuda,cudnn]')"
            )
        inputs = [*self._session.get_inputs(), *self._session.get_overridable_initializers()]
        self._inputs = {each.name: each.type for each in inputs}
        self._outputs = {each.name: each.type for each in self._session.get_outputs() if each.type in ELEMENT_TYPES}
        strange = sorted(name for name, kind in self._inputs.items() if kind not in ELEMENT_TYPES)
        if strange:
            raise BackendFailed(f"model '{config.name}': {_strange('input', strange[0], self._inputs[strange[0]])}")
        if not self._outputs:
            found = self._session.get_outputs()[0]
            why = _strange("output", found.name, found.type)
            raise BackendFailed(f"model '{config.name}': it has no output that can be served: {why}")
        self._answers = answers(config, self._outputs)
        taken = {ELEMENT_TYPES[kind] for kind in self._inputs.values()}
        types = taken.union(ELEMENT_TYPES[kind] for kind in self._outputs.values())
        self._native, self._texts = Datatype.BF16 not in types, Datatype.BYTES in types
        if not self._native and Datatype.BYTES in taken:
            raise BackendFailed(
                f"model '{config.name}': it takes strings and has tensors of bfloat16, which ONNX Runtime cannot be "
                "given both from Python; cast the one or the other within the model"
            )
        optional = {each.name for each in self._session.get_overridable_initializers()}
        self._config, self._states = config, states_of(config)
        return Loaded(
            tuple(_spec(each, each.name in optional) for each in inputs),
            tuple(_spec(each, False) for each in self._session.get_outputs() if each.type in ELEMENT_TYPES),
            omitted=() if config.outputs else _omitted(self._session.get_outputs()),
            measures=self._ragged.measures,
        )

    def execute(self, instance: int, requests: Sequence[Request], emit: Emit) -> Sequence[Response | None]:
        return self._ragged.execute(requests, self._answers, self._run, emit)

    def measured(self) -> tuple[Family, ...]:
        return self._ragged.measured()

    def close(self) -> None:
        del self._session

    def _run(self, feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        if self._texts:
            feed = {name: as_text(array, name) if array.dtype.hasobject else array for name, array in feed.items()}
        try:
            found = self._session.run(wanted, feed) if self._native else self._run_values(feed, wanted)
        except Exception as error:  # the library's exceptions have no common base class
            raise RuntimeError(_error_text(error)) from error
        made = dict(zip(wanted, found, strict=True))
        if self._texts:
            made = {name: as_bytes(array) if array.dtype.hasobject else array for name, array in made.items()}
        if self._states:
            check_states(self._states, made, self._config)
        return made

    def _run_values(self, feed: Mapping[str, Array], wanted: Sequence[str]) -> list[Array]:
        """Run a model with BF16 tensors, for which numpy has no type."""
        values = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, ONNX_BFLOAT16)
            if self._inputs.get(name) == "tensor(bfloat16)"
            else onnxruntime.OrtValue.ortvalue_from_numpy(array)
            for name, array in feed.items()
        }
        found = self._session.run_with_ort_values(wanted, values)
        return [_bits(each) if each.element_type() == ONNX_BFLOAT16 else each.numpy() for each in found]


def _session(file: Path, options: onnxruntime.SessionOptions, providers: Any) -> onnxruntime.InferenceSession:
    """A session that computes only the positions that the model reads, if all optimisations are on."""
    everything = options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    model = _narrowed(file) if everything else None
    if model is not None:
        with suppress(Exception):  # the library's exceptions have no common base class; the file itself is tried then
            return onnxruntime.InferenceSession(model, options, providers=providers)
    return onnxruntime.InferenceSession(str(file), options, providers=providers)


def _narrowed(file: Path) -> bytes | None:
    """The model with less work, if it is a transformer that reads one position (`onnx_model.narrowing`)."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data.find(b"Gather") < 0 or data.find(b"Softmax") < 0:
            return None  # others need not import what rewrites it
    try:
        from forebay.engines.tensor.onnx_model.narrowing import narrowed
    except ModuleNotFoundError:  # `onnx` is not installed
        return None
    return narrowed(file)


def _bits(value: Any) -> Array:
    """A copy of a BF16 value."""
    shape = tuple(value.shape())
    count = int(np.prod(shape))
    source = (ctypes.c_uint16 * count).from_address(value.data_ptr())
    return np.ctypeslib.as_array(source).reshape(shape).copy()


def _strange(what: str, name: str, kind: str) -> str:
    """Why an input or output cannot be served."""
    if kind.startswith("tensor("):
        return f"{what} '{name}' is a {kind}, an element type that the protocol does not have"
    return f"{what} '{name}' is not a tensor but a {kind}"


def _omitted(outputs: Sequence[Any]) -> tuple[str, ...]:
    return tuple(_strange("output", each.name, each.type) for each in outputs if each.type not in ELEMENT_TYPES)


def _spec(found: Any, optional: bool) -> TensorSpec:
    """No dimensions may also mean an unknown rank: ONNX Runtime shows both alike."""
    dims = tuple(size if isinstance(size, int) and size >= 0 else VARIABLE for size in found.shape)
    return TensorSpec(found.name, ELEMENT_TYPES[found.type], dims, optional=optional)


def _providers(config: ModelConfig, gpu: bool) -> list[tuple[str, dict[str, str]]]:
    """Execution providers with their options, best first. Raises `BackendFailed`."""
    options, fraction = _cuda_options(config), memory_fraction(config)
    if not gpu:
        return [(CPU, {})]
    if CUDA not in onnxruntime.get_available_providers():
        raise BackendFailed(f"model '{config.name}': its instances are KIND_GPU, but this ONNX Runtime has no CUDA")
    if fraction is not None:
        options["gpu_mem_limit"] = str(int(fraction * memory_bytes()))
    if hasattr(onnxruntime, "preload_dlls"):  # since 1.21
        onnxruntime.preload_dlls()  # those of CUDA and cuDNN in pip packages
    return [(CUDA, options), (CPU, {})]


def _cuda_options(config: ModelConfig) -> dict[str, str]:
    """Options from the model's configuration. Raises `BackendFailed`."""
    options: dict[str, str] = {}
    for name in CUDA_NUMBERS:
        if name in config.parameters:
            options[name] = str(_number(config, name))
    for name, choices in CUDA_CHOICES.items():
        if name in config.parameters:
            number = _number(config, name)
            if number >= len(choices):
                raise BackendFailed(
                    f"model '{config.name}': parameter {name} is {number}; it must be below {len(choices)}"
                )
            options[name] = choices[number]
    return options


def _options(config: ModelConfig) -> onnxruntime.SessionOptions:
    """Session options, by their names in Triton's ONNX Runtime backend (its README, "Model Config Options").

    Each instance brings a thread of its own, so the shared pool gets the remaining cores.
    """
    given = config.parameters
    options = onnxruntime.SessionOptions()
    cores = len(os.sched_getaffinity(0))
    options.intra_op_num_threads = _number(config, "intra_op_thread_count") or max(
        1, cores + 1 - config.instance_count
    )
    options.inter_op_num_threads = _number(config, "inter_op_thread_count") or 1
    if given.get("execution_mode") == "1":
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    everything = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.graph_optimization_level = LEVELS.get(config.graph_level, everything)
    options.enable_cpu_mem_arena = config.says("enable_mem_arena", default=True)
    # patterns are kept per shape, and with dynamic batching every batch has another one
    options.enable_mem_pattern = config.says("enable_mem_pattern")
    # spinning between batches would take the cores from the threads that feed and collect work
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # without VNNI, sums of 8-bit products overflow (by a quarter, say); no effect on other processors
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.log_severity_level = 3
    return options


def _number(config: ModelConfig, name: str) -> int:
    """A numeric parameter; 0: not set. Raises `BackendFailed`."""
    text = config.parameters.get(name, "0")
    if not text.isdecimal():
        raise BackendFailed(f"model '{config.name}': parameter {name} is {text!r}; it must be a whole number")
    return int(text)


def _error_text(error: Exception) -> str:
    """ONNX Runtime's error in Triton's wording."""
    found = _FAILURE.match(str(error))
    return f"onnx runtime error {found[1]}: {found[2].strip()}" if found else str(error)
