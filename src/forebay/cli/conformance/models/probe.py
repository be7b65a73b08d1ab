# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Reports how it was called: number of the execution, its number of requests, and the model version."""

import json
import time

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    """TELL = [execution since load, requests in it, rows in it, version]."""

    def initialize(self, args):
        """Read the parameter `sleep_ms`: how long an execution takes."""
        config = json.loads(args["model_config"])
        self.sleep_s = float(config["parameters"].get("sleep_ms", {"string_value": "0"})["string_value"]) / 1000
        self.batches = config["max_batch_size"] > 0
        self.version = int(args["model_version"])
        self.executions = 0

    def execute(self, requests):
        """Sleep, then report."""
        self.executions += 1
        arrays = [pb.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        rows = sum(len(array) if self.batches else 1 for array in arrays)
        time.sleep(self.sleep_s)
        counts = [self.executions, len(requests), rows, self.version]
        responses = []
        for array in arrays:
            one = np.array(counts, dtype=np.int64)
            answer = np.tile(one, (len(array), 1)) if self.batches else one
            responses.append(pb.InferenceResponse(output_tensors=[pb.Tensor("TELL", answer)]))
        return responses
