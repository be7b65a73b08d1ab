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


def test_tensors_are_equal_if_all_of_them_is() -> None:
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
def test_tensors_differ_if_anything_does(other: Tensor) -> None:
    assert other != TENSOR


def test_a_tensor_under_another_name_or_of_another_shape_has_the_same_data() -> None:
    assert TENSOR.named("y") == Tensor("y", Datatype.INT8, (1, 2), b"ab")
    assert TENSOR.shaped((2,)) == Tensor("x", Datatype.INT8, (2,), b"ab")
    assert TENSOR.named("y").data is TENSOR.shaped((2,)).data is TENSOR.data


def test_a_copy_keeps_what_it_had_when_the_buffers_are_used_again() -> None:
    data = bytearray(b"ab")
    response = InferResponse(
        "m", "1", "7", (Tensor("x", Datatype.INT8, (2,), memoryview(data)),), parameters={"a": 1}
    )

    copy = response.copied()
    data[:] = b"cd"

    assert (copy.model, copy.version, copy.id, copy.parameters, copy.error) == ("m", "1", "7", {"a": 1}, None)
    assert copy.outputs == (Tensor("x", Datatype.INT8, (2,), b"ab"),)


def test_a_configuration_knows_what_is_made_for_batches_and_what_is_taken_apart() -> None:
    made = BatchInput(BatchKind.COUNT, ("A", "B"), Datatype.FP32, "X")
    config = ModelConfig("m", "python", batch_inputs=(made,), batch_outputs=(BatchOutput(("Y",), "X"),))
    assert config.made_inputs == ("A", "B")
    assert config.scattered == {"Y": "X"}


def test_instances_are_counted_group_by_group_and_gpu_by_gpu() -> None:
    few, gpus = InstanceGroup("few", count=2), InstanceGroup("gpus", InstanceKind.GPU, count=2, gpus=(0, 3))
    config = ModelConfig("m", "python", instances=(few, gpus))
    assert config.instance_count == 6
    assert [config.group_of(each).name for each in range(8)] == ["few"] * 2 + ["gpus"] * 6
