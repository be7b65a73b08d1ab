"""What is specific to OpenVINO: other formats, fixed batch sizes, unsupported values."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino
import pytest
from openvino import opset13
from tests.contract.tensor.models import ask, build, config, load, run, sample, spec
from tests.contract.tensor.test_onnx_backend import weighted

from forebay.core.serving.config import Datatype
from forebay.core.serving.errors import Kind
from forebay.engines.tensor.arrays import DTYPES
from forebay.engines.tensor.protocol import BackendFailed

FP32 = config("openvino", Datatype.FP32, "identity")


def fixed(folder: Path, *shape: int) -> None:
    """A model Y = 2 · X that takes that shape only, and has no name for its output."""
    x = opset13.parameter(list(shape), openvino.Type.f32, name="X")
    x.output(0).set_names({"X"})
    double = opset13.multiply(x, np.float32(2), name="double")
    openvino.save_model(openvino.Model([opset13.result(double)], [x]), folder / "model.xml", compress_to_fp16=False)


def test_onnx_files_are_supported(tmp_path: Path) -> None:
    build("onnxruntime", "identity", Datatype.FP32, tmp_path)
    backend, loaded = load(replace(FP32, model_file="model.onnx"), tmp_path)

    (response,) = run(backend, [ask({"X": sample(Datatype.FP32)})])

    assert response.outputs["Y"].shape == (3, 4)
    assert loaded.inputs == (spec("X", Datatype.FP32, -1, 4),)
    backend.close()


def test_onnx_weights_outside_the_folder_are_never_read(tmp_path: Path) -> None:
    weighted(tmp_path / "1", "../secret.bin")
    np.eye(4, dtype=np.float32).tofile(tmp_path / "secret.bin")

    with pytest.raises(BackendFailed, match="which lies outside its folder"):
        load(replace(FP32, model_file="model.onnx"), tmp_path / "1")


def test_fixed_batch_size_becomes_dynamic_when_configured(tmp_path: Path) -> None:
    fixed(tmp_path, 1, 4)
    backend, loaded = load(replace(FP32, outputs=()), tmp_path)

    responses = run(backend, [ask({"X": np.full((rows, 4), rows, np.float32)}) for rows in (1, 2)])

    name = loaded.outputs[0].name
    assert loaded.inputs[0].dims == (-1, 4)
    assert [each.outputs[name].tolist() for each in responses] == [[[2] * 4], [[4] * 4] * 2]
    backend.close()


@pytest.mark.parametrize("changed", [{"max_batch": 0}, {"parameters": {"SKIP_OV_DYNAMIC_BATCHSIZE": "YES"}}])
def test_a_fixed_batch_size_is_kept_unless_configured_otherwise(changed: dict[str, object], tmp_path: Path) -> None:
    fixed(tmp_path, 1, 4)
    backend, loaded = load(replace(FP32, outputs=(), **changed), tmp_path)  # type: ignore[arg-type]

    (response,) = run(backend, [ask({"X": np.ones((2, 4), np.float32)})])

    assert loaded.inputs[0].dims == (1, 4)
    assert response.error == (
        "Can't set the input tensor with index: 0, because the model input (shape=[1,4]) and the tensor "
        "(shape=(2.4)) are incompatible"
    )
    backend.close()


@pytest.mark.parametrize(
    ("kind", "number"), [(Datatype.INT64, 2**31), (Datatype.INT64, -(2**31) - 1), (Datatype.UINT64, 2**31)]
)
def test_values_of_64_bits_beyond_32_bits_are_rejected(kind: Datatype, number: int, tmp_path: Path) -> None:
    build("openvino", "identity", kind, tmp_path)
    backend, _ = load(config("openvino", kind, "identity"), tmp_path)

    (response,) = run(backend, [ask({"X": np.array([[0, 1, 2, number]], DTYPES[kind])})])

    assert response.error == "input 'X' holds numbers beyond 32 bits, with which OpenVINO computes on a CPU"
    backend.close()


@pytest.mark.parametrize(("word", "text"), [(b"a\0", "ends in a zero byte"), (b"\xff", "bytes that are not UTF-8")])
def test_strings_that_would_be_altered_are_rejected(word: bytes, text: str, tmp_path: Path) -> None:
    build("openvino", "identity", Datatype.BYTES, tmp_path)
    backend, _ = load(config("openvino", Datatype.BYTES, "identity"), tmp_path)

    (response,) = run(backend, [ask({"X": np.array([[word] * 4], object)})])

    assert text in response.error
    assert response.kind is Kind.INVALID_ARGUMENT
    backend.close()


def test_strings_that_padding_would_blow_up_are_rejected(tmp_path: Path) -> None:
    build("openvino", "identity", Datatype.BYTES, tmp_path)
    backend, _ = load(config("openvino", Datatype.BYTES, "identity"), tmp_path)
    uneven = np.array([[b"x" * (1 << 20), b"", b"", b""], *[[b""] * 4] * 100], object)

    large, small = run(backend, [ask({"X": uneven}), ask({"X": np.array([[b"a"] * 4], object)})])

    assert "padded to the longest" in large.error
    assert large.kind is Kind.INVALID_ARGUMENT
    assert small.outputs["Y"].tolist() == [[b"a"] * 4]
    backend.close()


@pytest.mark.parametrize(
    "parameters",
    [
        {"PERFORMANCE_HINT": "throughput", "NUM_STREAMS": "AUTO"},
        {"INFERENCE_NUM_THREADS": "1", "NUM_STREAMS": "1", "HINT_BF16": "YES"},
    ],
)
def test_device_options_are_accepted(parameters: dict[str, str], tmp_path: Path) -> None:
    build("openvino", "identity", Datatype.FP32, tmp_path)
    backend, _ = load(replace(FP32, parameters=parameters), tmp_path)

    assert run(backend, [ask({"X": np.ones((1, 4), np.float32)})])[0].error == ""
    backend.close()


def test_unsupported_element_type_is_rejected(tmp_path: Path) -> None:
    x = opset13.parameter([-1, 4], openvino.Type.u4, name="X")
    model = openvino.Model([opset13.result(opset13.convert(x, "f32"))], [x])
    openvino.save_model(model, tmp_path / "model.xml")

    with pytest.raises(BackendFailed, match="has elements of u4, which the protocol cannot carry"):
        load(FP32, tmp_path)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"INFERENCE_NUM_THREADS": "-1"}, "INFERENCE_NUM_THREADS is '-1'; it must be a whole number"),
        ({"TARGET_DEVICE": "MOON"}, "cannot be loaded"),
    ],
)
def test_invalid_options_are_rejected(parameters: dict[str, str], text: str, tmp_path: Path) -> None:
    build("openvino", "identity", Datatype.FP32, tmp_path)

    with pytest.raises(BackendFailed, match=text):
        load(replace(FP32, parameters=parameters), tmp_path)


def test_a_file_without_outputs_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.xml").write_text('<net name="empty" version="11"><layers/><edges/></net>')
    (tmp_path / "model.bin").write_bytes(b"")

    with pytest.raises(BackendFailed, match=r"model\.xml describes a model without outputs"):
        load(FP32, tmp_path)
