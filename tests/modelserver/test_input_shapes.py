"""Shapes of inputs that no array can have."""

import pytest

from forebay.core.serving.config import Datatype, ModelConfig, TensorSpec
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, Tensor
from forebay.modelserver.models.running.inputs import Contract


def contract(datatype: Datatype, max_batch: int) -> Contract:
    spec = TensorSpec("IN", datatype, (-1,) * (3 - (max_batch > 0)))
    return Contract(ModelConfig(name="m", backend="python", max_batch=max_batch, inputs=(spec,)))


@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.BYTES])
@pytest.mark.parametrize("max_batch", [0, 8])
@pytest.mark.parametrize("sizes", [(2**63 - 1, 0), (2**64 - 1, 0), (0, 2**61), (0, 2**63)])
def test_dimensions_beside_a_zero_have_limits_too(datatype: Datatype, max_batch: int, sizes: tuple[int, int]) -> None:
    request = InferRequest("m", "", "", (Tensor("IN", datatype, (1, *sizes), b""),))

    with pytest.raises(Refused, match="exceed maximum size") as refused:
        contract(datatype, max_batch).check(request)
    assert refused.value.kind is Kind.INVALID_ARGUMENT


@pytest.mark.parametrize("shape", [(1, 0, 0), (1, 0, 2**31), (1, 2**31, 0)])
def test_inputs_without_elements_are_valid(shape: tuple[int, ...]) -> None:
    for max_batch in (0, 8):
        request = InferRequest("m", "", "", (Tensor("IN", Datatype.FP32, shape, b""),))
        assert contract(Datatype.FP32, max_batch).check(request).inputs == request.inputs
