# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""The running sum of a sequence, and the control inputs of the request."""

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    """OUT = [sum so far, start, end, ready]; SEEN = the correlation id as the model sees it."""

    def initialize(self, args):
        """Start without sequences."""
        self.sums = {}

    def execute(self, requests):
        """Add to the sums."""
        responses = []
        for request in requests:

            def flag(name, request=request):
                return int(pb.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0])

            start, end, ready, sequence = flag("START"), flag("END"), flag("READY"), flag("CORRID")
            if start:
                self.sums[sequence] = 0
            self.sums[sequence] = self.sums.get(sequence, 0) + flag("IN")
            sums = np.array([[self.sums[sequence], start, end, ready]], dtype=np.int32)
            seen = np.array([[sequence]], dtype=np.uint64)
            responses.append(pb.InferenceResponse([pb.Tensor("OUT", sums), pb.Tensor("SEEN", seen)]))
        return responses
