"""Python models: lifecycle, return values, failures. Texts are those of Triton's Python backend."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.contract.tensor.models import no_calls, spec
from tests.contract.tensor.python_models import CONFIG, answers, asked, loaded, value

from forebay.core.serving.config import Datatype, DynamicBatching, InstanceGroup, ModelConfig
from forebay.core.serving.errors import Kind
from forebay.engines.tensor.protocol import BackendFailed, Request
from forebay.engines.tensor.python.backend import PythonBackend

ECHO = "def execute(self, requests): return [out(x(request)) for request in requests]"
FAILED = "Failed to process the request(s) for model 'm_0_0', message: "

Load = Callable[..., PythonBackend]


@pytest.fixture
def load(tmp_path: Path, request: pytest.FixtureRequest) -> Load:
    """Loads a model of which only the class's body is given; it is closed in the end."""

    def made(body: str, config: ModelConfig = CONFIG, **more: object) -> PythonBackend:
        backend = loaded(tmp_path, body, config, **more)  # type: ignore[arg-type]
        request.addfinalizer(backend.close)
        return backend

    return made


def test_initialize_receives_triton_arguments(load: Load, tmp_path: Path) -> None:
    parameters = {"flavour": "sweet"}
    config = replace(CONFIG, max_batch=8, parameters=parameters, instances=(InstanceGroup(count=2),))
    backend = load(
        """
        def initialize(self, args): self.args = args
        def execute(self, requests): return [out(np.array([json.dumps(self.args)], object))]
        """,
        replace(config, outputs=(spec("Y", Datatype.BYTES),)),
    )

    (response,), _ = answers(backend, asked())

    args = json.loads(value(response)[0])  # type: ignore[index]
    assert {key: args[key] for key in args if key != "model_config"} == {
        "model_instance_kind": "CPU",
        "model_instance_name": "m_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(tmp_path / "m"),
        "model_version": "1",
        "model_name": "m",
    }
    shown = json.loads(args["model_config"])
    assert shown["max_batch_size"] == 8
    assert shown["input"][0] | {"name": "X", "data_type": "TYPE_FP32", "dims": [-1]} == shown["input"][0]
    assert shown["output"][0]["data_type"] == "TYPE_STRING"
    assert shown["parameters"] == {"flavour": {"string_value": "sweet"}}
    assert shown["instance_group"][0]["count"] == 2


def test_model_reads_all_request_fields(load: Load) -> None:
    backend = load(
        """
        def execute(self, requests):
            request = requests[0]
            tensor = request.inputs()[0]
            return [out(np.array([repr(each).encode() for each in (
                request.request_id(), request.correlation_id(), request.flags(), request.timeout(),
                json.loads(request.parameters()), request.requested_output_names(), request.is_cancelled(),
                request.trace().get_context(), tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu(),
            )], object))]
        """,
        replace(CONFIG, outputs=(spec("Y", Datatype.BYTES, -1),)),
    )
    request = Request(
        "r7", {"X": np.zeros((2, 3), np.float32)}, (), {"a": True, "b": 2}, "seq", start=True, end=True, timeout_us=9
    )

    (response,), _ = answers(backend, [request])

    assert value(response) == [
        repr(each).encode()
        for each in ("r7", "seq", 3, 9, {"a": True, "b": 2}, {"Y"}, False, None, "X", [2, 3], 11, True)
    ]


def test_parameters_are_written_as_triton_does(load: Load) -> None:
    backend = load(
        """
        def execute(self, requests):
            called = pb_utils.InferenceRequest(
                inputs=[], requested_output_names=[], model_name='m', parameters=json.loads(requests[0].parameters())
            )
            return [out(np.array([requests[0].parameters(), called.parameters()], object))]
        """,
        replace(CONFIG, outputs=(spec("Y", Datatype.BYTES, -1),)),
    )

    (response,), _ = answers(backend, [Request("", {"X": np.zeros(1, np.float32)}, (), {"é": "日本", "n": 1})])

    assert [text.decode() for text in value(response)] == [
        '{"é":"日本","n":1}',
        '{"\\u00e9": "\\u65e5\\u672c", "n": 1}',
    ]


def test_responses_carry_parameters_and_errors_of_every_kind(load: Load) -> None:
    backend = load(
        """
        def execute(self, requests):
            error = pb_utils.TritonError
            return [
                pb_utils.InferenceResponse([pb_utils.Tensor('Y', x(requests[0]))], parameters={'tokens': 3}),
                pb_utils.InferenceResponse(error=error('plain')),
                pb_utils.InferenceResponse(error=error('gone', error.NOT_FOUND)),
                pb_utils.InferenceResponse(error=error('late', error.CANCELLED)),
                pb_utils.InferenceResponse(error=error('')),
            ]
        """
    )

    found, _ = answers(backend, asked(5))

    assert [(each.error, each.kind) for each in found if each] == [
        ("", Kind.INTERNAL),
        ("plain", Kind.INTERNAL),
        ("gone", Kind.NOT_FOUND),
        ("late", Kind.CANCELLED),
        ("the model gave no message", Kind.INTERNAL),
    ]
    assert found[0] is not None
    assert found[0].parameters == {"tokens": 3}


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("'garbage'", "Expected a list in the execute return, found type '<class 'str'>'."),
        ("(1, 2)", "Expected a list in the execute return, found type '<class 'tuple'>'."),
        (
            "[out([1])]",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:1\n",
        ),
        (
            "[1, 2]",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'int'>'.",
        ),
        (
            "[out(x(requests[0])), 2]",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'int'>'.",
        ),
    ],
)
def test_invalid_return_value_fails_the_batch(load: Load, returned: str, text: str) -> None:
    found, _ = answers(load(f"def execute(self, requests): return {returned}"), asked(2))

    assert [value(each) for each in found] == [FAILED + text] * 2


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        ("ValueError('boom')", "ValueError: boom"),
        ("SystemExit(3)", "SystemExit: 3"),
        ("KeyboardInterrupt()", "KeyboardInterrupt: "),
        ("pb_utils.TritonModelException('mine')", "TritonModelException: mine"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "async "])
def test_exception_fails_the_batch_with_its_location_and_keeps_the_model(
    load: Load, raised: str, text: str, prefix: str, tmp_path: Path
) -> None:
    backend = load(f"""
        {prefix}def execute(self, requests):
            if x(requests[0])[0] == 1:
                raise {raised}
            return [out(x(request)) for request in requests]
    """)

    first, _ = answers(backend, asked(2))
    again, _ = answers(backend, asked(3)[2:])

    assert [str(value(each)).partition("\n")[0] for each in first] == [FAILED + text] * 2
    assert f"\n\nAt:\n  {tmp_path}/m/1/model.py(" in str(value(first[0]))
    assert str(value(first[0])).endswith("): execute\n")
    assert value(again[0]) == [3]


def test_traceback_lists_the_innermost_frame_first(load: Load, tmp_path: Path) -> None:
    backend = load("""
        def execute(self, requests): return self.deep()
        def deep(self): raise ValueError('x')
    """)

    (response,), _ = answers(backend, asked())

    file = f"{tmp_path}/m/1/model.py"
    assert str(value(response)).partition("At:\n")[2] == f"  {file}(15): deep\n  {file}(14): execute\n"


def test_missing_execute_is_reported(load: Load, tmp_path: Path) -> None:
    (response,), _ = answers(load("pass"), asked())

    text = str(value(response)).partition("\n")[0]
    assert text.endswith(f"Python model {tmp_path}/m/1/model.py does not implement `execute` method.")


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ("np.ones(1)", "model 'm' gave output 'Y' as FP64 [1]; its configuration says FP32 [-1]"),
        ("np.ones((1, 1), np.float32)", "model 'm' gave output 'Y' as FP32 [1, 1]; its configuration says FP32 [-1]"),
    ],
)
def test_output_contradicting_the_configuration_fails_only_its_request(load: Load, made: str, text: str) -> None:
    backend = load(f"def execute(self, requests): return [out({made}), out(x(requests[1]))]")

    found, _ = answers(backend, asked(2))

    assert [value(each) for each in found] == [text, [2]]


def test_output_that_cannot_be_encoded_fails_only_its_request(load: Load) -> None:
    backend = load("""
        def execute(self, requests):
            return [out(x(requests[0])), out(np.array(['\\ud800'], object)), out(x(requests[2]))]
    """)

    found, _ = answers(backend, asked(3))

    assert [value(found[0]), value(found[2])] == [[1], [3]]
    assert str(value(found[1])).startswith(f"{FAILED}UnicodeEncodeError: ")


def test_unrequested_outputs_are_omitted(load: Load) -> None:
    backend = load(
        """
        def execute(self, requests):
            tensors = [pb_utils.Tensor(name, x(requests[0])) for name in ('OTHER', 'Y', 'Z')]
            return [pb_utils.InferenceResponse(tensors)] * len(requests)
        """,
        replace(CONFIG, outputs=(*CONFIG.outputs, spec("Z", Datatype.FP32, -1))),
    )
    request = asked()[0]

    found, _ = answers(backend, [request, Request("", request.inputs, ("Z",))])

    assert [list(each.outputs) for each in found if each] == [["Y", "Z"], ["Z"]]


def test_all_string_types_become_bytes(load: Load) -> None:
    backend = load(
        """
        def execute(self, requests):
            x = requests[0].inputs()[0].as_numpy()
            return [pb_utils.InferenceResponse([
                pb_utils.Tensor('A', np.array(['é', b'\\xff', 3], object)),
                pb_utils.Tensor('B', np.array([b'ab', b'c'])),
                pb_utils.Tensor('C', x[::-1]),
            ])]
        """,
        replace(CONFIG, outputs=tuple(spec(name, Datatype.BYTES, -1) for name in "ABC")),
    )

    (response,), _ = answers(backend, [Request("", {"X": np.array([b"1", b"2"], object)}, ())])

    assert [value(response, name) for name in "ABC"] == [["é".encode(), b"\xff", b"3"], [b"ab", b"c"], [b"2", b"1"]]


def test_model_can_print_log_and_start_threads(load: Load, capfd: pytest.CaptureFixture[str]) -> None:
    backend = load("""
        def execute(self, requests):
            print('garbage' * 100)
            pb_utils.Logger.log_warn('careful')
            pb_utils.Logger.log_verbose('unseen')
            made = []
            thread = threading.Thread(target=lambda: made.append(out(x(requests[0]))))
            thread.start(); thread.join()
            return made
    """)

    (response,), _ = answers(backend, asked())

    assert value(response) == [1]
    assert capfd.readouterr().err == "warning: m: careful\n"


def test_model_imports_sibling_modules_and_leaves_no_trace(tmp_path: Path) -> None:
    paths, modules = list(sys.path), set(sys.modules)
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "beside_the_version.py").write_text("VALUE = 1")
    body = """
        def execute(self, requests):
            import beside_the_version, beside_the_model
            from .beside_the_model import VALUE
            return [out(np.float32([beside_the_version.VALUE, VALUE, len(pb_utils.get_model_dir())]))]
    """
    found = []
    for turn in (10, 20):
        (tmp_path / "m" / "1" / "beside_the_model.py").write_text(f"VALUE = {turn}")
        backend = loaded(tmp_path, body.replace("from .", f"from {'.'}"))
        (response,), _ = answers(backend, asked())
        found.append(value(response))
        backend.close()

    size = len(str(tmp_path / "m" / "1"))
    assert found == [[1, 10, size], [1, 20, size]]
    assert sys.path == paths
    assert not list(tmp_path.rglob("__pycache__"))  # or the same second would bring the old model back
    assert {name for name in set(sys.modules) - modules if "beside" in name or name.startswith("1")} == set()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise ImportError('no such library')", "ImportError: no such library"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("def broken(:", "SyntaxError: "),
        ("x = 1", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
        ("class TritonPythonModel:\n  def initialize(self, args): raise KeyError('k')", "KeyError: 'k'"),
        ("class TritonPythonModel:\n  def __init__(self): raise OSError('disk')", "OSError: disk"),
        (
            "class TritonPythonModel:\n  @staticmethod\n  def auto_complete_config(config): return None",
            "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object.",
        ),
    ],
)
def test_load_failure_reports_the_reason(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(text)

    with pytest.raises(BackendFailed) as caught:
        PythonBackend().load(CONFIG, tmp_path / "m" / "1", 0, no_calls)

    assert str(caught.value).startswith(f"model 'm': {problem}")


def test_execution_environment_is_rejected(tmp_path: Path) -> None:
    config = replace(CONFIG, parameters={"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/env.tar.gz"})

    with pytest.raises(BackendFailed, match="EXECUTION_ENV_PATH is not supported"):
        PythonBackend().load(config, tmp_path, 0, no_calls)


def test_finalize_is_called_and_its_failure_is_logged(
    load: Load, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = loaded(tmp_path, f"{ECHO}\ndef finalize(self): print('bye', flush=True); raise ValueError('stuck')")

    backend.close()

    found = capfd.readouterr()
    assert found.out == "bye\n"
    assert "error: m: ValueError: stuck" in found.err


def test_auto_complete_config_fills_in_the_configuration(tmp_path: Path) -> None:
    body = """
        @staticmethod
        def auto_complete_config(config):
            assert config.as_dict()['max_batch_size'] == 0
            config.add_input({'name': 'X', 'data_type': 'TYPE_FP32', 'dims': [3], 'optional': True})
            config.add_output({'name': 'Y', 'data_type': 'TYPE_STRING', 'dims': [-1]})
            config.set_max_batch_size(16)
            config.set_dynamic_batching()
            config.set_model_transaction_policy({'decoupled': True})
            return config
        def initialize(self, args): assert json.loads(args['model_config'])['max_batch_size'] == 16
    """
    version = tmp_path / "m" / "1"
    loaded(tmp_path, body, ModelConfig("m", "python")).close()
    backend = PythonBackend()

    found = backend.load(ModelConfig("m", "python"), version, 0, no_calls)
    backend.close()

    assert not found.threads
    config = found.config
    assert config is not None
    assert [(e.name, e.datatype, e.dims, e.optional) for e in (*config.inputs, *config.outputs)] == [
        ("X", Datatype.FP32, (3,), True),
        ("Y", Datatype.BYTES, (-1,), False),
    ]
    assert (config.max_batch, config.batching, config.decoupled) == (16, DynamicBatching(), True)


def test_auto_complete_config_may_give_the_settings_of_dynamic_batching(tmp_path: Path) -> None:
    body = """
        @staticmethod
        def auto_complete_config(config):
            config.set_max_batch_size(8)
            config.as_dict()['dynamic_batching'] = {
                'preferred_batch_size': [8, 4], 'max_queue_delay_microseconds': 1500, 'preserve_ordering': True,
                'priority_queue_policy': {},
            }
            return config
    """
    loaded(tmp_path, body, ModelConfig("m", "python")).close()
    backend = PythonBackend()

    found = backend.load(ModelConfig("m", "python"), tmp_path / "m" / "1", 0, no_calls)
    backend.close()

    assert found.config is not None
    assert found.config.batching == DynamicBatching((4, 8), delay_s=0.0015, preserve_ordering=True)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            "as_dict()['dynamic_batching'] = {'default_queue_policy': {'max_queue_size': 5}}",
            "dynamic_batching has ['default_queue_policy'], which only config.pbtxt can set",
        ),
        (
            "set_max_batch_size(2)",
            "configuration specified max_batch_size 4, but in auto-complete-config function for",
        ),
        (
            "add_input({'name': 'X', 'data_type': 'TYPE_INT8', 'dims': [-1]})",
            "configuration expects datatype TYPE_FP32",
        ),
        (
            "add_output({'name': 'Y', 'data_type': 'TYPE_FP32', 'dims': [3]})",
            "the model expects dims [3] but the model",
        ),
        ("add_output({'name': 'Y', 'data_type': 'TYPE_FP32'})", "is missing 'dims' property."),
        ("add_input({'data_type': 'TYPE_FP32', 'dims': [1]})", "is missing 'name' property."),
        (
            "add_input({'name': 'X', 'colour': 1})",
            "contains property other than 'name', 'data_type', 'dims' and 'optional'.",
        ),
        ("as_dict()['sequence_batching'] = {}", "sequence_batching can only be set in config.pbtxt"),
        ("set_model_transaction_policy({'coupled': 1})", "contains property other than 'decoupled'."),
    ],
)
def test_auto_complete_config_cannot_contradict_the_configuration(call: str, text: str, tmp_path: Path) -> None:
    body = f"""
        @staticmethod
        def auto_complete_config(config):
            config.{call}
            return config
    """

    with pytest.raises(BackendFailed) as caught:
        loaded(tmp_path, body, replace(CONFIG, max_batch=4))

    assert text in str(caught.value)
