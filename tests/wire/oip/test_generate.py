"""The generate extension: fields to tensors and back."""

from typing import Any

import msgspec
import pytest

from forebay.core.serving.config import Datatype, ModelConfig, TensorSpec
from forebay.core.serving.errors import Refused
from forebay.core.serving.values import InferResponse, Tensor
from forebay.wire.oip import fields
from forebay.wire.oip.generate import read_generate, write_generate


def config(datatype: Datatype, *dims: int, max_batch: int = 0, name: str = "x") -> ModelConfig:
    return ModelConfig("m", "python", max_batch=max_batch, inputs=(TensorSpec(name, datatype, dims),))


def read(config: ModelConfig, fields: Any) -> Tensor:
    return read_generate(config, "", msgspec.json.encode(fields), tensor_bytes_max=1000).inputs[0]


SHAPES: list[tuple[tuple[int, ...], int, Any, tuple[int, ...]]] = [
    ((1,), 0, 5, (1,)),
    ((1,), 4, 5, (1, 1)),
    ((-1,), 0, [1, 2, 3], (3,)),
    ((-1,), 4, [1, 2, 3], (1, 3)),
    ((2,), 4, [1, 2, 3, 4], (2, 2)),
    ((-1, 2), 0, [1, 2, 3, 4], (2, 2)),
    ((-1, -1), 0, [1, 2, 3], (1, 3)),
    ((-1,), 0, [], (0,)),
    ((2, 2), 0, [[1, 2], [3, 4]], (2, 2)),
]


@pytest.mark.parametrize(("dims", "max_batch", "value", "shape"), SHAPES)
def test_innermost_variable_dimension_takes_the_remaining_elements(
    dims: tuple[int, ...], max_batch: int, value: Any, shape: tuple[int, ...]
) -> None:
    tensor = read(config(Datatype.INT8, *dims, max_batch=max_batch), {"x": value})
    assert tensor.shape == shape


@pytest.mark.parametrize(("dims", "value"), [((2,), 1), ((2,), []), ((0,), []), ((2,), [1, 2, 3, 4])])
def test_elements_that_do_not_fill_the_shape_are_rejected(dims: tuple[int, ...], value: Any) -> None:
    with pytest.raises(Refused, match="The schema can not convert input 'x' to tensor with proper shape"):
        read(config(Datatype.INT8, *dims), {"x": value})


def test_unsupported_json_inputs_are_rejected() -> None:
    with pytest.raises(Refused, match="receiving BF16 data via JSON is not supported"):
        read(config(Datatype.BF16, 1), {"x": 1})
    with pytest.raises(Refused, match="Keyword 'parameters' for nested schema also given as input tensor name"):
        read(config(Datatype.INT8, 1, name="parameters"), {"parameters": 1})


def test_fields_within_parameters_may_be_inputs() -> None:
    assert read(config(Datatype.INT8, 1), {"parameters": {"x": 3}}).data == b"\3"


def test_an_input_given_twice_is_rejected() -> None:
    fields = {"x": 3, "parameters": {"x": 4}}
    with pytest.raises(Refused, match="'parameters': input 'x' already exists in request"):
        read(config(Datatype.INT8, 1), fields)


def test_too_many_parameters_are_rejected() -> None:
    fields = {"x": 3, "parameters": {str(n): n for n in range(5_000)}, **{f"p{n}": n for n in range(5_000)}}
    with pytest.raises(Refused, match="at most 10000 inputs and parameters"):
        read(config(Datatype.INT8, 1), fields)


def test_response_fields_are_sorted_by_name() -> None:
    outputs = (
        Tensor("text", Datatype.BYTES, (1, 1), b"\2\0\0\0hi"),
        Tensor("a", Datatype.INT8, (2,), b"\1\2"),
        Tensor("model_name", Datatype.INT8, (1,), b"\1"),
    )
    response = InferResponse("m", "1", "7", outputs, parameters={"p": True})
    assert write_generate(response, tensor_bytes_max=1000) == (
        b'{"a":[1,2],"id":"7","model_name":"m","model_version":"1","p":true,"text":"hi"}'
    )


def test_too_large_outputs_are_rejected() -> None:
    response = InferResponse("m", "1", "", (Tensor("a", Datatype.INT8, (9,), bytes(9)),))
    with pytest.raises(
        Refused, match=r"^the outputs have 9 bytes, over the limit of 8 .* use --http-max-json-output-size"
    ):
        write_generate(response, tensor_bytes_max=8)


@pytest.mark.interpreted
def test_too_many_values_are_rejected_but_a_long_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "ODD_BYTES_MAX", 100)
    monkeypatch.setattr(fields, "VALUES_MAX", 9)
    assert len(read(config(Datatype.BYTES, 1), {"x": "a" * 200}).data) == 4 + 200
    for value in ([1] * 50, [[]] * 50):
        with pytest.raises(Refused, match="values in JSON are not read here: use infer"):
            read(config(Datatype.INT8, -1), {"x": value})
