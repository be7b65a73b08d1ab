"""The smaller parts of `triton_python_backend_utils` that models import."""

import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.tensor.python_models import CONFIG
from tests.examples import USUAL

from forebay.core.serving.config import (
    BatchInput,
    BatchKind,
    BatchOutput,
    Datatype,
    DynamicBatching,
    InstanceGroup,
    SequenceBatching,
    VersionPolicy,
    VersionRule,
)
from forebay.core.serving.errors import Kind
from forebay.engines.tensor.measures import Family, Measure, Series
from forebay.engines.tensor.python import triton_api as pb_utils
from forebay.engines.tensor.python.config import ModelConfig, document, instance_name
from forebay.engines.tensor.python.host import current
from forebay.engines.tensor.python.metrics import measured

ONE = np.ones(1, np.float32)


def test_type_names_and_numbers_are_consistent() -> None:
    for name, kind in pb_utils.TRITON_STRING_TO_NUMPY.items():
        number = pb_utils.numpy_to_triton_type(kind)
        assert number is not None
        assert np.dtype(pb_utils.triton_to_numpy_type(number)) == np.dtype(pb_utils.triton_string_to_numpy(name))
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    assert pb_utils.numpy_to_triton_type(complex) is None
    assert pb_utils.triton_to_numpy_type(14) is None


@settings(max_examples=USUAL)
@given(st.lists(st.binary(max_size=300), max_size=5))
def test_byte_tensors_round_trip(parts: list[bytes]) -> None:
    array = np.empty(len(parts), object)
    array[:] = parts

    data = pb_utils.serialize_byte_tensor(array)

    assert pb_utils.deserialize_bytes_tensor(bytes(data)).tolist() == parts


@pytest.mark.parametrize("encoded", [b"\1\0\0\0a\5\0\0\0b", b"\1\0\0\0a\5\0"])
def test_truncated_byte_tensors_are_rejected(encoded: bytes) -> None:
    with pytest.raises(struct.error, match="requires a buffer"):
        pb_utils.deserialize_bytes_tensor(encoded)


def test_tensor_configuration_is_found_by_name() -> None:
    shown = document(replace(CONFIG, decoupled=True))

    assert (pb_utils.get_input_config_by_name(shown, "X") or {})["data_type"] == "TYPE_FP32"
    assert (pb_utils.get_output_config_by_name(shown, "Y") or {})["dims"] == [-1]
    assert pb_utils.get_output_config_by_name(shown, "X") is None
    assert pb_utils.using_decoupled_model_transaction_policy(shown)
    assert not pb_utils.using_decoupled_model_transaction_policy({})


def test_document_contains_the_configuration() -> None:
    config = replace(
        CONFIG,
        inputs=(replace(CONFIG.inputs[0], reshape=(2, 2)),),
        versions=VersionPolicy(VersionRule.SPECIFIC, versions=(1, 3)),
        batch_inputs=(BatchInput(BatchKind.ENDS, ("ENDS",), Datatype.INT32, "X"),),
        batch_outputs=(BatchOutput(("Y",), "X"),),
        batching=DynamicBatching(preferred_sizes=(4,), delay_s=0.0005),
        sequences=SequenceBatching(oldest=True, candidates_max=8, idle_max_s=2),
    )

    shown = document(config)

    assert shown["version_policy"] == {"specific": {"versions": [1, 3]}}
    assert shown["input"][0]["reshape"] == {"shape": [2, 2]}
    assert [shown[kind][0]["is_non_linear_format_io"] for kind in ("input", "output")] == [False, False]
    assert shown["optimization"]["input_pinned_memory"] == {"enable": True}
    assert shown["batch_input"] == [{
        "kind": "BATCH_ACCUMULATED_ELEMENT_COUNT", "target_name": ["ENDS"], "data_type": "TYPE_INT32",
        "source_input": ["X"],
    }]  # fmt: skip
    assert shown["batch_output"] == [
        {"target_name": ["Y"], "kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "source_input": ["X"]}
    ]
    assert shown["dynamic_batching"]["max_queue_delay_microseconds"] == 500
    assert shown["sequence_batching"]["oldest"] == {"max_candidate_sequences": 8}
    assert shown["sequence_batching"]["max_sequence_idle_microseconds"] == 2_000_000
    assert document(replace(config, versions=VersionPolicy(VersionRule.ALL)))["version_policy"] == {"all": {}}
    direct = document(replace(config, sequences=SequenceBatching()))["sequence_batching"]
    assert direct["direct"] == {}


def test_instance_names_match_triton() -> None:
    config = replace(CONFIG, instances=(InstanceGroup(count=1), InstanceGroup("fast", count=2, gpus=(0, 1))))

    assert [instance_name(config, each) for each in range(5)] == [
        "m_0_0", "fast_0", "fast_1", "fast_2", "fast_3",
    ]  # fmt: skip


def test_instances_that_a_reload_adds_have_names_of_their_own() -> None:
    config = replace(CONFIG, instances=(InstanceGroup(count=2),))

    assert [instance_name(config, each) for each in range(4)] == ["m_0_0", "m_0_1", "m_0_2", "m_0_3"]


@pytest.mark.parametrize("scheduler", ["sequence_batching", "ensemble_scheduling"])
def test_dynamic_batching_conflicts_with_another_scheduler(scheduler: str) -> None:
    config = ModelConfig(f'{{"name": "m", "{scheduler}": {{}}}}')

    with pytest.raises(ValueError, match=f"Configuration specified scheduling_choice as '{scheduler}'"):
        config.set_dynamic_batching()


def test_transaction_policy_cannot_be_changed() -> None:
    config = ModelConfig('{"name": "m", "model_transaction_policy": {"decoupled": false}}')

    with pytest.raises(ValueError, match="which is already set to 'False'"):
        config.set_model_transaction_policy({"decoupled": True})


def test_add_input_completes_an_existing_input() -> None:
    config = ModelConfig('{"name": "m", "input": [{"name": "X", "data_type": "TYPE_INVALID", "dims": []}]}')

    config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [3]})

    assert config.as_dict()["input"] == [{"name": "X", "data_type": "TYPE_FP32", "dims": [3]}]


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (lambda: pb_utils.Tensor("", ONE), pb_utils.TritonModelException, "cannot be an empty string"),
        (lambda: pb_utils.Tensor("X", [1]), TypeError, "was called with <class 'list'>"),
        (lambda: pb_utils.Tensor("X", np.ones(1, complex)), pb_utils.TritonModelException, "which is not supported"),
        (lambda: pb_utils.Tensor.from_dlpack("", ONE), pb_utils.TritonModelException, "cannot be an empty string"),
        (lambda: pb_utils.Tensor.from_dlpack("X", 1), pb_utils.TritonModelException, "must be a DLPack capsule"),
        (
            lambda: pb_utils.Tensor.from_dlpack("X", np.ones((2, 3)).T),
            pb_utils.TritonModelException,
            "DLPack tensor is not contiguous",
        ),
        (
            lambda: pb_utils.Tensor("X", np.array([b"a"], object)).to_dlpack(),
            pb_utils.TritonModelException,
            "does not have support for string tensors",
        ),
        (lambda: pb_utils.InferenceResponse([None]), pb_utils.TritonModelException, "should not be empty"),
        (lambda: pb_utils.InferenceResponse([1]), TypeError, "it holds <class 'int'>"),
        (lambda: pb_utils.InferenceResponse(error="text"), TypeError, "must be a TritonError"),
        (lambda: pb_utils.InferenceResponse(parameters={"k": 1.5}), pb_utils.TritonModelException, "bool/int/str"),
        (lambda: pb_utils.InferenceResponse(parameters={1: "v"}), pb_utils.TritonModelException, "to have type str"),
        (lambda: pb_utils.InferenceRequest(inputs=[]), TypeError, "requested_output_names and model_name"),
        (
            lambda: pb_utils.InferenceRequest(model_name="o", requested_output_names=[], inputs=[None]),
            pb_utils.TritonModelException,
            "Input tensor for request with id '' and model name 'o' should not be empty.",
        ),
        (
            lambda: pb_utils.InferenceRequest(model_name="o", requested_output_names=[""], inputs=[]),
            pb_utils.TritonModelException,
            "Requested output name for request with id '' and model name 'o' should not be empty.",
        ),
        (
            lambda: pb_utils.InferenceRequest(
                model_name="o", requested_output_names=[], inputs=[], correlation_id=1.5
            ),
            pb_utils.TritonModelException,
            "Correlation ID must be integer or string",
        ),
        (
            lambda: pb_utils.load_model("o"),
            pb_utils.TritonModelException,
            "only be reached until `finalize` has ended",
        ),
        (lambda: pb_utils.is_model_ready("o", "one"), pb_utils.TritonModelException, "not the number of a version"),
    ],
)
def test_invalid_arguments_are_rejected(
    wrong: Callable[[], object], kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current.host, "administer", None)  # a failed load leaves it in this process
    with pytest.raises(kind) as caught:
        wrong()

    assert text in str(caught.value)


def test_outgoing_request_has_no_response_sender() -> None:
    request = pb_utils.InferenceRequest(model_name="o", requested_output_names=["Y"], inputs=[])
    request.set_flags(pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)

    assert (request.flags(), request.is_cancelled(), request.requested_output_names()) == (2, False, {"Y"})
    with pytest.raises(pb_utils.TritonModelException, match="has no response sender"):
        request.get_response_sender()


def test_response_accessors() -> None:
    response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", ONE)], parameters={"k": True})

    assert response.parameters() == '{"k": true}'
    assert not response.has_error()
    found = pb_utils.get_output_tensor_by_name(response, "Y")
    assert found is not None
    assert found.name() == "Y"
    assert pb_utils.get_output_tensor_by_name(response, "Z") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float16])
def test_pytorch_tensors_can_be_exchanged(dtype: torch.dtype) -> None:
    given_in = torch.arange(6).reshape(2, 3).to(dtype)

    tensor = pb_utils.Tensor.from_dlpack("X", given_in)
    again = torch.from_dlpack(pb_utils.Tensor.from_dlpack("Y", tensor.to_dlpack()))

    assert tensor.is_cpu()
    assert tensor.shape() == [2, 3]
    assert torch.equal(again, given_in)
    if dtype is torch.bfloat16:
        with pytest.raises(pb_utils.TritonModelException, match="BF16 and cannot be converted to NumPy"):
            tensor.as_numpy()
    else:
        assert tensor.as_numpy().tolist() == given_in.tolist()


def test_read_only_tensor_is_copied_for_dlpack() -> None:
    array = np.ones(3, np.float32)
    array.flags.writeable = False

    found = torch.from_dlpack(pb_utils.Tensor("X", array))

    assert found.tolist() == [1, 1, 1]


def test_bf16_exchange_requires_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = pb_utils.Tensor.of("X", np.ones(3, "<u2"), Datatype.BF16)
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(pb_utils.TritonModelException, match="PyTorch is needed to exchange"):
        tensor.to_dlpack()


def test_metrics_record_values() -> None:
    counter = pb_utils.MetricFamily("c", "", pb_utils.MetricFamily.COUNTER).Metric(labels={"a": "b"})
    gauge = pb_utils.MetricFamily("g", "", pb_utils.MetricFamily.GAUGE).Metric()
    histogram = pb_utils.MetricFamily("h", "", pb_utils.MetricFamily.HISTOGRAM).Metric(buckets=[1, 10])

    counter.increment(2)
    gauge.set(5)
    gauge.increment(-1)
    for each in (0.5, 1, 3, 99):
        histogram.observe(each)

    assert (counter.value(), gauge.value()) == (2, 4)
    (found,) = (family.series[0] for family in measured() if family.name == "h")
    assert found[1:] == (103.5, 0, (1.0, 10.0), (2, 1, 1))


def test_metric_families_of_one_name_are_shared_while_any_is_referenced() -> None:
    first = pb_utils.MetricFamily("n", "what", pb_utils.MetricKind.COUNTER)
    second = pb_utils.MetricFamily("n", "what", pb_utils.MetricKind.COUNTER)
    second.Metric({"b": "1", "a": "2"}).increment(1)
    first.Metric({"a": "2", "b": "1"}).increment(2)
    with pytest.raises(pb_utils.TritonModelException, match="'n' is there as COUNTER, not GAUGE"):
        pb_utils.MetricFamily("n", "what", pb_utils.MetricKind.GAUGE)
    del first
    (family,) = [each for each in measured() if each.name == "n"]
    assert family == Family("n", Measure.COUNTER, "what", (Series((("a", "2"), ("b", "1")), 3.0),))
    del second
    assert not [each for each in measured() if each.name == "n"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda family: pb_utils.MetricFamily("a b", "", family.COUNTER), "'a b' of kind"),
        (lambda family: pb_utils.MetricFamily("x", "", "counter"), "of kind counter"),  # type: ignore[arg-type]
        (lambda family: family.Metric({"a-b": "c"}), "label 'a-b'"),
        (lambda family: family.Metric({"a": 1}), "label 'a': 1"),
        (lambda family: family.Metric([("a", "b")]), "must be a dictionary"),
        (lambda family: family.Metric({"a": "b" * 300}), "too long"),
        (lambda family: family.Metric({f"a{n}": "" for n in range(20)}), "more than 16 labels"),
        (lambda family: [family.Metric({"a": str(n)}) for n in range(1001)], "there are 1000 already"),
        (lambda family: [pb_utils.MetricFamily(f"y{n}", "", family.COUNTER) for n in range(101)], "100 already"),
    ],
)
def test_invalid_or_too_many_metrics_are_rejected(make: Callable[[pb_utils.MetricFamily], object], text: str) -> None:
    family = pb_utils.MetricFamily("bounded", "", pb_utils.MetricKind.COUNTER)
    kept: list[object] = []
    with pytest.raises(pb_utils.TritonModelException, match=text):
        kept.append(make(family))


@pytest.mark.parametrize(
    ("kind", "buckets", "call", "text"),
    [
        ("COUNTER", None, lambda m: m.increment(-1), "Failed to increment"),
        ("COUNTER", None, lambda m: m.set(1), "COUNTER does not support Set"),
        ("COUNTER", None, lambda m: m.observe(1), "COUNTER does not support Observe"),
        ("HISTOGRAM", [1], lambda m: m.value(), "HISTOGRAM does not support Value"),
        ("HISTOGRAM", [1], lambda m: m.increment(1), "Failed to increment"),
        ("HISTOGRAM", None, lambda m: m, "a histogram has buckets"),
        ("GAUGE", [1], lambda m: m, "nothing else has any"),
        ("HISTOGRAM", [2, 1], lambda m: m, "buckets must ascend"),
    ],
)
def test_metric_operations_depend_on_the_kind(
    kind: str, buckets: list[float] | None, call: Callable[[pb_utils.Metric], object], text: str
) -> None:
    family = pb_utils.MetricFamily(f"x_{kind}", "", pb_utils.MetricKind[kind])

    with pytest.raises(pb_utils.TritonModelException, match=text):
        call(family.Metric(buckets=buckets))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"model_name": 3}, "model_name must be a str, not <class 'int'>"),
        ({"request_id": 5}, "request_id must be a str"),
        ({"requested_output_names": [None]}, "a requested output name must be a str"),
        ({"model_version": "1"}, "model_version must be an int, not <class 'str'>"),
        ({"model_version": 2**70}, "model_version must be an int of 64 bits"),
        ({"correlation_id": 2**64}, "correlation_id must be an int of 64 bits"),
        ({"timeout": 1.5}, "timeout must be an int"),
        ({"flags": None}, "flags must be an int"),
    ],
)
def test_request_with_an_argument_of_another_type_is_rejected(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        pb_utils.InferenceRequest(**{"inputs": [], "requested_output_names": [], "model_name": "m", **wrong})


def test_values_of_response_and_metric_are_sent_as_plain_types() -> None:
    text = np.str_("a")
    tensor = pb_utils.Tensor(text, ONE)
    response = pb_utils.InferenceResponse(
        [tensor, pb_utils.Tensor.from_dlpack(text, ONE)], parameters={text: text, "n": IntEnum("N", "ONE").ONE}
    ).values(())
    family = pb_utils.MetricFamily(np.str_("plain"), "half a \ud800", pb_utils.MetricKind.GAUGE)
    kept = family.Metric({text: text, "half": "\ud800"})

    assert msgspec.msgpack.decode(msgspec.msgpack.encode((list(response.outputs), response.parameters))) == [
        ["a"],
        {"a": "a", "n": 1},
    ]
    (found,) = (each for each in measured() if each.name == "plain")
    name, _, described, ((labels, *_),) = msgspec.msgpack.decode(msgspec.msgpack.encode(found))
    assert (name, described, labels) == ("plain", "half a ?", [["a", "a"], ["half", "?"]])
    assert kept.value() == 0


def test_error_takes_bytes_and_integers_of_numpy() -> None:
    code = np.int64(pb_utils.TritonError.NOT_FOUND)
    error = pb_utils.TritonError(b"half \xff", code)  # type: ignore[arg-type] - Triton takes it, too

    assert (error.message(), error.code(), error.kind()) == ("half \ufffd", 2, Kind.NOT_FOUND)
    with pytest.raises(TypeError, match="code must be an int, not <class 'str'>"):
        pb_utils.TritonError("m", "NOT_FOUND")  # type: ignore[arg-type] - the mistake that is tested


def test_log_lines_have_their_level(capfd: pytest.CaptureFixture[str]) -> None:
    logger = pb_utils.Logger
    for write in (logger.log_info, logger.log_warn, logger.log_error, logger.log_verbose):
        write("said")
    logger.log("more", logger.LogLevel.ERROR)

    lines = [line.partition(":")[0] for line in capfd.readouterr().err.splitlines()]
    assert lines == ["info", "warning", "error", "error"]
