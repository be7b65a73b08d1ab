"""Completing a configuration from the loaded model, and rejecting one that contradicts it."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.modelserver.repository.models import described
from tests.modelserver.repository.writing import message_from

from forebay.core.serving.config import (
    BatchInput,
    BatchKind,
    BatchOutput,
    Datatype,
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    SequenceBatching,
    TensorSpec,
    VersionPolicy,
    VersionRule,
)
from forebay.engines.tensor.protocol import Loaded
from forebay.modelserver.repository import BadModel, Described, Rules, complete, same_but_instances
from forebay.modelserver.repository.form.schema import document_of

IMAGE = TensorSpec("image", Datatype.FP32, (-1, 3, 224, 224))
SCORES = TensorSpec("scores", Datatype.FP32, (-1, 1000))
BATCHING = Loaded((IMAGE,), (SCORES,))
FIXED = Loaded((replace(IMAGE, dims=(1, 3, 224, 224)),), (SCORES,))
FILE = "1/model.onnx"


def completed(folder: Path, config: str | None, loaded: Loaded, rules: Rules | None = None) -> Described:
    return complete(described(folder, config, FILE, rules=rules), loaded, rules)


def refusals(folder: Path, config: str, loaded: Loaded, rules: Rules | None = None) -> list[str]:
    with pytest.raises(BadModel) as raised:
        completed(folder, config, loaded, rules)
    return list(raised.value.problems)


def test_model_with_only_variable_first_dimensions_batches(tmp_path: Path) -> None:
    got = completed(tmp_path, None, BATCHING)

    assert got.config.max_batch == 4
    assert got.config.batching == DynamicBatching(preferred_sizes=(4,))
    assert got.config.inputs == (TensorSpec("image", Datatype.FP32, (3, 224, 224)),)
    assert got.config.outputs == (TensorSpec("scores", Datatype.FP32, (1000,)),)
    assert got.document["input"][0]["dims"] == [3, 224, 224]
    assert got.document["dynamic_batching"]["preferred_batch_size"] == [4]


@pytest.mark.parametrize(
    ("config", "max_batch_default", "expected"),
    [
        ("", 1, (1, None)),
        ("", 0, (0, None)),
        ("", -1, (0, None)),
        ("max_batch_size: 32", 4, (32, DynamicBatching(preferred_sizes=(32,)))),
        ("dynamic_batching { preferred_batch_size: [] }", 8, (8, DynamicBatching(preferred_sizes=(8,)))),
        ("max_batch_size: 8 sequence_batching {}", 4, (8, None)),
    ],
)
def test_max_batch_size_from_file_configuration_and_default(
    tmp_path: Path, config: str, max_batch_default: int, expected: tuple[int, DynamicBatching | None]
) -> None:
    got = completed(tmp_path, config, BATCHING, Rules(max_batch_default=max_batch_default)).config

    assert (got.max_batch, got.batching) == expected
    assert len(got.inputs[0].dims) == (3 if got.max_batch else 4)


@pytest.mark.parametrize(("backend", "expected"), [("onnxruntime", 2), ("openvino", 9)])
def test_how_much_a_model_batches_may_be_said_for_its_backend(tmp_path: Path, backend: str, expected: int) -> None:
    rules = Rules(max_batch_default=9, max_batch_of={"onnxruntime": 2})
    assert completed(tmp_path, f"backend: '{backend}'", BATCHING, rules).config.max_batch == expected


@pytest.mark.parametrize(
    "config",
    [
        "input { name: 'image' data_type: TYPE_FP32 dims: [ -1, 3, 224, 224 ] }",
        "output { name: 'scores' data_type: TYPE_FP32 dims: [ 5, 1000 ] }",
    ],
)
def test_model_with_a_tensor_declared_as_in_the_file_does_not_batch(config: str, tmp_path: Path) -> None:
    got = completed(tmp_path, config, BATCHING).config

    assert (got.max_batch, got.batching) == (0, None)
    assert [len(spec.dims) for spec in (*got.inputs, *got.outputs)] == [4, 2]


def test_model_with_a_fixed_first_dimension_does_not_batch(tmp_path: Path) -> None:
    got = completed(tmp_path, None, FIXED).config

    assert (got.max_batch, got.batching, got.inputs[0].dims) == (0, None, (1, 3, 224, 224))
    assert refusals(tmp_path, "max_batch_size: 8", FIXED)[0] == (
        "max_batch_size: found 8, but the model does not batch: "
        "'image' has the shape [1, 3, 224, 224], which does not begin with -1"
    )


def test_scalar_output_has_one_element_for_clients(tmp_path: Path) -> None:
    batched = completed(tmp_path, None, Loaded((IMAGE,), (TensorSpec("loss", Datatype.FP64, (-1,)),)))
    alone = completed(tmp_path, None, Loaded((IMAGE,), (TensorSpec("loss", Datatype.FP64, ()),)))

    assert batched.config.outputs == alone.config.outputs == (TensorSpec("loss", Datatype.FP64, (1,), ()),)


@pytest.mark.parametrize("dims", ["1", "[1, 1]", "1 reshape { }"])
def test_scalar_is_configured_as_one_element(dims: str, tmp_path: Path) -> None:
    config = f"input {{ name: 'x' data_type: TYPE_FP32 dims: {dims} }} output {{ name: 'y' }}"
    scalars = Loaded((TensorSpec("x", Datatype.FP32, ()),), (TensorSpec("y", Datatype.FP32, ()),))
    got = completed(tmp_path, config, scalars).config

    assert [each.reshape for each in (*got.inputs, *got.outputs)] == [(), ()]


def test_configuration_says_the_dims_that_an_onnx_file_leaves_open(tmp_path: Path) -> None:
    config = "output { name: 'y' data_type: TYPE_FP32 dims: [ -1, 4 ] }"
    unknown = Loaded((replace(IMAGE, dims=(3,)),), (TensorSpec("y", Datatype.FP32, ()),))

    assert completed(tmp_path, config, unknown).config.outputs == (TensorSpec("y", Datatype.FP32, (-1, 4)),)
    assert refusals(tmp_path, config + "backend: 'openvino'", unknown) == [
        "output[0].dims: 'y' is [-1, 4]; the model has []"
    ]


def test_scheduler_tensors_are_not_client_inputs_or_outputs(tmp_path: Path) -> None:
    config = """max_batch_size: 2 sequence_batching {
      control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
      state { input_name: "si" output_name: "so" data_type: TYPE_FP32 dims: 2 } }"""
    extra = [TensorSpec(name, Datatype.FP32, (-1, 2)) for name in ("START", "si", "so")]
    loaded = Loaded((IMAGE, *extra[:2]), (SCORES, extra[2]))

    got = completed(tmp_path, config, loaded).config
    declared = completed(
        tmp_path, config + "input { name: 'image' data_type: TYPE_FP32 dims: [3, 224, 224] }", loaded
    )

    assert [spec.name for spec in (*got.inputs, *got.outputs)] == ["image", "scores"]
    assert got.inputs == declared.config.inputs


@pytest.mark.parametrize("config", [None, "max_batch_size: 8"])
def test_optional_input_without_a_batch_does_not_keep_a_model_from_batching(
    config: str | None, tmp_path: Path
) -> None:
    weights = TensorSpec("weights", Datatype.FP32, (1000,), optional=True)
    got = completed(tmp_path, config, Loaded((IMAGE, weights), (SCORES,))).config

    assert got.max_batch == (8 if config else 4)
    assert [spec.name for spec in got.inputs] == ["image"]


WHOLE = """max_batch_size: 8
input { name: "image" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 1000 ] }
"""


def test_complete_configuration_is_unchanged(tmp_path: Path) -> None:
    before = described(tmp_path, WHOLE, FILE)

    assert complete(before, BATCHING) == before
    assert complete(before, Loaded()) == before


def test_outputs_and_optional_inputs_can_be_omitted(tmp_path: Path) -> None:
    more = Loaded(
        (IMAGE, TensorSpec("mask", Datatype.BOOL, (-1,), optional=True)), (SCORES, replace(SCORES, name="x"))
    )

    assert [spec.name for spec in completed(tmp_path, WHOLE, more).config.outputs] == ["scores"]


def test_tensor_given_by_name_only_is_completed(tmp_path: Path) -> None:
    loss = TensorSpec("loss", Datatype.FP32, (-1,))
    got = completed(
        tmp_path, "input { name: 'image' } output { name: 'loss' }", Loaded((IMAGE,), (SCORES, loss))
    ).config
    batched = completed(
        tmp_path,
        "max_batch_size: 2 input { name: 'image' } output { name: 'loss' }",
        Loaded((IMAGE,), (SCORES, loss)),
    ).config

    assert got.inputs == (IMAGE,)
    assert batched.inputs == (TensorSpec("image", Datatype.FP32, (3, 224, 224)),)
    assert batched.outputs == (TensorSpec("loss", Datatype.FP32, (1,), ()),)


CONTRADICTIONS = {
    "another name": (
        WHOLE.replace('"image"', '"img"'),
        ["input[0].name: found 'img'; the model's inputs are ['image']",
         "input: the model also has ['image'], and needs them"],
    ),
    "another type": (
        WHOLE.replace("TYPE_FP32 dims: [ 3", "TYPE_UINT8 dims: [ 3"),
        ["input[0].data_type: found TYPE_UINT8 for 'image'; the model has TYPE_FP32"],
    ),
    "another size": (
        WHOLE.replace("1000", "10"),
        [
            "output[0].dims: 'scores' is [-1, 10] with the batch in front (max_batch_size is not 0); the model has "
            "[-1, 1000]"
        ],
    ),
    "another rank": (
        WHOLE.replace("max_batch_size: 8", ""),
        [
            "input[0].dims: 'image' is [3, 224, 224]; the model has [-1, 3, 224, 224]",
            "output[0].dims: 'scores' is [1000]; the model has [-1, 1000]",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradiction_names_configured_and_actual_values(tmp_path: Path, config: str, expected: list[str]) -> None:
    assert refusals(tmp_path, config, BATCHING) == expected


def test_batching_requires_a_variable_first_dimension_in_the_file(tmp_path: Path) -> None:
    assert refusals(tmp_path, WHOLE, FIXED) == [
        "input[0].dims: 'image' is [-1, 3, 224, 224] with the batch in front (max_batch_size is not 0); the model "
        "has [1, 3, 224, 224]"
    ]


def test_reshaped_inputs_are_compared_after_reshape(tmp_path: Path) -> None:
    reshaped = "dims: [ 150528 ] reshape { shape: [ 3, 224, 224 ] }"

    completed(tmp_path, WHOLE.replace("dims: [ 3, 224, 224 ]", reshaped), BATCHING)


SEQUENCES = """
    max_batch_size: 8
    sequence_batching {
        control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
        control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
        state { input_name: "was" output_name: "is" data_type: TYPE_FP32 dims: [ 2 ] }
    }
"""
FED = {
    "START": Datatype.INT32, "id": Datatype.UINT64, "was": Datatype.FP32, "x": Datatype.FP32, "is": Datatype.FP32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"START": Datatype.BOOL}, ["control_input[0]: found TYPE_INT32 for 'START'; the model has TYPE_BOOL"]),
        ({"id": None}, ["control_input[1].name: found 'id'; the model's inputs are ['START', 'was', 'x']"]),
        ({"is": Datatype.FP64}, ["state[0]: found TYPE_FP32 for 'is'; the model has TYPE_FP64"]),
        ({"is": None}, ["state[0].output_name: found 'is'; the model's outputs are ['y']"]),
    ],
)
def test_controls_and_states_are_compared_with_the_file(
    tmp_path: Path, changed: dict[str, Datatype | None], expected: list[str]
) -> None:
    specs = {name: TensorSpec(name, kind, (-1, 2)) for name, kind in (FED | changed).items() if kind is not None}
    made = [specs.pop("is")] if "is" in specs else []
    loaded = Loaded(tuple(specs.values()), (TensorSpec("y", Datatype.FP32, (-1, 2)), *made))

    if expected:
        assert refusals(tmp_path, SEQUENCES, loaded) == [f"sequence_batching.{problem}" for problem in expected]
    else:
        assert [spec.name for spec in completed(tmp_path, SEQUENCES, loaded).config.inputs] == ["x"]


RAGGED = """
    max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: [ 9, -1 ] allow_ragged_batch: true }
    output { name: "y" data_type: TYPE_FP32 dims: [ 9, -1 ] }
    batch_input { kind: BATCH_ELEMENT_COUNT target_name: "n" data_type: TYPE_INT32 source_input: "x" }
    batch_output { target_name: "y" source_input: "x" }
"""
FLAT = Loaded(
    (TensorSpec("x", Datatype.FP32, (-1,)), TensorSpec("n", Datatype.INT32, (-1,))),
    (TensorSpec("y", Datatype.FP32, (-1,)),),
)


def test_ragged_input_is_flat_and_batch_inputs_are_not_client_inputs(tmp_path: Path) -> None:
    got = completed(tmp_path, RAGGED, FLAT).config

    assert got.batch_inputs == (BatchInput(BatchKind.COUNT, ("n",), Datatype.INT32, "x"),)
    assert got.batch_outputs == (BatchOutput(("y",), "x"),)
    assert [spec.name for spec in got.inputs] == ["x"]


def test_model_incompatible_with_ragged_batches_is_rejected(tmp_path: Path) -> None:
    wide = Loaded((TensorSpec("x", Datatype.FP32, (-1, 9, -1)), replace(FLAT.inputs[1], name="m")), FLAT.outputs)
    other = Loaded((FLAT.inputs[0], TensorSpec("n", Datatype.FP32, (-1,))), FLAT.outputs)

    assert refusals(tmp_path, RAGGED, wide) == [
        "batch_input[0].target_name: found 'n'; the model's inputs are ['m', 'x']",
        "input[0].allow_ragged_batch: 'x' is ragged, so a batch has it in one dimension; the model has [-1, 9, -1]",
        "input: the model also has ['m'], and needs them",
    ]
    assert refusals(tmp_path, RAGGED, other) == [
        "batch_input[0].data_type: found TYPE_INT32 for 'n'; the model has TYPE_FP32"
    ]


def test_auto_complete_disabled_adds_nothing(tmp_path: Path) -> None:
    strict = Rules(auto_complete=False)

    assert refusals(tmp_path, "max_batch_size: 8", BATCHING, strict) == [
        "input: the model also has ['image'], and needs them"
    ]
    assert completed(tmp_path, WHOLE, BATCHING, strict).config.batching is None


def test_tensors_unknown_to_the_model_must_be_configured(tmp_path: Path) -> None:
    torch = described(tmp_path, "backend: 'pytorch' input { name: 'a' dims: 1 }", "1/model.pt")

    with pytest.raises(BadModel) as raised:
        complete(torch, Loaded())

    assert raised.value.problems == (
        "input: must be given, and output too: the file does not name its tensors",
        "input[0].data_type: must be given for 'a'",
    )
    assert complete(described(tmp_path, "backend: 'python'"), Loaded()).config.inputs == ()


def test_python_model_can_complete_its_own_configuration(tmp_path: Path) -> None:
    before = described(tmp_path, "backend: 'python'", "1/model.py")
    said = replace(
        before.config,
        max_batch=16,
        inputs=(TensorSpec("a", Datatype.BYTES, (-1,), optional=True),),
        outputs=(TensorSpec("b", Datatype.INT8, (2, 2), (4,)),),
        batching=DynamicBatching(delay_s=0.001),
        decoupled=True,
    )

    got = complete(before, Loaded(config=said)).config

    assert got == replace(said, batching=DynamicBatching(preferred_sizes=(16,), delay_s=0.001))


def test_configuration_from_the_model_is_validated(tmp_path: Path) -> None:
    before = described(tmp_path, "backend: 'python' sequence_batching {}", "1/model.py")
    said = replace(
        before.config, max_batch=-2, inputs=(TensorSpec("a", Datatype.FP32, ()),), batching=DynamicBatching()
    )

    with pytest.raises(BadModel) as raised:
        complete(before, Loaded(config=said))

    assert raised.value.problems == (
        "max_batch_size: found -2; allowed: 0 (no batches) or more",
        "input[0].dims: must be given for 'a'",
    )


def test_allow_pickle_survives_completion(tmp_path: Path) -> None:
    rules = Rules(allow_pickle=frozenset({"m"}))
    got = completed(tmp_path, WHOLE, BATCHING, rules)

    assert got.config.parameters == {"forebay.allow_pickle": "true"}


BASE = ModelConfig("m", "python", instances=(InstanceGroup(count=1),))


@pytest.mark.parametrize(
    ("new", "same"),
    [
        (BASE, True),
        (replace(BASE, instances=(InstanceGroup(count=5), InstanceGroup("x"))), True),
        (replace(BASE, versions=VersionPolicy(VersionRule.ALL)), True),
        (replace(BASE, max_batch=1), False),
        (replace(BASE, parameters={"a": "b"}), False),
        (replace(BASE, sequences=SequenceBatching()), False),
    ],
)
def test_only_instance_and_version_changes_need_no_reload(new: ModelConfig, same: bool) -> None:
    assert same_but_instances(_as_described(BASE), _as_described(new)) is same


def test_changed_fields_without_a_value_need_a_reload() -> None:
    message = message_from(BASE)
    message.metric_tags["team"] = "a"
    assert not same_but_instances(_as_described(BASE), Described(BASE, document_of(message), Path(), {}))


def _as_described(config: ModelConfig) -> Described:
    return Described(config, document_of(message_from(config)), Path(), {})
