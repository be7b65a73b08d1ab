# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Sum and difference of two vectors."""

import triton_python_backend_utils as pb


class TritonPythonModel:
    """OUT0 = IN0 + IN1, OUT1 = IN0 - IN1; only requested outputs."""

    def execute(self, requests):
        """Answer each request."""
        responses = []
        for request in requests:
            left = pb.get_input_tensor_by_name(request, "IN0").as_numpy()
            right = pb.get_input_tensor_by_name(request, "IN1").as_numpy()
            made = {"OUT0": left + right, "OUT1": left - right}
            wanted = [name for name in ("OUT0", "OUT1") if name in request.requested_output_names()]
            responses.append(pb.InferenceResponse(output_tensors=[pb.Tensor(name, made[name]) for name in wanted]))
        return responses
