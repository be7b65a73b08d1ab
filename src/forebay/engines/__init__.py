"""The Engine protocol and its adapters; an adapter and its library are imported only when used."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from forebay.core.model import Task
from forebay.engines.protocol import Engine, EngineBroken

ADAPTERS = {
    "openvino": ("forebay.engines.openvino", "OpenVinoEngine", "llm"),
    "llamacpp": ("forebay.engines.llamacpp.engine", "LlamaCppEngine", "llamacpp"),
    "onnx": ("forebay.engines.onnx", "OnnxEngine", "onnx"),
    "synthetic": ("forebay.engines.synthetic", "SyntheticEngine", ""),
}
"""Engine name → module, class, and the extra of this package that installs its library."""

TASKS = {"openvino": Task.CHAT, "llamacpp": Task.CHAT, "onnx": Task.EMBED, "synthetic": Task.CHAT}
"""Default task of each engine."""

ANY_TASK = ("synthetic",)


def create(name: str, artifact: str, settings: Mapping[str, int | float | str | bool]) -> Engine:
    """Create an engine that is not loaded yet. Raises `EngineBroken` if its library is not installed.

    The setting `task` is passed only to engines that support several tasks.
    """
    if name not in ADAPTERS:
        raise EngineBroken(f"engine {name!r} does not exist; choose one of {', '.join(sorted(ADAPTERS))}")
    module, adapter, extra = ADAPTERS[name]
    try:
        make = getattr(import_module(module), adapter)
    except ImportError as error:
        hint = f"; install it with: pip install 'forebay[{extra}]'" if extra else ""
        raise EngineBroken(f"engine {name!r} needs a library that cannot be imported ({error}){hint}") from error
    options = {key: value for key, value in settings.items() if key != "task" or name in ANY_TASK}
    return cast(Engine, make(artifact, options))


def choose_engine(path: Path) -> str:
    """The default engine for an artifact. Raises `EngineBroken` if no engine can run it."""
    if path.is_dir():
        if next(path.glob("openvino_model.xml"), None):
            return "openvino"
        if (path / "model.onnx").is_file():
            return "onnx"
        expected = "a folder with openvino_model.xml (OpenVINO IR) or model.onnx"
    else:
        if path.suffix.lower() == ".gguf":
            return "openvino" if find_spec("openvino_genai") or not find_spec("xllamacpp") else "llamacpp"
        if path.suffix.lower() == ".onnx":
            return "onnx"
        expected = "a file that ends in .gguf or .onnx"
    raise EngineBroken(f"{path}: no engine is known for this; expected {expected}. Or name one with `engine`.")
