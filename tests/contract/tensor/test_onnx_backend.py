"""What is specific to ONNX Runtime: external files, optional inputs, options, non-tensor outputs."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from tests.contract.tensor.models import ask, build, config, load, run
from tests.examples import USUAL

from forebay.core.serving.config import Datatype, DynamicBatching
from forebay.core.serving.errors import Kind
from forebay.engines.tensor import onnx as onnx_backend
from forebay.engines.tensor.onnx_model import file as onnx_file
from forebay.engines.tensor.onnx_model import narrowing
from forebay.engines.tensor.onnx_model.file import outside
from forebay.engines.tensor.protocol import BackendFailed

PLAIN = config("onnxruntime", Datatype.FP32, "identity")


def weighted(folder: Path, location: str, deep: bool = False) -> None:
    """A model Y = X · W whose weights lie in another file; `deep`: within the branch of an If."""
    weights = TensorProto(name="W", data_type=TensorProto.FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    weights.external_data.add(key="location", value=location)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "XY")
    node, given = helper.make_node("MatMul", ["X", "W"], ["Y"]), [weights]
    if deep:
        branch = helper.make_graph([node], "branch", [], [y], given)
        true = helper.make_tensor("always", TensorProto.BOOL, [], [True])
        node, given = helper.make_node("If", ["always"], ["Y"], then_branch=branch, else_branch=branch), [true]
    graph = helper.make_graph([node], "g", [x], [y], given)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def test_int8_products_do_not_overflow_without_vnni(tmp_path: Path) -> None:
    weights = np.full((64, 4), 127, np.int8)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["X"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "W", "zero"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["cast"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["cast", "scale"], ["Y"]),
    ]
    x = helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n", 64])
    y = helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["n", 4])
    graph = helper.make_graph(nodes, "g", [x], [y], [onnx.numpy_helper.from_array(weights, "W")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    backend, _ = load(PLAIN, tmp_path)

    (response,) = run(backend, [ask({"X": np.ones((2, 64), np.float32)})])

    assert response.outputs["Y"] == pytest.approx(64.0 * 127)
    backend.close()


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_batch_runs_in_parts_of_as_many_rows_as_are_set(name: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["X"], ["rows"], start=0, end=1),
        helper.make_node("Cast", ["rows"], ["together"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["X", "together"], ["Y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1]) for name in "XY")
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 15)], ir_version=8
    )
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    found = config(
        name,
        Datatype.FP32,
        "identity",
        model_file="model.onnx",
        batching=DynamicBatching(),
        parameters={"forebay.micro_batch_rows": "2"},
    )
    backend, _ = load(found, tmp_path)
    requests = [ask({"X": np.full((rows, 1), 10 * rows, np.float32)}) for rows in (1, 3, 2)]

    whole, parts = run(backend, requests), run(backend, requests)

    assert [each.outputs["Y"].ravel().tolist() for each in whole] == [[16], [36] * 3, [26] * 2]
    assert [each.outputs["Y"].ravel().tolist() for each in parts] == [[12], [32] * 3, [22] * 2]
    backend.close()


def _answers_with_identity(folder: Path) -> None:
    backend, _ = load(PLAIN, folder)

    (response,) = run(backend, [ask({"X": np.ones((2, 4), np.float32)})])

    assert response.outputs["Y"].tolist() == [[1.0] * 4] * 2
    backend.close()


@pytest.mark.parametrize("deep", [False, True])
def test_external_weights_in_the_folder_are_read(deep: bool, tmp_path: Path) -> None:
    weighted(tmp_path / "1", "weights.bin", deep)
    np.eye(4, dtype=np.float32).tofile(tmp_path / "1" / "weights.bin")
    _answers_with_identity(tmp_path / "1")


def test_model_and_weights_can_be_links_into_one_folder(tmp_path: Path) -> None:
    weighted(tmp_path / "1", "weights.bin")
    np.eye(4, dtype=np.float32).tofile(tmp_path / "1" / "weights.bin")
    (tmp_path / "contents").mkdir()
    for number, name in enumerate(("model.onnx", "weights.bin")):
        (tmp_path / "1" / name).rename(tmp_path / "contents" / str(number))
        (tmp_path / "1" / name).symlink_to(f"../contents/{number}")
    _answers_with_identity(tmp_path / "1")


def test_weights_that_are_a_link_elsewhere_are_never_read(tmp_path: Path) -> None:
    weighted(tmp_path / "1", "weights.bin")
    np.eye(4, dtype=np.float32).tofile(tmp_path / "secret")
    (tmp_path / "1" / "weights.bin").symlink_to("../secret")

    with pytest.raises(BackendFailed, match=r"refers to .*, which lies outside its folder"):
        load(PLAIN, tmp_path / "1")


def test_model_file_can_be_a_folder(tmp_path: Path) -> None:
    weighted(tmp_path / "1" / "model.onnx", "weights.bin")
    np.eye(4, dtype=np.float32).tofile(tmp_path / "1" / "model.onnx" / "weights.bin")
    _answers_with_identity(tmp_path / "1")


def test_strings_with_bfloat16_are_rejected_at_load(tmp_path: Path) -> None:
    kinds = {"S": TensorProto.STRING, "B": TensorProto.BFLOAT16, "F": TensorProto.FLOAT}
    s, b, f = (helper.make_tensor_value_info(name, kind, ["n", 4]) for name, kind in kinds.items())
    cast = helper.make_node("Cast", ["F"], ["B"], to=TensorProto.BFLOAT16)
    graph = helper.make_graph([cast], "g", [s, f], [b])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())

    with pytest.raises(BackendFailed, match="takes strings and has tensors of bfloat16"):
        load(PLAIN, tmp_path)


def test_invalid_utf8_string_fails_only_its_request(tmp_path: Path) -> None:
    build("onnxruntime", "identity", Datatype.BYTES, tmp_path)
    backend, _ = load(config("onnxruntime", Datatype.BYTES, "identity"), tmp_path)

    bad, good = run(backend, [ask({"X": np.array([[word] * 4], object)}) for word in (b"\xff", b"a")])

    assert "bytes that are not UTF-8" in bad.error
    assert (bad.kind, good.error) == (Kind.INVALID_ARGUMENT, "")
    backend.close()


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("location", ["../secret.bin", "sub/../../secret.bin", "{absolute}", "link.bin"])
def test_weights_outside_the_folder_are_never_read(location: str, deep: bool, tmp_path: Path) -> None:
    secret = tmp_path / "secret.bin"
    np.eye(4, dtype=np.float32).tofile(secret)
    weighted(tmp_path / "1", location.format(absolute=secret), deep)
    (tmp_path / "1" / "link.bin").symlink_to(secret)

    with pytest.raises(BackendFailed, match=r"refers to .*, which lies outside its folder"):
        load(PLAIN, tmp_path / "1")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    weighted(tmp_path / "1", "weights.bin")

    with pytest.raises(BackendFailed, match=r"keeps weights in 'weights\.bin', which is missing"):
        load(PLAIN, tmp_path / "1")


@settings(max_examples=USUAL)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_parsed_without_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.onnx"
    file.write_bytes(data)

    assert all(isinstance(problem, str) for problem in outside(file))


def test_graph_nesting_is_limited(tmp_path: Path) -> None:
    body = b""
    for _ in range(onnx_file.DEPTH_MAX):
        for field in (6, 5, 1):  # graph of an attribute, attribute of a node, node of a graph
            body = bytes([field << 3 | 2]) + _varint(len(body)) + body
    file = tmp_path / "deep.onnx"
    file.write_bytes(bytes([7 << 3 | 2]) + _varint(len(body)) + body)

    assert list(outside(file)) == [
        f"deep.onnx is not a whole ONNX file: its graphs are nested more than {onnx_file.DEPTH_MAX} deep"
    ]


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def test_input_with_a_default_is_optional(tmp_path: Path) -> None:
    x, y, scale = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in (("X", ["n", 4]), ("Y", ["n", 4]), ("S", [1]))
    )
    default = helper.make_tensor("S", TensorProto.FLOAT, [1], [3.0])
    graph = helper.make_graph([helper.make_node("Mul", ["X", "S"], ["Y"])], "g", [x, scale], [y], [default])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10),
        str(tmp_path / "model.onnx"),
    )
    backend, loaded = load(PLAIN, tmp_path)
    x_only = {"X": np.ones((1, 4), np.float32)}

    found = [
        run(backend, [ask(i)])[0].outputs["Y"][0, 0] for i in (x_only, x_only | {"S": np.full(1, 5, np.float32)})
    ]

    assert found == [3, 5]
    assert [(each.name, each.optional) for each in loaded.inputs] == [("X", False), ("S", True)]
    backend.close()


def test_non_tensor_outputs_are_omitted(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "XY")
    many = helper.make_tensor_sequence_value_info("MANY", TensorProto.FLOAT, None)
    nodes = [helper.make_node("Identity", ["X"], ["Y"]), helper.make_node("SequenceConstruct", ["X"], ["MANY"])]
    graph = helper.make_graph(nodes, "g", [x], [many, y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10),
        str(tmp_path / "model.onnx"),
    )
    backend, loaded = load(replace(PLAIN, outputs=()), tmp_path)

    assert [each.name for each in loaded.outputs] == ["Y"]
    assert loaded.omitted == ("output 'MANY' is not a tensor but a seq(tensor(float))",)
    assert load(PLAIN, tmp_path)[1].omitted == ()
    assert list(run(backend, [ask({"X": np.ones((1, 4), np.float32)})])[0].outputs) == ["Y"]
    backend.close()


def test_non_tensor_input_is_rejected(tmp_path: Path) -> None:
    many = helper.make_tensor_sequence_value_info("MANY", TensorProto.FLOAT, None)
    y = helper.make_tensor_value_info("Y", TensorProto.INT64, [])
    graph = helper.make_graph([helper.make_node("SequenceLength", ["MANY"], ["Y"])], "g", [many], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10),
        str(tmp_path / "model.onnx"),
    )

    with pytest.raises(BackendFailed, match=r"input 'MANY' is not a tensor but a seq\(tensor\(float\)\)"):
        load(PLAIN, tmp_path)


def test_unsupported_element_type_is_rejected(tmp_path: Path) -> None:
    small = helper.make_tensor_value_info("SMALL", TensorProto.FLOAT8E4M3FN, ["n"])
    y = helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["n"])
    node = helper.make_node("Cast", ["SMALL"], ["Y"], to=TensorProto.FLOAT)
    onnx.save(
        helper.make_model(
            helper.make_graph([node], "g", [small], [y]), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
        ),
        str(tmp_path / "model.onnx"),
    )

    text = "input 'SMALL' is a tensor(float8e4m3fn), an element type that the protocol does not have"
    with pytest.raises(BackendFailed, match=re.escape(text)):
        load(PLAIN, tmp_path)


def test_model_without_supported_outputs_is_rejected(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n"])
    small = helper.make_tensor_value_info("SMALL", TensorProto.FLOAT8E4M3FN, ["n"])
    node = helper.make_node("Cast", ["X"], ["SMALL"], to=TensorProto.FLOAT8E4M3FN)
    onnx.save(
        helper.make_model(
            helper.make_graph([node], "g", [x], [small]), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
        ),
        str(tmp_path / "model.onnx"),
    )

    text = "it has no output that can be served: output 'SMALL' is a tensor(float8e4m3fn), an element type"
    with pytest.raises(BackendFailed, match=re.escape(text)):
        load(PLAIN, tmp_path)


def test_errors_have_triton_texts(tmp_path: Path) -> None:
    build("onnxruntime", "identity", Datatype.FP32, tmp_path)
    backend, _ = load(PLAIN, tmp_path)

    (response,) = run(backend, [ask({"X": np.ones((1, 3), np.float32)})])

    assert response.error.startswith("onnx runtime error 2: Got invalid dimensions for input: X")
    backend.close()


@pytest.mark.parametrize(
    "parameters",
    [
        {"intra_op_thread_count": "1", "inter_op_thread_count": "2", "execution_mode": "1"},
        {"enable_mem_arena": "0", "enable_mem_pattern": "1"},
    ],
)
def test_session_options_are_accepted(parameters: dict[str, str], tmp_path: Path) -> None:
    build("onnxruntime", "identity", Datatype.FP32, tmp_path)
    backend, _ = load(replace(PLAIN, parameters=parameters), tmp_path)

    assert run(backend, [ask({"X": np.ones((1, 4), np.float32)})])[0].error == ""
    backend.close()


@pytest.mark.parametrize(("level", "meaning"), [(0, "ALL"), (-1, "BASIC"), (1, "EXTENDED"), (2, "DISABLE_ALL")])
def test_the_level_of_optimisation_is_tritons(level: int, meaning: str) -> None:
    options = onnx_backend._options(replace(PLAIN, graph_level=level))

    assert options.graph_optimization_level.name.removeprefix("ORT_ENABLE_").removeprefix("ORT_") == meaning


@pytest.mark.parametrize(
    ("word", "on"), [("1", True), ("true", True), ("True", True), ("0", False), ("false", False)]
)
def test_switches_may_be_words(word: str, on: bool) -> None:
    given = {"enable_mem_arena": word, "enable_mem_pattern": word}
    options = onnx_backend._options(replace(PLAIN, parameters=given))

    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (on, on)


def test_invalid_thread_count_is_rejected(tmp_path: Path) -> None:
    build("onnxruntime", "identity", Datatype.FP32, tmp_path)

    with pytest.raises(BackendFailed, match="intra_op_thread_count is 'many'; it must be a whole number"):
        load(replace(PLAIN, parameters={"intra_op_thread_count": "many"}), tmp_path)


def test_gpu_options_map_to_provider_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """What becomes of them on a GPU is tested in tests/gpu."""
    given = {"gpu_mem_limit": "4294967200", "cudnn_conv_algo_search": "1", "arena_extend_strategy": "1"}
    providers = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)

    assert onnx_backend._providers(replace(PLAIN, parameters=given), True) == [
        (
            "CUDAExecutionProvider",
            {
                "gpu_mem_limit": "4294967200",
                "cudnn_conv_algo_search": "HEURISTIC",
                "arena_extend_strategy": "kSameAsRequested",
            },
        ),
        ("CPUExecutionProvider", {}),
    ]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("gpu_mem_limit", "4 GiB", "is '4 GiB'; it must be a whole number"),
        ("cudnn_conv_algo_search", "3", "is 3; it must be below 3"),
    ],
)
def test_invalid_gpu_option_is_rejected_without_a_gpu(name: str, value: str, text: str, tmp_path: Path) -> None:
    build("onnxruntime", "identity", Datatype.FP32, tmp_path)

    with pytest.raises(BackendFailed, match=f"parameter {name} {text}"):
        load(replace(PLAIN, parameters={name: value}), tmp_path)


def reading_first(width: int = 4) -> onnx.ModelProto:
    """Y is the first position of X · W, after positions were mixed."""
    nodes = [
        helper.make_node("Softmax", ["X"], ["mixed"], axis=1),
        helper.make_node("MatMul", ["mixed", "W"], ["all"]),
        helper.make_node("Gather", ["all", "first"], ["Y"], axis=1),
    ]
    x = helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n", "positions", width])
    y = helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["n", width])
    constants = [
        onnx.numpy_helper.from_array(np.arange(width * width, dtype=np.float32).reshape(width, width), "W"),
        onnx.numpy_helper.from_array(np.array(0), "first"),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("level", "rewritten", "changed"),
    [
        pytest.param(0, None, False, id="as it is"),
        pytest.param(0, "other", True, id="rewritten"),
        pytest.param(0, "broken", False, id="the rewritten one cannot be loaded"),
        pytest.param(1, "other", False, id="not all optimisations"),
    ],
)
def test_a_model_that_reads_one_position_is_rewritten(
    level: int, rewritten: str | None, changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reading_first()
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    if rewritten is not None:
        model.graph.node[2].op_type = "NoSuchOperator" if rewritten == "broken" else "Gather"
        model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.zeros((4, 4), np.float32), "W"))
        monkeypatch.setattr(narrowing, "narrowed", lambda _: model.SerializeToString())
    backend, _ = load(config("onnxruntime", Datatype.FP32, "identity", graph_level=level), tmp_path)

    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    (response,) = run(backend, [ask({"X": x})])

    mixed = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    wanted = mixed[:, 0] @ np.arange(16, dtype=np.float32).reshape(4, 4)
    assert response.outputs["Y"] == pytest.approx(np.zeros((2, 4)) if changed else wanted, rel=1e-5)
    backend.close()
