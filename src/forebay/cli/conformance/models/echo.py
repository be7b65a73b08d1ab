# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Gives back each input `IN…` as output `OUT…`, whatever its type; BF16 has no numpy form, hence the capsules."""

import triton_python_backend_utils as pb


class TritonPythonModel:
    """Identity."""

    def execute(self, requests):
        """Answer each request with what it brought."""
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
