"""Messages with too many fields: rejected before they are parsed, on any call."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tests.modelserver.rpc.rig import infer_request, rig
from tests.net.rig import run
from tritonclient.grpc import service_pb2 as pb

from forebay.modelserver.rpc import walking
from forebay.modelserver.rpc.requests import parse
from forebay.modelserver.rpc.walking import check_fields, raw_begins, split
from forebay.wire.http2.grpc import BadMessage

TEXT = f"the message has more than {walking.FIELDS_MAX} fields"
EMPTY_INPUTS = b"\x2a\x00" * walking.WALKED_BYTES


def message(inputs: int, texts: int, outputs: int, raw: int, parameters: int) -> Any:
    found = pb.ModelInferRequest(model_name="m")
    for n in range(inputs):
        each = found.inputs.add(name="x", datatype="BYTES", shape=[1, 300])
        each.contents.bytes_contents.extend([b"t"] * texts)
        each.contents.uint64_contents.extend([1, 2, 3])
        each.parameters["p"].int64_param = n
    for _ in range(outputs):
        found.outputs.add(name="y")
    found.raw_input_contents.extend([b"*" * 200] * raw)
    for n in range(parameters):
        found.parameters[f"{n}"].double_param = 0.5
    return found


small = st.integers(0, 4)


@pytest.mark.interpreted
@given(small, small, small, small, small)
def test_all_fields_of_a_request_are_counted(
    inputs: int, texts: int, outputs: int, raw: int, parameters: int
) -> None:
    data = message(inputs, texts, outputs, raw, parameters).SerializeToString()
    count = 1 + inputs * (1 + 5 + 1 + texts) + outputs * 2 + raw + parameters
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walking, "WALKED_BYTES", 0)
        patch.setattr(walking, "FIELDS_MAX", count)
        check_fields(data)
        patch.setattr(walking, "FIELDS_MAX", count - 1)
        with pytest.raises(BadMessage):
            check_fields(data)


@pytest.mark.interpreted
@pytest.mark.parametrize("field", ["int_contents", "int64_contents", "uint_contents", "uint64_contents"])
def test_packed_integers_count_a_quarter(field: str) -> None:
    asked = pb.ModelInferRequest()
    getattr(asked.inputs.add().contents, field).extend([1, 200, 30_000, 4] * 10)  # of one to three bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walking, "WALKED_BYTES", 0)
        patch.setattr(walking, "FIELDS_MAX", 3 + 10)
        check_fields(asked.SerializeToString())
        patch.setattr(walking, "FIELDS_MAX", 3 + 9)
        with pytest.raises(BadMessage, match="send strings and integers as raw contents"):
            check_fields(asked.SerializeToString())
        getattr(asked.inputs[0].contents, field).extend([1] * 1000)
        with pytest.raises(BadMessage):
            check_fields(asked.SerializeToString())


@pytest.mark.interpreted
@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_walked_without_error(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walking, "WALKED_BYTES", 0)
        check_fields(data)


def test_messages_with_too_many_fields_are_rejected(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            for path in ("ModelInfer", "RepositoryIndex"):
                call = it.channel.unary_unary(f"/inference.GRPCInferenceService/{path}")
                with pytest.raises(Exception, match=TEXT):
                    await call(EMPTY_INPUTS)
            stream = it.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            with pytest.raises(Exception, match=TEXT):
                async for _ in stream(iter([EMPTY_INPUTS])):
                    pass
            assert await it.code("ModelInfer", infer_request("echo", shape=[1] * 1025)) == (
                "INVALID_ARGUMENT",
                "invalid shape for input 'IN': 1025 dimensions are more than 1024",
            )

    run(main())


def either_way(data: bytes) -> tuple[Any, list[bytes]] | None:
    """What a request says with its raw contents taken out before it is parsed, and that it says the same without;
    None: it is invalid.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walking, "SPLIT_BYTES_MIN", 0)
        try:
            whole = pb.ModelInferRequest.FromString(data)
        except DecodeError:
            with pytest.raises(DecodeError):
                parse(data)
            return None
        found, raw = parse(data)
    contents = [bytes(each) for each in raw]
    assert contents == list(whole.raw_input_contents)
    whole.ClearField("raw_input_contents")
    found.ClearField("raw_input_contents")
    assert found.SerializeToString(deterministic=True) == whole.SerializeToString(deterministic=True)
    return found, contents


ODD = (
    b"\x0a\x01m", b"\x1a\x02id", b"\x2a\x03\x0a\x01x", b"\x32\x03\x0a\x01y", b"\x38\x05", b"\x98\x01\x80\x01",
    b"\x99\x0112345678", b"\x9d\x011234", b"\x9b\x01\x9c\x01", b"\x3a\x80\x00", b"\x3a\x80", b"\x3a\xff\x01",
    b"\x02\x00", b"\xba\x80\x80\x80\x80\x80\x80\x80\x80\x00\x00", b"\xba\x80\x80\x80\x10\x00", b"\x9f\x01",
    b"\x3a\x81\x80\x80\x80\x10x",
)  # fmt: skip
"""Other fields, unknown ones, and those that are written in an unusual or an invalid way."""
short = st.binary(max_size=12).map(lambda body: bytes([len(body)]) + body)
fields = st.one_of(
    short.map(lambda body: b"\x3a" + body), short.map(lambda body: b"\xba\x00" + body), st.sampled_from(ODD)
)


@pytest.mark.interpreted
@given(st.lists(fields, max_size=6).map(b"".join), st.integers(0, 3))
def test_raw_contents_are_taken_out_of_what_the_parser_accepts(data: bytes, cut: int) -> None:
    either_way(data[: len(data) - cut])


@pytest.mark.interpreted
@given(small, small, small, small, small)
def test_raw_contents_of_a_request_are_those_that_were_sent(
    inputs: int, texts: int, outputs: int, raw: int, parameters: int
) -> None:
    found = either_way(message(inputs, texts, outputs, raw, parameters).SerializeToString())
    assert found is not None
    assert found[1] == [b"*" * 200] * raw


def test_large_raw_contents_are_views_of_the_message() -> None:
    contents = [bytes([n]) * (walking.SPLIT_BYTES_MIN // 2) for n in (1, 2, 3)]
    data = pb.ModelInferRequest(model_name="m", raw_input_contents=contents).SerializeToString()
    rest, raw = split(data)
    assert pb.ModelInferRequest.FromString(bytes(rest)) == pb.ModelInferRequest(model_name="m")
    assert [bytes(each) for each in raw] == contents
    assert all(each.obj is data for each in raw)
    few = pb.ModelInferRequest(raw_input_contents=[bytes(walking.SPLIT_BYTES_MIN - 10)]).SerializeToString()
    many = pb.ModelInferRequest(raw_input_contents=[bytes(100)] * 1100).SerializeToString()
    assert split(few) == (few, [])
    assert split(many) == (many, [])


def test_largest_raw_contents_are_found_from_their_beginning() -> None:
    one, two = bytes(5_000), bytes(300_000)
    data = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"small", two, one]).SerializeToString()
    begin = raw_begins(data[:100], len(data))
    assert data[begin : begin + len(two)] == two
    assert data[begin - 4] == walking._RAW
    assert raw_begins(data[:10], len(data)) == len(
        b"\x0a\x01m\x3a\x05"
    )  # of the small ones, where nothing else is seen
    assert raw_begins(data[:4], len(data)) == 0
    assert raw_begins(b"", 10) == 0
