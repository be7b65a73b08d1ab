"""Classification of outputs, and outputs in shared memory."""

import json
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Kind, Refused
from forebay.core.serving.values import InferRequest, InferResponse, Tensor
from forebay.wire.oip import infer_answer
from forebay.wire.oip.infer_answer import CLASSIFIED_ELEMENTS_MAX, classified, write_infer
from forebay.wire.oip.infer_request import BINARY_FORM, JSON_FORM, Asked, Form
from forebay.wire.oip.tensors import split


def unnamed(_: str) -> Sequence[str]:
    return ()


def ranked(tensor: Tensor, classes: int, batches: bool = False) -> tuple[tuple[int, ...], list[str]]:
    found = classified(tensor, classes, batches=batches, labels=unnamed)
    assert found.datatype is Datatype.BYTES
    return found.shape, [bytes(each).decode() for each in split(found.data)]


def test_empty_line_of_a_label_file_is_not_a_label() -> None:
    tensor = Tensor("y", Datatype.FP32, (4,), struct.pack("<4f", 1, 2, 3, 4))

    found = classified(tensor, 4, batches=False, labels=lambda _: ["first", "", "third"])

    assert split(found.data) == [b"4.000000:3", b"3.000000:2:third", b"2.000000:1", b"1.000000:0:first"]


@given(st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), max_size=4), st.integers(1, 5))
def test_classes_are_the_top_scores_of_each_row_in_stable_order(rows: list[list[int]], classes: int) -> None:
    flat = [value for row in rows for value in row]
    tensor = Tensor("y", Datatype.INT16, (len(rows), 3), struct.pack(f"<{len(flat)}h", *flat))
    shape, said = ranked(tensor, classes, batches=True)
    count = min(classes, 3)
    if not rows:
        assert (shape, said) == ((0,), [])
        return
    assert shape == (len(rows), count)
    for n, row in enumerate(rows):
        best = sorted(range(3), key=lambda at: -row[at])[:count]
        assert said[n * count : (n + 1) * count] == [f"{row[at]}:{at}" for at in best]


def test_scores_are_written_as_triton_writes_them() -> None:
    tensor = Tensor("y", Datatype.FP64, (3,), struct.pack("<3d", 0.1234567, 1e10, float("inf")))
    assert ranked(tensor, 3) == ((3,), ["inf:2", "10000000000.000000:1", "0.123457:0"])


@pytest.mark.parametrize(
    ("tensor", "kind", "text"),
    [
        (
            Tensor("y", Datatype.BYTES, (1,), b"\0\0\0\0"),
            Kind.INVALID_ARGUMENT,
            "class result not available for outpu",
        ),
        (Tensor("y", Datatype.BOOL, (1,), b"\0"), Kind.INVALID_ARGUMENT, "class result not available for output due"),
        (Tensor("y", Datatype.FP16, (1,), b"\0\0"), Kind.INVALID_ARGUMENT, "class result not available for output"),
        (Tensor("y", Datatype.INT8, (2,), b"\0"), Kind.INTERNAL, "output tensor shape does not match size of output"),
        (
            Tensor("y", Datatype.INT8, (CLASSIFIED_ELEMENTS_MAX + 1,), b""),
            Kind.INVALID_ARGUMENT,
            "classification output tensor too large",
        ),
    ],
)
def test_outputs_without_classes_are_rejected(tensor: Tensor, kind: Kind, text: str) -> None:
    with pytest.raises(Refused) as refused:
        ranked(tensor, 1)
    assert refused.value.kind is kind
    assert refused.value.text.startswith(text)


def test_response_may_have_parameters_without_outputs() -> None:
    asked = Asked(InferRequest("m", "", "", ()), {}, JSON_FORM)
    response = InferResponse("m", "3", "", parameters={"a": 1, "b": "x", "c": True})
    written = write_infer(response, asked, batches=False, labels=unnamed)
    assert (written.json, written.buffers) == (
        b'{"model_name":"m","model_version":"3","parameters":{"a":1,"b":"x","c":true},"outputs":[]}',
        [],
    )


BINARY = Asked(InferRequest("m", "", "", ()), {}, BINARY_FORM)


@pytest.mark.parametrize("id", ["", "a"])
@pytest.mark.parametrize("forms", [{}, {"x": BINARY_FORM, "y": BINARY_FORM}])
def test_binary_outputs_follow_a_document_with_their_sizes(id: str, forms: dict[str, Form]) -> None:
    asked = Asked(InferRequest("m", "", "", ()), forms, JSON_FORM if forms else BINARY_FORM)
    for rows in (1, 2, 1, 0):
        outputs = (
            Tensor("x", Datatype.INT8, (rows, 2), b"ab" * rows),
            Tensor("y", Datatype.FP32, (rows, 1), b"1234" * rows),
        )
        written = write_infer(InferResponse("m", "1", id, outputs), asked, batches=True, labels=unnamed)
        assert b"".join(written.buffers) == b"ab" * rows + b"1234" * rows
        told = json.loads(written.json)
        assert told.pop("id", "") == id
        assert told == {
            "model_name": "m",
            "model_version": "1",
            "outputs": [
                {"name": "x", "datatype": "INT8", "shape": [rows, 2], "parameters": {"binary_data_size": 2 * rows}},
                {"name": "y", "datatype": "FP32", "shape": [rows, 1], "parameters": {"binary_data_size": 4 * rows}},
            ],
        }


def test_documents_of_responses_that_are_kept_are_few_and_small() -> None:
    infer_answer._known.clear()
    wide = tuple(Tensor(f"{'x' * 100}{number}", Datatype.INT8, (1,), b"a") for number in range(40))
    write_infer(InferResponse("m", "1", "", wide), BINARY, batches=False, labels=unnamed)
    assert not infer_answer._known
    for size in range(2 * infer_answer.KNOWN_MAX):
        tensor = Tensor("x", Datatype.INT8, (size,), b"a" * size)
        write_infer(InferResponse("m", "1", "", (tensor,)), BINARY, batches=False, labels=unnamed)
    assert len(infer_answer._known) <= infer_answer.KNOWN_MAX
