# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Fails in the way that its input selects, per request of a batch where possible."""

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    """HOW (text) selects the failure; OUT would be two FP32."""

    def execute(self, requests):
        """Fail, or succeed if HOW is `fine`."""
        hows = [pb.get_input_tensor_by_name(each, "HOW").as_numpy().reshape(-1)[0].decode() for each in requests]
        if "raise" in hows:
            raise ValueError("raised by the model")
        if "raise-triton" in hows:
            raise pb.TritonModelException("refused by the model")
        if "none" in hows:
            return None
        if "too-few" in hows:
            return []
        if "wrong-object" in hows:
            return ["not a response"] * len(requests)
        return [self.answer(how) for how in hows]

    def answer(self, how):
        """One response, with the selected error."""
        good = pb.Tensor("OUT", np.array([[1, 2]], dtype=np.float32))
        if how == "error":
            return pb.InferenceResponse(output_tensors=[], error=pb.TritonError("an error of one response"))
        if how == "error-code":
            error = pb.TritonError("not there", pb.TritonError.NOT_FOUND)
            return pb.InferenceResponse(output_tensors=[], error=error)
        if how == "wrong-name":
            return pb.InferenceResponse(output_tensors=[pb.Tensor("OTHER", np.zeros((1, 2), dtype=np.float32))])
        if how == "wrong-datatype":
            return pb.InferenceResponse(output_tensors=[pb.Tensor("OUT", np.zeros((1, 2), dtype=np.int32))])
        if how == "wrong-shape":
            return pb.InferenceResponse(output_tensors=[pb.Tensor("OUT", np.zeros((1, 5), dtype=np.float32))])
        if how == "no-output":
            return pb.InferenceResponse(output_tensors=[])
        if how == "noise":
            print('{"not": "a frame"}\x00\n' * 100, flush=True)
        return pb.InferenceResponse(output_tensors=[good])
