"""The code of demo models, loaded as a server loads it."""

import sys
from importlib import resources
from types import ModuleType

from forebay.engines.tensor.python import triton_api


def loaded(model: str, file: str = "model.py") -> ModuleType:
    """A module of a demo model; what it imports from the server is what the server offers."""
    path = resources.files("forebay.cli").joinpath("demo", "repository", model, "1", file)
    module = ModuleType(f"{model}/{file}")
    name = "triton_python_backend_utils"
    before = sys.modules.get(name)
    sys.modules[name] = triton_api
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
    return module
