"""Tensors in JSON and binary form: conversions round-trip."""

import json
import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.serving.config import ELEMENT_BYTES, Datatype
from forebay.core.serving.errors import Kind, Refused
from forebay.wire.oip import tensors

BITS = {"8": 8, "16": 16, "32": 32, "64": 64}
INTEGERS = [each for each in Datatype if "INT" in each]


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def bounds(datatype: Datatype) -> tuple[int, int]:
    bits = ELEMENT_BYTES[datatype] * 8
    return (0, 2**bits - 1) if datatype.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@st.composite
def values(draw: st.DrawFn) -> tuple[Datatype, list[Any]]:
    datatype = draw(st.sampled_from([*INTEGERS, Datatype.BOOL, Datatype.FP32, Datatype.FP64, Datatype.BYTES]))
    element: st.SearchStrategy[Any]
    if datatype in INTEGERS:
        element = st.integers(*bounds(datatype))
    elif datatype is Datatype.BOOL:
        element = st.booleans()
    elif datatype is Datatype.BYTES:
        element = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    else:
        element = st.floats(width=32 if datatype is Datatype.FP32 else 64)
    return datatype, draw(st.lists(element, max_size=12)) * draw(st.sampled_from((1, 5)))


@st.composite
def nested(draw: st.DrawFn, elements: list[Any]) -> Any:
    """The same elements in arrays within arrays, regular or not."""
    if len(elements) < 2 or draw(st.booleans()):
        return elements
    cut = draw(st.integers(1, len(elements) - 1))
    return [draw(nested(elements[:cut])), draw(nested(elements[cut:]))]


@given(st.data())
def test_tensors_round_trip(data: st.DataObject) -> None:
    datatype, elements = data.draw(values())
    shaped = data.draw(nested(elements))
    packed = tensors.pack("x", datatype, raw(shaped), len(elements))
    back = json.loads(tensors.unpack("x", datatype, packed, len(elements)))
    assert len(back) == len(elements)
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(back, elements, strict=True))
    view = memoryview(b"x" + packed)[1:]  # no alignment is needed
    assert tensors.unpack("x", datatype, view, len(elements)) == tensors.unpack("x", datatype, packed, len(elements))


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_out_of_range_are_rejected_not_truncated(datatype: Datatype) -> None:
    low, high = bounds(datatype)
    code = {1: "b", 2: "h", 4: "i", 8: "q"}[ELEMENT_BYTES[datatype]]
    code = code.upper() if low == 0 else code
    assert tensors.pack("x", datatype, raw([low, high]), 2) == struct.pack(f"<2{code}", low, high)
    for value in (low - 1, high + 1, 2**70):
        with pytest.raises(Refused) as refused:
            tensors.pack("x", datatype, raw([value]), 1)
        assert refused.value.kind is Kind.INVALID_ARGUMENT


UNPACKABLE: list[tuple[Datatype, bytes, int, str]] = [
    (Datatype.FP16, b"[1]", 1, "receiving FP16 data via JSON is not supported. Please use the binary data format fo"),
    (Datatype.BF16, b"[1]", 1, "receiving BF16 data via JSON is not supported. Please use the binary data format fo"),
    (Datatype.FP32, b"1", 1, "Unable to parse 'data': attempt to access JSON non-array as array"),
    (Datatype.FP32, b'"a"', 1, "Unable to parse 'data': attempt to access JSON non-array as array"),
    (Datatype.FP32, b"[1,2]", 1, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
    (Datatype.FP32, b"[[1],[2]]", 3, "Failed to parse 'data' field: shape does not match true shape"),
    (Datatype.FP32, b"[true]", 1, "Unable to parse 'data': attempt to access JSON non-number as double"),
    (Datatype.FP32, b"[null]", 1, "Unable to parse 'data': attempt to access JSON non-number as double"),
    (Datatype.FP32, b"[[1],2]", 1, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
    (Datatype.FP64, b"[1e999]", 1, "failed to parse the request JSON buffer: Number too big to be stored in double."),
    (Datatype.FP64, b"[[1],%b]" % (b"9" * 400), 2, "failed to parse the request JSON buffer: Number too big to be s"),
    (Datatype.BOOL, b"[1]", 1, "Unable to parse 'data': attempt to access JSON non-boolean as boolean"),
    (Datatype.INT32, b"[1.0]", 1, "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-inte"),
    (Datatype.INT8, b"[true]", 1, "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-inte"),
    (Datatype.INT8, b"[200]", 1, "Unable to parse 'data': input 'x' has a value that INT8 cannot hold"),
    (Datatype.UINT8, b"[300]", 1, "Unable to parse 'data': input 'x' has a value that UINT8 cannot hold"),
    (Datatype.UINT8, b"[-1]", 1, "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-i"),
    (Datatype.UINT8, b'["1"]', 1, "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-"),
    (Datatype.BYTES, b"[1]", 1, "Unable to parse 'data': attempt to access JSON non-string as string"),
    (Datatype.BYTES, b'[["a"],"\\ud800"]', 2, "failed to parse the request JSON buffer: The surrogate pair in"),
    (Datatype.BYTES, b'["\xff"]', 2, "failed to parse the request JSON buffer: Invalid encoding in string. at 2"),
    (Datatype.INT8, b"[" * 100 + b"]" * 100, 0, "Unable to parse 'data': JSON nesting depth exceeds maximum allowed"),
    (Datatype.INT8, b"[" * 99999 + b"]" * 99999, 0, "failed to parse the request JSON buffer: Nested too deeply. at"),
]  # fmt: skip


@pytest.mark.parametrize(("datatype", "data", "elements", "text"), UNPACKABLE)
def test_data_of_the_wrong_shape_has_the_error_message_of_triton(
    datatype: Datatype, data: bytes, elements: int, text: str
) -> None:
    with pytest.raises(Refused) as refused:
        tensors.pack("x", datatype, msgspec.Raw(data), elements)
    assert refused.value.text.startswith(text)
    assert refused.value.http_status == 400


def test_whitespace_between_arrays_is_ignored() -> None:
    assert tensors.pack("x", Datatype.INT8, msgspec.Raw(b"[ [1,2],\n [3,4] ]"), 4) == b"\1\2\3\4"


def test_nesting_up_to_the_limit_of_triton_is_read() -> None:
    data = b"[" * 99 + b"7" + b"]" * 99
    assert tensors.pack("x", Datatype.INT8, msgspec.Raw(data), 1) == b"\x07"


def test_nesting_depth_of_arrays_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = msgspec.Raw(b"[[1,2],3,[[4]],[[5],6]]")
    assert tensors.pack("x", Datatype.INT8, mixed, 6) == bytes(range(1, 7))
    monkeypatch.setattr(tensors, "ODD_BYTES_MAX", 18)
    with pytest.raises(Refused, match="non-signed-integer as signed-integer"):
        tensors.pack("x", Datatype.INT8, msgspec.Raw(b"[7,[[]],[[]],[[]]]" + b" "), 6)


@pytest.mark.parametrize("slice_bytes", [1, 2, 3, 7, 20, 64])
@given(texts=st.lists(st.text('[\\"{,', max_size=12), max_size=6, unique=True))
def test_marks_outside_of_strings_are_counted_across_slices(slice_bytes: int, texts: list[str]) -> None:
    """Whatever is in them, strings are two quotes each, and arrays are those that are not in strings."""
    text = memoryview(json.dumps({f"a{text}": [text] for text in texts}).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "SLICE_BYTES", slice_bytes)
        for mark, count in ((b'"', 4 * len(texts)), (b"[", len(texts)), (b"{", 1)):
            assert not tensors.exceeds(text, mark, count)
            assert tensors.exceeds(text, mark, count - 1)


@pytest.mark.parametrize(
    ("data", "elements", "why"),
    [
        (b"[" + b",".join([b'""'] * 100) + b"]", 99, "Shape does not match true shape"),
        (b"[" + b",".join([b"[]"] * 200) + b"]", 20, "4 arrays for each element"),
    ],
    ids=["strings", "arrays"],
)
def test_objects_in_long_texts_are_bounded(
    data: bytes, elements: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "SLICE_BYTES", 32)
    monkeypatch.setattr(tensors, "ODD_BYTES_MAX", 32)
    with pytest.raises(Refused, match=why):
        tensors.pack("x", Datatype.BYTES, msgspec.Raw(data), elements)


def test_long_texts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "SLICE_BYTES", 32)
    monkeypatch.setattr(tensors, "ODD_BYTES_MAX", 32)
    texts = ['{"a": ["\\", 1]}', "", "[[[["] * 20
    for data in (texts, [[text] for text in texts]):
        packed = tensors.pack("x", Datatype.BYTES, msgspec.Raw(json.dumps(data).encode()), 60)
        assert [bytes(each).decode() for each in tensors.split(packed)] == texts


@pytest.mark.parametrize("slice_bytes", [1, 2, 3, 7, 20, 64])
@given(data=st.data())
def test_long_data_are_read_in_slices_as_if_whole(slice_bytes: int, data: st.DataObject) -> None:
    datatype, elements = data.draw(values())
    text = json.dumps(data.draw(nested(elements)), indent=data.draw(st.sampled_from([None, 1])))
    count = len(elements) + data.draw(st.sampled_from([0, 0, 0, 1, -1]))

    def packed(slice_bytes: int) -> bytes | str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensors, "SLICE_BYTES", slice_bytes)
            try:
                return tensors.pack("x", datatype, msgspec.Raw(text.encode()), count)
            except Refused as refused:
                return refused.text

    assert packed(slice_bytes) == packed(1 << 20)


@pytest.mark.parametrize(("datatype", "data", "elements", "text"), UNPACKABLE)
def test_long_data_of_the_wrong_shape_has_the_same_error_message(
    monkeypatch: pytest.MonkeyPatch, datatype: Datatype, data: bytes, elements: int, text: str
) -> None:
    monkeypatch.setattr(tensors, "SLICE_BYTES", 1)
    test_data_of_the_wrong_shape_has_the_error_message_of_triton(datatype, data, elements, text)


@pytest.mark.parametrize("slice_elements", [1, 2, 5])
@given(data=st.data())
def test_long_tensors_are_written_in_slices_as_if_whole(slice_elements: int, data: st.DataObject) -> None:
    datatype, elements = data.draw(values())
    packed = tensors.pack("x", datatype, raw(elements), len(elements))
    whole = tensors.unpack("x", datatype, packed, len(elements))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "SLICE_ELEMENTS", slice_elements)
        assert tensors.unpack("x", datatype, packed, len(elements)) == whole


def test_serialisation_stops_when_the_client_is_gone() -> None:
    asked: list[bool] = []

    def wanted() -> bool:
        asked.append(True)
        return len(asked) < 3

    elements = 9 * tensors.SLICE_ELEMENTS
    with pytest.raises(Refused) as caught:
        tensors.unpack("x", Datatype.BOOL, bytes(elements), elements, wanted)
    assert (caught.value.kind, len(asked)) == (Kind.CANCELLED, 3)


def test_signalling_nan_is_written_without_a_warning() -> None:
    packed = struct.pack("<40I", *[0x7FA0_0001] * 40)
    assert tensors.unpack("x", Datatype.FP32, packed, 40) == b"[%b]" % b",".join([b"NaN"] * 40)


def test_nan_and_infinity_are_written_and_read_like_triton() -> None:
    packed = struct.pack("<4f", math.nan, math.inf, -math.inf, 0.1)
    for times in (1, 30):  # few and many are written in different ways
        text = tensors.unpack("x", Datatype.FP32, packed * times, 4 * times)
        assert text == b"[%b]" % b",".join([b"NaN,Infinity,-Infinity,0.10000000149011612"] * times)
        assert tensors.pack("x", Datatype.FP32, msgspec.Raw(text), 4 * times) == packed * times


def test_floats_too_large_for_their_type_become_infinite() -> None:
    assert tensors.pack("x", Datatype.FP32, raw([1e39]), 1) == struct.pack("<f", math.inf)


def test_shapes_are_counted_within_bounds() -> None:
    big = 2**63 - 1
    assert tensors.count("x", []) == 1
    assert tensors.count("x", [3, 0, big, big]) == 0
    assert tensors.count("x", [big]) == big
    for shape, text in (
        ([2**63], "shape [9223372036854775808] contains one or more invalid dimensions"),
        ([big, 2], f"shape [{big},2] causes total element count to exceed maximum size of {big}"),
        ([2**40] * 1_000_000, "shape [1099511627776,"),
    ):
        with pytest.raises(Refused) as refused:
            tensors.count("x", shape)
        assert refused.value.text.startswith(f"invalid shape for input 'x': {text}")


UNWRITABLE: list[tuple[Datatype, bytes, Kind, str]] = [
    (Datatype.FP16, b"12", Kind.INVALID_ARGUMENT, "sending FP16 data via JSON is not supported"),
    (Datatype.INT8, b"12", Kind.INTERNAL, "Failed to write 'data' field: output tensor shape does not match"),
    (Datatype.BYTES, b"\1\0\0", Kind.INTERNAL, "Failed to write 'data' field: output tensor shape does not match"),
    (Datatype.BYTES, b"\1\0\0\0", Kind.INTERNAL, "Failed to write 'data' field: output tensor shape does not match"),
    (Datatype.BYTES, b"\0\0\0\0" * 2, Kind.INTERNAL, "Failed to write 'data' field: output tensor shape does not m"),
    (Datatype.BYTES, b"\1\0\0\0\xff", Kind.INVALID_ARGUMENT, "sending BYTES data that is not UTF-8 via JSON is not"),
]  # fmt: skip


@pytest.mark.parametrize(("datatype", "data", "kind", "text"), UNWRITABLE)
def test_values_without_a_json_form_are_an_error(datatype: Datatype, data: bytes, kind: Kind, text: str) -> None:
    with pytest.raises(Refused) as refused:
        tensors.unpack("x", datatype, data, 1)
    assert refused.value.kind is kind
    assert refused.value.text.startswith(text)


def test_bools_other_than_one_are_true() -> None:
    assert tensors.unpack("x", Datatype.BOOL, b"\0\1\2\xff", 4) == b"[false,true,true,true]"
