# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Decoupled: sends as many responses as its input says, optionally followed by an error."""

import time

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    """COUNT [1] responses with OUT [1] = 0, 1, 2 …; a negative count: an error after that many."""

    def execute(self, requests):
        """Send the responses, then the final flag."""
        final = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        for request in requests:
            count = int(pb.get_input_tensor_by_name(request, "COUNT").as_numpy().reshape(-1)[0])
            wait = pb.get_input_tensor_by_name(request, "WAIT_MS")
            sender = request.get_response_sender()
            for number in range(abs(count)):
                if request.is_cancelled():
                    break
                sender.send(pb.InferenceResponse([pb.Tensor("OUT", np.array([number], dtype=np.int32))]))
                if wait is not None:
                    time.sleep(float(wait.as_numpy().reshape(-1)[0]) / 1000)
            if count < 0:
                sender.send(pb.InferenceResponse(error=pb.TritonError("broke off")), flags=final)
            else:
                sender.send(flags=final)
