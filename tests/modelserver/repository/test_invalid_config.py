"""Every invalid configuration is reported with its field, the value found and the allowed values."""

from pathlib import Path

import pytest
from tests.modelserver.repository.models import described, problems

from forebay.modelserver.repository.values import Rules

WRONG = [
    (
        "name: 'other'",
        "name: found 'other'; allowed: 'm', the name of the model's folder",
    ),
    (
        "platform: 'tensorrt_plan'",
        (
            "platform: found 'tensorrt_plan'; supported are the backends onnxruntime, openvino, pytorch, "
            "python and the platform ensemble"
        ),
    ),
    (
        "backend: 'dali'",
        (
            "backend: found 'dali'; supported are the backends onnxruntime, openvino, pytorch, python and "
            "the platform ensemble"
        ),
    ),
    (
        "backend: 'pytorch' platform: 'onnxruntime_onnx'",
        "platform: found 'onnxruntime_onnx', which does not match the backend 'pytorch'",
    ),
    (
        "default_model_filename: '../x.py' backend: 'python'",
        "default_model_filename: '../x.py' leads out of the model's folder",
    ),
    (
        "default_model_filename: '/x.py' backend: 'python'",
        "default_model_filename: '/x.py' leads out of the model's folder",
    ),
    (
        "default_model_filename: 'a\\nb' backend: 'python'",
        "default_model_filename: 'a\\nb' contains characters that are not text",
    ),
    (
        "max_batch_size: -1",
        "max_batch_size: found -1; allowed: 0 (no batches) or more",
    ),
    (
        "input { data_type: TYPE_FP32 dims: 1 }",
        "input[0].name: must be given",
    ),
    (
        "input { name: 'a' dims: 0 }",
        "input[0].dims: found 0; allowed: 1 or more, or -1 for any size",
    ),
    (
        "input { name: 'a' dims: [1000000000, 1000000000] }",
        "input[0].dims: found [1000000000, 1000000000]; at most 1099511627776 elements",
    ),
    (
        "input { name: 'a' } input { name: 'a' }",
        "input[1].name: 'a' is the name of an earlier input",
    ),
    (
        "input { name: 'a' dims: 4 reshape { shape: 3 } }",
        "input[0].reshape.shape: [3] does not have as many elements as dims [4]",
    ),
    (
        "output { name: 'a' dims: [2, -1] reshape { shape: [-1, 2] } }",
        "output[0].reshape.shape: [-1, 2] does not have as many elements as dims [2, -1]",
    ),
    (
        "input { name: 'a' dims: 4 reshape { shape: -4 } }",
        "input[0].reshape.shape: found -4; allowed: 1 or more, or -1 for any size",
    ),
    (
        "input { name: 'a' dims: 4 format: FORMAT_NCHW }",
        "input[0].format: FORMAT_NCHW needs 3 dims; found [4]",
    ),
    (
        "input { name: 'a' is_shape_tensor: true }",
        "input[0].is_shape_tensor: only TensorRT models have this, and they are not served here",
    ),
    (
        "output { name: 'a' label_filename: '../../etc/passwd' }",
        "output[0].label_filename: '../../etc/passwd' leads out of the model's folder",
    ),
    (
        "output { name: 'a' label_filename: 'absent' }",
        "output[0].label_filename: 'absent' cannot be read: No such file or directory",
    ),
    (
        "version_policy { latest {} }",
        "version_policy.latest.num_versions: found 0; allowed: 1 or more",
    ),
    (
        "version_policy { specific {} }",
        "version_policy.specific.versions: found []; allowed: the numbers of some versions",
    ),
    (
        "instance_group { count: 1001 }",
        "instance_group[0].count: found 1001; allowed: 1 to 1000",
    ),
    (
        "instance_group { kind: KIND_GPU }",
        "instance_group[0].kind: found KIND_GPU, but there are no GPUs here; allowed: KIND_CPU, KIND_AUTO",
    ),
    (
        "instance_group { kind: KIND_CPU gpus: 0 }",
        "instance_group[0].gpus: found [0], but the kind is KIND_CPU; KIND_AUTO becomes that unless all of them can "
        "be used, and the GPUs here are []",
    ),
    (
        "instance_group { profile: '0' }",
        "instance_group[0].profile: only TensorRT models have this, and they are not served here",
    ),
    (
        "instance_group { secondary_devices {} }",
        "instance_group[0].secondary_devices: there are none here",
    ),
    (
        "instance_group { rate_limiter { resources {} } }",
        "instance_group[0].rate_limiter.resources[0].name: found ''; allowed: a name, each once in a group",
    ),
    (
        "input { name: 'a' } batch_input { target_name: 'x' data_type: TYPE_INT32 source_input: 'a' }",
        "batch_input[0]: needs a max_batch_size of 1 or more",
    ),
    (
        "max_batch_size: 2 input { name: 'a' } batch_input { target_name: 'x' data_type: TYPE_INT32 }",
        "batch_input[0].source_input: found []; allowed: the name of one input",
    ),
    (
        "max_batch_size: 2 input { name: 'a' } "
        "batch_input { target_name: 'x' source_input: 'a' data_type: TYPE_INT64 }",
        "batch_input[0].data_type: found TYPE_INT64; allowed: TYPE_INT32, TYPE_FP32",
    ),
    (
        "max_batch_size: 2 input { name: 'a' } "
        "batch_input { target_name: 'a' data_type: TYPE_FP32 source_input: 'a' }",
        "batch_input[0].target_name: found 'a'; allowed: a name, each once",
    ),
    (
        "max_batch_size: 2 input { name: 'a' } batch_input { data_type: TYPE_FP32 source_input: 'a' }",
        "batch_input[0].target_name: must be given",
    ),
    (
        "max_batch_size: 2 input { name: 'a' } batch_output { target_name: 'x' source_input: 'a' }",
        "batch_output[0].target_name: found 'x'; allowed: an output with its dims",
    ),
    (
        "max_batch_size: 2 input { name: 'a' dims: -1 } output { name: 'x' dims: [-1, -1] }"
        "batch_output { target_name: 'x' source_input: 'a' }",
        "batch_output[0].target_name: 'x' has a variable dimension that 'a' lacks",
    ),
    (
        "model_repository_agents { agents { name: 'checksum' } }",
        "model_repository_agents: agents are not supported here, so their checks would be skipped",
    ),
    (
        (
            "ensemble_scheduling { step { model_name: 'a' input_map { key: 'a' value: 'b' } output_map "
            "{ key: 'a' value: 'c' } } }platform: 'ensemble' backend: 'python'"
        ),
        "backend: found 'python'; an ensemble has none",
    ),
    (
        "platform: 'ensemble'",
        "ensemble_scheduling: must be given for an ensemble",
    ),
    (
        "response_cache { enable: true } sequence_batching {}",
        "response_cache.enable: responses within a sequence cannot be cached",
    ),
    (
        "response_cache { enable: true } model_transaction_policy { decoupled: true }",
        "response_cache.enable: responses of a decoupled model cannot be cached",
    ),
    (
        "parameters { key: 'forebay.pined' }",
        'parameters["forebay.pined"]: unknown parameter; allowed: forebay.age_step_ms, forebay.calls, '
        "forebay.deadlines, forebay.in_process, forebay.micro_batch_rows, forebay.pinned, "
        "forebay.gpu_memory_fraction, forebay.task",
    ),
    (
        "parameters { key: 'forebay.calls' value { string_value: 'one,,two' } }",
        "parameters[\"forebay.calls\"]: found 'one,,two'; allowed: comma-separated model names",
    ),
    (
        "backend: 'openvino' parameters { key: 'forebay.calls' value { string_value: 'one' } }",
        'parameters["forebay.calls"]: only models of the python backend can call others',
    ),
    (
        "parameters { key: 'forebay.task' value { string_value: 'embbed' } }",
        "parameters[\"forebay.task\"]: found 'embbed'; allowed: embed, rerank, classify, transcribe, speak, "
        "classify-image, detect-objects, segment-image, read-text",
    ),
    (
        "parameters { key: 'forebay.deadlines' value { string_value: 'true' } } sequence_batching {}",
        'parameters["forebay.deadlines"]: neither sequences nor ensembles have deadlines',
    ),
    (
        "parameters { key: 'forebay.in_process' value { string_value: 'true' } }",
        'parameters["forebay.in_process"]: only ensembles have steps to run in one process',
    ),
    (
        "parameters { key: 'forebay.micro_batch_rows' value { string_value: '4' } }",
        'parameters["forebay.micro_batch_rows"]: needs dynamic_batching and one of the backends onnxruntime, '
        "openvino, pytorch",
    ),
    (
        "dynamic_batching {} parameters { key: 'forebay.micro_batch_rows' value { string_value: '-1' } }",
        "parameters[\"forebay.micro_batch_rows\"]: found '-1'; allowed: a number of rows, 0 (whole batches) or more",
    ),
    (
        "parameters { key: 'forebay.pinned' value { string_value: 'x' } }",
        "parameters[\"forebay.pinned\"]: found 'x'; allowed: true or false",
    ),
    (
        "parameters { key: 'forebay.age_step_ms' value { string_value: '1' } }",
        'parameters["forebay.age_step_ms"]: needs dynamic_batching',
    ),
    (
        "dynamic_batching {} parameters { key: 'forebay.age_step_ms' value { string_value: '-1' } }",
        "parameters[\"forebay.age_step_ms\"]: found '-1'; allowed: milliseconds, 0 (strict order) to 3600000",
    ),
    (
        "dynamic_batching {} parameters { key: 'forebay.age_step_ms' value { string_value: 'x' } }",
        "parameters[\"forebay.age_step_ms\"]: found 'x'; allowed: milliseconds, 0 (strict order) to 3600000",
    ),
    (
        "parameters { key: 'forebay.allow_pickle' value { string_value: 'true' } }",
        'parameters["forebay.allow_pickle"]: only the operator can allow this, by the model\'s name',
    ),
    (
        "parameters { key: 'TRITON_BATCH_STRATEGY_PATH' }",
        'parameters["TRITON_BATCH_STRATEGY_PATH"]: custom batching libraries are not run here',
    ),
]


@pytest.mark.parametrize(("config", "problem"), WRONG, ids=[text[:50] for text, _ in WRONG])
def test_invalid_configuration_reports_field_found_and_allowed_values(
    tmp_path: Path, config: str, problem: str
) -> None:
    assert problems(tmp_path, config) == [problem]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (("1/resnet.onnx", "1/b.bin"), "found the files b.bin, resnet.onnx; expected one of model.onnx, model.xml, "),
        (
            tuple(f"1/{number}.bin" for number in range(9)),
            "found the files 0.bin, 1.bin, 2.bin, 3.bin, 4.bin, 5.bin, ",
        ),
        (("model.onnx",), "there are no files in a folder with the number of a version, such as 1; supported are"),
        (("v1/model.onnx",), "there are no files in a folder with the number of a version, such as 1; supported are"),
    ],
)
def test_backend_that_cannot_be_derived_is_reported_with_the_files(
    tmp_path: Path, files: tuple[str, ...], why: str
) -> None:
    (problem,) = problems(tmp_path, "", *files)
    assert problem.startswith(f"backend: not given, and it cannot be derived: {why}")


@pytest.mark.parametrize(("gpus", "named"), [((), "[0]"), ((0, 1), "[0, 7]")])
def test_gpus_that_are_named_but_not_there_are_not_replaced_by_the_cpu(
    tmp_path: Path, gpus: tuple[int, ...], named: str
) -> None:
    (problem,) = problems(tmp_path, f"instance_group {{ gpus: {named} }}", rules=Rules(gpus=gpus))
    assert problem.startswith(
        f"instance_group[0].gpus: found {named}, but the kind is KIND_CPU; KIND_AUTO becomes that"
    )
    assert problem.endswith(f"the GPUs here are {list(gpus)}")


def test_the_level_of_optimisation_has_an_effect_on_onnx_models_only(tmp_path: Path) -> None:
    text = "optimization { graph { level: -1 } }"
    onnx, python = (described(tmp_path, f"backend: '{each}' {text}") for each in ("onnxruntime", "python"))

    assert (onnx.config.graph_level, onnx.warnings) == (-1, ())
    assert python.warnings == ("optimization.graph has no effect here",)


def test_buckets_of_the_first_response_have_an_effect_and_other_metrics_none(tmp_path: Path) -> None:
    control = "metric_control {{ metric_identifier {{ family: '{}' }} histogram_options {{ buckets: [ 1 ] }} }}"
    families = "nv_inference_first_response_histogram_ms", "nv_other"
    text = "model_metrics {" + "".join(map(control.format, families)) + "}"

    assert described(tmp_path, f"backend: 'python' {text}").warnings == (
        "model_metrics.metric_control[1] (it is for 'nv_other') has no effect here",
    )


def test_what_would_be_ignored_is_said(tmp_path: Path) -> None:
    text = "instance_group { kind: KIND_CPU } instance_group { kind: KIND_CPU passive: true }"
    iterative = "sequence_batching { iterative_sequence: true oldest { preserve_ordering: true } }"

    assert described(tmp_path, f"backend: 'python' {text} {iterative}").warnings == (
        "instance_group[1].passive has no effect here",
        "sequence_batching.oldest.preserve_ordering (with iterative_sequence) has no effect here",
    )
