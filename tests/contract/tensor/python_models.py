"""Python models written and loaded for the tests of that backend."""

from dataclasses import replace
from pathlib import Path
from textwrap import dedent, indent

import numpy as np
from tests.contract.tensor.models import Emitted, no_calls, spec

from forebay.core.serving.config import Datatype, ModelConfig
from forebay.engines.tensor.protocol import Array, CallModel, Request, Response
from forebay.engines.tensor.python.backend import PythonBackend

HEAD = """
import asyncio, gc, json, sys, threading
import numpy as np
import triton_python_backend_utils as pb_utils

def out(value, name='Y'):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.asarray(value))])

def x(request):
    return pb_utils.get_input_tensor_by_name(request, 'X').as_numpy()

class TritonPythonModel:
"""
CONFIG = ModelConfig(
    "m", "python", inputs=(spec("X", Datatype.FP32, -1),), outputs=(spec("Y", Datatype.FP32, -1),), max_batch=0
)
DECOUPLED = replace(CONFIG, decoupled=True)
ONE = np.ones(1, np.float32)


def loaded(folder: Path, body: str, config: ModelConfig = CONFIG, call: CallModel = no_calls) -> PythonBackend:
    """A model whose class has that body, loaded as version 1."""
    version = folder / config.name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(HEAD + indent(dedent(body), "    "))
    backend = PythonBackend()
    backend.load(config, version, 0, call)
    return backend


def asked(count: int = 1, **changed: object) -> list[Request]:
    """Requests with X = [1], [2], …"""
    return [Request(f"r{n}", {"X": ONE * (n + 1)}, (), **changed) for n in range(count)]  # type: ignore[arg-type]


def answers(backend: PythonBackend, requests: list[Request]) -> tuple[list[Response | None], Emitted]:
    """What a batch returns and sends."""
    emitted = Emitted()
    return list(backend.execute(0, requests, emitted)), emitted


def value(response: Response | None, name: str = "Y") -> object:
    """An output as plain values; the error instead, if there is one."""
    assert response is not None
    array: Array | str = response.error or response.outputs[name]
    return array if isinstance(array, str) else array.tolist()
