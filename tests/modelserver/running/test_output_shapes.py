"""Outputs in other shapes than the model file declares, which ONNX Runtime passes on."""

import asyncio
from pathlib import Path

import pytest
from tests.modelserver.models.rig import serving, tensor

from forebay.core.serving.errors import Kind

onnx = pytest.importorskip("onnx")
pytestmark = pytest.mark.slow
CONFIG = """
backend: "onnxruntime"
input [ { name: "IN" data_type: TYPE_FP32 dims: [-1] }, { name: "SHAPE" data_type: TYPE_INT64 dims: [-1] } ]
"""


def build(root: Path, output: str, says: list[int | str]) -> None:
    """A model that answers in any shape, and says that it is this one."""
    helper, types = onnx.helper, onnx.TensorProto
    inputs = [
        helper.make_tensor_value_info("IN", types.FLOAT, ["n"]),
        helper.make_tensor_value_info("SHAPE", types.INT64, ["k"]),
    ]
    made = helper.make_tensor_value_info("OUT", types.FLOAT, says)
    graph = helper.make_graph([helper.make_node("Reshape", ["IN", "SHAPE"], ["OUT"])], "g", inputs, [made])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (root / "m/1").mkdir(parents=True)
    onnx.save(model, str(root / "m/1/model.onnx"))
    (root / "m/config.pbtxt").write_text(f"{CONFIG} output {{ name: 'OUT' data_type: TYPE_FP32 {output} }}")


def test_output_that_cannot_be_reshaped_as_configured_is_an_error(tmp_path: Path) -> None:
    build(tmp_path, "dims: [4] reshape { shape: [2, 2] }", [2, 2])

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            values = tensor("IN", [1.0, 2.0, 3.0, 4.0])
            assert await server.numbers("m", values, tensor("SHAPE", [2, 2], "int64")) == [1.0, 2.0, 3.0, 4.0]
            for shape in ([4], [2, 1, 2], [4, 1]):
                refused = await server.ask("m", values, tensor("SHAPE", shape, "int64")).error()
                assert refused.kind is Kind.INTERNAL
                assert refused.text == (f"model 'm' gave output 'OUT' as FP32 {shape}; its configuration says [2, 2]")

    asyncio.run(main())


@pytest.mark.parametrize(("dims", "says"), [("[-1, 2]", ["n", "k"]), ("[2, 2]", [2, 2])])
def test_output_of_a_file_in_another_shape_than_configured_is_passed_on(
    tmp_path: Path, dims: str, says: list[int | str]
) -> None:
    build(tmp_path, f"dims: {dims}", says)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            values = tensor("IN", [1.0, 2.0, 3.0, 4.0])
            assert await server.numbers("m", values, tensor("SHAPE", [1, 4], "int64")) == [[1.0, 2.0, 3.0, 4.0]]

    asyncio.run(main())
