"""Ragged batches: what the model receives, and how its outputs are split per request."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.tensor.models import ask, build_sums, config, load, run, spec

from forebay.core.serving.config import BatchInput, BatchKind, BatchOutput, Datatype, ModelConfig, TensorSpec
from forebay.engines.tensor.protocol import Array, Request
from forebay.engines.tensor.ragged import Ragged

BOUNDS = BatchInput(BatchKind.BOUNDS, ("BOUNDS",), Datatype.INT32, "X")
SUMS = ModelConfig(
    "sums",
    "onnxruntime",
    max_batch=8,
    inputs=(TensorSpec("X", Datatype.FP32, (-1,), allow_ragged=True),),
    outputs=(spec("SUM", Datatype.FP32, 1), spec("DOUBLE", Datatype.FP32, -1)),
    batch_inputs=(BOUNDS,),
    batch_outputs=(BatchOutput(("DOUBLE",), "X"),),
)
"""Sums of each request's X, and twice its elements."""


class Sums(torch.nn.Module):
    def forward(self, x: torch.Tensor, bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.cat([torch.zeros(1), x]).cumsum(0)[bounds]
        return (at[1:] - at[:-1]).unsqueeze(1), x + x


def build_torch(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the format is deprecated; Triton's users have it
        torch.jit.save(torch.jit.script(Sums()), str(folder / "model.pt"))


def row(*values: float, wanted: tuple[str, ...] = ()) -> Request:
    return ask({"X": np.array([values], np.float32)}, *wanted)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "pytorch"])
def test_requests_of_any_length_share_a_batch(backend: str, tmp_path: Path) -> None:
    (build_torch if backend == "pytorch" else build_sums)(tmp_path)
    file = "model.onnx" if backend == "openvino" else ""
    served, _ = load(replace(SUMS, backend=backend, model_file=file), tmp_path)
    wide = ask({"X": np.array([[1, 2], [3, 4]], np.float32)})

    (alone,) = run(served, [row(1, 2, 3)])
    batched = run(served, [row(1, 2, 3), row(4, 5, 6, 7, wanted=("SUM",)), row(8)])

    assert {name: array.tolist() for name, array in alone.outputs.items()} == {"SUM": [[6]], "DOUBLE": [[2, 4, 6]]}
    assert [each.error for each in batched] == ["", "", ""]
    assert [each.outputs["SUM"].tolist() for each in batched] == [[[6]], [[22]], [[8]]]
    assert [list(each.outputs) for each in batched] == [["SUM", "DOUBLE"], ["SUM"], ["SUM", "DOUBLE"]]
    assert batched[2].outputs["DOUBLE"].tolist() == [[16]]
    # a request counts once, however many rows it has: this model has one sum for each
    (refused,) = run(served, [wide])
    assert refused.error == "output 'SUM' has 1 rows for a batch of 2; a batching model must keep their number"
    served.close()


def made(kind: BatchKind, datatype: Datatype, *shapes: tuple[int, ...]) -> Array:
    """What a model is told of a batch of requests with an X of these shapes."""
    settings = replace(SUMS, batch_inputs=(BatchInput(kind, ("T", "U"), datatype, "X"),), batch_outputs=())
    told: list[Array] = []

    def ran(feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        assert feed["X"].shape == (sum(int(np.prod(shape)) for shape in shapes),)
        assert feed["T"] is feed["U"]
        told.append(feed["T"])
        return {"Y": np.zeros((sum(shape[0] for shape in shapes), 1))}

    responses = Ragged(settings).execute([ask({"X": np.ones(shape, np.float32)}) for shape in shapes], ["Y"], ran)
    assert [(each.error, each.outputs["Y"].shape) for each in responses] == [("", (shape[0], 1)) for shape in shapes]
    (found,) = told
    return found


@pytest.mark.parametrize(
    ("kind", "shape", "values"),
    [
        (BatchKind.COUNT, (2,), [6, 4]),
        (BatchKind.ENDS, (2,), [6, 10]),
        (BatchKind.BOUNDS, (3,), [0, 6, 10]),
        (BatchKind.LARGEST, (6,), [0] * 6),
        (BatchKind.SHAPES, (3, 2), [3, 1, 3, 1, 2, 2]),
        (BatchKind.SHAPES_FLAT, (6,), [3, 1, 3, 1, 2, 2]),
    ],
)
@pytest.mark.parametrize("datatype", [Datatype.INT32, Datatype.FP32])
def test_batch_inputs_have_values_of_their_kind(
    kind: BatchKind, datatype: Datatype, shape: tuple[int, ...], values: list[int]
) -> None:
    found = made(kind, datatype, (2, 3, 1), (1, 2, 2))

    assert found.shape == shape
    assert found.ravel().tolist() == values
    assert found.dtype == {Datatype.INT32: np.int32, Datatype.FP32: np.float32}[datatype]


def test_requests_with_different_non_ragged_shapes_are_separate_batches() -> None:
    settings = replace(SUMS, inputs=(*SUMS.inputs, spec("M", Datatype.FP32, -1)), batch_outputs=())
    batches = []

    def ran(feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        batches.append((feed["X"].shape, feed["M"].shape))
        return {"Y": feed["M"]}

    asked = [ask({"X": np.ones((1, x), np.float32), "M": np.full((1, m), x)}) for x, m in ((2, 1), (3, 2), (4, 1))]
    responses = Ragged(settings).execute(asked, ["Y"], ran)

    assert batches == [((6,), (2, 1)), ((3,), (1, 2))]
    assert [each.outputs["Y"].tolist() for each in responses] == [[[2]], [[3, 3]], [[4]]]


def test_failing_request_fails_alone_and_unsplittable_output_is_named() -> None:
    def ran(feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        if (feed["X"] < 0).any():
            raise ValueError("negative")
        return {"DOUBLE": feed["X"][1:]}

    responses = Ragged(SUMS).execute([row(1, 2), row(-1), ask({}), row(1, wanted=("Z",))], ["DOUBLE"], ran)

    assert [each.error for each in responses] == [
        "output 'DOUBLE' has 1 elements for a batch whose requests have [2]",
        "negative",
        "input 'X', which determines the batch, is missing",
        "unexpected inference output 'Z'",
    ]


def test_without_ragged_inputs_requests_are_batched_normally(tmp_path: Path) -> None:
    settings = config("onnxruntime", Datatype.FP32, "identity")

    def ran(feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        return {"Y": feed["X"]}

    (first, second) = Ragged(settings).execute([row(1, 2), row(3, 4)], ["Y"], ran)

    assert (first.outputs["Y"].tolist(), second.outputs["Y"].tolist()) == ([[1, 2]], [[3, 4]])
