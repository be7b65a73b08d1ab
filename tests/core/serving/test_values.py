"""Tensors and what holds them; the instances of a model."""

import pytest

from forebay.core.serving.config import (
    BatchInput,
    BatchKind,
    BatchOutput,
    Datatype,
    InstanceGroup,
    InstanceKind,
    ModelConfig,
)
from forebay.core.serving.values import InferResponse, Tensor

TENSOR = Tensor("x", Datatype.INT8, (1, 2), memoryview(bytearray(b"ab")))


def test_tensors_with_equal_fields_are_equal() -> None:
    assert Tensor("x", Datatype.INT8, (1, 2), b"ab") == TENSOR
    assert TENSOR != ("x", Datatype.INT8, (1, 2), b"ab")


@pytest.mark.parametrize(
    "other",
    [
        Tensor("y", Datatype.INT8, (1, 2), b"ab"),
        Tensor("x", Datatype.UINT8, (1, 2), b"ab"),
        Tensor("x", Datatype.INT8, (2, 1), b"ab"),
        Tensor("x", Datatype.INT8, (1, 2), b"ac"),
    ],
)
def test_tensors_with_any_different_field_differ(other: Tensor) -> None:
    assert other != TENSOR


def test_renamed_or_reshaped_tensor_shares_its_data() -> None:
    assert TENSOR.named("y") == Tensor("y", Datatype.INT8, (1, 2), b"ab")
    assert TENSOR.shaped((2,)) == Tensor("x", Datatype.INT8, (2,), b"ab")
    assert TENSOR.named("y").data is TENSOR.shaped((2,)).data is TENSOR.data


def test_copied_tensor_survives_reuse_of_its_buffer() -> None:
    data = bytearray(b"ab")
    response = InferResponse(
        "m", "1", "7", (Tensor("x", Datatype.INT8, (2,), memoryview(data)),), parameters={"a": 1}
    )

    copy = response.copied()
    data[:] = b"cd"

    assert (copy.model, copy.version, copy.id, copy.parameters, copy.error) == ("m", "1", "7", {"a": 1}, None)
    assert copy.outputs == (Tensor("x", Datatype.INT8, (2,), b"ab"),)


def test_configuration_lists_batch_inputs_and_scattered_outputs() -> None:
    made = BatchInput(BatchKind.COUNT, ("A", "B"), Datatype.FP32, "X")
    config = ModelConfig("m", "python", batch_inputs=(made,), batch_outputs=(BatchOutput(("Y",), "X"),))
    assert config.made_inputs == ("A", "B")
    assert config.scattered == {"Y": "X"}


def test_instances_are_counted_group_by_group_and_gpu_by_gpu() -> None:
    few, gpus = InstanceGroup("few", count=2), InstanceGroup("gpus", InstanceKind.GPU, count=2, gpus=(0, 3))
    config = ModelConfig("m", "python", instances=(few, gpus))
    assert config.instance_count == 6
    assert [config.group_of(each).name for each in range(8)] == ["few"] * 2 + ["gpus"] * 6
