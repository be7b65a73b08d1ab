"""Batching requests and splitting results, for models that take a whole batch as one array."""

from collections.abc import Sequence

import numpy as np
import pytest

from forebay.engines.tensor import batch
from forebay.engines.tensor.protocol import Array, Request, Rows, Stack


def request(*shape: int, wanted: tuple[str, ...] = (), value: float = 1) -> Request:
    return Request("", {"X": np.full(shape, value, np.float32)}, wanted)


class Model:
    """Doubles its input; notes what it is run with."""

    def __init__(self) -> None:
        self.runs: list[tuple[tuple[int, ...], list[str]]] = []

    def __call__(self, feed: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        x = feed["X"]
        self.runs.append((x.shape, list(wanted)))
        if (x < 0).any():
            raise ValueError("negative")
        made = {"Y": x * 2, "Z": x * 3, "ONE": np.ones(1)}
        return {name: made[name] for name in wanted}


def test_requests_are_batched_by_shape() -> None:
    model = Model()

    responses = batch.execute([request(1, 2), request(1, 3), request(2, 2, value=5)], ["Y"], model)

    assert model.runs == [((3, 2), ["Y"]), ((1, 3), ["Y"])]
    assert [each.outputs["Y"].tolist() for each in responses] == [[[2, 2]], [[2, 2, 2]], [[10, 10]] * 2]


def test_requests_with_different_inputs_or_types_are_not_batched() -> None:
    model = Model()
    more = Request("", {"X": np.ones(1, np.float32), "M": np.ones(1)}, ())
    wide = Request("", {"X": np.ones(1, np.float64)}, ())

    batch.execute([request(1), more, request(1), wide], ["Y"], model)

    assert [shape for shape, _ in model.runs] == [(2,), (1,), (1,)]


def test_requests_for_the_same_outputs_return_rows() -> None:
    group = [request(1, 2, wanted=("Y",)), request(3, 2, value=5, wanted=("Y",)), request(0, 2, wanted=("Y",))]

    responses = batch.execute(group, ["Y", "Z"], Model())

    assert isinstance(responses, Rows)
    assert responses.outputs["Y"].tolist() == [[2, 2], *[[10, 10]] * 3]
    assert [each.outputs["Y"].tolist() for each in responses] == [[[2, 2]], [[10, 10]] * 3, []]
    assert [each.outputs["Y"].shape for each in responses[1:]] == [(3, 2), (0, 2)]
    assert responses[-2].outputs["Y"].shape == (3, 2)


def test_union_of_outputs_is_computed_and_split_per_request() -> None:
    model = Model()

    responses = batch.execute([request(1, wanted=("Y",)), request(1, wanted=("Z", "Y"))], ["Y", "Z"], model)

    assert model.runs == [((2,), ["Y", "Z"])]
    assert [list(each.outputs) for each in responses] == [["Y"], ["Z", "Y"]]


def test_failing_request_does_not_fail_its_batch() -> None:
    model = Model()

    responses = batch.execute([request(1), request(1, value=-1), request(1)], ["Y"], model)

    assert [each.error for each in responses] == ["", "negative", ""]
    assert len(model.runs) == 4


def test_scalars_are_not_batched() -> None:
    model = Model()

    batch.execute([request(), request()], ["Y"], model)

    assert [shape for shape, _ in model.runs] == [(), ()]


def test_output_with_wrong_row_count_fails_the_batch() -> None:
    responses = batch.execute([request(1), request(2)], ["ONE"], Model())

    assert {each.error for each in responses} == {
        "output 'ONE' has 1 rows for a batch of 3; a batching model must keep their number"
    }


@pytest.mark.parametrize("count", [1, 2])
def test_unknown_output_is_rejected_without_a_run(count: int) -> None:
    model = Model()

    responses = batch.execute([request(1, wanted=("N",)), request(1)][:count], ["Y"], model)

    assert [each.error for each in responses] == ["unexpected inference output 'N'", ""][:count]
    assert len(model.runs) == count - 1


def stack(*values: float, wanted: tuple[tuple[str, ...], ...] = ()) -> Stack:
    """Requests of two rows each."""
    x = np.repeat(np.array(values, np.float32), 2)
    asked = wanted or ((),) * len(values)
    return Stack({"X": x}, [2] * len(values), asked, lambda place, inputs: Request(str(place), inputs, asked[place]))


def test_stack_is_run_without_splitting() -> None:
    model, requests = Model(), stack(1, 2)

    responses = batch.execute(requests, ["Y", "Z"], model)

    assert model.runs == [((4,), ["Y", "Z"])]
    assert [each.outputs["Z"].tolist() for each in responses] == [[3, 3], [6, 6]]


def test_stack_requests_are_views_of_their_rows() -> None:
    requests = stack(1, 2, 3)

    assert [each.id for each in requests] == ["0", "1", "2"]
    assert [each.id for each in requests[1:]] == ["1", "2"]
    requests[-1].inputs["X"] += 1
    assert requests.inputs["X"].tolist() == [1, 1, 2, 2, 4, 4]
    assert len(requests) == 3


def test_failing_stack_is_run_request_by_request() -> None:
    assert [each.error for each in batch.execute(stack(1, -1, 2), ["Y"], Model())] == ["", "negative", ""]

    responses = batch.execute(stack(1, 2, wanted=(("Y",), ("N",))), ["Y"], Model())
    assert [each.error for each in responses] == ["", "unexpected inference output 'N'"]
