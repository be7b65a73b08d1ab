"""Backends of the model server, which run tensor models; each library is imported only by its backend."""

from importlib import import_module
from typing import cast

from forebay.engines.tensor.protocol import Backend, BackendFailed

BACKENDS = {
    "onnxruntime": ("forebay.engines.tensor.onnx", "OnnxBackend", "onnx"),
    "openvino": ("forebay.engines.tensor.openvino", "OpenVinoBackend", "llm"),
    "pytorch": ("forebay.engines.tensor.torch", "TorchBackend", "torch"),
    "python": ("forebay.engines.tensor.python.backend", "PythonBackend", ""),
}
"""Backend by its name in `config.pbtxt` → module, class, and the extra that installs its library."""


def create(name: str) -> Backend:
    """Create a backend that is not loaded yet. Raises `BackendFailed` if it is unknown or its library is missing."""
    if name not in BACKENDS:
        raise BackendFailed(f"backend {name!r} does not exist; choose one of {', '.join(sorted(BACKENDS))}")
    module, backend, extra = BACKENDS[name]
    try:
        make = getattr(import_module(module), backend)
    except ImportError as error:
        hint = f"; install it with: pip install 'forebay[{extra}]'" if extra else ""
        raise BackendFailed(f"backend {name!r} needs a library that cannot be imported ({error}){hint}") from error
    return cast(Backend, make())
