"""Tensors in typed fields of gRPC requests."""

from pathlib import Path

import pytest
from tests.modelserver.rpc.rig import infer_request, rig
from tests.net.rig import run

from forebay.modelserver.rpc.responses import varint


@pytest.mark.parametrize("count", [1, 31, 32, 5000])
@pytest.mark.parametrize(("field", "number"), [("fp32_contents", 0x7FA00001), ("fp64_contents", 0x7FF4000000000001)])
@pytest.mark.parametrize("unknown", [b"", b"\x78\x01"])
def test_typed_floats_reach_the_model_as_they_were_sent(
    tmp_path: Path, field: str, number: int, count: int, unknown: bytes
) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            wide = field == "fp64_contents"
            sent = number.to_bytes(8 if wide else 4, "little") * count  # a signalling NaN
            head = (b"\x3a" if wide else b"\x32") + varint(len(sent))
            message = infer_request("echo", None, [count])
            message.inputs[0].datatype = "FP64" if wide else "FP32"
            message.inputs[0].contents.MergeFromString(head + sent + unknown)
            await it.stub.ModelInfer(message)
            found = bytes(it.models.requests[0].inputs[0].data or b"")
            assert len(found) == len(sent)
            assert found == sent or unknown  # with fields that we do not know, the numbers are read one by one

    run(main())


def test_typed_booleans_reach_the_model(tmp_path: Path) -> None:
    async def main() -> None:
        async with rig(tmp_path) as it:
            message = infer_request("echo", None, [4])
            message.inputs[0].datatype = "BOOL"
            message.inputs[0].contents.bool_contents.extend([True, False, False, True])
            await it.stub.ModelInfer(message)
            assert bytes(it.models.requests[0].inputs[0].data or b"") == b"\1\0\0\1"

    run(main())
