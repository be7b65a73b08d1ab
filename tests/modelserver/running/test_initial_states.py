"""Implicit state: that with which a sequence begins, from a file or zeros, and what models make of it."""

import asyncio
from pathlib import Path

import pytest
import torch
from tests.modelserver.models.rig import IO, serving, tensor, write

from forebay.core.serving.errors import Refused

pytestmark = pytest.mark.slow
ADD = """
    def answer(self, request):
        assert get(request).shape == get(request, "WAS").shape
        total = get(request) + get(request, "WAS")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", total), pb_utils.Tensor("IS", total)])
"""


def repository(root: Path, source: str) -> Path:
    """A model with a state of any size, of which the initial one has 2 elements; its file has 3."""
    state = f"""
        max_batch_size: 2
        sequence_batching {{ state {{ input_name: "WAS" output_name: "IS" data_type: TYPE_FP32 dims: [-1]
            initial_state {{ name: "first" data_type: TYPE_FP32 dims: [2] {source} }} }} }}
    """
    write(root, "m", f'backend: "python" {IO.format(dims="-1")} {state}', ADD)
    (root / "m" / "initial_state").mkdir()
    (root / "m" / "initial_state" / "three").write_bytes(bytes(tensor("IN", [10.0, 20.0, 30.0]).data))
    (root / "m" / "initial_state" / "one").write_bytes(bytes(tensor("IN", [10.0]).data))
    return root


@pytest.mark.parametrize(("source", "first"), [('data_file: "three"', [11.0, 21.0]), ("zero_data: true", [1.0, 1.0])])
def test_initial_state_has_its_own_dims_and_may_have_a_longer_file(
    tmp_path: Path, source: str, first: list[float]
) -> None:
    async def main() -> None:
        async with serving(repository(tmp_path, source), startup=("m",)) as server:
            one = tensor("IN", [[1.0, 1.0]])
            assert await server.numbers("m", one, sequence_id=1, sequence_start=True) == [first]
            assert await server.numbers("m", one, sequence_id=1, sequence_end=True) == [[x + 1 for x in first]]

    asyncio.run(main())


class Adding(torch.nn.Module):
    def forward(self, value: torch.Tensor, was: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = was + value.to(was.dtype)
        return total.float(), total


BF16_MODEL = """
    def answer(self, request):
        import torch
        assert pb_utils.get_input_tensor_by_name(request, "WAS").triton_dtype() == 14
        total = torch.from_dlpack(pb_utils.get_input_tensor_by_name(request, "WAS")) + get(request, "IN").item()
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("OUT", total.float().numpy()), pb_utils.Tensor.from_dlpack("IS", total),
        ])
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript, which Triton's users have
@pytest.mark.parametrize("backend", ["python", "pytorch"])
def test_state_may_be_of_bf16(tmp_path: Path, backend: str) -> None:
    settings = f"""
        backend: "{backend}" max_batch_size: 2
        input {{ name: "IN" data_type: TYPE_FP32 dims: [1] }}
        output {{ name: "OUT" data_type: TYPE_FP32 dims: [1] }}
        sequence_batching {{ state {{ input_name: "WAS" output_name: "IS" data_type: TYPE_BF16 dims: [1]
            initial_state {{ name: "first" data_type: TYPE_BF16 dims: [1] zero_data: true }} }} }}
    """
    write(tmp_path, "m", settings, BF16_MODEL)
    if backend == "pytorch":
        (tmp_path / "m/1/model.py").unlink()
        torch.jit.save(torch.jit.script(Adding()), str(tmp_path / "m/1/model.pt"))

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            one = tensor("IN", [[1.5]])
            assert await server.numbers("m", one, sequence_id=1, sequence_start=True) == [[1.5]]
            assert await server.numbers("m", one, sequence_id=1) == [[3.0]]
            assert await server.numbers("m", one, sequence_id=1, sequence_end=True) == [[4.5]]

    asyncio.run(main())


def test_initial_state_with_too_short_a_file_fails_the_load(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(repository(tmp_path, 'data_file: "one"')) as server:
            with pytest.raises(Refused, match="initial state 'one' has 4 bytes; state 'WAS' needs 8"):
                await server.load("m", {})

    asyncio.run(main())


def write_file(root: Path, backend: str, operator: str, **attributes: int) -> None:
    """An ONNX model that makes its next state of IN and the last one, and returns that."""
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node(operator, ["WAS", "IN"], ["IS"], **attributes),
        helper.make_node("Identity", ["IS"], ["OUT"]),
    ]
    inputs, outputs = (
        [helper.make_tensor_value_info(name, kind, ["n", name.lower()]) for name in names]
        for names in (("IN", "WAS"), ("OUT", "IS"))
    )
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    settings = """
        max_batch_size: 2
        sequence_batching { state { input_name: "WAS" output_name: "IS" data_type: TYPE_FP32 dims: [1] } }
    """
    write(root, "m", f'backend: "{backend}" {IO.format(dims="-1")} default_model_filename: "model.onnx" {settings}')
    (root / "m/1/model.py").unlink()
    onnx.save(model, str(root / "m/1/model.onnx"))


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_state_of_a_model_file_is_kept_and_hidden(tmp_path: Path, backend: str) -> None:
    write_file(tmp_path, backend, "Add")

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            one = tensor("IN", [[1.0]])
            first = await server.ask("m", one, sequence_id=1, sequence_start=True).one()
            assert [output.name for output in first.outputs] == ["OUT"]
            assert await server.numbers("m", one, sequence_id=1) == [[2.0]]
            assert await server.numbers("m", one, sequence_id=1, outputs=("OUT",)) == [[3.0]]

    asyncio.run(main())


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_state_of_a_model_file_that_outgrows_its_configuration_is_an_error(tmp_path: Path, backend: str) -> None:
    write_file(tmp_path, backend, "Concat", axis=1)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            for start in (True, False):
                refused = await server.ask("m", tensor("IN", [[1.0]]), sequence_id=1, sequence_start=start).error()
                assert (
                    refused.text == "model 'm' gave output 'IS' as FP32 [1, 2]; its configuration says FP32 [-1, 1]"
                )

    asyncio.run(main())


@pytest.mark.parametrize(
    ("makes", "found"),
    [("np.zeros((1, 3), np.float32)", "FP32 [1, 3]"), ("np.zeros((1, 2))", "FP64 [1, 2]")],
    ids=["shape", "datatype"],
)
def test_state_that_contradicts_its_configuration_fails_the_request_and_is_not_kept(
    tmp_path: Path, makes: str, found: str
) -> None:
    settings = """
        max_batch_size: 2
        sequence_batching { state { input_name: "WAS" output_name: "IS" data_type: TYPE_FP32 dims: [2] } }
    """
    source = f"""
    def answer(self, request):
        state = get(request, "WAS") + 1 if get(request)[0, 0] else {makes}
        out = pb_utils.Tensor("OUT", get(request, "WAS"))
        return pb_utils.InferenceResponse([out, pb_utils.Tensor("IS", state)])
    """
    write(tmp_path, "m", f'backend: "python" {IO.format(dims="2")} {settings}', source)

    async def main() -> None:
        async with serving(tmp_path, startup=("m",)) as server:
            good, bad = tensor("IN", [[1.0, 1.0]]), tensor("IN", [[0.0, 0.0]])
            assert await server.numbers("m", good, sequence_id=1, sequence_start=True) == [[0.0, 0.0]]
            refused = await server.ask("m", bad, sequence_id=1).error()
            assert refused.text == f"model 'm' gave output 'IS' as {found}; its configuration says FP32 [-1, 2]"
            assert await server.numbers("m", good, sequence_id=1, sequence_end=True) == [[1.0, 1.0]]

    asyncio.run(main())
