"""A model in Triton's Python backend: one run of the same sessions for the whole batch."""

from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from chain import Chain


class TritonPythonModel:
    """Joins the rows of a batch, runs them at once, and hands each request its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the files."""
        folder = Path(args["model_repository"]) / args["model_version"]
        self.chain = Chain(sorted(map(str, folder.glob("*.onnx"))))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run a batch."""
        rows = {
            name: [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for request in requests]
            for name in self.chain.inputs
        }
        found = self.chain.run({name: np.concatenate(arrays) for name, arrays in rows.items()})
        responses = []
        at = 0
        for row in rows[self.chain.inputs[0]]:
            end = at + len(row)
            own = [array[at:end] for array in found]
            tensors = [pb_utils.Tensor(name, array) for name, array in zip(self.chain.names, own, strict=True)]
            responses.append(pb_utils.InferenceResponse(tensors))
            at = end
        return responses
