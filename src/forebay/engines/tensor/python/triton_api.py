"""The module that models import as `triton_python_backend_utils`: the API of Triton's Python backend (its README)."""

import sys
from enum import Enum
from typing import Any, ClassVar, Final

import numpy as np

from forebay.engines.tensor.protocol import Act
from forebay.engines.tensor.python.calls import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    PreferredMemory,
    ResponseIterator,
    TritonError,
    ask,
)
from forebay.engines.tensor.python.config import ModelConfig
from forebay.engines.tensor.python.host import current
from forebay.engines.tensor.python.metrics import Metric, MetricFamily, MetricKind
from forebay.engines.tensor.python.tensors import (
    TRITON_STRING_TO_NUMPY,
    Tensor,
    TritonModelException,
    as_integer,
    as_text,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]


LATEST: Final = -1
EMPTY: Final = np.empty(0, np.uint8)


class MemoryType(Enum):
    """Location of memory."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU


class _Level(Enum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    VERBOSE = "verbose"


class Logger:
    """Writes to the server's log through standard error, with level and model name."""

    LogLevel: ClassVar = _Level
    INFO: ClassVar = _Level.INFO
    WARNING: ClassVar = _Level.WARNING
    ERROR: ClassVar = _Level.ERROR
    VERBOSE: ClassVar = _Level.VERBOSE

    @staticmethod
    def log(message: str, level: _Level = _Level.INFO) -> None:
        """Write a line. Verbose ones are dropped, as Triton does by default."""
        if level is not _Level.VERBOSE:
            sys.stderr.write(f"{level.value}: {current.host.name}: {message}\n")

    @staticmethod
    def log_info(message: str) -> None:
        """Write an informational line."""
        Logger.log(message)

    @staticmethod
    def log_warn(message: str) -> None:
        """Write a warning."""
        Logger.log(message, _Level.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        """Write an error."""
        Logger.log(message, _Level.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Write a verbose line."""
        Logger.log(message, _Level.VERBOSE)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input with that name, or None."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output with that name, or None."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The configuration of an input, or None."""
    return _named(model_config, "input", name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The configuration of an output, or None."""
    return _named(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Whether the configuration allows any number of responses."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def get_model_dir() -> str:
    """Folder of the version."""
    return current.host.folder


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load a model; in explicit mode, also in `initialize` and `finalize`. Raises `TritonModelException`."""
    inputs = {
        as_text(name, "a file's name"): np.frombuffer(data, np.uint8) if data else EMPTY
        for name, data in (files or {}).items()
    }
    ask(Act.LOAD, model_name, LATEST, {"config": as_text(config, "config")} if config else {}, inputs)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; in explicit mode, also in `initialize` and `finalize`. Raises `TritonModelException`."""
    ask(Act.UNLOAD, model_name, LATEST, {"unload_dependents": bool(unload_dependents)}, {})


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model, or that version of it, is ready. Raises `TritonModelException`."""
    wanted = as_text(model_version, "model_version") if model_version else ""
    if wanted and not (wanted.isascii() and wanted.isdigit()):
        raise TritonModelException(f"is_model_ready: {wanted!r} is not the number of a version.")
    version = as_integer(int(wanted), "model_version") if wanted else LATEST
    return bool(ask(Act.READY, model_name, version, {}, {}).parameters[Act.READY])


def _named(model_config: dict[str, Any], kind: str, name: str) -> dict[str, Any] | None:
    return next((each for each in model_config.get(kind, ()) if each["name"] == name), None)
