"""The model in Triton's Python backend: one run of the same session for the whole batch."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Joins the rows of a batch, runs them at once, and hands each request its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model on one thread."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.x64quantprecision", "1")  # as ours: the same numbers everywhere
        folder = Path(args["model_repository"]) / args["model_version"]
        self.session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options)
        self.input = self.session.get_inputs()[0].name
        self.names = [output.name for output in self.session.get_outputs()]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run a batch."""
        rows = [pb_utils.get_input_tensor_by_name(request, self.input).as_numpy() for request in requests]
        found = self.session.run(None, {self.input: np.concatenate(rows)})
        responses = []
        at = 0
        for row in rows:
            end = at + len(row)
            tensors = [pb_utils.Tensor(name, array[at:end]) for name, array in zip(self.names, found)]  # noqa: B905 - Python 3.10
            responses.append(pb_utils.InferenceResponse(tensors))
            at = end
        return responses
