# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""A text model for the generate extension: returns its input word by word."""

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    """Decoupled: one response per word of `text_input`; REPEAT (optional) repeats the text."""

    def execute(self, requests):
        """Send the words. The word `oops` ends with an error."""
        final = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        for request in requests:
            text = pb.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0].decode()
            repeat = pb.get_input_tensor_by_name(request, "REPEAT")
            times = 1 if repeat is None else int(repeat.as_numpy().reshape(-1)[0])
            sender = request.get_response_sender()
            error = None
            for word in text.split() * times:
                if word == "oops":
                    error = pb.TritonError("cannot say that")
                    break
                tensor = pb.Tensor("text_output", np.array([word.encode()], dtype=np.object_))
                sender.send(pb.InferenceResponse([tensor]))
            if error is None:
                sender.send(flags=final)
            else:
                sender.send(pb.InferenceResponse(error=error), flags=final)
