# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Returns what the model is told about a request besides its tensors."""

import json

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    """ABOUT: a JSON object, keys sorted."""

    def initialize(self, args):
        """Keep the arguments of `initialize` that are the same on every server."""
        self.args = {key: args[key] for key in ("model_name", "model_version", "model_instance_kind")}

    def execute(self, requests):
        """Return the metadata of each request."""
        responses = []
        for request in requests:
            about = {
                "id": request.request_id(),
                "correlation_id": request.correlation_id(),
                "flags": request.flags(),
                "timeout": request.timeout(),
                "parameters": json.loads(request.parameters()),
                "requested": sorted(request.requested_output_names()),
                "args": self.args,
            }
            text = json.dumps(about, sort_keys=True).encode()
            tensor = pb.Tensor("ABOUT", np.array([text], dtype=np.object_))
            responses.append(pb.InferenceResponse([tensor]))
        return responses
