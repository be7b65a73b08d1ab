"""Configurations as written for Triton: defaults, problems, and overrides by load requests."""

import json
from pathlib import Path

import pytest
from tests.modelserver.repository.models import described, model, problems

from forebay.core.serving.config import (
    Control,
    Datatype,
    DynamicBatching,
    InstanceGroup,
    InstanceKind,
    ModelConfig,
    QueuePolicy,
    Resource,
    SequenceBatching,
    State,
    Step,
    TensorSpec,
    TimeoutAction,
    VersionPolicy,
    VersionRule,
    Warmup,
    WarmupInput,
)
from forebay.modelserver.repository import BadModel, Rules, named, read, scan

TENSORS = """
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""


BATCHING = """
name: "m"  # as the folder
backend: "python"
max_batch_size: 8
input [
  { name: "IMAGE" data_type: TYPE_UINT8 format: FORMAT_NHWC dims: [ 224, 224, 3 ] },
  { name: "WORDS" data_type: TYPE_STRING dims: [ -1 ] optional: true allow_ragged_batch: true }
]
output { name: "CLASS" data_type: TYPE_BF16 dims: [ 4 ] reshape { shape: [ 2, 2 ] } label_filename: "labels.txt" }
version_policy { specific { versions: [ 3, 1 ] } }
instance_group [
  { count: 2 kind: KIND_CPU host_policy: "numa0"
    rate_limiter { resources [ { name: "R" count: 4 }, { name: "G" count: 1 global: true } ] priority: 2 } },
  { passive: true }
]
dynamic_batching {
  preferred_batch_size: [ 8, 4 ]
  max_queue_delay_microseconds: 1500
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 2000000 allow_timeout_override: true }
  priority_queue_policy { key: 3 value { max_queue_size: 7 } }
}
parameters { key: "threads" value { string_value: "2" } }
parameters { key: "forebay.age_step_ms" value { string_value: "250" } }
model_warmup { name: "w" batch_size: 2 count: 3
  inputs { key: "IMAGE" value { data_type: TYPE_UINT8 dims: [ 224, 224, 3 ] random_data: true } }
  inputs { key: "WORDS" value { data_type: TYPE_STRING dims: [ 1 ] input_data_file: "words" } } }
response_cache { enable: true }
"""


def test_dynamic_batching_configuration_with_every_field(tmp_path: Path) -> None:
    (tmp_path / "m/warmup").mkdir(parents=True)
    (tmp_path / "m/warmup/words").touch()
    (tmp_path / "m/labels.txt").write_text("cat\ndog\n\nbird\n")

    got = described(tmp_path, BATCHING, "1/model.py", "3/model.py")

    assert got.config == ModelConfig(
        name="m",
        backend="python",
        max_batch=8,
        inputs=(
            TensorSpec("IMAGE", Datatype.UINT8, (224, 224, 3), format="FORMAT_NHWC"),
            TensorSpec("WORDS", Datatype.BYTES, (-1,), optional=True, allow_ragged=True),
        ),
        outputs=(TensorSpec("CLASS", Datatype.BF16, (4,), (2, 2), label_file="labels.txt"),),
        versions=VersionPolicy(VersionRule.SPECIFIC, versions=(1, 3)),
        instances=(
            InstanceGroup(
                "m_0", InstanceKind.CPU, 2, host_policy="numa0", priority=2,
                resources=(Resource("R", 4), Resource("G", 1, is_global=True)),
            ),
            InstanceGroup("m_1", passive=True),
        ),
        batching=DynamicBatching(
            preferred_sizes=(4, 8),
            delay_s=0.0015,
            levels=3,
            default_level=2,
            default_policy=QueuePolicy(TimeoutAction.DELAY, 2.0, allow_override=True),
            policies={3: QueuePolicy(queue_max=7)},
            age_step_s=0.25,
        ),
        parameters={"threads": "2"},
        model_file="model.py",
        warmups=(
            Warmup(
                "w", 2, count=3,
                inputs={
                    "IMAGE": WarmupInput(Datatype.UINT8, (224, 224, 3), "random"),
                    "WORDS": WarmupInput(Datatype.BYTES, (1,), "file", "words"),
                },
            ),
        ),
        cache=True,
    )  # fmt: skip
    assert got.labels == {"CLASS": ("cat", "dog", "", "bird")}
    assert got.document["parameters"]["forebay.age_step_ms"] == {"string_value": "250"}
    assert sorted(got.versions) == [1, 3]
    assert got.warnings == ("instance_group[1].passive has no effect here",)


SEQUENCES = """
platform: "onnxruntime_onnx"
max_batch_size: 4
sequence_batching {
  max_sequence_idle_microseconds: 5000000
  oldest { max_candidate_sequences: 16 max_queue_delay_microseconds: 100 preserve_ordering: true }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ -1, 1 ] } ] },
    { name: "END" control { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } },
    { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
  ]
  state [
    { input_name: "SI" output_name: "SO" data_type: TYPE_INT32 dims: [ -1 ] use_growable_memory: true
      initial_state { name: "zeros" data_type: TYPE_INT32 dims: [ 2 ] zero_data: true } },
    { input_name: "TI" output_name: "TO" data_type: TYPE_FP32 dims: [ 3 ]
      initial_state { name: "t" data_type: TYPE_FP32 dims: [ 3 ] data_file: "t" } }
  ]
  iterative_sequence: true
}
"""


def test_sequence_batching_configuration_with_every_field(tmp_path: Path) -> None:
    got = described(tmp_path, SEQUENCES, "1/model.onnx", "initial_state/t")

    assert got.config.sequences == SequenceBatching(
        idle_max_s=5.0,
        oldest=True,
        controls=(
            Control("START", "START", Datatype.FP32, (0.0, 1.0)),
            Control("READY", "READY", Datatype.INT32, (-1, 1)),
            Control("END", "END", Datatype.BOOL, (False, True)),
            Control("ID", "CORRID", Datatype.BYTES),
        ),
        states=(
            State("SI", "SO", Datatype.INT32, (-1,), initial_dims=(2,)),
            State("TI", "TO", Datatype.FP32, (3,), "t", (3,)),
        ),
        delay_s=0.0001,
        preferred_sizes=(4,),
        candidates_max=16,
        preserve_ordering=True,
        iterative=True,
    )
    assert got.warnings[1:] == ("sequence_batching.state[0].use_growable_memory has no effect here",)


def test_warmup_without_batch_size_gives_a_warning(tmp_path: Path) -> None:
    sample = "model_warmup { inputs { key: 'x' value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }"

    got = described(tmp_path, f"max_batch_size: 2 {sample}", "1/model.py")

    assert got.warnings == ("model_warmup[0] (its batch_size is 0) has no effect here",)


def test_batch_inputs_of_a_python_model_give_a_warning(tmp_path: Path) -> None:
    text = """
        max_batch_size: 2 input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
        batch_input { target_name: "n" data_type: TYPE_INT32 source_input: "x" }
    """

    assert described(tmp_path, text, "1/model.py").warnings == ("batch_input has no effect here",)


def test_sequence_batching_defaults_to_direct_with_one_second_idle_time(tmp_path: Path) -> None:
    direct = "sequence_batching { direct { minimum_slot_utilization: 0.3 max_queue_delay_microseconds: 5 } }"
    assert described(tmp_path, direct).config.sequences == SequenceBatching(
        delay_s=5e-6, minimum_slot_utilization=0.3
    )
    assert described(tmp_path, "sequence_batching {}").config.sequences == SequenceBatching(idle_max_s=1.0)


def test_ensemble_configuration(tmp_path: Path) -> None:
    config = (
        TENSORS
        + """
    platform: "ensemble"
    ensemble_scheduling { max_inflight_requests: 9
      step { model_name: "a" model_version: -1
        input_map { key: "X" value: "IN" } output_map { key: "Y" value: "OUT" } }
    }"""
    )

    got = described(tmp_path, config, "1/.keep")

    assert (got.config.backend, got.config.instances, got.config.inflight_max) == ("ensemble", (), 9)
    assert got.config.steps == (Step("a", -1, {"X": "IN"}, {"Y": "OUT"}),)
    assert (got.document["platform"], got.document["backend"]) == ("ensemble", "")
    assert "optimization" not in got.document


GUESSES = {
    "model.onnx": ("onnxruntime", "onnxruntime_onnx", 2),
    "model.xml": ("openvino", "", 1),
    "model.pt": ("pytorch", "pytorch_libtorch", 1),
    "model.pt2": ("pytorch", "torch_aoti", 1),
    "model.py": ("python", "", 1),
}


@pytest.mark.parametrize("file", GUESSES)
def test_backend_is_inferred_from_the_file_with_triton_defaults(tmp_path: Path, file: str) -> None:
    backend, platform, count = GUESSES[file]

    got = described(tmp_path, None, f"1/{file}")

    assert got.config == ModelConfig(
        "m", backend, platform, model_file=file, instances=(InstanceGroup("m", InstanceKind.CPU, count),)
    )
    assert got.document["version_policy"] == {"latest": {"num_versions": 1}}
    assert got.document["optimization"]["input_pinned_memory"] == {"enable": True}
    assert got.document["cc_model_filenames"] == {}


@pytest.mark.parametrize(
    ("config", "file", "expected"),
    [
        ('backend: "openvino"', "model.onnx", ("openvino", "", "model.onnx")),
        ('backend: "openvino"', "other.xml", ("openvino", "", "model.xml")),
        ('platform: "libtorch"', "x.pt", ("pytorch", "pytorch_libtorch", "model.pt")),
        ('platform: "torch_aoti"', "x", ("pytorch", "torch_aoti", "model.pt2")),
        ('backend: "pytorch" default_model_filename: "net.pt"', "net.pt", ("pytorch", "pytorch_libtorch", "net.pt")),
        ('default_model_filename: "model.onnx"', "x", ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ('backend: "python" platform: "anything"', "x.py", ("python", "anything", "model.py")),
    ],
)
def test_backend_platform_and_file_name_are_inferred_from_each_other(
    tmp_path: Path, config: str, file: str, expected: tuple[str, str, str]
) -> None:
    got = described(tmp_path, config, f"1/{file}").config

    assert (got.backend, got.platform, got.model_file) == expected


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("", InstanceGroup("m", InstanceKind.GPU, gpus=(0, 1))),
        ("instance_group { count: 3 }", InstanceGroup("m_0", InstanceKind.GPU, 3, gpus=(0, 1))),
        ("instance_group { kind: KIND_GPU gpus: 1 }", InstanceGroup("m_0", InstanceKind.GPU, gpus=(1,))),
        ("instance_group { gpus: 1 }", InstanceGroup("m_0", InstanceKind.GPU, gpus=(1,))),
        ("instance_group { kind: KIND_MODEL }", InstanceGroup("m_0", InstanceKind.MODEL)),
    ],
)
def test_instances_default_to_the_available_gpus(tmp_path: Path, group: str, expected: InstanceGroup) -> None:
    assert described(tmp_path, group, rules=Rules(gpus=(0, 1))).config.instances == (expected,)


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_backends_without_gpu_support_default_to_the_cpu(tmp_path: Path, backend: str) -> None:
    rules = Rules(gpus=(0,), gpu_backends=frozenset({"python"}))
    (group,) = described(tmp_path, f"backend: '{backend}'", rules=rules).config.instances
    assert (group.kind, group.gpus) == (InstanceKind.CPU, ())


def test_preferred_batch_size_defaults_to_max_batch_size(tmp_path: Path) -> None:
    got = described(tmp_path, "max_batch_size: 6 dynamic_batching {}").config.batching
    assert got is not None
    assert got.preferred_sizes == (6,)
    none = described(tmp_path, "dynamic_batching {}").config.batching
    assert none is not None
    assert none.preferred_sizes == ()


def test_idle_time_is_capped_at_a_year(tmp_path: Path) -> None:
    text = "sequence_batching { max_sequence_idle_microseconds: 18446744073709551615 }"
    sequences = described(tmp_path, text).config.sequences

    assert sequences is not None
    assert sequences.idle_max_s == 365 * 86_400


def test_fields_without_effect_give_warnings_and_stay_in_the_document(tmp_path: Path) -> None:
    text = (
        "optimization { graph { level: 1 } priority: PRIORITY_MAX gather_kernel_buffer_threshold: 1"
        " eager_batching: true cuda { graphs: true }"
        " execution_accelerators { cpu_execution_accelerator { name: 'openvino' } } }"
        "cc_model_filenames { key: '7.5' value: 'x' } runtime: 'r' metric_tags { key: 'a' value: 'b' }"
        "model_operations { op_library_filename: 'x' } model_metrics {}"
        "dynamic_batching { priority_queue_policy { key: 1 value {} } }"
    )

    got = described(tmp_path, text)

    assert sorted(warning.split(" ")[0] for warning in got.warnings) == [
        "cc_model_filenames", "dynamic_batching.priority_queue_policy", "metric_tags", "model_operations",
        "optimization.cuda", "optimization.eager_batching", "optimization.execution_accelerators",
        "optimization.gather_kernel_buffer_threshold", "optimization.graph", "optimization.priority", "runtime",
    ]  # fmt: skip
    assert got.document["runtime"] == "r"


def test_syntax_and_semantic_problems_are_reported_together(tmp_path: Path) -> None:
    found = problems(tmp_path, "backend: 'python'\nmax_batchsize: 8\nmax_batch_size: -1\ninput { name: 3 dims: 0 }")

    assert [problem.split(";")[0] for problem in found] == [
        "line 2: max_batchsize: no such field",
        "line 4: input[0].name: found 3",
        "max_batch_size: found -1",
        "input[0].dims: found 0",
    ]


@pytest.mark.parametrize("config", ["input {", "name: 'x' \0"])
def test_parse_error_reports_the_line(tmp_path: Path, config: str) -> None:
    [problem] = problems(tmp_path, config)

    assert problem.startswith("config.pbtxt: line 1: ")


def test_missing_gpus_are_rejected(tmp_path: Path) -> None:
    assert problems(tmp_path, "instance_group { kind: KIND_GPU gpus: [0, 5] }", rules=Rules(gpus=(0,))) == [
        "instance_group[0].gpus: found [5], but the GPUs here are [0]"
    ]


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("openvino", "models of OpenVINO run on CPUs only"),
        ("pytorch", "the PyTorch that is installed here computes on none (it is a build without CUDA)"),
    ],
)
def test_gpu_instances_of_a_backend_without_gpu_support_are_rejected(tmp_path: Path, backend: str, why: str) -> None:
    rules = Rules(gpus=(0,), gpu_backends=frozenset({"python", "onnxruntime"}))
    config = f"backend: '{backend}' instance_group {{ kind: KIND_GPU }}"
    assert problems(tmp_path, config, rules=rules) == [
        f"instance_group[0].kind: found KIND_GPU, but {why}; allowed: KIND_CPU, KIND_AUTO"
    ]


def test_auto_complete_disabled_requires_a_complete_configuration(tmp_path: Path) -> None:
    strict = Rules(auto_complete=False)
    assert problems(tmp_path, "input { name: 'a' }", rules=strict) == [
        "input[0].data_type: must be given for 'a'",
        "input[0].dims: must be given for 'a'",
    ]
    (tmp_path / "m/config.pbtxt").unlink()
    with pytest.raises(BadModel, match=r"model 'm': there is no config\.pbtxt"):
        read(scan(tmp_path)[0], rules=strict)


def test_named_configuration_replaces_the_default(tmp_path: Path) -> None:
    rules = Rules(config_name="big")
    assert described(tmp_path, "max_batch_size: 2", rules=rules).config.max_batch == 2
    (tmp_path / "m/configs").mkdir()
    (tmp_path / "m/configs/big.pbtxt").write_text("max_batch_size: 64")
    assert described(tmp_path, "max_batch_size: 2", rules=rules).config.max_batch == 64
    assert described(tmp_path, "max_batch_size: 2", rules=Rules(config_name="../m/configs/big")).config.max_batch == 2


def test_only_the_operator_can_allow_pickle(tmp_path: Path) -> None:
    allowed = described(tmp_path, None, "1/model.pt", rules=Rules(allow_pickle=frozenset({"m"})))

    assert allowed.config.parameters == {"forebay.allow_pickle": "true"}
    assert allowed.document["parameters"] == {}
    assert described(tmp_path, None, "1/model.pt", rules=Rules(allow_pickle=frozenset({"n"}))).config.parameters == {}


def test_label_files_without_final_newline_or_empty(tmp_path: Path) -> None:
    text = "output { name: 'a' label_filename: 'l' } output { name: 'b' label_filename: 'none' }"
    (tmp_path / "m").mkdir()
    (tmp_path / "m/l").write_bytes(b"x\ny\xff")

    assert described(tmp_path, text, "none", "1/model.py").labels == {"a": ("x", "y\ufffd"), "b": ()}


def test_label_file_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path, "output { name: 'a' label_filename: 'l' }")
    (tmp_path / "m/l").write_text("cat\n")
    [found] = scan(tmp_path)
    monkeypatch.setattr("forebay.modelserver.repository.describing.LABELS_BYTES_MAX", 3)

    with pytest.raises(BadModel, match="'l' has more than 3 bytes"):
        read(found)


@pytest.mark.parametrize("link", ["l", "warmup/x"])
def test_symlink_out_of_the_model_folder_is_rejected(tmp_path: Path, link: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "repository/m/warmup").mkdir(parents=True)
    text = (
        "output { name: 'a' label_filename: 'l' }"
        if link == "l"
        else "model_warmup { inputs { key: 'a' value { data_type: TYPE_FP32 dims: 2 input_data_file: 'x' } } }"
    )
    model(tmp_path / "repository", text)
    [found] = scan(tmp_path / "repository")
    (tmp_path / "repository/m" / link).symlink_to(tmp_path / "secret")

    with pytest.raises(BadModel, match="it is a link out of the model's folder"):
        read(found)


def test_unreadable_configuration_is_reported(tmp_path: Path) -> None:
    model(tmp_path, None)
    (tmp_path / "m/config.pbtxt").mkdir()

    with pytest.raises(BadModel, match=r"config\.pbtxt cannot be read: Is a directory"):
        read(scan(tmp_path)[0])


def test_version_removed_after_the_scan_is_reported(tmp_path: Path) -> None:
    [found] = scan(model(tmp_path, ""))
    (tmp_path / "m/1/model.py").unlink()
    (tmp_path / "m/1").rmdir()

    with pytest.raises(BadModel, match="version 1 cannot be read"):
        read(found)


def test_load_request_can_override_the_configuration(tmp_path: Path) -> None:
    [found] = scan(model(tmp_path, "max_batch_size: 2"))

    got = read(found, json.dumps({"max_batch_size": 16, "backend": "python"}))

    assert (got.config.max_batch, got.temporary) == (16, None)
    got.release()
    assert dict(got.versions) == {1: tmp_path / "m/1"}
    with pytest.raises(BadModel, match="Invalid config override: not a JSON object"):
        read(found, "3")
    with pytest.raises(BadModel, match=r"\\ud800: no such field"):
        read(found, '{"\\ud800": 1}')
    with pytest.raises(BadModel, match="max_batch: no such field"):
        read(found, '{"max_batch": 4}')


def test_document_can_be_used_as_configuration_override(tmp_path: Path) -> None:
    got = described(tmp_path, SEQUENCES, "1/model.onnx", "initial_state/t")

    assert read(scan(tmp_path)[0], json.dumps(got.document)) == got


def test_load_request_can_include_files(tmp_path: Path) -> None:
    files = {"file:2/model.onnx": b"onnx", "3/sub/x": b"", "file:labels.txt": b"a\nb"}

    got = read(named("new"), '{"output": [{"name": "o", "label_filename": "labels.txt"}]}', files)

    assert (got.config.name, got.config.backend, sorted(got.versions)) == ("new", "onnxruntime", [2, 3])
    assert (got.versions[2] / "model.onnx").read_bytes() == b"onnx"
    assert got.labels == {"o": ("a", "b")}
    got.release()
    assert not got.folder.exists()
    got.release()


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"file:../x": b""}, "file '../x': '../x' leads out of the model's folder"),
        ({"file:1/../../x": b""}, "file '1/../../x': '1/../../x' leads out of the model's folder"),
        ({"file:/etc/x": b""}, "file '/etc/x': '/etc/x' leads out of the model's folder"),
        ({"file:": b""}, "file '': a path has 1 to 1000 characters"),
        ({"file:1": b"", "file:1/x": b""}, "file '1/x' cannot be written: "),
        ({"file:1/" + "x" * 300: b""}, f"file '1/{'x' * 300}' cannot be written: File name too long"),
        ({f"file:1/{n}": b"" for n in range(10_001)}, "10001 files; at most 10000"),
    ],
    ids=range(7),
)
def test_invalid_file_overrides_are_rejected(files: dict[str, bytes], problem: str) -> None:
    with pytest.raises(BadModel) as raised:
        read(named("new"), "{}", files)

    assert raised.value.problems[0].startswith(problem)


def test_file_overrides_need_a_configuration_and_unknown_models_need_files() -> None:
    with pytest.raises(BadModel, match="load parameter 'config' must be specified for model file override"):
        read(named("new"), None, {"file:1/model.py": b""})
    with pytest.raises(BadModel, match="it is not in the repository"):
        read(named("new"), "{}")
    with pytest.raises(BadModel, match="the platform ensemble"):
        read(named("new"), "{}", {"file:1/strange": b""})


@pytest.mark.parametrize("name", ["", " ", "..", ".", "a/b", "a\\b", "a\nb", "\ud800", "x" * 201])
def test_invalid_model_names_are_rejected(name: str) -> None:
    with pytest.raises(BadModel) as raised:
        named(name)
    assert raised.value.text.encode()
