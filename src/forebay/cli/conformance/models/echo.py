# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Returns each input `IN…` as output `OUT…`, whatever its type; BF16 has no numpy type, hence DLPack."""

import triton_python_backend_utils as pb


class TritonPythonModel:
    """Identity."""

    def execute(self, requests):
        """Return the inputs of each request."""
        responses = []
        for request in requests:
            outputs = []
            for tensor in request.inputs():
                name = "OUT" + tensor.name()[2:]
                if name.endswith("BF16"):
                    outputs.append(pb.Tensor.from_dlpack(name, tensor.to_dlpack()))
                else:
                    outputs.append(pb.Tensor(name, tensor.as_numpy()))
            responses.append(pb.InferenceResponse(output_tensors=outputs))
        return responses
