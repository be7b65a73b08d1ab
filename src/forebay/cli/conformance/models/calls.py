# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="import-not-found"
"""Calls other models (business logic scripting): one, two at once, and one that does not exist."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb


def ask(left, right, model="add_sub"):
    """A request for the sum and difference of two vectors."""
    tensors = [pb.Tensor("IN0", left), pb.Tensor("IN1", right)]
    return pb.InferenceRequest(model_name=model, requested_output_names=["OUT0", "OUT1"], inputs=tensors)


def out(response, name):
    """An output of the called model. Raises that model's error."""
    if response.has_error():
        raise pb.TritonModelException(response.error().message())
    return pb.get_output_tensor_by_name(response, name).as_numpy()


class TritonPythonModel:
    """HOW is `one`, `both` or `missing`; OUT: the result for IN [1, 4]."""

    async def execute(self, requests):
        """Call the other model, and respond."""
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        """One request; an error of the called model becomes its error."""
        how = pb.get_input_tensor_by_name(request, "HOW").as_numpy().reshape(-1)[0].decode()
        value = pb.get_input_tensor_by_name(request, "IN").as_numpy()
        try:
            if how == "missing":
                made = out(ask(value, value, "no_such_model").exec(), "OUT0")
            elif how == "both":
                answers = await asyncio.gather(ask(value, value).async_exec(), ask(value, 2 * value).async_exec())
                made = out(answers[0], "OUT0") + out(answers[1], "OUT1")
            else:
                made = out(await ask(value, value).async_exec(), "OUT0")
        except pb.TritonModelException as error:
            return pb.InferenceResponse(error=pb.TritonError(str(error)))
        return pb.InferenceResponse([pb.Tensor("OUT", made.astype(np.float32))])
