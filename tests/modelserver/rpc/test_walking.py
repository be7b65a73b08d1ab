"""Messages with too many fields: rejected before they are parsed, on any call."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.modelserver.rpc.rig import infer_request, rig
from tests.net.rig import run
from tritonclient.grpc import service_pb2 as pb

from forebay.modelserver.rpc import walking
from forebay.modelserver.rpc.walking import check_fields
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
