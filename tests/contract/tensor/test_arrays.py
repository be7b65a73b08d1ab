"""Protocol arrays: element types, rows joined without a copy, mismatches with a configuration."""

import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import USUAL

from forebay.core.serving.config import Datatype, TensorSpec
from forebay.engines.tensor.arrays import (
    DTYPES,
    VIEWED_BYTES_MIN,
    as_bytes,
    as_text,
    datatype_of,
    joined,
    mismatch,
    plain,
)


def test_datatype_of_recognises_every_type_but_bf16() -> None:
    found = {each: datatype_of(np.zeros(1, DTYPES[each])) for each in Datatype}

    assert found.pop(Datatype.BF16) is Datatype.UINT16
    assert all(datatype is each for datatype, each in found.items())
    assert datatype_of(np.zeros(1, "S3")) is Datatype.BYTES
    assert datatype_of(np.zeros(1, ">f4")) is Datatype.FP32
    assert datatype_of(np.zeros(1, complex)) is None


@pytest.mark.parametrize(
    "array", [np.arange(6.0).reshape(2, 3).T, np.arange(3, dtype=">i4"), np.float32(3.5), np.array(["ab", "c"])]
)
def test_plain_keeps_the_values_and_the_shape(array: "np.ndarray") -> None:  # type: ignore[type-arg]
    made = plain(np.asarray(array))

    assert made.flags.c_contiguous
    assert made.shape == np.shape(array)
    assert made.dtype.byteorder in "=|<"
    assert made.tolist() == (
        np.char.encode(array).tolist() if np.asarray(array).dtype.kind == "U" else array.tolist()
    )


@settings(max_examples=USUAL)
@given(st.lists(st.binary(max_size=9), max_size=6))
def test_as_text_rejects_bytes_that_are_not_utf8(parts: list[bytes]) -> None:
    array = np.empty(len(parts), object)
    array[:] = parts

    assert as_bytes(array).tolist() == parts
    try:
        expected = [part.decode() for part in parts]
    except UnicodeDecodeError:
        with pytest.raises(ValueError, match="input 'X' holds bytes that are not UTF-8"):
            as_text(array, "X")
    else:
        assert as_text(array, "X").tolist() == expected


@settings(max_examples=USUAL)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6), st.booleans(), st.sampled_from([3, VIEWED_BYTES_MIN // 4])
)
def test_joined_rows_are_the_rows_of_the_parts(sizes: list[int], shuffled: bool, width: int) -> None:
    whole = np.arange(sum(sizes) * width, dtype=np.float32).reshape(-1, width)
    ends = np.cumsum(sizes)
    parts = [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    if shuffled:
        parts.reverse()

    assert np.array_equal(joined(parts), np.concatenate(parts))


def test_adjacent_rows_are_joined_without_a_copy() -> None:
    size = VIEWED_BYTES_MIN
    memory = mmap.mmap(-1, 4 * size)
    rows = [np.frombuffer(memoryview(memory)[64 + n * size :][:size], np.float32).reshape(2, -1) for n in range(3)]

    together = joined(rows)
    rows[1][0, 0] = 7
    separate = joined([rows[0], rows[2]])
    rows[0][0, 0] = 5

    assert together.shape == (6, size // 8)
    assert (together[2, 0], together[0, 0], separate[0, 0]) == (7, 5, 0)


def test_arrays_of_different_owners_are_copied() -> None:
    one, other = np.zeros((2, VIEWED_BYTES_MIN)), np.ones((2, VIEWED_BYTES_MIN))

    assert not np.shares_memory(joined([one, other]), one)


@pytest.mark.parametrize(
    ("array", "batches", "problem"),
    [
        (np.zeros((2, 4), "<f4"), True, ""),
        (np.zeros((2, 4), "<f8"), True, "as FP64 [2, 4]; its configuration says FP32 [-1, 4]"),
        (np.zeros((2, 5), "<f4"), True, "as FP32 [2, 5]; its configuration says FP32 [-1, 4]"),
        (np.zeros(4, "<f4"), True, "as FP32 [4]; its configuration says FP32 [-1, 4]"),
        (np.zeros((), "<f4"), True, "as FP32 []; its configuration says FP32 [-1, 4]"),
        (np.zeros(4, "<f4"), False, ""),
        (np.zeros((1, 4), "<f4"), False, "as FP32 [1, 4]; its configuration says FP32 [4]"),
        (np.zeros(4, "<c8"), False, "as complex64 [4]; its configuration says FP32 [4]"),
    ],
)
def test_mismatch_names_actual_and_configured_output(
    array: "np.ndarray",  # type: ignore[type-arg]
    batches: bool,
    problem: str,
) -> None:
    found = mismatch(TensorSpec("Y", Datatype.FP32, (4,)), array, "m", batches)

    assert found == (f"model 'm' gave output 'Y' {problem}" if problem else "")


def test_mismatch_uses_the_reshaped_dims() -> None:
    spec = TensorSpec("Y", Datatype.FP32, (1,), reshape=())

    assert mismatch(spec, np.zeros(3, "<f4"), "m", True) == ""
    assert mismatch(spec, np.zeros((3, 1), "<f4"), "m", True) != ""
